"""From requested sites to live taps: what acts on which tensor of which module, in which order.

The anatomy says where a site is (`Tap`); a request adds one head, query rows, a function. A stream between mixer and
MLP that exists only as the MLP's input is edited on the mixer's contribution: with the block's hops,
`resid_mid = a resid_pre + sum_i b_i c_i` over what is added before the MLP, so a delta d is d / b on the last c.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from torch import Tensor, nn

from microtome.capture.anatomy import Anatomy, Point, Tap, coefficient
from microtome.capture.forward_call import RunningForward
from microtome.capture.hooks import LiveTap, Side
from microtome.capture.layouts import (
    PHASE_ABOVE,
    PHASE_THROUGH,
    PHASE_VALUE,
    Columns,
    HeadAxis,
    HeadWrite,
    Layout,
    Remember,
    RouterInput,
    RowsOf,
    StreamBetween,
    Tokens,
    Whole,
)
from microtome.capture.live_taps import (
    EditContext,
    LiveEdit,
    LivePatternEdit,
    LivePatternRead,
    LiveRead,
    Queries,
    with_context,
)
from microtome.capture.sites import Site

SiteName = str | tuple | Site
EditFunction = Callable[[Tensor], Tensor] | Callable[[Tensor, EditContext], Tensor]


@dataclass(frozen=True)
class Read:
    """A request to keep a site's value.

    Attributes:
        site: a name, tuple or Site; a kind without a layer stands for all layers.
        select: what to keep of the value, such as `lambda x: x[:, -1]`; runs inside the forward, so that only its
            result takes memory. None keeps all.
        queries: for pattern, the query rows wanted: numbers (negative from the end), a tensor `[batch, row]` with rows
            for each text, or "all".
        keep_graph: keep the value in the autograd graph, not a detached copy. The model goes on from this very
            tensor, so `torch.autograd.grad(loss, tape[site])` works, with frozen parameters too. head_out and pattern
            are no tensors of the model: gradients flow from them to what came before, not to them.
    """

    site: SiteName
    select: Callable[[Tensor], Tensor] | None = None
    queries: Queries | None = None
    keep_graph: bool = False


@dataclass(frozen=True)
class Edit:
    """An edit with options.

    Attributes:
        function: gets the value and, if it takes two arguments, an `EditContext`; returns the delta to add.
        queries: for pattern, the query rows, as in `Read`.
    """

    function: EditFunction
    queries: Queries | None = None


@dataclass(eq=False)
class TapPlan:
    """The live taps of one context.

    Attributes:
        at: by side and module, in the order in which they act.
        reads, edits: the same taps by their site.
        entrances: modules whose call begins a forward; empty unless a site names a call or an edit takes a context.
        running: the running forward, for edits.
    """

    at: dict[Side, dict[nn.Module, list[LiveTap]]]
    reads: dict[Site, LiveRead | LivePatternRead]
    edits: dict[Site, LiveEdit | LivePatternEdit]
    entrances: frozenset[nn.Module] = frozenset()
    running: RunningForward = field(default_factory=RunningForward)

    @property
    def uses_seam(self) -> bool:
        """Whether any of them acts at the attention seam."""
        return bool(self.at["seam in"] or self.at["seam out"])


def plan_taps(
    model: nn.Module,
    anatomy: Anatomy,
    reads: Iterable[SiteName | Read] | SiteName | Read,
    edits: Mapping[SiteName, EditFunction | Edit],
) -> TapPlan:
    """The live taps for reads and edits.

    Raises:
        KeyError, IndexError: a site that is not offered, or out of range.
        ValueError: a site asked for twice; a pattern without heads or queries; queries elsewhere; a stream that
            cannot be edited.
        TypeError: an edit that is no function of one or two arguments.
    """
    placed = _Places(model, anatomy)
    edit_requests = {name: edit if isinstance(edit, Edit) else Edit(edit) for name, edit in edits.items()}
    edits_of = _single_sites(anatomy, list(edit_requests.items()))
    for site, edit in edits_of:
        placed.edit(site, edit)
    read_requests = [read if isinstance(read, Read) else Read(read) for read in _as_list(reads)]
    for site, read in _single_sites(anatomy, [(read.site, read) for read in read_requests]):
        placed.read(site, read)
    for modules in placed.at.values():
        for taps in modules.values():
            taps.sort(key=lambda tap: tap.phase)
    names_calls = any(tap.call is not None for side in placed.at.values() for taps in side.values() for tap in taps)
    # A function of one argument is wrapped; one that takes a context may ask it for the running forward.
    wants_forward = any(placed.edits[site].function is edit.function for site, edit in edits_of)
    entrances = {model, getattr(model, "base_model", model)} if names_calls or wants_forward else set()
    return TapPlan(placed.at, placed.reads, placed.edits, frozenset(entrances), placed.running)


def _as_list(reads: Iterable[SiteName | Read] | SiteName | Read) -> list[SiteName | Read]:
    is_site_tuple = isinstance(reads, tuple) and reads and all(isinstance(n, int) for n in reads[1:])
    return [reads] if isinstance(reads, (str, Site, Read)) or is_site_tuple else list(reads)


Request = TypeVar("Request")


def _single_sites(anatomy: Anatomy, requests: list[tuple[SiteName, Request]]) -> list[tuple[Site, Request]]:
    single = [(site, request) for name, request in requests for site in anatomy.expand(name)]
    known = {site for site, _ in single}
    if len(known) < len(single) or any(site.head is not None and site.whole in known for site in known):
        anatomy.expand([site for site, _ in single])  # raises, and says which are named twice
    return single


@dataclass(eq=False)
class _Places:
    """Collects live taps while requests are gone through."""

    model: nn.Module
    anatomy: Anatomy
    at: dict[Side, dict[nn.Module, list[LiveTap]]] = field(
        default_factory=lambda: {"in": {}, "out": {}, "seam in": {}, "seam out": {}, "cache": {}}
    )
    reads: dict[Site, LiveRead | LivePatternRead] = field(default_factory=dict)
    edits: dict[Site, LiveEdit | LivePatternEdit] = field(default_factory=dict)
    remembered: dict[Point, Remember] = field(default_factory=dict)
    noted: dict[Point, RowsOf] = field(default_factory=dict)
    running: RunningForward = field(default_factory=RunningForward)

    def read(self, site: Site, read: Read) -> None:
        tap = self.anatomy.tap(site)
        queries = _checked_queries(site, read.queries)
        if queries is not None:
            live = LivePatternRead(site, _heads_of(site), queries, read.select, read.keep_graph, tap.point.call)
        else:
            if read.keep_graph and tap.point.side == "cache":
                raise ValueError(f"{site} with keep_graph=True: a cache holds no graph. Read it without.")
            if read.keep_graph and tap.edited_at is not None:
                raise ValueError(
                    f"{site} with keep_graph=True would give no gradient: this router returns logits that it has "
                    "already used. Take the gradient with respect to what it reads, such as resid_mid."
                )
            if read.keep_graph and site.kind == "resid_mid" and tap.through is not None:
                raise ValueError(
                    f"{site} with keep_graph=True would give the gradient through the MLP alone: here it is the MLP's "
                    f"input, not the trunk. Read {tap.through}: its gradient is {tap.factor:g} times that of {site}."
                )
            layout, phase = self._layout(tap, site.head)
            live = LiveRead(site, tap.point.slot, phase, layout, read.select, read.keep_graph, tap.point.call)
        self.reads[site] = live
        self._place(tap.point, live)

    def edit(self, site: Site, edit: Edit) -> None:
        tap = self.anatomy.tap(site)
        point, function = tap.point, with_context(edit.function)
        queries = _checked_queries(site, edit.queries)
        if queries is not None:
            live = LivePatternEdit(site, _heads_of(site), queries, function, point.call, running=self.running)
        elif site.kind == "resid_mid" and tap.through is not None:
            point = self.anatomy.tap(tap.through).point
            live = LiveEdit(
                site,
                point.slot,
                PHASE_ABOVE,
                self._stream_between(tap, point),
                function,
                point.call,
                running=self.running,
            )
        elif tap.edited_at is not None:
            point = tap.edited_at
            layout = RouterInput(tap.point.slot, None if tap.rows_of is None else self._rows(tap.rows_of))
            live = LiveEdit(site, point.slot, PHASE_VALUE, layout, function, point.call, running=self.running)
        else:
            layout, phase = self._layout(tap, site.head)
            live = LiveEdit(site, point.slot, phase, layout, function, point.call, running=self.running)
        self.edits[site] = live
        self._place(point, live)

    def _layout(self, tap: Tap, head: int | None) -> tuple[Layout, int]:
        if tap.others:
            return StreamBetween(1.0, [(self._remember(p), factor) for p, factor in tap.others]), PHASE_ABOVE
        if tap.rows_of is None:
            return _layout(tap, head)
        return Tokens(self._rows(tap.rows_of)), PHASE_VALUE

    def _rows(self, point: Point) -> RowsOf:
        if point not in self.noted:
            self.noted[point] = RowsOf(point.slot, call=point.call)
            self._place(point, self.noted[point])
        return self.noted[point]

    def _place(self, point: Point, live: LiveTap) -> None:
        side: Side = point.side if point.side != "seam" else "seam out" if point.slot in ("z", "pattern") else "seam in"
        self.at[side].setdefault(self.model.get_submodule(point.module), []).append(live)

    def _stream_between(self, tap: Tap, mixer: Point) -> StreamBetween:
        block = next(b for b in self.anatomy.blocks if any(c.point == mixer for c in b.contributions))
        terms: dict[Point, float | Tensor] = {block.entry: 1.0}
        constant: float | Tensor = 0.0
        for hop in block.hops[: tap.after]:
            factor = coefficient(self.model, hop.factor, hop.vectors)
            if hop.step == "norm":
                raise ValueError(f"{tap.site} cannot be edited: the norm {hop.module!r} is on the trunk.")
            if hop.step == "scale":
                terms = {point: other * factor for point, other in terms.items()}
                constant = constant * factor
            elif hop.step == "shift":
                constant = constant + factor
            elif block.contributions[hop.contribution].role == "mlp":
                break
            else:
                terms[block.contributions[hop.contribution].point] = factor
        order = [c.point for c in block.contributions]
        if mixer not in terms or any(order.index(p) > order.index(mixer) for p in terms if p != block.entry):
            raise ValueError(
                f"{tap.site} cannot be edited: {tap.through} is not the last term added before the MLP. Edit that term."
            )
        factor = terms.pop(mixer)
        others = [(self._remember(point), other) for point, other in terms.items()]
        return StreamBetween(factor, others, constant)

    def _remember(self, point: Point) -> Remember:
        if point not in self.remembered:
            self.remembered[point] = Remember(point.slot, call=point.call)
            self._place(point, self.remembered[point])
        return self.remembered[point]


def _layout(tap: Tap, head: int | None) -> tuple[Layout, int]:
    if tap.site.kind == "head_out":
        return HeadWrite(Columns.of(tap.heads.columns, head)), PHASE_THROUGH
    if tap.point.side == "seam":
        return HeadAxis(2 if tap.point.slot == "z" else 1, head), PHASE_VALUE
    if tap.heads is not None:
        return Columns.of(tap.heads.columns, head), PHASE_VALUE
    return Whole(), PHASE_VALUE


def _heads_of(site: Site) -> list[int] | None:
    return None if site.head is None else [site.head]


def _checked_queries(site: Site, queries: object) -> Queries | None:
    if site.kind != "pattern":
        if queries is not None:
            raise ValueError(f"{site}: queries choose rows of a pattern; use select= to choose positions.")
        return None
    if isinstance(queries, int) or (isinstance(queries, str) and queries != "all"):
        raise ValueError(f"{site}: queries are a list of rows, a tensor [batch, row], or 'all'. Got {queries!r}.")
    if queries is None and site.head is None:
        raise ValueError(
            f"{site} is heads x queries x keys for every text. Name a head ('{site}.0') or query rows "
            f"(Read({str(site)!r}, queries=[-1])), or ask for everything with queries='all'."
        )
    return "all" if queries is None else queries
