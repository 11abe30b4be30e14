"""A CSV or Parquet table as features and row columns: which columns are features, and what stays beside them.

Features are columns of numbers or Booleans, or list columns of one length (what `export` writes, a site each). Beware
of a column of row numbers or subject numbers: without `columns` it would be a feature like any other, and one that
gives labels away where rows are sorted. `said_columns` says which columns were taken.
"""

import csv
import difflib
import re
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow
import pyarrow.parquet

Columns = str | Sequence[str] | Mapping[str, str | Sequence[str]]
_OWN = ("text", "position", "token")  # every row table has them, with meanings of their own
_MANY = 12  # names in the provenance; of more, only the ends
_SHOWN = 8  # names, or runs of names, in a line
_SITES_SAID = 4
_LIST_TYPES = (pyarrow.types.is_fixed_size_list, pyarrow.types.is_list, pyarrow.types.is_large_list)


def read_columns(
    path: Path,
    columns: Columns | None,
    *,
    label: str | None,
    group: str | None,
    site: str,
    beside: Sequence[str] = (),
) -> tuple[dict[str, np.ndarray], pd.DataFrame, dict[str, list[str]]]:
    """Arrays `[row, d]` by site, the table of all columns that are no features, and the names of the features by site.

    Args:
        path: a .csv or .parquet file.
        columns: a name or several, or those by site; what is no name of a column is a prefix of names. None: every
            column of numbers but label, group and `beside`, or, if the table has list columns, these.
        label, group: names of columns that are no features; `group` is read as text in a CSV ("007" is not 7).
        site: name of the site where `columns` names none.
        beside: names of further columns that are no features; the table need not have them.

    Raises:
        ValueError: not readable, no rows, a column named twice, no columns of numbers, a column that is meant as a
            feature and holds something else, a missing value.
        KeyError: a column that the file lacks, or a prefix with which none begins.
    """
    table, lists = _read_csv(path, group) if path.suffix.lower() == ".csv" else _read_parquet(path)
    if not len(table):
        raise ValueError(f"{path} has no rows. Give a table with one row per example.")
    for name in (label, group):
        if name is not None:
            require_column(table, name, path)
    reserved = [name for name in (label, group, *beside) if name is not None]
    chosen = _chosen(table, lists, columns, reserved, path, site)
    used = {name for names in chosen.values() for name in names}
    arrays = {
        name: lists[names[0]] if names[0] in lists else _numbers(table, names, path) for name, names in chosen.items()
    }
    others = [name for name in table if name not in used and name not in lists]
    return arrays, table[others], chosen


def chosen_names(known: Sequence[str], wanted: str | Sequence[str], reserved: Sequence[str], where: str) -> list[str]:
    """Names that are wanted, each once: what is no known name is a prefix. Reserved names are left out of a prefix.

    where: what has the names, for errors: "eeg.csv has no column", "x.npz has no array".
    Raises KeyError for what is neither name nor prefix, ValueError for a reserved or repeated name, or none at all.
    """
    asked = [wanted] if isinstance(wanted, str) else list(wanted)
    if not asked or "" in asked:
        raise ValueError(f"{where} '': columns is empty. Name the features, or leave columns out for all numbers.")
    names: list[str] = []
    for name in asked:
        if name not in known:
            begun = [other for other in known if other.startswith(name) and other not in reserved]
            if not begun:
                raise KeyError(
                    f"{where} {name!r} and none that begins so; there are {_some(known)}.{_near(name, known)}"
                )
            names += begun
        elif name in reserved or asked.count(name) > 1:
            raise ValueError(
                f"{where.partition(' has ')[0]}: {name!r} is a feature and a label or group, or named twice. Name it "
                "once."
            )
        else:
            names.append(name)
    return list(dict.fromkeys(names))


def said_columns(columns: Mapping[str, Sequence[str]]) -> str:
    """As in "34 features: frontal_0 ... frontal_32, trial": neighbours that begin with the same letters are one piece.

    columns: names of all features by site.
    """
    if len(columns) > _SITES_SAID:
        sizes = [len(names) for names in columns.values()]
        sites = list(columns)
        return f"{sum(sizes)} features at {len(sites)} sites: {sites[0]} ... {sites[-1]}"
    said = [
        f"{'' if len(columns) == 1 else f'{site}: '}{len(names)} feature{'s'[: len(names) != 1]}: {_pieces(names)}"
        for site, names in columns.items()
    ]
    return "; ".join(said)


def few_or_ends(names: Sequence[str]) -> list[str] | dict[str, int | str]:
    """The names; of many, how many there are, and the first and the last."""
    return list(names) if len(names) <= _MANY else {"count": len(names), "first": names[0], "last": names[-1]}


def _pieces(names: Sequence[str]) -> str:
    if len(names) <= _SHOWN:
        return ", ".join(names)
    runs: list[list[str]] = []
    for name in names:
        if runs and _stem(runs[-1][0]) == _stem(name):
            runs[-1].append(name)
        else:
            runs.append([name])
    said = [", ".join(run) if len(run) < 3 else f"{run[0]} ... {run[-1]}" for run in runs]
    return ", ".join(said) if len(said) <= _SHOWN else f"{', '.join(said[: _SHOWN - 2])} ... {', '.join(said[-2:])}"


def _stem(name: str) -> str:
    """The letters that a name begins with."""
    return re.match(r"[^\W\d_]*", name).group()


def read_rows(path: Path, *, group: str | None = None) -> pd.DataFrame:
    """A CSV or Parquet file of labels, one row per feature row. Raises ValueError for what cannot be read."""
    table, _ = _read_csv(path, group) if path.suffix.lower() == ".csv" else _read_parquet(path)
    return table


def require_column(table: pd.DataFrame, name: str, path: Path | str) -> None:
    """Raise KeyError, with near matches, for a column that is not there."""
    if name in table:
        return
    known = [str(column) for column in table]
    raise KeyError(f"{path} has no column {name!r}; its columns are {_some(known)}.{_near(name, known)}")


def _some(known: Sequence[str]) -> str:
    return f"{list(known[:12])}{' and more' if len(known) > 12 else ''}"


def _near(name: str, known: Sequence[str]) -> str:
    """The names that a name, or the beginning of longer ones that a prefix, may have been meant for."""
    beginnings = {other[: len(name)]: other for other in reversed(known)}
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    near += [beginnings[found] for found in difflib.get_close_matches(name, list(beginnings), n=3, cutoff=0.6)]
    near = list(dict.fromkeys(near))[:3]
    return f" Did you mean {' or '.join(map(repr, near))}?" if near else ""


def _chosen(
    table: pd.DataFrame,
    lists: Mapping[str, np.ndarray],
    columns: Columns | None,
    reserved: Sequence[str],
    path: Path,
    site: str,
) -> dict[str, list[str]]:
    """Names of the feature columns of each site."""
    if isinstance(columns, Mapping):
        if not columns:
            raise ValueError(f"{path}: columns is empty. Give columns by site, or leave columns out for all numbers.")
        chosen = {
            name: chosen_names(list(table), wanted, reserved, f"{path} has no column")
            for name, wanted in columns.items()
        }
    elif columns is not None:
        chosen = {site: chosen_names(list(table), columns, reserved, f"{path} has no column")}
    elif lists:
        return {name: [name] for name in lists if name not in reserved}
    else:
        chosen = {site: _numeric(table, reserved, path)}
    for name, names in chosen.items():
        if any(column in lists for column in names) and len(names) > 1:
            raise ValueError(
                f"{path}: site {name!r} joins list columns with others ({names[:3]}). Give each list column a site of "
                "its own: columns={'a': ['a'], 'b': ['b']}."
            )
    return chosen


def _numeric(table: pd.DataFrame, reserved: Sequence[str], path: Path) -> list[str]:
    names = []
    for name in table:
        if name in reserved or name in _OWN:
            continue
        if _is_number(table[name]):
            names.append(name)
        else:
            _refuse_almost_numbers(table[name], name, path)
    if not names:
        raise ValueError(
            f"{path} has no columns of numbers beside labels and groups; its columns are {list(table)[:12]}. Give one "
            "column per feature, or a .npy file."
        )
    return names


def _is_number(column: pd.Series) -> bool:
    return pd.api.types.is_numeric_dtype(column) and not pd.api.types.is_complex_dtype(column)


def _refuse_almost_numbers(column: pd.Series, name: str, path: Path) -> None:
    """Raise ValueError for a column that is text because of a few entries: it would silently be no feature."""
    if not (pd.api.types.is_string_dtype(column) or column.dtype == object):
        return
    is_number = pd.to_numeric(column, errors="coerce").notna().to_numpy()
    if is_number.mean() > 0.5 and not is_number.all():
        row = int(np.argmin(is_number))
        raise ValueError(
            f"{path}, row {row} (counted from 0): column {name!r} holds {column.iloc[row]!r} among numbers, in "
            f"{int((~is_number).sum())} of {len(column)} rows. Fill them in or drop the rows; or name the features "
            "with columns= if this is none."
        )


def _numbers(table: pd.DataFrame, names: list[str], path: Path) -> np.ndarray:
    """Columns side by side, float64 if one of them is, else float32."""
    for name in names:
        if not _is_number(table[name]):
            _refuse_almost_numbers(table[name], name, path)
            raise ValueError(
                f"{path}: column {name!r} holds {table[name].dtype}, not numbers. Leave it out of columns."
            )
        if table[name].isna().any():
            row = int(table[name].isna().to_numpy().argmax())
            raise ValueError(
                f"{path}, row {row} (counted from 0): feature {name!r} is missing, as in "
                f"{int(table[name].isna().sum())} of {len(table)} rows. Fill it in or drop the rows."
            )
    is_wide = any(table[name].dtype == np.float64 for name in names)
    return table[names].to_numpy(dtype=np.float64 if is_wide else np.float32)


def _read_csv(path: Path, group: str | None) -> tuple[pd.DataFrame, dict[str, np.ndarray]]:
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            header = next(csv.reader(file), [])
        if len(set(header)) < len(header):
            raise ValueError(f"{path} names a column twice: {_twice(header)!r}. Give each column one name.")
        if "" in header or "Unnamed: 0" in header:
            raise ValueError(
                f"{path} has a column without a name (column {[*header].index('' if '' in header else 'Unnamed: 0')}), "
                "such as the row numbers that pandas writes. Write it with to_csv(path, index=False)."
            )
        with warnings.catch_warnings():
            warnings.simplefilter("error", pd.errors.ParserWarning)
            table = pd.read_csv(
                path,
                encoding="utf-8-sig",
                index_col=False,
                keep_default_na=False,
                na_values=["", "nan", "NaN"],
                dtype={group: str} if group in header else None,
            )
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 (byte {error.start}: {error.reason}). Save it as UTF-8.") from error
    except (pd.errors.ParserError, pd.errors.EmptyDataError, pd.errors.ParserWarning) as error:
        raise ValueError(f"{path} is not a CSV table with a header line: {error}") from error
    return table, {}


def _twice(names: Sequence[str]) -> str:
    return next(name for name in names if names.count(name) > 1)


def _read_parquet(path: Path) -> tuple[pd.DataFrame, dict[str, np.ndarray]]:
    try:
        table = pyarrow.parquet.read_table(path)
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(f"{path} cannot be read as Parquet: {error}") from error
    names = table.column_names
    if len(set(names)) < len(names):
        raise ValueError(f"{path} names a column twice: {_twice(names)!r}. Give each column one name.")
    lists = {
        field.name: _list_column(table.column(field.name), field.name, path)
        for field in table.schema
        if any(is_list(field.type) for is_list in _LIST_TYPES)
    }
    frame = table.drop_columns(list(lists)).to_pandas().reset_index(drop=True)
    for name in lists:
        frame[name] = None  # its place among the columns, so that it is found by name
    return frame, lists


def _list_column(column: pyarrow.ChunkedArray, name: str, path: Path) -> np.ndarray:
    """A column of lists as `[row, d]`."""
    values = column.combine_chunks()
    lengths = np.unique(values.value_lengths().to_numpy(zero_copy_only=False))
    if values.null_count or len(lengths) != 1:
        raise ValueError(
            f"{path}: the lists of column {name!r} have lengths {lengths[:5].tolist()} and {values.null_count} are "
            "missing. Features need one length in every row."
        )
    flat = values.flatten()
    if not (pyarrow.types.is_floating(flat.type) or pyarrow.types.is_integer(flat.type)) or flat.null_count:
        raise ValueError(f"{path}: the lists of column {name!r} hold {flat.type} or missing values, not numbers.")
    return flat.to_numpy(zero_copy_only=False).reshape(len(values), -1)
