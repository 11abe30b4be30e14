"""The heads of one mixer: z before its output projection, and the queries, keys and values behind it.

Where attention goes through transformers' interface its values are looked up there; where a model computes attention
itself, around its softmax. Slices of the projection's input count as heads only if acting on one moves it alone.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from microtome.capture.anatomy import HeadColumns, Point, Tap
from microtome.capture.attention_ops import AttentionOp
from microtome.capture.causality import head_check
from microtome.capture.found_parts import BlockParts, replay
from microtome.capture.head_layout import SeamRecord, before_rotation, column_match, head_axes
from microtome.capture.linear_maps import last_linear, linear_maps
from microtome.capture.opgraph import OpGraph
from microtome.capture.trunk import Chain, Factor, Walk


def _of_their_own(
    found: dict[str, tuple[Point, HeadColumns] | None],
) -> dict[str, tuple[Point, HeadColumns] | None]:
    """Columns that queries, keys or values share with one another (values that are the keys) are nobody's."""
    taken = {k: {(f[0], c) for c in f[1].columns.flatten().tolist()} for k, f in found.items() if f is not None}
    shared = {k for k in taken if any(taken[k] & taken[other] for other in taken if other != k)}
    return {kind: None if kind in shared else f for kind, f in found.items()}


@dataclass
class MixerHeads:
    """Finds the heads of one mixer: z before the output projection, and the queries, keys and values behind it."""

    parts: BlockParts
    graph: OpGraph
    walk: Walk
    width: int
    mixer: int
    chain: Chain
    k: int

    @property
    def block(self) -> int:
        """The block's call."""
        return self.chain.calls[self.k]

    def tap(self, kind: str, point: Point, columns: HeadColumns | None, heads: int, d_head: int) -> None:
        """Offer a site of this block, subject to proof."""
        self.parts.taps.append(Tap(self.parts.block.site(kind), point, columns, heads, d_head))

    def add_z(self, seams: tuple[SeamRecord, ...]) -> None:
        """z and head_out where heads are slices of the projection's input; z_attn where attention returns others."""
        seam = seams[0] if len(seams) == 1 else None
        linear = last_linear(self.walk, self.walk.terms[self.mixer].node)
        refusal = "what the mixer adds is not made by one linear map alone"
        is_at_seam = False
        if linear is not None:
            slot, into = next(iter(self.graph.calls[linear].inputs.items()))
            value, point = self.graph.nodes[into].value, self.graph.point(linear, "in", slot)
            columns, refusal = self._columns(value, into, point, seam, linear)
            if columns is not None:
                is_at_seam = seam is not None and self._is_seam_z(seam, value, columns)
                z_at = seam.point("z") if is_at_seam else point
                self.tap("z", z_at, None if is_at_seam else columns, columns.heads, columns.width)
                out = self.graph.point(linear, "out", next(iter(self.graph.calls[linear].outputs)))
                site = self.parts.block.site("head_out")
                term = self.walk.terms[self.mixer]
                made = next(iter(self.graph.calls[linear].outputs.values()))
                factor = term.factor if self.graph.source(made) == self.graph.source(term.node) else Factor()
                heads_of = Tap(site, out, columns, columns.heads, self.width, through=out.module)
                self.parts.taps.append(replace(heads_of, factor=factor.number, vectors=factor.vectors))
                refusal = ""
        if refusal:
            self.parts.refuse("z", refusal)
            self.parts.refuse("head_out", refusal)
        if seam is not None and not is_at_seam:
            _, _, heads, d_head = self.graph.nodes[seam.z].value.shape
            self.tap("z_attn", seam.point("z"), None, heads, d_head)

    def _columns(
        self, value: Tensor, into: int, point: Point, seam: SeamRecord | None, linear: int
    ) -> tuple[HeadColumns | None, str]:
        """The layout of heads in the projection's input, or why there is none."""
        if value.ndim != 3:
            return (
                None,
                f"the output projection {self.parts.inside(point.module)} gets a tensor of shape {tuple(value.shape)}",
            )
        if seam is not None:
            z = self.graph.nodes[seam.z].value
            rows, heads, d_head = z.shape[0] * z.shape[1], z.shape[2], z.shape[3]
            match = column_match(z.reshape(rows, -1), value.reshape(rows, -1)) if z.numel() == value.numel() else None
            if match is not None:
                return HeadColumns(match.view(heads, d_head)), ""
        behind = self.walk.behind(self.mixer)
        found = head_axes(self.graph, behind, into)
        if not found:
            return None, "no split into heads was found before the mixer's output projection"
        self.parts.linears = linears = linear_maps(self.graph, behind, into, self.block)
        seen = ""
        for axes in found:
            columns = HeadColumns(torch.arange(value.shape[-1]).view(*axes))
            wrong, note = head_check(replay(self.graph, self.block), point, value, columns, 0, linears)
            if not wrong:
                return columns, ""
            if not seen:
                into_what = f"{self.parts.inside(point.module)}'s input"
                seen = f"{axes[0]} heads of {axes[1]} columns of {into_what} are no heads: {note}"
        return None, seen

    def _is_seam_z(self, seam: SeamRecord, value: Tensor, columns: HeadColumns) -> bool:
        z = self.graph.nodes[seam.z].value
        return z.numel() == value.numel() and torch.equal(value[..., columns.columns].reshape(z.shape), z)

    def add_inputs(self, seams: tuple[SeamRecord, ...], ops: list[AttentionOp]) -> None:
        """q, k and v, their rotated forms and the pattern."""
        if len(seams) == 1:
            self._add_at_seam(seams[0])
            return
        silent = "this model's attention does not go through transformers' attention interface"
        if seams:
            silent = f"the block calls the attention interface in {len(seams)} modules"
        elif not ops:
            silent = "this mixer has no attention over positions"
        for kind in ("q", "k", "v", "q_rot", "k_rot", "pattern"):
            self.parts.refuse(kind, silent)
        if seams or len(ops) != 1:
            return
        if not any(t.site.kind == "z" for t in self.parts.taps):
            for kind in ("q", "k", "v"):
                self.parts.refuse(kind, f"{silent}, and without z what its heads do cannot be told")
            return
        before = {k: self._before(n, self.block, ops[0].heads, w) for k, n, w in ops[0].parts(self.graph)}
        for kind, found in _of_their_own(before).items():
            if found is None:
                self.parts.refuse(kind, f"{silent}, and no module output holds the {kind} heads as columns")
                continue
            del self.parts.unavailable[self.parts.block.site(kind)]
            self.tap(kind, *found, found[1].heads, found[1].width)

    def _before(self, node: int, mixer: int, heads: int, width: int) -> tuple[Point, HeadColumns] | None:
        shape = self.walk.shape[0], self.walk.shape[1]
        return before_rotation(self.graph, mixer, node, source=self.walk.entry, shape=shape, heads=heads, width=width)

    def _add_at_seam(self, seam: SeamRecord) -> None:
        q_heads = self.graph.nodes[seam.q].value.shape[1]
        self.parts.taps.append(Tap(self.parts.block.site("pattern"), seam.point("pattern"), head_count=q_heads))
        shapes = {k: self.graph.nodes[n].value.shape for k, n in (("q", seam.q), ("k", seam.k), ("v", seam.v))}
        nodes = {"q": seam.q, "k": seam.k, "v": seam.v}
        before = {k: self._before(nodes[k], seam.call, shape[1], shape[3]) for k, shape in shapes.items()}
        for kind, found in _of_their_own(before).items():
            _, heads, _, d_head = shapes[kind]
            at_seam = seam.point(kind)
            if found is not None and found[1].heads == heads:
                self.tap(kind, found[0], found[1], heads, d_head)
            elif kind == "v":
                self.tap(kind, at_seam, None, heads, d_head)
            else:
                self.parts.refuse(kind, f"no module output holds the {kind} heads as columns; {kind}_rot is available")
            if kind != "v":
                self.tap(f"{kind}_rot", at_seam, None, heads, d_head)
