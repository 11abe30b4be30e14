"""Features of any origin from a file: EEG, speech, images, another framework. `read_features("eeg.csv", ...)`.

    .npy           [row, d] or [row, head, d], mapped from disk and read when touched; one site
    .npz           such arrays by name, a site each
    .safetensors   such tensors by name, a site each
    .csv .parquet  a row per example, a column per feature (or a list column per site)

Names become sites: trailing numbers are layer and head ("vit.3" is layer 3 of "vit"). The values stay as they are;
whole numbers and Booleans become float32. Beware: without groups of speakers, subjects or recordings a probe may know
them again by their features; say which column holds them.
"""

import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from zipfile import BadZipFile

import numpy as np
import pandas as pd
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from microtome.capture.activations import Activations
from microtome.capture.feature_columns import (
    Columns,
    chosen_names,
    few_or_ends,
    read_columns,
    read_rows,
    require_column,
)
from microtome.capture.feature_leaks import features_that_tell, said_leaks
from microtome.capture.fingerprint import file_fingerprint

SUFFIXES = (".npy", ".npz", ".parquet", ".csv", ".safetensors")
_TABLES = (".csv", ".parquet")
Column = str | Path | Sequence | np.ndarray | pd.Series
Features = dict[str, np.ndarray] | dict[str, Tensor]
Archive = tuple[Features, dict[str, np.ndarray], dict[str, list[str]]]


def read_features(
    path: str | Path,
    *,
    columns: Columns | None = None,
    labels: Column | None = None,
    groups: Column | None = None,
    rows: str | Path | pd.DataFrame | None = None,
    site: str = "features",
    beside: Sequence[str] = (),
) -> Activations:
    """Features of a file as `Activations`, with the columns `label` and `group`.

    Args:
        path: a .npy, .npz, .parquet, .csv or .safetensors file.
        columns: which are features. Of a table: a name or several, or those by site, `{"eeg.0": "frontal_",
            "eeg.1": ["a", "b"]}`; what is no name of a column is a prefix. Of .npz and .safetensors: names or
            prefixes of arrays, or the name of an array by site. None takes every column of numbers, or every array.
            Columns named as labels, groups or `beside` are never features, wherever their entries come from.
        labels, groups: the name of a column (of `rows` if given, else of the table), or of a 1-D array in a .npz or
            .safetensors; a .npy file of one entry per row; or the entries themselves.
        rows: a second file (.csv, .parquet) or a table with one row per row of features, in the same order; all its
            columns are kept.
        site: name of the one site of a .npy file, or of a table without `columns` by site.
        beside: names of columns (or 1-D arrays) that stay in the row table and are no features, where there are such.

    Returns:
        Activations whose row table has the columns that are no features. A column `text` of strings is kept as
        `string`, by which a sweep finds equal texts; every row is a text of its own. The provenance has the names of
        the features by site (`columns`; of many, the ends) and the XXH3-128 of the file's bytes.

    Warns:
        UserWarning: a feature that equals the labels or has one value of its own for each of them (from 20 rows on).

    Raises:
        FileNotFoundError: a file is not there.
        ValueError: another suffix, a file that cannot be read, NaN or infinity (with row and column), lengths that do
            not agree, no columns of numbers, Python objects (which are never unpickled).
        KeyError: a column or array that the file lacks.
        TypeError: arrays of text or complex numbers.
    """
    read, names = read_named_features(
        path, columns=columns, labels=labels, groups=groups, rows=rows, site=site, beside=beside
    )
    if labels is not None and (leaks := features_that_tell(read.tensors, read.rows["label"].to_numpy(), names)):
        warnings.warn(f"{path}: {said_leaks(leaks)} Leave it out with columns=.", stacklevel=2)
    return read


def read_named_features(
    path: str | Path,
    *,
    columns: Columns | None = None,
    labels: Column | None = None,
    groups: Column | None = None,
    rows: str | Path | pd.DataFrame | None = None,
    site: str = "features",
    beside: Sequence[str] = (),
) -> tuple[Activations, dict[str, list[str]]]:
    """As `read_features` without its warning, and the names of all features by site: of columns, or of the array."""
    path = _existing(path, SUFFIXES)
    suffix = path.suffix.lower()
    second = None if rows is None else _second_table(rows, groups)
    in_second = () if second is None else tuple(second)
    label, group = (name if _is_name(name) and name not in in_second else None for name in (labels, groups))
    no_features = [*beside, *(name for name in (labels, groups) if _is_name(name))]
    kept = pd.DataFrame()
    names: dict[str, list[str]] = {}
    named: dict[str, np.ndarray] = {}
    if suffix in _TABLES:
        arrays, kept, names = read_columns(path, columns, label=label, group=group, site=site, beside=no_features)
    elif suffix == ".npy":
        if columns is not None:
            raise ValueError(
                f"{path} is one array and has no names, so columns={columns!r} means nothing. Leave it out."
            )
        arrays = {site: _npy(path)}
    else:
        read = _npz if suffix == ".npz" else _safetensors
        required = [name for name in (label, group) if name is not None]
        arrays, named, names = read(path, columns, required, no_features)
    arrays = {name: _floating(array, name, path) for name, array in arrays.items()}
    n_rows = _one_length(arrays, path)
    for name, array in arrays.items():
        _require_finite(array, name, path)
    table = pd.DataFrame(index=pd.RangeIndex(n_rows)) if second is None else second
    if len(table) != n_rows:
        raise ValueError(
            f"{path} has {n_rows} rows of features, rows={_called(rows)} {len(table)} rows. They must agree, in the "
            "same order."
        )
    table = table.assign(**{name: kept[name] for name in kept if name not in table})
    for name in beside:
        if name in named and name not in table and named[name].ndim == 1:
            table = _with_column(table, name, name, named, path, n_rows)
    where = str(path) if rows is None else f"{_called(rows)} or {path}"
    for name, given in (("label", labels), ("group", groups)):
        table = _with_column(table, name, given, named, where, n_rows)
    facts = {"source": "file", "file": path.name, "bytes": path.stat().st_size, "xxh3_128": file_fingerprint(path)}
    if names:
        facts["columns"] = {name: few_or_ends(of_site) for name, of_site in names.items()}
    if rows is not None and not isinstance(rows, pd.DataFrame):
        second_path = Path(rows).expanduser()
        facts["rows"] = {"file": second_path.name, "xxh3_128": file_fingerprint(second_path)}
    made = Activations.from_arrays(
        arrays,
        rows=_as_row_table(table),
        provenance=facts,
        allow_nonfinite=True,  # looked at above, where rows and columns have names
    )
    return made, {str(of): names[given] for of, given in zip(made.sites, arrays, strict=True) if given in names}


def _existing(path: str | Path, suffixes: Sequence[str]) -> Path:
    path = Path(path).expanduser()
    if path.suffix.lower() not in suffixes:
        raise ValueError(f"{path} has the suffix {path.suffix!r}. Give a {', '.join(suffixes)} file.")
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}. Check the path; the working directory is {Path.cwd()}.")
    return path


def _is_name(column: Column | None) -> bool:
    """Whether a label or group is the name of a column, rather than a file or the entries."""
    return isinstance(column, str) and not column.lower().endswith(".npy")


def _called(rows: str | Path | pd.DataFrame | None) -> str:
    return "the table" if isinstance(rows, pd.DataFrame) else str(rows)


def _second_table(rows: str | Path | pd.DataFrame, groups: Column | None) -> pd.DataFrame:
    if isinstance(rows, pd.DataFrame):
        return rows.reset_index(drop=True)
    path = Path(rows).expanduser()
    if path.suffix.lower() == ".npy":
        raise ValueError(f"rows={path} is one array without names. Pass it as labels= or groups=.")
    return read_rows(_existing(path, _TABLES), group=groups if _is_name(groups) else None)


def _with_column(
    table: pd.DataFrame,
    name: str,
    given: Column | None,
    named: Mapping[str, np.ndarray],
    where: Path | str,
    n_rows: int,
) -> pd.DataFrame:
    """The table with one more column, `label` or `group`, in place of the one that it is."""
    if given is None:
        return table
    if _is_name(given) and given in named:
        entries, source = named[given], given
    elif _is_name(given):
        require_column(table, given, where)
        entries, source = table[given], given
        missing = pd.isna(entries) | (entries.astype(object) == "")
        if missing.any():
            raise ValueError(
                f"{where}, row {int(missing.to_numpy().argmax())} (counted from 0): column {given!r}, the {name}, is "
                f"empty, as in {int(missing.sum())} of {len(table)} rows. Fill it in or drop the rows."
            )
        table = table.drop(columns=given)
    elif isinstance(given, str | Path):
        entries, source = _npy(_existing(given, (".npy",))), str(given)
    else:
        entries, source = given, f"{name}s"
    entries = np.asarray(entries)
    if entries.ndim != 1 or len(entries) != n_rows:
        raise ValueError(f"{source} has shape {list(entries.shape)} for {n_rows} rows. Give one {name} per row.")
    if name in table:
        raise ValueError(f"{where} has a column {name!r} beside {source!r}. Rename it, or name it as {name}s.")
    return table.assign(**{name: entries})


def _as_row_table(table: pd.DataFrame) -> pd.DataFrame:
    """Without the columns that every row table has itself, unless they mean the same."""
    renames = {}
    if "text" in table and not pd.api.types.is_integer_dtype(table["text"]):
        renames["text"] = "string" if "string" not in table else "text_column"
    if "position" in table and not pd.api.types.is_integer_dtype(table["position"]):
        renames["position"] = "position_column"
    return table.rename(columns=renames)


def _npy(path: Path) -> np.ndarray:
    try:
        return np.load(path, mmap_mode="c", allow_pickle=False)  # pages are read when touched, never written back
    except (ValueError, EOFError, OSError) as error:
        raise ValueError(f"{path} cannot be read: {_without_pickle(error)}") from error


def _without_pickle(error: Exception) -> str:
    if "allow_pickle" in str(error) or "Python objects" in str(error):
        return "it holds Python objects, and unpickling runs what a file says. Save numbers: array.astype('float32')."
    return f"{error}. Write it with numpy.save."


def _npz(path: Path, columns: Columns | None, wanted: Sequence[str], beside: Sequence[str]) -> Archive:
    try:
        with np.load(path, allow_pickle=False) as archive:
            return _by_site(archive.files, archive.__getitem__, columns, wanted, beside, path)
    except (BadZipFile, EOFError, OSError) as error:
        raise ValueError(f"{path} is no .npz archive: {error}. Write it with numpy.savez.") from error
    except ValueError as error:
        if "allow_pickle" not in str(error) and "Python objects" not in str(error):
            raise
        raise ValueError(f"{path} cannot be read: {_without_pickle(error)}") from error


def _safetensors(path: Path, columns: Columns | None, wanted: Sequence[str], beside: Sequence[str]) -> Archive:
    try:
        with safe_open(path, framework="pt") as archive:
            return _by_site(list(archive.keys()), archive.get_tensor, columns, wanted, beside, path)
    except SafetensorError as error:
        raise ValueError(f"{path} is no safetensors file: {error}.") from error


def _by_site(
    names: Sequence[str],
    read: Callable[[str], np.ndarray | Tensor],
    columns: Columns | None,
    wanted: Sequence[str],
    beside: Sequence[str],
    path: Path,
) -> Archive:
    """The arrays of an archive by site, the 1-D arrays that are labels or groups or stay beside, and names by site."""
    missing = f"{path} has no array"
    for name in wanted:
        chosen_names(names, name, (), missing)
    others = [name for name in names if name in wanted or name in beside]
    if isinstance(columns, Mapping):
        of_site = {site: chosen_names(names, name, others, missing) for site, name in columns.items()}
        for site, several in of_site.items():
            if len(several) > 1:
                raise ValueError(f"{path}: site {site!r} is given {len(several)} arrays, {several[:3]}. Give it one.")
    else:
        free = [name for name in names if name not in others]
        of_site = {
            name: [name] for name in (free if columns is None else chosen_names(names, columns, others, missing))
        }
    if not of_site:
        raise ValueError(f"{path} holds no arrays of features, only {list(names)}. Give [row, d] arrays.")
    arrays = {site: read(name) for site, [name] in of_site.items()}
    return arrays, {name: np.asarray(read(name)) for name in others}, of_site


def _floating(array: np.ndarray | Tensor, name: str, path: Path) -> np.ndarray | Tensor:
    """As it is, or whole numbers and Booleans as float32."""
    if isinstance(array, Tensor):
        if array.is_complex():
            raise TypeError(f"{path}: {name!r} holds {array.dtype}. Save real numbers.")
        return array if array.is_floating_point() else array.to(torch.float32)
    if array.dtype.kind not in "fiub":
        raise TypeError(f"{path}: {name!r} holds {array.dtype}, not real numbers. Save float32.")
    if array.dtype.kind == "f" and array.dtype.itemsize <= 8 and array.dtype.isnative:
        return array
    return array.astype(np.float64 if array.dtype.kind == "f" and array.dtype.itemsize >= 8 else np.float32)


def _one_length(arrays: Features, path: Path) -> int:
    lengths = {}
    for name, array in arrays.items():
        if array.ndim not in (2, 3) or 0 in array.shape:
            raise ValueError(
                f"{path}: {name!r} has shape {list(array.shape)}; expected [row, d] or [row, head, d], no axis empty. "
                "Reshape it to one row per example (a 1-D array of labels or groups: name it as labels= or groups=)."
            )
        lengths[name] = array.shape[0]
    if len(set(lengths.values())) > 1:
        raise ValueError(f"{path}: arrays have different numbers of rows, {lengths}. Every site needs the same rows.")
    return next(iter(lengths.values()))


def _require_finite(array: np.ndarray | Tensor, name: str, path: Path, *, at_once: int = 2**24) -> None:
    """Raise ValueError for NaN or infinity, a piece of the rows at a time."""
    step = max(1, at_once // max(1, int(np.prod(array.shape[1:]))))
    for first in range(0, array.shape[0], step):
        piece = array[first : first + step]
        finite = torch.isfinite(piece).numpy() if isinstance(piece, Tensor) else np.isfinite(piece)
        if finite.all():
            continue
        place = np.argwhere(~finite)[0]
        raise ValueError(
            f"{path}: {name!r} is NaN or infinite at row {first + int(place[0])}, feature "
            f"{', '.join(str(int(n)) for n in place[1:])} (counted from 0). Fill it in or drop the row."
        )
