import sqlite3
import sys
import zipfile
from dataclasses import replace

import pytest
from sklearn.feature_extraction.text import CountVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GroupKFold, cross_val_predict
from sklearn.pipeline import make_pipeline

from microtome.data.elements import ELEMENTS_ARCHIVE, ELEMENTS_TABLE, OF_DISPUTED_BLOCK, element_facts, elements
from microtome.data.registry import file_sha256

SERIES = ("Nonmetals", "Noble gases", "Alkali metals", "Transition metals")


def database(folder, rows: list[tuple]) -> bytes:
    """A SQLite file with mendeleev's two tables, less the columns that nobody reads."""
    path = folder / "elements.db"
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE series (id INTEGER, name VARCHAR)")
        connection.executemany("INSERT INTO series VALUES (?, ?)", list(enumerate(SERIES)))
        columns = (
            "name VARCHAR, symbol VARCHAR, atomic_number INTEGER, period INTEGER, block VARCHAR, series_id INTEGER"
        )
        connection.execute(f"CREATE TABLE elements ({columns})")
        connection.executemany("INSERT INTO elements VALUES (?, ?, ?, ?, ?, ?)", rows)
    connection.close()
    return path.read_bytes()


def place_archive(cache, monkeypatch, content: bytes) -> None:
    path = cache / "archives" / ELEMENTS_ARCHIVE.filename
    path.parent.mkdir(parents=True)
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr("mendeleev/elements.db", content)
    table = replace(ELEMENTS_TABLE, archive=replace(ELEMENTS_ARCHIVE, sha256=file_sha256(path)), check=lambda *_: None)
    monkeypatch.setattr(sys.modules["microtome.data.elements"], "ELEMENTS_TABLE", table)


@pytest.fixture
def small_archive(cache, monkeypatch, tmp_path):
    """24 elements: number, period, block and series all differ between the first and the second half."""
    made = [
        (f"Elem{n}", f"E{n}", n, 1 + n % 3 + 3 * (n > 12), "spdf"[n % 2 + 2 * (n > 12)], n % 4) for n in range(1, 25)
    ]
    disputed = [(name, "X", 100 + row, 9, "d", 3) for row, name in enumerate(OF_DISPUTED_BLOCK)]
    place_archive(cache, monkeypatch, database(tmp_path, made[::-1] + disputed))


@pytest.mark.usefixtures("small_archive")
def test_facts_are_text_in_the_order_of_numbers():
    facts = element_facts()
    assert facts.iloc[0].to_dict() == {
        **{"entity": "elem1", "symbol": "E1", "atomic_number": "1", "period": "2", "block": "p"},
        **{"series": "noble gases", "popularity": -1},
    }
    assert facts["popularity"].is_monotonic_decreasing


@pytest.mark.usefixtures("small_archive")
def test_statements_on_all_but_the_disputed():
    table = elements()
    assert len(table) == 24 * 4 * 2
    assert set(table["relation"]) == {"atomic_number", "period", "block", "series"}
    assert set(table["entity"]) == {f"elem{n}" for n in range(1, 25)}
    pairs = {frozenset((row.object, row.true_object)) for row in table[~table["label"]].itertuples()}
    assert all(len(pair) == 2 for pair in pairs)
    assert frozenset(("nonmetals", "noble gases")) not in pairs


def test_a_file_that_is_no_database_is_named(cache, monkeypatch):
    place_archive(cache, monkeypatch, b"not a database")
    with pytest.raises(ValueError, match=r"elements\.db in .* is not the table of mendeleev 1\.3\.0"):
        element_facts()


@pytest.mark.slow
@pytest.mark.network
@pytest.mark.usefixtures("empty_cache")
def test_the_real_archive():
    facts = element_facts()
    assert len(facts) == 118
    iron = facts[facts["entity"] == "iron"].iloc[0]
    assert (iron["symbol"], iron["atomic_number"], iron["period"], iron["block"]) == ("Fe", "26", "4", "d")
    assert facts["series"].nunique() == 10
    table = elements(["plain", "negated", "conjunction"])
    assert table.groupby("variant").size().to_dict() == {"plain": 912, "negated": 912, "conjunction": 896}
    assert (table.groupby("variant")["label"].mean() == 0.5).all()
    assert table["text"].is_unique
    assert table["group"].nunique() == 28
    for variant, rows in table.groupby("variant"):
        model = make_pipeline(CountVectorizer(token_pattern=r"\w+", ngram_range=(1, 2)), LogisticRegression())
        folds = GroupKFold(5, shuffle=True, random_state=0)
        predicted = cross_val_predict(model, rows["text"], rows["label"], groups=rows["group"], cv=folds)
        assert abs((predicted == rows["label"]).mean() - 0.5) < 0.02, variant
