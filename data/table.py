"""Read labelled texts from a CSV, JSONL or Parquet file, and hash a table's content.

The result has the columns `text`, `label` and, if asked for, `group`, whatever the file calls them. Beware: in a CSV
the words NA, null and None are text like any other, not missing values; only an empty field is missing.
"""

import csv
import difflib
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

_SUFFIXES = (".csv", ".jsonl", ".parquet")


def read_table(
    path: str | Path,
    *,
    text: str = "text",
    label: str | None = "label",
    group: str | None = None,
    keep: Sequence[str] = (),
) -> pd.DataFrame:
    """The file's texts and labels, in file order, with a fresh index.

    text, label, group: the file's columns that become `text` (str), `label` (as it is: bool, number or str, two or
    more values) and `group` (as it is); label=None or group=None leaves that column out. keep: further columns, under
    their own names. CSV has a header line; both CSV and JSONL are UTF-8. In a CSV, a label or kept column of numbers
    alone, or of true and false, becomes that type; texts and groups stay text ("007" is not 7).

    Raises FileNotFoundError; KeyError for a column that the file lacks; ValueError for another suffix, a file that
    cannot be parsed or has no rows, or a missing text, label or group (the message names the row, counted from 0);
    TypeError for a text that is not a string.
    """
    path = Path(path)
    if path.suffix.lower() not in _SUFFIXES:
        raise ValueError(f"{path.name} has the suffix {path.suffix!r}. Give a {', '.join(_SUFFIXES)} file.")
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}. Check the path; the working directory is {Path.cwd()}.")
    columns = {"text": text} | {name: held for name, held in (("label", label), ("group", group)) if held is not None}
    if clash := sorted(set(keep) & set(columns)):
        raise ValueError(f"keep names {clash}, which the result already has. Keep columns of other names.")
    table = _read(path)
    for name in (*columns.values(), *keep):
        _require_column(table, name, path)
    if table.empty:
        raise ValueError(f"{path} has no rows. Give a file with at least one text.")
    named = {name: table[source] for name, source in columns.items()} | {name: table[name] for name in keep}
    if path.suffix.lower() == ".csv":
        named |= {name: _numbers_or_text(named[name]) for name in ("label", *keep) if name in named}
    result = pd.DataFrame(named).reset_index(drop=True)
    _check_texts(result["text"], column=text, path=path)
    for name, source in columns.items():
        _check_filled(result[name], column=source, path=path)
    return result


def table_sha256(table: pd.DataFrame) -> str:
    """SHA-256 of the column names and values in row order, 64 hex digits; index and storage types do not count."""
    return hashlib.sha256(table.to_csv(index=False, lineterminator="\n").encode("utf-8")).hexdigest()


def _read(path: Path) -> pd.DataFrame:
    suffix = path.suffix.lower()
    try:
        if suffix == ".parquet":
            return pd.read_parquet(path)
        content = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 (byte {error.start}: {error.reason}). Save it as UTF-8.") from error
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read as Parquet: {error}") from error
    return _from_csv(content, path) if suffix == ".csv" else _from_jsonl(content, path)


def _from_csv(content: str, path: Path) -> pd.DataFrame:
    # csv rather than pandas: it neither guesses missing values nor drops blank lines inside quotes
    try:
        header, *lines = [line for line in csv.reader(content.splitlines(keepends=True), strict=True) if line] or [[]]
    except csv.Error as error:
        raise ValueError(f"{path} is not a CSV file: {error}. Quote fields with commas, quotes or newlines.") from error
    if len(set(header)) != len(header):
        raise ValueError(f"{path} names a column twice: {header}. Give each column one name.")
    for row, line in enumerate(lines):
        if len(line) != len(header):
            raise ValueError(
                f"{path}, row {row} (counted from 0): {len(line)} fields for {len(header)} columns {header}. "
                "Quote fields that hold commas."
            )
    return pd.DataFrame(lines, columns=header, dtype=str)


def _numbers_or_text(column: pd.Series) -> pd.Series:
    if column.isin(["True", "False", "true", "false"]).all():
        return column.str.lower() == "true"
    numbers = pd.to_numeric(column, errors="coerce")
    return column if numbers.isna().any() else pd.Series(numbers)


def _from_jsonl(content: str, path: Path) -> pd.DataFrame:
    records = []
    for number, line in enumerate(content.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}, line {number}: not JSON ({error}). Put one JSON object on each line.") from error
        if not isinstance(record, dict):
            raise ValueError(f'{path}, line {number}: {line[:40]!r} is not an object such as {{"text": ...}}.')
        records.append(record)
    return pd.DataFrame(records)


def _require_column(table: pd.DataFrame, name: str, path: Path) -> None:
    if name in table.columns:
        return
    columns = [str(column) for column in table.columns]
    near = difflib.get_close_matches(name, columns, n=3, cutoff=0.5)
    hint = f" Did you mean {' or '.join(map(repr, near))}?" if near else ""
    raise KeyError(f"{path} has no column {name!r}; its columns are {columns}.{hint}")


def _check_texts(texts: pd.Series, *, column: str, path: Path) -> None:
    for row, value in enumerate(texts):
        if isinstance(value, str) and not value.strip():
            raise ValueError(
                f"{path}, row {row} (counted from 0): the text in column {column!r} is empty. Delete the row."
            )
        if not isinstance(value, str) and not pd.isna(value):
            raise TypeError(
                f"{path}, row {row} (counted from 0): column {column!r} holds {value!r} ({type(value).__name__}), "
                "not text. Name the column that holds the texts."
            )


def _check_filled(values: pd.Series, *, column: str, path: Path) -> None:
    missing = values.isna() | (values == "")
    if missing.any():
        raise ValueError(
            f"{path}, row {int(missing.idxmax())} (counted from 0): column {column!r} is empty, as in "
            f"{int(missing.sum())} of {len(values)} rows. Fill it in or delete the rows."
        )
