"""Texts that a command reads: drawn from a data set of the catalogue, or from a file."""

from pathlib import Path

import pandas as pd

from microtome.data.catalogue import DATA_SETS, load_data
from microtome.data.table import read_table, table_sha256


def drawn_texts(
    data: str, *, texts: int, text_column: str, group_column: str | None, seed: int
) -> tuple[pd.DataFrame, dict]:
    """As many texts at random, in their order; and what they are, JSON-able: name, texts, table_sha256.

    Columns: text, group (the document; of a file without such a column each text is one).
    Raises what reading the file or fetching the data set raises.
    """
    if data in DATA_SETS:
        known = DATA_SETS[data]
        drawn = load_data(data, texts=min(texts, known.rows), seed=seed)
        return drawn.table.rename(columns={known.group: "group"})[["text", "group"]], drawn.facts
    place = Path(data).expanduser()
    table = read_table(place, text=text_column, label=None, group=group_column)
    if len(table) > texts:
        table = table.sample(texts, random_state=seed).sort_index().reset_index(drop=True)
    if "group" not in table:
        table = table.assign(group=range(len(table)))
    kept = table[["text", "group"]]
    return kept, {"name": place.name, "texts": len(kept), "table_sha256": table_sha256(kept)}
