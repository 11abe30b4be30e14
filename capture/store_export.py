"""Part of a store, or of any activations, as files that other tools read.

NumPy arrays, one Parquet table, or a folder of `Activations`; written piece by piece, so that it may be larger than
memory, and whole or not at all.
"""

import os
import shutil
from pathlib import Path
from typing import Literal, get_args

import numpy as np
import pyarrow
import pyarrow.parquet
import torch
from torch import Tensor

from microtome.capture.activation_files import scratch_beside
from microtome.capture.activation_sites import heads_apart
from microtome.capture.activations import Activations
from microtome.capture.stored_tensor import in_memory, pieces

ExportFormat = Literal["activations", "npy", "parquet"]
_ROWS_AT_ONCE = 4096


def export(activations: Activations, out: str | Path, format: ExportFormat = "npy") -> Path:
    """Write them and return the path.

    - "npy": a folder with `<site>.npy` (`[row, d]` or `[row, head, d]`) and `rows.parquet`.
    - "parquet": one file, the row table and a column of fixed-size lists per site or head.
    - "activations": what `Activations.load` reads.

    bfloat16, which the first two lack, becomes float32.

    Raises:
        FileExistsError: `out` is there already.
        ValueError: another format, two columns (or files) that would have one name, a name that is none of a file.
        TypeError: a column that Parquet cannot hold.
    """
    out = Path(out).resolve()
    if format not in get_args(ExportFormat):
        raise ValueError(f"format={format!r}: expected one of {', '.join(get_args(ExportFormat))}.")
    if out.exists():
        raise FileExistsError(f"{out} exists. Give another path.")
    if format == "activations":
        return activations.save(out)
    if format == "npy":
        _require_file_names(activations)
    else:
        _require_own_columns(activations)
    rows = _row_table(activations)
    out.parent.mkdir(parents=True, exist_ok=True)
    scratch = scratch_beside(out)
    try:
        if format == "npy":
            _write_npy(activations, rows, scratch)
            os.rename(scratch, out)
        else:
            _write_parquet(activations, rows, scratch / "table.parquet")
            os.rename(scratch / "table.parquet", out)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return out


def _require_file_names(activations: Activations) -> None:
    """Raise ValueError unless every site has a file of its own in the folder, also where case makes no difference."""
    seen: dict[str, str] = {}
    for name in map(str, activations.tensors):
        if any(character in name for character in "/\\\0"):
            raise ValueError(
                f"Site {name!r} cannot be the name of a file. Export it with format='parquet', or give it another name."
            )
        if (other := seen.setdefault(name.casefold(), name)) != name:
            raise ValueError(
                f"Sites {other!r} and {name!r} would be one file where case makes no difference. Export them one by "
                "one, or with format='parquet'."
            )


def _require_own_columns(activations: Activations) -> None:
    """Raise ValueError where a site or head would be a column that is there already."""
    taken = {str(name): "the row table has a column" for name in activations.rows}
    for site, tensor in activations.tensors.items():
        for name in map(str, heads_apart({site: tensor})):
            if name in taken:
                raise ValueError(
                    f"{site} makes a column {name!r}, and {taken[name]} of that name. Rename the column, leave the "
                    "site out, or export with format='npy'."
                )
            taken[name] = f"{site} makes one"


def _row_table(activations: Activations) -> pyarrow.Table:
    try:
        return pyarrow.Table.from_pandas(activations.rows, preserve_index=False)
    except (pyarrow.ArrowException, ValueError) as error:
        raise TypeError(f"rows cannot be written as Parquet: {error}. Give every column one type and name.") from error


def _write_npy(activations: Activations, rows: pyarrow.Table, folder: Path) -> None:
    for site, tensor in activations.tensors.items():
        dtype = _numpy_dtype(tensor.dtype)
        array = np.lib.format.open_memmap(folder / f"{site}.npy", mode="w+", dtype=dtype, shape=tuple(tensor.shape))
        first = 0
        for piece in pieces(tensor):
            array[first : first + len(piece)] = _plain(piece).numpy()
            first += len(piece)
        array.flush()
    pyarrow.parquet.write_table(rows, folder / "rows.parquet")


def _write_parquet(activations: Activations, rows: pyarrow.Table, file: Path) -> None:
    parts = heads_apart(activations.tensors)
    lists = [
        pyarrow.field(str(site), pyarrow.list_(pyarrow.from_numpy_dtype(_numpy_dtype(part.dtype)), part.shape[1]))
        for site, part in parts.items()
    ]
    schema = pyarrow.schema([*rows.schema, *lists], metadata=rows.schema.metadata)
    with pyarrow.parquet.ParquetWriter(file, schema) as writer:
        for first in range(0, activations.n_rows, _ROWS_AT_ONCE):
            stop = min(first + _ROWS_AT_ONCE, activations.n_rows)
            columns = [rows.column(name).slice(first, stop - first) for name in rows.column_names]
            for part, field in zip(parts.values(), lists, strict=True):
                flat = _plain(in_memory(part[first:stop])).reshape(-1).numpy()
                columns.append(pyarrow.FixedSizeListArray.from_arrays(pyarrow.array(flat), part.shape[1]))
                assert columns[-1].type == field.type
            writer.write_table(pyarrow.table(columns, schema=schema))


def _numpy_dtype(dtype: torch.dtype) -> np.dtype:
    return torch.empty(0, dtype=torch.float32 if dtype == torch.bfloat16 else dtype).numpy().dtype


def _plain(tensor: Tensor) -> Tensor:
    tensor = tensor.detach().cpu()
    return tensor.float() if tensor.dtype == torch.bfloat16 else tensor
