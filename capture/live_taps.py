"""Reads and edits while they run: what happens to one tensor each time it passes.

A read keeps a copy (later in-place adds of the model must not reach it), or the value itself with its graph, the model
then going on with a copy. An edit is asked for a delta, which is checked against the value and added. On pattern
rows, P + delta means z + delta V for those heads and rows: attention is linear in P, so the implementation's
own z stays exact where nothing was added.
"""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from microtome.capture.forward_call import ForwardCall, RunningForward
from microtome.capture.layouts import PHASE_THROUGH, HeadWrite, Layout, Passing
from microtome.capture.sites import Site

Queries = Sequence[int] | Int[Tensor, " row"] | Int[Tensor, "batch row"] | Literal["all"]


@dataclass(frozen=True)
class EditContext:
    """What an edit is told beside the value.

    Attributes:
        site: the single site that is edited (an edit of `resid_post` is called for every layer).
        firing: how often this edit has fired before in this context: the step number in `generate`.
        call: the running forward: which tokens are real, their positions, the prompts' lengths, what edits keep.
    """

    site: Site
    firing: int
    call: ForwardCall | None = None


@dataclass(eq=False)
class LiveRead:
    """Keeps a site's value each time it passes.

    Attributes:
        values: one per firing: a tensor, what `select` made of it, or a function that computes it when asked.
    """

    site: Site
    slot: int | str | None
    phase: int
    layout: Layout
    select: Callable[[Tensor], Tensor] | None = None
    keep_graph: bool = False
    call: int | None = None
    fired: int = 0
    values: list[Tensor | Callable[[], Tensor]] = field(default_factory=list)

    def apply(self, tensor: Tensor, passing: Passing) -> Tensor:
        self.fired += 1
        if isinstance(self.layout, HeadWrite) and self.select is None:
            self.values.append(self.layout.deferred(passing, keep_graph=self.keep_graph))
            return tensor
        value = self.layout.present(tensor, passing)
        if not self.keep_graph:
            self.values.append(own_copy(selected(value.detach(), self.select, self.site), value))
            return tensor
        if torch.is_grad_enabled() and not value.requires_grad:
            value = value.detach().requires_grad_()
        self.values.append(selected(value, self.select, self.site))
        return self.layout.put(tensor, value, passing)


def selected(value: Tensor, select: Callable[[Tensor], Tensor] | None, site: Site) -> Tensor:
    """`select(value)`, or the value. Raises TypeError if that is no tensor."""
    kept = value if select is None else select(value)
    if not isinstance(kept, Tensor):
        raise TypeError(f"select= of {site} returned {type(kept).__name__}; expected a tensor, such as value[:, -1].")
    return kept


def own_copy(kept: Tensor, value: Tensor) -> Tensor:
    """What is kept, copied if it lies in the value's memory."""
    is_own = kept.untyped_storage().data_ptr() != value.untyped_storage().data_ptr()
    return kept if is_own else kept.clone(memory_format=torch.contiguous_format)


@dataclass(eq=False)
class LiveEdit:
    """Adds what a function returns for a site's value each time it passes."""

    site: Site
    slot: int | str | None
    phase: int
    layout: Layout
    function: Callable[[Tensor, EditContext], Tensor]
    call: int | None = None
    running: RunningForward = field(default_factory=RunningForward)
    fired: int = 0

    def apply(self, tensor: Tensor, passing: Passing) -> Tensor:
        value = self.layout.present(tensor, passing)
        delta = delta_of(self.function, value, EditContext(self.site, self.fired, self.running.ask()))
        self.fired += 1
        return self.layout.add(tensor, delta, passing)


@dataclass(eq=False)
class LivePatternRead:
    """Keeps pattern rows of chosen heads at each attention call of one module."""

    site: Site
    heads: list[int] | None
    queries: Queries
    select: Callable[[Tensor], Tensor] | None = None
    keep_graph: bool = False
    call: int | None = None
    slot: str = "pattern"
    phase: int = PHASE_THROUGH
    fired: int = 0
    values: list[Tensor | Callable[[], Tensor]] = field(default_factory=list)

    def apply(self, tensor: Tensor, passing: Passing) -> Tensor:
        self.fired += 1
        rows = query_rows(self.queries, passing.call.query, self.site)
        value = pattern_value(passing, self.heads, rows, self.site)
        kept = selected(value if self.keep_graph else value.detach(), self.select, self.site)
        # A part of the rows is copied, so that it does not hold all of them.
        self.values.append(kept if self.select is None or self.keep_graph else own_copy(kept, value))
        return tensor


@dataclass(eq=False)
class LivePatternEdit:
    """Adds to pattern rows of chosen heads, by what that changes in z."""

    site: Site
    heads: list[int] | None
    queries: Queries
    function: Callable[[Tensor, EditContext], Tensor]
    call: int | None = None
    running: RunningForward = field(default_factory=RunningForward)
    slot: str = "pattern"
    phase: int = PHASE_THROUGH
    fired: int = 0

    def apply(self, tensor: Tensor, passing: Passing) -> Tensor:
        rows = query_rows(self.queries, passing.call.query, self.site)
        if any(len(row.unique()) < len(row) for row in rows):
            raise ValueError(f"The edit at {self.site} names a query row twice: {rows.tolist()}. Name each row once.")
        value = pattern_value(passing, self.heads, rows, self.site)
        delta = delta_of(self.function, value, EditContext(self.site, self.fired, self.running.ask()))
        self.fired += 1
        heads = self.heads if self.heads is not None else list(range(passing.call.query.shape[1]))
        delta = delta if delta.ndim == 4 else delta[:, None]
        passing.row_deltas.append((heads, rows, delta))
        return _z_after(tensor, passing.call.value, heads, rows, delta)


def query_rows(queries: Queries, query: Tensor, site: Site) -> Int[Tensor, "one_or_batch row"]:
    """Rows of this call from 0, one line for all texts or one each; negative ones count from the end of the call.

    Raises:
        IndexError: a row that this call does not have.
    """
    n = query.shape[2]
    if isinstance(queries, str):
        return torch.arange(n, device=query.device)[None]
    asked = torch.as_tensor(queries, device=query.device)
    if asked.numel() and not -n <= int(asked.min()) <= int(asked.max()) < n:
        raise IndexError(
            f"{site}: query rows {asked.tolist()} are out of range; this call has {n} queries, 0 to {n - 1} (in "
            "generation with a cache, every step after the first has one)."
        )
    rows = torch.where(asked < 0, asked + n, asked)
    return rows if rows.ndim == 2 else rows[None]


def pattern_value(
    passing: Passing, heads: list[int] | None, rows: Int[Tensor, "one_or_batch row"], site: Site
) -> Float[Tensor, "batch head row key"] | Float[Tensor, "batch row key"]:
    """Pattern rows after the edits so far; without the head axis where the site names one head."""
    value = passing.call.pattern_rows(heads, rows[0] if len(rows) == 1 else rows)
    wanted = heads if heads is not None else list(range(value.shape[1]))
    for edited, edited_rows, delta in passing.row_deltas:
        if shared := [h for h in wanted if h in edited]:
            is_same = (rows[:, None, :, None] == edited_rows[:, None, None, :]).to(delta.dtype)
            added = is_same @ delta[:, [edited.index(h) for h in shared]]
            places = torch.tensor([wanted.index(h) for h in shared], device=value.device)
            value = value.index_add(1, places, added)
    return value if site.head is None else value[:, 0]


def _z_after(
    z: Float[Tensor, "batch query head d_head"],
    v: Float[Tensor, "batch kv_head key d_head"],
    heads: list[int],
    rows: Int[Tensor, "one_or_batch row"],
    delta: Float[Tensor, "batch chosen_head row key"],
) -> Float[Tensor, "batch query head d_head"]:
    group = z.shape[2] // v.shape[1]
    moved = delta @ v[:, [h // group for h in heads]].to(delta.dtype)
    texts = torch.arange(len(z), device=z.device)[:, None, None]
    places = (texts, rows[:, None, :], torch.tensor(heads, device=z.device)[None, :, None])
    return z.index_put(places, moved.to(z.dtype), accumulate=True)


def delta_of(function: Callable[[Tensor, EditContext], Tensor], value: Tensor, at: EditContext) -> Tensor:
    """The delta that an edit returns, checked and broadcast to the value's shape.

    Raises:
        TypeError: it returned no tensor, or one of another dtype.
        ValueError: its shape or device does not fit, or it changed the value in place.
    """
    version = None if value.is_inference() else value._version
    delta = function(value, at)
    if not isinstance(delta, Tensor):
        raise TypeError(
            f"The edit at {at.site} returned {'None' if delta is None else type(delta).__name__}; expected a tensor of "
            f"shape {tuple(value.shape)} to add to the value (not the new value). Zeros change nothing."
        )
    is_row = delta.ndim == 1 and delta.shape[0] == value.shape[-1]
    is_block = delta.ndim == value.ndim and all(d in (1, v) for d, v in zip(delta.shape, value.shape, strict=True))
    if not is_row and not is_block:
        raise ValueError(
            f"The edit at {at.site} returned a delta of shape {tuple(delta.shape)}; expected {tuple(value.shape)}, the "
            f"same with axes of size 1, or ({value.shape[-1]},) to add the same everywhere."
        )
    if delta.dtype != value.dtype:
        raise TypeError(
            f"The edit at {at.site} returned {delta.dtype}, the value is {value.dtype}. Return delta.to(value.dtype)."
        )
    if delta.device != value.device:
        raise ValueError(
            f"The edit at {at.site} returned a delta on {delta.device}, the value is on {value.device}. "
            "Return delta.to(value.device)."
        )
    if version is not None and value._version != version:
        raise ValueError(f"The edit at {at.site} changed its value in place. Return the delta instead.")
    return delta.broadcast_to(value.shape)


def with_context(edit: object) -> Callable[[Tensor, EditContext], Tensor]:
    """An edit of one argument (the value) or two (value, context) as one of two.

    Raises:
        TypeError: not callable, or it takes neither one nor two arguments.
    """
    if not callable(edit):
        raise TypeError(f"An edit is a function of the value that returns the delta to add. Got {edit!r}.")
    try:
        signature = inspect.signature(edit.forward if isinstance(edit, nn.Module) else edit)
    except ValueError:  # some functions written in C have no signature; torch's take the value alone
        return lambda value, at: edit(value)
    parameters = signature.parameters.values()
    places = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    required = sum(p.default is p.empty for p in places)
    takes_any = any(p.kind == p.VAR_POSITIONAL for p in parameters)
    if required > 2 or not (places or takes_any):
        raise TypeError(
            f"The edit {edit!r} takes {required} arguments; expected one (the value) or two (the value and its "
            "EditContext)."
        )
    if required == 2 or not places or (len(places) > 1 and places[1].name == "at"):
        return edit
    return lambda value, at: edit(value)
