"""What interventions did: for every layer and step whether they fired, how large they were, what moved.

    relative = |delta| / |x|,   effort = |delta|^2,   before = u . x,   after = u . (x + delta)

over the tokens where they act, u the operation's first direction. Kept by text, so that conditions compare pairwise.
Small changes, as the steps of a generation make, are noted and reduced some dozens at a time: one product over all
layers costs as much as that of one.
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
SMALL = 2**17  # numbers of one change that is noted and reduced later
HELD = 2**22  # numbers that are noted at most


class NeverActed(RuntimeError):
    """An intervention's positions met no token, so that what was asked for did not happen."""


@dataclass(frozen=True, eq=False)
class _Change:
    site: Site
    name: str
    step: int
    texts: tuple[int, ...]
    x: Tensor
    delta: Tensor
    mask: Tensor
    direction: Tensor | None

    def is_like(self, other: "_Change") -> bool:
        """Whether the two can be reduced together."""
        mine, theirs = self.x, other.x
        return mine.shape == theirs.shape and mine.dtype == theirs.dtype and mine.device == theirs.device


@dataclass(eq=False)
class Ledger:
    """Sums by site, intervention, step and text; `to_frame()` gives their means.

    Attributes:
        names: interventions that have to act.
    """

    names: tuple[str, ...] = ()
    _noted: list[_Change] = field(default_factory=list)
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
        texts = call.rows.texts if call.rows is not None else tuple(range(len(mask)))
        with torch.no_grad():
            x, delta = x.flatten(2), delta.flatten(2)
            direction = None if directions is None or directions.shape[-1] != x.shape[-1] else directions[0]
            is_small = x.numel() <= SMALL
            if is_small:  # the stream may be written over before the change is reduced
                x, delta = x.clone(), delta.clone()
            change = _Change(site, name, call.step, tuple(texts), x, delta, mask, direction)
            if self._noted and not (is_small and self._noted[-1].is_like(change)):
                self._reduce()
            self._noted.append(change)
            if not is_small or len(self._noted) * x.numel() >= HELD:
                self._reduce()
        if name not in self._acted and bool(mask.any()):
            self._acted.add(name)

    def _reduce(self) -> None:
        """Sums of what was noted."""
        if not self._noted:
            return
        noted, self._noted = self._noted, []
        x, delta = (torch.stack([getattr(change, part) for change in noted]) for part in ("x", "delta"))
        at = torch.stack([change.mask for change in noted]).to(x.dtype)
        blank = x.new_full(x.shape[-1:], torch.nan)
        u = torch.stack([blank if c.direction is None else c.direction.to(x) for c in noted])[:, None, :, None]
        size = torch.linalg.vector_norm(delta, dim=-1)
        relative = size / torch.linalg.vector_norm(x, dim=-1).clamp_min(1e-30)
        before, moved = (x @ u).squeeze(-1), (delta @ u).squeeze(-1)
        parts = torch.stack([at, relative * at, size.square() * at, before * at, (before + moved) * at]).sum(-1)
        largest = (delta.abs().amax(-1) * at).amax(-1)
        for number, change in enumerate(noted):
            where = (change.site, change.name, change.step, change.texts)
            self._rows.append((*where, parts[:, number], largest[number]))

    def require_acted(self) -> None:
        """Raise NeverActed naming interventions that no token met."""
        if silent := [name for name in self.names if name not in self._acted]:
            raise NeverActed(
                f"{', '.join(silent)}: no token met the positions, so that nothing was edited. Look at positions= and "
                "at the lengths of the prompts; a gate that never opens is seen in the ledger."
            )

    def by_text(self) -> pd.DataFrame:
        """A row per site, intervention, step and text; relative, before and after are means over tokens."""
        with torch.no_grad():
            self._reduce()
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
