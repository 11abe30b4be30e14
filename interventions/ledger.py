"""What interventions did: for every layer and step whether they fired, how large they were, what moved.

    relative = |delta| / |x|,   effort = |delta|^2,   before = u . x,   after = u . (x + delta)

over the tokens where they act, u the operation's first direction. Kept by text, so that conditions compare pairwise.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from microtome.capture.forward_call import ForwardCall
from microtome.capture.sites import Site

if TYPE_CHECKING:
    from microtome.interventions.steering import Intervention

_SUMS = ("tokens", "relative", "effort", "before", "after")


class NeverActed(RuntimeError):
    """An intervention's positions met no token, so that what was asked for did not happen."""


@dataclass(eq=False)
class Ledger:
    """Sums by site, intervention, step and text; `to_frame()` gives their means.

    Attributes:
        names: interventions that have to act.
    """

    names: tuple[str, ...] = ()
    _rows: list[tuple[Site, str, int, tuple[int, ...], Tensor, Tensor]] = field(default_factory=list)
    _acted: set[str] = field(default_factory=set)

    @classmethod
    def of(cls, interventions: "Iterable[Intervention]") -> "Ledger":
        """One that expects these to act."""
        return cls(tuple(dict.fromkeys(one.name for one in interventions)))

    def add(
        self,
        site: Site,
        name: str,
        call: ForwardCall,
        x: Tensor,
        delta: Tensor,
        mask: Tensor,
        directions: Tensor | None,
    ) -> None:
        """Note one change. Nothing is read off the device here."""
        with torch.no_grad():
            x, delta, at = x.flatten(2), delta.flatten(2), mask.to(x.dtype)
            size = torch.linalg.vector_norm(delta, dim=-1)
            relative = size / torch.linalg.vector_norm(x, dim=-1).clamp_min(1e-30)
            parts = [at, relative * at, size.square() * at]
            if directions is not None and directions.shape[-1] == x.shape[-1]:
                both = torch.stack([x, delta]) @ directions[0].to(x)
                parts += [both[0] * at, both.sum(0) * at]
            else:
                parts += [torch.full_like(at, torch.nan)] * 2
            largest = (delta.abs().amax(-1) * at).amax(-1)
        texts = call.rows.texts if call.rows is not None else tuple(range(len(mask)))
        self._rows.append((site, name, call.step, tuple(texts), torch.stack(parts).sum(-1), largest))
        if name not in self._acted and bool(mask.any()):
            self._acted.add(name)

    def require_acted(self) -> None:
        """Raise NeverActed naming interventions that no token met."""
        if silent := [name for name in self.names if name not in self._acted]:
            raise NeverActed(
                f"{', '.join(silent)}: no token met the positions, so that nothing was edited. Look at positions= and "
                "at the lengths of the prompts; a gate that never opens is seen in the ledger."
            )

    def by_text(self) -> pd.DataFrame:
        """A row per site, intervention, step and text; relative, before and after are means over tokens."""
        if not self._rows:
            columns = ["site", "layer", "name", "step", "text", "fired", *_SUMS[:2], "largest", *_SUMS[2:]]
            return pd.DataFrame({name: [] for name in columns})
        sizes = [len(texts) for *_, texts, _, _ in self._rows]
        sums = torch.cat([s for *_, s, _ in self._rows], 1).double().cpu().numpy()
        frame = pd.DataFrame(
            {
                "site": np.repeat([str(site) for site, *_ in self._rows], sizes),
                "layer": np.repeat([-1 if site.layer is None else site.layer for site, *_ in self._rows], sizes),
                "name": np.repeat([name for _, name, *_ in self._rows], sizes),
                "step": np.repeat([step for _, _, step, *_ in self._rows], sizes),
                "text": np.concatenate([texts for *_, texts, _, _ in self._rows]),
                "largest": torch.cat([m for *_, m in self._rows]).double().cpu().numpy(),
                **dict(zip(_SUMS, sums, strict=True)),
            }
        )
        with np.errstate(invalid="ignore", divide="ignore"):
            for name in ("relative", "before", "after"):
                frame[name] = frame[name] / frame["tokens"]
        frame["tokens"] = frame["tokens"].astype(int)
        frame["fired"] = frame["tokens"] > 0
        order = ["site", "layer", "name", "step", "text", "fired", *_SUMS[:2], "largest", *_SUMS[2:]]
        return frame[order]

    def to_frame(self) -> pd.DataFrame:
        """A row per site, intervention and step, over the texts it acted in."""
        frame = self.by_text()
        keys = ["site", "layer", "name", "step"]
        if not len(frame):
            return frame.drop(columns="text")
        for name in ("relative", "before", "after"):
            frame[name] = frame[name] * frame["tokens"]
        sums = {name: (name, "sum") for name in _SUMS}
        found = frame.groupby(keys, sort=False).agg(fired=("fired", "any"), largest=("largest", "max"), **sums)
        for name in ("relative", "before", "after"):
            found[name] = found[name] / found["tokens"].where(found["tokens"] > 0)
        return found.reset_index()[[*keys, "fired", *_SUMS[:2], "largest", *_SUMS[2:]]]

    def by_layer(self) -> pd.DataFrame:
        """A row per site and intervention, over steps: tokens, relative, largest, effort, before, after."""
        frame = self.to_frame()
        keys = ["site", "layer", "name"]
        for name in ("relative", "before", "after"):
            frame[name] = frame[name] * frame["tokens"]
        sums = {name: (name, "sum") for name in _SUMS}
        found = frame.groupby(keys, sort=False).agg(largest=("largest", "max"), **sums)
        for name in ("relative", "before", "after"):
            found[name] = found[name] / found["tokens"].where(found["tokens"] > 0)
        return found.reset_index()
