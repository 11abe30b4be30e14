"""True and false statements on 114 chemical elements: "Iron is in period 4 of the periodic table."

Source: the SQLite table inside PyPI's mendeleev 1.3.0 (MIT), 118 elements; fetched by name on first use, checked and
cached. Four relations: atomic number, period, block and series ("one of the noble gases"). How the false statements are
made, and which words are balanced: see `statements`. Two elements that exchange their objects differ in all four.

Left out: lanthanum, lutetium, actinium and lawrencium, on whose block chemists disagree; the symbol as a relation,
because its letters are in the name, and comparing spellings is not knowing. Series that overlap (halogens are
nonmetals) are never exchanged.
Beware: which series an element is in is this table's view (zinc as a transition metal, polonium as a metalloid). A
small model knows the first thirty or so; popularity is minus the atomic number, so that larger is better known.
"""

import sqlite3
import zipfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pandas as pd

from microtome.data.cached_tables import CachedTable, check_rows
from microtome.data.registry import Archive
from microtome.data.statements import Relation, build_statements

ELEMENTS_ARCHIVE = Archive(
    package="mendeleev",
    version="1.3.0",
    filename="mendeleev-1.3.0-py3-none-any.whl",
    sha256="76f415767b654634e51dead755513ef431abf200e892eab8468aa659ff218d1c",
)
OF_DISPUTED_BLOCK = ("Lanthanum", "Lutetium", "Actinium", "Lawrencium")

_ALIKE_SERIES = (
    *(("nonmetals", "noble gases"), ("nonmetals", "halogens"), ("nonmetals", "metalloids")),
    *(("metalloids", "halogens"), ("metalloids", "poor metals"), ("poor metals", "transition metals")),
)
RELATIONS = (
    Relation(
        "atomic_number",
        ("the atomic number of {entity} {is_} {object}", "{entity} {is_} element {object} of the periodic table"),
    ),
    Relation(
        "period",
        ("{entity} {is_} in period {object} of the periodic table", "the period of {entity} {is_} number {object}"),
    ),
    Relation(
        "block",
        (
            "{entity} {is_} in the {object}-block of the periodic table",
            "{entity} {is_} an element of the {object}-block",
        ),
    ),
    Relation(
        "series",
        ("{entity} {is_} one of the {object}", "{entity} {is_} counted among the {object}"),
        alike=frozenset(map(frozenset, _ALIKE_SERIES)),
    ),
)
_QUERY = """
    SELECT elements.name, symbol, atomic_number, period, block, series.name
    FROM elements JOIN series ON elements.series_id = series.id ORDER BY atomic_number
"""


def elements(variants: Sequence[str] = ("plain",), *, seed: int = 0) -> pd.DataFrame:
    """Statements on elements: 912 plain, as many negated, 896 conjunctions; the columns of `build_statements`.

    popularity is minus the atomic number; seed decides which elements exchange their objects, and the templates.
    Raises ValueError for unknown variants, and what `fetch` raises.
    """
    facts = element_facts()
    stated = facts[~facts["entity"].isin([name.lower() for name in OF_DISPUTED_BLOCK])]
    return build_statements(stated, RELATIONS, variants=variants, seed=seed)


def element_facts() -> pd.DataFrame:
    """One row for each of the 118 elements by atomic number: entity (str, "iron"), symbol, atomic_number, period,
    block, series (all str, series as in "noble gases") and popularity (int, minus the atomic number)."""
    return ELEMENTS_TABLE.read()


def _parse_archive(path: Path) -> pd.DataFrame:
    with zipfile.ZipFile(path) as wheel:
        content = wheel.read("mendeleev/elements.db")
    connection = sqlite3.connect(":memory:")
    try:
        connection.deserialize(content)
        rows = connection.execute(_QUERY).fetchall()
    except sqlite3.Error as error:
        raise ValueError(f"elements.db in {path} is not the table of mendeleev 1.3.0 ({error}).") from error
    finally:
        connection.close()
    table = pd.DataFrame(rows, columns=["entity", "symbol", "atomic_number", "period", "block", "series"])
    table["popularity"] = -table["atomic_number"]
    table["entity"], table["series"] = table["entity"].str.lower(), table["series"].str.lower()
    return table.astype({"atomic_number": str, "period": str})


ELEMENTS_TABLE = CachedTable(
    name="elements",
    archive=ELEMENTS_ARCHIVE,
    version=1,
    parse=_parse_archive,
    check=partial(check_rows, rows=118, release=ELEMENTS_ARCHIVE.requirement),
)
