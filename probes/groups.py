"""Which rows belong together: validated group codes, and the refusal of groups that leak.

A split is honest when no group has rows on both sides. Rows that share a sentence or an entity carry each other's
answer whatever the label says, so equal text (casefolded, runs of white space joined) or an equal entity key in two
groups is an error here and not a warning. The two directions of the leak, on features without any signal: four rows
per entity with one label score 0.69 under a row split, a true and a false row per entity score 0.27; both score 0.5
under a group split (tests/probes/test_folds.py measures them).

`groups` has no default. The string "rows" is the statement that rows are independent of each other.
"""

import unicodedata
from collections.abc import Iterable, Mapping

import numpy as np
import pandas as pd
from jaxtyping import Int64
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from microtome.probes.row_keys import row_keys

ROWS = "rows"
_SHOWN = 3
_MERGE = "Give them one group: groups=merged_groups(groups, texts, entities=entities) joins every such pair."


def group_codes(
    groups,
    *,
    n_rows: int,
    texts: Iterable | None = None,
    entities: Mapping[str, Iterable] | None = None,
) -> Int64[np.ndarray, " example"]:
    """Group number of every row, 0..n_groups-1 in order of first appearance, after all checks.

    `groups` is "rows" (every row its own group) or one key per row (numbers, strings, anything hashable). `texts` has
    one string per row; `entities` maps a column name to one key per row. A missing text or entity key takes no part in
    the check.

    Raises ValueError for a wrong length, a missing key, fewer than two groups, and equal text or entity across groups
    (the message names the first few with their groups); TypeError for a string other than "rows".
    """
    codes, names = _factorize(groups, n_rows)
    if texts is not None:
        _refuse_shared("text", normalised_texts(texts, n_rows=n_rows), codes, names)
    for column, keys in (entities or {}).items():
        keys = row_keys(keys, n_rows, f"entities[{column!r}]")
        _refuse_shared(f"entity key in column {column!r}", keys, codes, names)
    if codes.max() == 0:
        raise ValueError(
            f"All {n_rows} rows are in one group ({names[0]!r}), so no row can be held out. "
            "Give at least as many groups as folds; a coarser key than the rows share will not do."
        )
    return codes


def merged_groups(
    groups, texts: Iterable | None = None, *, entities: Mapping[str, Iterable] | None = None
) -> Int64[np.ndarray, " example"]:
    """Smallest groups that keep the given ones whole and put equal text and equal entity keys together.

    The connected components of rows joined by a shared group, text or entity. With "rows", rows are joined by text and
    entity alone. Pass the result as `groups`. One very large component means that the keys chain everything together.
    """
    columns = [] if texts is None else [list(texts)]
    columns += [list(keys) for keys in (entities or {}).values()]
    if isinstance(groups, str) and groups == ROWS and not columns:
        raise ValueError('groups="rows" needs texts or entities to merge by. Pass texts=, or use "rows" as it is.')
    n_rows = len(columns[0]) if isinstance(groups, str) and groups == ROWS else len(groups)
    codes, _ = _factorize(groups, n_rows)
    joined = [codes]
    if texts is not None:
        joined.append(pd.factorize(normalised_texts(texts, n_rows=n_rows))[0])
    for column, keys in (entities or {}).items():
        joined.append(pd.factorize(row_keys(keys, n_rows, f"entities[{column!r}]"))[0])
    rows, nodes, n_nodes = [], [], n_rows
    for column in joined:
        is_known = column >= 0
        rows.append(np.flatnonzero(is_known))
        nodes.append(column[is_known] + n_nodes)
        n_nodes += int(column.max(initial=-1)) + 1
    row, node = np.concatenate(rows), np.concatenate(nodes)
    graph = coo_array((np.ones(len(row), dtype=np.int8), (row, node)), shape=(n_nodes, n_nodes))
    component = connected_components(graph, directed=False)[1][:n_rows]
    return pd.factorize(component)[0].astype(np.int64)


def normalised_texts(texts: Iterable, *, n_rows: int) -> np.ndarray:
    """Texts as they are compared: Unicode NFKC without format characters, casefolded, runs of white space one space.

    Missing ones are None.

    Raises ValueError for a wrong length and TypeError for an entry that is no string.
    """
    texts = list(texts)
    if len(texts) != n_rows:
        raise ValueError(f"texts has {len(texts)} entries for {n_rows} rows. Pass one string per row.")
    compared = np.empty(n_rows, dtype=object)
    known: dict[str, str] = {}  # rows of single tokens repeat their text
    for row, text in enumerate(texts):
        if isinstance(text, str):
            if text not in known:
                visible = "".join(c for c in unicodedata.normalize("NFKC", text) if unicodedata.category(c) != "Cf")
                known[text] = " ".join(visible.casefold().split())
            compared[row] = known[text]
        elif not pd.api.types.is_scalar(text) or not pd.isna(text):
            raise TypeError(f"texts[{row}] is {text!r} ({type(text).__name__}); every text must be a string.")
    return compared


def _factorize(groups, n_rows: int) -> tuple[Int64[np.ndarray, " example"], list]:
    if isinstance(groups, str):
        if groups != ROWS:
            raise TypeError(
                f'groups={groups!r} is a string. Pass one key per row, or "rows" to declare the rows independent.'
            )
        return np.arange(n_rows, dtype=np.int64), list(range(n_rows))
    keys = row_keys(groups, n_rows, "groups")
    codes, names = pd.factorize(keys)
    missing = np.flatnonzero(codes < 0)
    if len(missing):
        raise ValueError(
            f"groups has no key for {len(missing)} of {n_rows} rows (first: row {missing[0]}). "
            "Fill them in, or drop the rows; a missing key is not a group."
        )
    return codes.astype(np.int64), list(names.tolist())


def _refuse_shared(what: str, keys: np.ndarray, codes: Int64[np.ndarray, " example"], names: list) -> None:
    """Raise if one key occurs in two groups."""
    key_codes, key_names = pd.factorize(keys)
    key_names = key_names.tolist()
    frame = pd.DataFrame({"key": key_codes, "group": codes})[key_codes >= 0].drop_duplicates()
    counts = frame["key"].value_counts()
    shared = np.sort(counts.index[counts > 1].to_numpy())
    if not len(shared):
        return
    shown = []
    for key in shared[:_SHOWN]:
        where = [repr(names[group]) for group in frame["group"][frame["key"] == key][:_SHOWN]]
        shown.append(f"{key_names[key]!r} in groups {', '.join(where)}")
    more = f"; and {len(shared) - _SHOWN} more" if len(shared) > _SHOWN else ""
    raise ValueError(
        f"{len(shared)} {what} value(s) occur in more than one group, which leaks between training and test rows: "
        f"{'; '.join(shown)}{more}. {_MERGE}"
    )
