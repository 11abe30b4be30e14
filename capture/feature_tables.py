"""Features of any origin from a file: EEG, speech, images, another framework. `read_features("eeg.csv", ...)`.

    .npy           [row, d] or [row, head, d], mapped from disk and read when touched; one site
    .npz           such arrays by name, a site each
    .safetensors   such tensors by name, a site each
    .csv .parquet  a row per example, a column per feature (or a list column per site)

Names become sites: trailing numbers are layer and head ("vit.3" is layer 3 of "vit"). The values stay as they are;
whole numbers and Booleans become float32. Beware: without groups of speakers, subjects or recordings a probe may know
them again by their features; say which column holds them.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from zipfile import BadZipFile

import numpy as np
import pandas as pd
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from microtome.capture.activations import Activations
from microtome.capture.feature_columns import Columns, read_columns, read_rows, require_column
from microtome.capture.sites import near_matches

SUFFIXES = (".npy", ".npz", ".parquet", ".csv", ".safetensors")
_TABLES = (".csv", ".parquet")
Column = str | Path | Sequence | np.ndarray | pd.Series
Features = dict[str, np.ndarray] | dict[str, Tensor]


def read_features(
    path: str | Path,
    *,
    columns: Columns | None = None,
    labels: Column | None = None,
    groups: Column | None = None,
    rows: str | Path | pd.DataFrame | None = None,
    site: str = "features",
) -> Activations:
    """Features of a file as `Activations`, with the columns `label` and `group`.

    Args:
        path: a .npy, .npz, .parquet, .csv or .safetensors file.
        columns: which are features. Of a table: names, or a prefix of names such as "eeg_", or either by site,
            `{"eeg.0": "frontal_", "eeg.1": "occipital_"}`; of .npz and .safetensors: names of arrays, or the name of
            an array by site. None takes every column of numbers but labels and groups, or every array.
        labels, groups: the name of a column (of `rows` if given, else of the table), or of a 1-D array in a .npz or
            .safetensors; a .npy file of one entry per row; or the entries themselves.
        rows: a second file (.csv, .parquet) or a table with one row per row of features, in the same order; all its
            columns are kept.
        site: name of the one site of a .npy file, or of a table without `columns` by site.

    Returns:
        Activations whose row table has the columns that are no features. A column `text` of strings is kept as
        `string`, by which a sweep finds equal texts; every row is a text of its own.

    Raises:
        FileNotFoundError: a file is not there.
        ValueError: another suffix, a file that cannot be read, NaN or infinity (with row and column), lengths that do
            not agree, no columns of numbers, Python objects (which are never unpickled).
        KeyError: a column or array that the file lacks.
        TypeError: arrays of text or complex numbers.
    """
    path = _existing(path, SUFFIXES)
    suffix = path.suffix.lower()
    second = None if rows is None else _second_table(rows, groups)
    in_second = () if second is None else tuple(second)
    label, group = (name if _is_name(name) and name not in in_second else None for name in (labels, groups))
    beside = pd.DataFrame()
    named: dict[str, np.ndarray] = {}
    if suffix in _TABLES:
        arrays, beside = read_columns(path, columns, label=label, group=group, site=site)
    elif suffix == ".npy":
        if columns is not None:
            raise ValueError(
                f"{path} is one array and has no names, so columns={columns!r} means nothing. Leave it out."
            )
        arrays = {site: _npy(path)}
    else:
        read = _npz if suffix == ".npz" else _safetensors
        arrays, named = read(path, columns, [name for name in (label, group) if name is not None])
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
    table = table.assign(**{name: beside[name] for name in beside if name not in table})
    where = str(path) if rows is None else f"{_called(rows)} or {path}"
    for name, given in (("label", labels), ("group", groups)):
        table = _with_column(table, name, given, named, where, n_rows)
    return Activations.from_arrays(
        arrays,
        rows=_as_row_table(table),
        provenance={"source": "file", "file": path.name, "bytes": path.stat().st_size},
        allow_nonfinite=True,  # looked at above, where rows and columns have names
    )


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


def _npz(path: Path, columns: Columns | None, wanted: Sequence[str]) -> tuple[Features, dict[str, np.ndarray]]:
    try:
        with np.load(path, allow_pickle=False) as archive:
            return _by_site(archive.files, archive.__getitem__, columns, wanted, path)
    except (BadZipFile, EOFError, OSError) as error:
        raise ValueError(f"{path} is no .npz archive: {error}. Write it with numpy.savez.") from error
    except ValueError as error:
        if "allow_pickle" not in str(error) and "Python objects" not in str(error):
            raise
        raise ValueError(f"{path} cannot be read: {_without_pickle(error)}") from error


def _safetensors(path: Path, columns: Columns | None, wanted: Sequence[str]) -> tuple[Features, dict[str, np.ndarray]]:
    try:
        with safe_open(path, framework="pt") as archive:
            return _by_site(list(archive.keys()), archive.get_tensor, columns, wanted, path)
    except SafetensorError as error:
        raise ValueError(f"{path} is no safetensors file: {error}.") from error


def _by_site(
    names: Sequence[str],
    read: Callable[[str], np.ndarray | Tensor],
    columns: Columns | None,
    wanted: Sequence[str],
    path: Path,
) -> tuple[Features, dict[str, np.ndarray]]:
    """The arrays of an archive by site, and the 1-D arrays that are labels or groups."""
    if isinstance(columns, str):
        columns = [name for name in names if name.startswith(columns) and name not in wanted] or [columns]
    if columns is None:
        columns = [name for name in names if name not in wanted]
    sites = dict(columns) if isinstance(columns, Mapping) else {name: name for name in columns}
    sites = {site: name if isinstance(name, str) else next(iter(name)) for site, name in sites.items()}
    for name in (*sites.values(), *wanted):
        if name not in names:
            raise KeyError(f"{path} has no array {name!r}; it holds {list(names)[:12]}. {near_matches(name, names)}")
    if not sites:
        raise ValueError(f"{path} holds no arrays of features, only {list(names)}. Give [row, d] arrays.")
    return {site: read(name) for site, name in sites.items()}, {name: np.asarray(read(name)) for name in wanted}


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
