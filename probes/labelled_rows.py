"""Sites, labels and groups as a caller gives them, read and checked as `sweep` does, for the analyses beside it."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Int64
from torch import Tensor

from microtome.capture.activations import Activations
from microtome.capture.sites import Site
from microtome.probes.groups import ROWS, group_codes
from microtome.probes.site_blocks import SiteBlock, as_activations, site_blocks
from microtome.probes.target import Kind, Target, target_of

SIDE_BY_SIDE_BYTES = 2**25  # float64 rows of the sites in one call of the solver


@dataclass(frozen=True, eq=False)
class LabelledRows:
    """Checked input: what to tell apart, which rows belong together, and where the features are."""

    rows: pd.DataFrame
    target: Target
    groups: Int64[np.ndarray, " example"]  # numbered 0..n_groups-1
    texts: pd.Series | None  # by which equal rows were looked for: strings or token ids
    blocks: tuple[SiteBlock, ...]

    @property
    def probes(self) -> list[Site]:
        """Every site and head, in the order of `chunks`."""
        return [probe for block in self.blocks for probe in block.probes]

    def chunks(self, *, most_bytes: int = SIDE_BY_SIDE_BYTES) -> Iterator[Float[Tensor, "site example feature"]]:
        """Features of some sites of one width at a time."""
        waiting: list[Tensor] = []
        for block in self.blocks:
            for features in block.features:
                together = max(1, most_bytes // (8 * features.numel()))
                if waiting and (waiting[0].shape != features.shape or len(waiting) >= together):
                    yield torch.stack(waiting)
                    waiting = []
                waiting.append(features)
        yield torch.stack(waiting)


def labelled_rows(
    activations: Activations | Mapping,
    labels: str | Sequence | np.ndarray | pd.Series | Tensor,
    *,
    groups: str | Sequence | np.ndarray | pd.Series | Tensor,
    sites: Iterable | None = None,
    target: Kind | None = None,
    texts: Iterable | None = None,
    entities: Mapping[str, Iterable] | None = None,
) -> LabelledRows:
    """Read labels and groups (values, or names of columns) and check them; arguments as for `sweep`.

    Raises ValueError and KeyError as `target_of`, `group_codes` and `site_blocks`.
    """
    activations = as_activations(activations)
    rows = activations.rows
    made = target_of(column_of(labels, rows, "labels"), n_rows=len(rows), kind=target)
    groups = column_of(groups, rows, "groups")
    if texts is None:
        texts = next((rows[name] for name in ("string", "token_ids") if name in rows), None)
    if "text" in rows and "text" not in (entities or {}):  # rows of one text, whatever it says
        entities = {**(entities or {}), "text": rows["text"]}
    texts = None if texts is None else pd.Series(list(texts))
    codes = group_codes(groups, n_rows=len(rows), texts=texts, entities=entities)
    blocks = tuple(site_blocks(activations, sites))
    return LabelledRows(rows=rows, target=made, groups=codes, texts=texts, blocks=blocks)


def column_of(values, rows: pd.DataFrame, name: str):
    """The column of that name, or the values as they are; "rows" stays what it says of groups.

    Raises KeyError for a name that is no column.
    """
    if not isinstance(values, str) or (name == "groups" and values == ROWS):
        return values
    if values not in rows:
        hint = ' or "rows"' if name == "groups" else ""
        raise KeyError(
            f"{name}={values!r} is no column of activations.rows, which has {list(rows)}. Name one of them{hint}, or "
            "pass one value per row."
        )
    return rows[values]
