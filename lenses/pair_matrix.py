"""A table of pairs as a matrix of one of its columns, sources down and targets across."""

from collections.abc import Sequence

import pandas as pd


def pair_matrix(
    table: pd.DataFrame, value: str, sources: Sequence[str] | None = None, targets: Sequence[str] | None = None
) -> pd.DataFrame:
    """One column by source and target, in the orders given, or else those of the table; NaN for pairs it lacks.

    Raises:
        KeyError: there is no such column.
    """
    if value not in table.columns:
        raise KeyError(f"the table has no column {value!r}; it has {list(table.columns)}.")
    wide = table.pivot_table(index="source", columns="target", values=value, sort=False)  # a pair may be there twice
    down, across = (
        list(dict.fromkeys(table[name])) if given is None else list(given)
        for name, given in (("source", sources), ("target", targets))
    )
    return wide.reindex(index=pd.Index(down, name="source"), columns=pd.Index(across, name="target"))
