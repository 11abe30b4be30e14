"""Activations as tables: the row columns beside one column per component, or per norm."""

from collections.abc import Mapping

import pandas as pd
import torch
from torch import Tensor

from microtome.capture.activation_sites import heads_apart
from microtome.capture.sites import Site
from microtome.capture.stored_tensor import StoredTensor, in_memory

# Some 40 MB of float64; a wider table is nothing that pandas is of use for.
MAX_CELLS = 5_000_000


def wide_frame(
    rows: pd.DataFrame, tensors: Mapping[Site, Tensor | StoredTensor], *, values: str = "components"
) -> pd.DataFrame:
    """The row table and, to its right, `z.5.3[0]`, `z.5.3[1]`, ... (components) or `z.5.3` (Euclidean norms).

    Half-precision values become float32; others keep their type.

    Raises:
        ValueError: more than `MAX_CELLS` values, or neither "components" nor "norms".
    """
    if values not in ("components", "norms"):
        raise ValueError(f'values={values!r}: expected "components" or "norms".')
    parts = heads_apart(tensors)
    n_columns = len(parts) if values == "norms" else sum(tensor.shape[1] for tensor in parts.values())
    if len(rows) * n_columns > MAX_CELLS:
        raise ValueError(
            f"A table of {len(rows):,} rows x {n_columns:,} columns is over {MAX_CELLS:,} cells. Narrow it with "
            'sel(...) or select_rows(...), take values="norms", or use the tensors: acts["resid_post", 3].'
        )
    frames = [rows]
    for site, tensor in parts.items():
        wide = in_memory(tensor).detach().cpu().to(torch.promote_types(tensor.dtype, torch.float32))
        if values == "norms":
            frames.append(pd.DataFrame({str(site): wide.norm(dim=1).numpy()}))
        else:
            names = [f"{site}[{n}]" for n in range(wide.shape[1])]
            frames.append(pd.DataFrame(wide.numpy(), columns=names, copy=True))
    return pd.concat(frames, axis=1)
