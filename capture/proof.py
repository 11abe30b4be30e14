"""The identities that a site rests on, checked on a second batch with ordinary hooks.

    fires          every tapped module runs exactly once in a forward
    chain          resid_post.k is resid_pre.k+1, bit for bit
    sum            resid_post = trunk(resid_pre, contributions), with the factors that were found
    stream edit    changing the stream where a block takes it is changing it where the block before returns it
    edit           the contributions replaced by their values, one changed at random, give what the formula says
    role           with the stream changed at one position a mixer moves at others too, an MLP there alone
    not empty      a contribution is at least 1e-3 of the stream, so that nothing above holds vacuously
    router sum     the router's weight times its input, plus the bias, is its logits
    router edit    logits changed at one position are what they are meant to be, and move what the MLP adds there alone
    head sum       sum over heads of z_h W_O^h, plus the bias, is the output projection's output
    head split     quantised models: the output projection run on the z of all heads put together gives its output
    head causality halving one head's queries (or its pattern) moves that head's columns of z and no others; in a mixer
                   without attention, pushing columns of its linear maps that act on both ends of one head and on no
                   other moves exactly that head's columns
    head order     each head scaled by its own number where attention returns it scales its columns of z by that number
    act sum        the MLP's neurons times its last weight, plus the bias, is its last linear map's output
    act decides    with the MLP's neurons held, a changed block input leaves what it adds as it was
    key groups     halving key head j moves z of the query heads j g .. j g + g - 1 and of no others
    q, k, v edit   changing the columns of one head changes that head at the attention interface, and no other; without
                   the interface, at one position: a query moves z there and in its head alone, a key or value moves z
                   elsewhere and in its group alone, a value in proportion and a key not
    seam parity    with the interface observed the logits are bit-identical, and its z is the projection's input
    tail           unembedding(final norm(last stream)), with factor and cap, is the logits
    null edit      with every hook handing on its value plus zero the output is bit-identical

Limits: exact where bits must agree, 1e-5 (sums) and 1e-4 (edits) of the largest value at the same position in
float32 and float64, 2e-2 in half precision and where linear maps round their inputs (quantised). Wrong sites miss by
0.1 and more.
"""

import itertools
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from microtome.capture.anatomy import TERM_OF_ROLE, Block, Contribution, HeadColumns, Identity, Point, Tap, coefficient
from microtome.capture.attention_seam import SeamCall
from microtome.capture.causality import POSITION, SMALL, head_check, heads_in_order, moved_columns, terms_move
from microtome.capture.opgraph import elements, map_tensors
from microtome.capture.padding import call_options
from microtome.capture.plain_hooks import plain_hooks
from microtome.capture.precision import precision
from microtome.capture.routers import router_map
from microtome.capture.seam_record import recorded_seam_calls
from microtome.capture.sites import Site
from microtome.capture.tail import Tail

_AT_SEAM = {"q": "query", "k": "key", "v": "value"}


def _nudge(columns: Tensor, positions: slice = slice(None), size: float = 1.0) -> Callable[[Tensor], Tensor]:
    """A hook that adds to some columns, at all positions or some, `size` times the mean absolute value."""

    def hook(value: Tensor) -> Tensor:
        flat = value.flatten(2).clone()
        flat[:, positions, columns.to(flat.device)] += size * value.abs().mean()
        return flat.view(value.shape)

    return hook


class Proof:
    """Runs the identities of a model once; `record` holds them all.

    With `is_quick` only those that need no replay of blocks: fires, chain, sum, not empty, tail, null edit and seam
    parity, in two forwards.

    Attributes:
        record: every identity that was checked, in order.
    """

    def __init__(
        self,
        model: nn.Module,
        blocks: list[Block],
        taps: list[Tap],
        tail: Tail,
        batch: dict[str, Any],
        linears: Mapping[Site, Sequence[Point]] = MappingProxyType({}),
        readers: Mapping[Site, Sequence[Point]] = MappingProxyType({}),
        *,
        is_quick: bool = False,
    ):
        self.model, self.blocks, self.tail, self.batch = model, blocks, tail, batch
        self.linears, self.readers = linears, readers
        self.stream_edits: dict[str, list[tuple[str, str]]] = {}
        self.record: list[Identity] = []
        self._whole: dict[str, str] = {}
        self.points = list(
            dict.fromkeys([*self._stream_points(), *(t.point for t in taps if t.point.side in ("in", "out"))])
        )
        self.points += [t.edited_at for t in taps if t.edited_at is not None]
        self.taps = {tap.site: tap for tap in taps}
        self.precision = precision(model)
        self.sums, self.edits = (1e-5, 1e-4) if self.precision == "full" else (2e-2, 2e-2)
        self._forward(is_quick)
        self._check_whole()
        for block in blocks:
            self._check_sum(block)
        for stack in dict.fromkeys(block.stack for block in blocks) if not is_quick else ():
            self._check_stream_edits([block for block in blocks if block.stack == stack])
        for block in blocks if not is_quick else ():
            self._check_edits(block)
            self._check_resid_mid(block)
            self._check_act(block)
            self._check_router(block)
            self._check_heads(block)
            self._check_seam(block)
        self._check_tail()

    def holds(self, name: str, site: str) -> bool:
        """Whether an identity was checked at a site and held each time."""
        found = [i.holds for i in self.record if i.name == name and i.site == site]
        return bool(found) and all(found)

    def checked(self, name: str, site: str) -> list[tuple[str, str]]:
        """Every check of an identity at a site or its heads, as (name, site)."""
        return [(i.name, i.site) for i in self.record if i.name == name and self._whole.get(i.site) == site]

    def forget(self, name: str, site: str) -> None:
        """Take an identity at a site and its heads out of the record: it was about a tap that is not offered."""
        self.record = [i for i in self.record if i.name != name or self._whole.get(i.site) != site]

    def failure(self, name: str, site: str) -> str:
        """One sentence on why an identity does not hold at a site."""
        for i in self.record:
            if i.name == name and i.site == site and not i.holds:
                note = f": {i.note}" if i.note else ""
                return f"identity '{name}' misses by {i.error:.2g} (limit {i.limit:.0e}){note}"
        return f"identity '{name}' could not be checked"

    def label(self, point: Point) -> str:
        """How a point is named in the record."""
        slot = "" if point.slot is None else f" {point.slot}"
        return f"{point.module or 'model'} {point.side}{slot}{'' if point.call is None else f', call {point.call}'}"

    def seam_label(self, point: Point) -> str:
        """How a call of the attention interface is named in the record."""
        return f"attention interface of {point.module}{'' if point.call is None else f', call {point.call}'}"

    def _stream_points(self) -> list[Point]:
        points = []
        for block in self.blocks:
            points += [block.entry, block.exit, *(c.point for c in block.contributions)]
            points += [c.projection for c in block.contributions if c.projection is not None]
        return points

    def _note(self, name: str, site: Site | str, error: int | float, limit: float, note: str = "") -> None:
        if isinstance(site, Site):
            self._whole[str(site)] = str(site.whole)
        if self.precision == "quantised" and limit:
            note = "; ".join(filter(None, (note, "the model is quantised: its linear maps round their inputs")))
        self.record.append(Identity(name, str(site), float(error), limit, bool(error <= limit), note))

    def _forward(self, is_quick: bool) -> None:
        """One plain forward, one with every hook handing on its value plus zero, and one with the seam observed."""
        options = call_options(self.model)
        self.values: dict[Point, Tensor] = {}
        self.counts = dict.fromkeys(self.points, 0)
        self._order: dict[Point, int] = {}
        self.arguments: dict[tuple[str, int], tuple[tuple, dict]] = {}
        self.calls_before: dict[tuple[str, int], dict[str, int]] = {}
        made: Counter[str] = Counter()
        thread = threading.get_ident()

        def keep(point: Point) -> Callable[[Tensor], Tensor]:
            def hook(x: Tensor) -> Tensor:
                self.values[point] = x.detach().clone()
                self.counts[point] += 1
                self._order[point] = len(self._order)
                return x + 0

            return hook

        def count(path: str) -> Callable[..., None]:
            def hook(module: nn.Module, args: tuple, kwargs: dict) -> None:
                if threading.get_ident() != thread:
                    return
                if path in blocks:
                    self.arguments[path, made[path]] = map_tensors((args, dict(kwargs)), lambda t: t.detach().clone())
                    self.calls_before[path, made[path]] = dict(made)
                made[path] += 1

            return hook

        self.plain = self._output(self.model(**self.batch, **options))
        blocks = {block.path for block in self.blocks}
        counted = sorted(blocks | {point.module for point in self.points})
        handles = [
            self.model.get_submodule(path).register_forward_pre_hook(count(path), with_kwargs=True) for path in counted
        ]
        with (
            plain_hooks(self.model, {point: keep(point) for point in self.points}),
            recorded_seam_calls(self.model) if is_quick else nullcontext(),
        ):
            hooked = self._output(self.model(**self.batch, **options))
        for handle in handles:
            handle.remove()
        self._note("null edit", "logits", _largest(hooked - self.plain), 0.0)
        if is_quick:  # one forward with both
            self._note("seam parity", "logits", _largest(hooked - self.plain), 0.0)
            return
        with recorded_seam_calls(self.model) as self.seams:
            observed = self._output(self.model(**self.batch, **options))
        self._note("seam parity", "logits", _largest(observed - self.plain), 0.0)

    def _output(self, output: Any) -> Tensor:
        return dict(elements(output))[self.tail.output.slot].detach().clone()

    def _check_whole(self) -> None:
        for point, count in self.counts.items():
            self._note("fires", self.label(point), abs(count - 1), 0.0, f"{count} calls in one forward")
        for a, b in itertools.pairwise(self.blocks):
            if a.stack == b.stack:
                gap = _largest(self.values[a.exit] - self.values[b.entry])
                self._note("chain", a.site("resid_post"), gap, 0.0)

    def _formula(
        self, block: Block, entry: Tensor, contributions: list[Tensor], *, hops: slice = slice(None)
    ) -> Tensor:
        x = entry
        for hop in block.hops[hops]:
            factor = coefficient(self.model, hop.factor, hop.vectors)
            if hop.step == "add":
                x = x + factor * contributions[hop.contribution].reshape(x.shape)
            elif hop.step == "scale":
                x = x * factor
            elif hop.step == "shift":
                x = x + factor
            else:
                x = self.model.get_submodule(hop.module)(x)
        return x

    def _replay(self, block: Block, hooks: dict[Point, Callable]) -> Tensor:
        which = (block.path, block.call or 0)
        args, kwargs = map_tensors(self.arguments[which], Tensor.clone)
        with plain_hooks(self.model, hooks, calls_before=self.calls_before[which]):
            output = self.model.get_submodule(block.path)(*args, **kwargs)
        return dict(elements(output))[block.exit.slot]

    def _check_sum(self, block: Block) -> None:
        if not block.contributions:
            return
        entry, exit = self.values[block.entry], self.values[block.exit]
        terms = [self.values[c.point] for c in block.contributions]
        self._note("sum", block.site("resid_post"), _relative(self._formula(block, entry, terms), exit), self.sums)
        for term, contribution in zip(terms, block.contributions, strict=True):
            share = float(term.float().norm() / exit.float().norm())
            site = block.site(TERM_OF_ROLE[contribution.role])
            self._note("not empty", site, max(0.0, 1e-3 - share), 0.0, f"{share:.3g} of the stream's norm")

    def _check_stream_edits(self, blocks: list[Block]) -> None:
        """At the second, a middle and the last block: changed where it comes in, or where the one before lets it go."""
        pairs = [(a, b) for a, b in itertools.pairwise(blocks) if a.exit != b.entry and a.layer != b.layer]
        for a, b in (pairs[n] for n in sorted({0, len(pairs) // 2, len(pairs) - 1}) if pairs):
            noise = torch.randn(self.values[b.entry].shape, generator=torch.Generator().manual_seed(6))
            push = noise.to(self.values[b.entry]) * self.values[b.entry].abs().mean()
            outputs = []
            for point in (a.exit, b.entry):
                with plain_hooks(self.model, {point: lambda x, push=push: x + push}):
                    outputs.append(self._output(self.model(**self.batch, **call_options(self.model))))
            site = b.site("resid_pre")
            self._note("stream edit", site, _relative(outputs[1], outputs[0]), self.edits)
            self.stream_edits.setdefault(b.stack, []).append(("stream edit", str(site)))

    def _check_edits(self, block: Block) -> None:
        entry = self.values[block.entry]
        terms = [self.values[c.point] for c in block.contributions]
        for i, contribution in enumerate(block.contributions):
            site = block.site(TERM_OF_ROLE[contribution.role])
            noise = torch.randn(terms[i].shape, generator=torch.Generator().manual_seed(2 + i)).to(terms[i])
            changed = [t + noise * t.abs().mean() if j == i else t for j, t in enumerate(terms)]
            hooks = {c.point: lambda x, new=changed[j]: new.clone() for j, c in enumerate(block.contributions)}
            expected = self._formula(block, entry, changed)
            self._note("edit", site, _relative(self._replay(block, hooks), expected), self.edits)

        shape = entry.shape
        order = sorted(range(len(terms)), key=lambda i: self._order[block.contributions[i].point])
        recorded = {block.contributions[i].point: terms[i].reshape(shape) for i in order}
        moves = terms_move(partial(self._replay, block), block.inputs, recorded) if block.inputs else []
        for i, (_, mixes) in zip(order, moves, strict=False):
            role = block.contributions[i].role
            site, note = block.site(TERM_OF_ROLE[role]), f"moved {'at other positions' if mixes else 'there alone'}"
            self._note("role", site, mixes != (role in ("attention", "mixer")), 0.0, note)

    def _check_resid_mid(self, block: Block) -> None:
        """The trunk up to the MLP; where it is a module's output there, it is written with the MLP's term held."""
        tap = self.taps.get(block.site("resid_mid"))
        if tap is None or not block.hops:
            return
        terms = [self.values[c.point] for c in block.contributions]
        middle = self.values[tap.point]
        found = self._formula(block, self.values[block.entry], terms, hops=slice(0, tap.after))
        self._note("sum", tap.site, _relative(found.reshape(middle.shape), middle), self.sums)
        i = next(i for i, c in enumerate(block.contributions) if c.role == "mlp")
        noise = torch.randn(middle.shape, generator=torch.Generator().manual_seed(1)).to(middle)
        changed = middle + noise * middle.abs().mean()
        if tap.through is not None:
            self._check_mid_through(block, tap, block.contributions[i].point, changed - middle)
            return
        hooks = {tap.point: lambda x: changed.clone(), block.contributions[i].point: lambda x: terms[i].clone()}
        after = changed.reshape(self.values[block.entry].shape)
        expected = self._formula(block, after, terms, hops=slice(tap.after, None))
        self._note("edit", tap.site, _relative(self._replay(block, hooks), expected), self.edits)

    def _check_mid_through(self, block: Block, tap: Tap, mlp: Point, push: Tensor) -> None:
        """A change of the mixer's term is that change wherever the stream is read, and reaches the MLP there alone."""
        if (through := self.taps.get(Site.parse(tap.through or ""))) is None:
            return
        factor = coefficient(self.model, tap.factor, tap.vectors)
        read: dict[Point, Tensor] = {}
        seen: list[Tensor] = []

        def keep(x: Tensor) -> None:
            seen.append(x.detach().clone())

        def note(point: Point) -> Callable[[Tensor], None]:
            return lambda x: read.__setitem__(point, x.detach().clone())

        readers = self.readers.get(tap.site, ())
        term = {through.point: lambda x: x + (push / factor).reshape(x.shape)}
        self._replay(block, {**term, mlp: keep, **{point: note(point) for point in readers}})
        self._replay(block, {**{p: lambda x, p=p: read[p].clone() for p in readers}, mlp: keep})
        wanted = self.values[tap.point] + push.reshape(self.values[tap.point].shape)
        error = max([_relative(read[p].reshape(wanted.shape), wanted) for p in readers], default=0.0)
        error = max(error, _relative(seen[0], seen[1]) if readers else 0.0)
        self._note("edit", tap.site, error, self.edits, "what is read after the mixer's term was changed")

    def _check_act(self, block: Block) -> None:
        tap = self.taps.get(block.site("mlp_act"))
        mlp = next((c for c in block.contributions if c.role == "mlp"), None)
        if tap is None or mlp is None:
            return
        act = self.values[tap.point]
        output = Point(tap.point.module, "out", None, tap.point.call)
        seen: list[Tensor] = []
        self._replay(block, {output: lambda x: seen.append(x.detach().clone())})
        weight, bias = affine_map(self.model.get_submodule(output.module), act.shape[-1], like=act)
        self._note("act sum", tap.site, _relative(act @ weight + bias, seen[0]), self.sums)
        noise = torch.randn(self.values[block.entry].shape, generator=torch.Generator().manual_seed(1))
        hooks = {point: lambda x: x + noise.to(x) * x.abs().mean() for point in block.inputs}
        terms: list[Tensor] = []
        held = {tap.point: lambda x: act.clone(), mlp.point: lambda x: terms.append(x.detach().clone())}
        self._replay(block, hooks | held)
        self._note("act decides", tap.site, _relative(terms[0], self.values[mlp.point]), self.edits)

    def _check_router(self, block: Block) -> None:
        tap = self.taps.get(block.site("router"))
        if tap is None:
            return
        rows = self.values[block.entry].shape[:2]
        logits = self.values[tap.point].reshape(*rows, -1)
        raised = torch.zeros_like(logits)
        raised[:, POSITION] = torch.randn(logits.shape[-1], generator=torch.Generator().manual_seed(5)).to(logits)
        raised[:, POSITION] *= 4 * logits.abs().max()
        module = self.model.get_submodule(tap.point.module)
        if tap.edited_at is not None:
            into = self.values[tap.edited_at]
            weight, bias = router_map(module, tap.point.slot, into)
            found = (into @ weight + bias).reshape(logits.shape)
            self._note("router sum", tap.site, _relative(found, logits), self.sums)
            push = (raised @ torch.linalg.pinv(weight.float()).to(weight)).reshape(into.shape)
            edit = {tap.edited_at: lambda x: x + push}
        else:
            self._note("router sum", tap.site, 0.0, self.sums, "the linear map itself")
            edit = {tap.point: lambda x: x + raised.reshape(x.shape)}
        moved = torch.zeros(rows, dtype=torch.bool, device=logits.device)

        def compare(point: Point) -> Callable[[Tensor], None]:
            def hook(x: Tensor) -> None:
                term = self.values[point].reshape(*rows, -1)
                far = (x.reshape(term.shape) - term).abs().amax(-1) > SMALL * term.abs().max()
                moved.logical_or_(far)

            return hook

        after: list[Tensor] = []
        terms = {c.point: compare(c.point) for c in block.contributions if c.role == "mlp"}
        if tap.edited_at is not None:
            terms[tap.point] = lambda x: after.append(x.detach().reshape(logits.shape))
        self._replay(block, edit | terms)
        if after:
            self._note(
                "router edit", tap.site, _relative(after[0], logits + raised), self.edits, "the logits themselves"
            )
        elsewhere = moved.clone()
        elsewhere[:, POSITION] = False
        wrong = int(elsewhere.sum()) + int(not moved[:, POSITION].any())
        self._note("router edit", tap.site, wrong, 0.0, f"what the MLP adds moved at {int(moved.sum())} positions")

    def _check_heads(self, block: Block) -> None:
        out = self.taps.get(block.site("head_out"))
        if out is None or (mixer := self._with_heads(block, out)) is None:
            return
        x = self.values[mixer.projection]
        weight, bias = affine_map(self.model.get_submodule(out.point.module), x.shape[-1], like=x)
        total = sum(x[..., columns] @ weight[columns] for columns in out.heads.columns) + bias
        self._note("head sum", block.site("z"), _relative(total, self.values[out.point]), self.sums)
        if self.precision == "quantised":
            together = torch.zeros_like(x)
            for columns in out.heads.columns:
                together[..., columns] += x[..., columns]
            whole = self.model.get_submodule(out.point.module)(together)
            self._note("head split", block.site("z"), _relative(whole, self.values[out.point]), self.edits)
        linears = self.linears.get(block.site("z"), ())
        run = partial(self._replay, block)
        for head in sorted({0, 1 % out.heads.heads, out.heads.heads - 1}):
            wrong, note = head_check(run, mixer.projection, x, out.heads, head, linears)
            self._note("head causality", replace(block.site("z"), head=head), wrong, 0.0, note)
        wrong, note = heads_in_order(run, mixer.projection, x, out.heads)
        self._note("head order", block.site("z"), wrong, 0.0, note)
        if block.site("pattern") not in self.taps:
            for kind in ("q", "k", "v"):
                if (tap := self.taps.get(block.site(kind))) is not None:
                    self._check_inputs(kind, block, tap, mixer.projection, out.heads)

    def _with_heads(self, block: Block, out: Tap) -> Contribution | None:
        """The contribution whose output projection a head_out tap is on."""
        return next((c for c in block.contributions if c.projection and c.projection.module == out.point.module), None)

    def _check_inputs(self, kind: str, block: Block, tap: Tap, into: Point, heads: HeadColumns) -> None:
        """Queries, keys or values of one head changed at one position, as seen in z."""
        group = heads.heads // tap.heads.heads
        x = self.values[into]
        for head in sorted({0, tap.heads.heads - 1}):
            moves = []
            for size in (1.0, 2.0):
                nudge = _nudge(tap.heads.columns[head], slice(POSITION, POSITION + 1), size)
                seen: list[Tensor] = []
                self._replay(block, {tap.point: nudge, into: lambda t, seen=seen: seen.append(t.detach().clone())})
                moves.append(seen[0] - x)
            once, twice = moves
            moved = once.abs() > SMALL * x.abs().max()
            found = {h for h in range(heads.heads) if moved[..., heads.columns[h].to(moved.device)].any()}
            expected = {head} if kind == "q" else set(range(head * group, (head + 1) * group))
            elsewhere = moved.clone()
            elsewhere[:, POSITION] = False
            bend = float((twice - 2 * once).abs().max() / once.abs().max().clamp(min=1e-30))
            wrong = len(found ^ expected) + int(bool(elsewhere.any()) == (kind == "q"))
            wrong += int(kind != "q" and (bend < 1e-3) != (kind == "v"))
            where = "at other positions too" if elsewhere.any() else "at its own position"
            note = f"moved z heads {sorted(found)} {where}; twice the change misses twice the move by {bend:.1g}"
            self._note(f"{kind} edit", replace(block.site(kind), head=head), wrong, 0.0, note)

    def _check_seam(self, block: Block) -> None:
        pattern, out = self.taps.get(block.site("pattern")), self.taps.get(block.site("head_out"))
        if pattern is None:
            return
        path, number = pattern.point.module, pattern.point.call
        calls = self.seams.get(path, [])
        is_there = len(calls) == 1 if number is None else number < len(calls)
        self._note("fires", self.seam_label(pattern.point), not is_there, 0.0, f"{len(calls)} calls")
        if not is_there:
            return
        call = calls[number or 0]
        mixer = None if out is None else self._with_heads(block, out)
        z = self.taps.get(block.site("z"))
        if mixer is not None and z is not None and z.point.side == "seam":
            x = self.values[mixer.projection]
            is_alike = x[..., out.heads.columns].shape == call.z.shape
            error = _largest(x[..., out.heads.columns] - call.z) if is_alike else 1.0
            self._note("seam parity", z.site, error, 0.0, f"{call.z.shape[2]} heads at the attention interface")
        q_heads, k_heads = call.query.shape[1], call.key.shape[1]
        z_heads = self._moved_z_heads(block, path, mixer, out)
        group = q_heads // k_heads
        for j in sorted({0, k_heads - 1}):
            found, expected = z_heads("key", j), set(range(j * group, (j + 1) * group))
            note = f"halving key head {j} moved z heads {sorted(found)}, expected {sorted(expected)}"
            self._note("key groups", replace(block.site("k"), head=j), len(found ^ expected), 0.0, note)
        if (at_attention := self.taps.get(block.site("z_attn"))) is not None:
            for head in sorted({0, 1 % q_heads, q_heads - 1}):
                found = self._moved_z_heads(block, path, None, None)("query", head)
                note = f"halving query head {head} moved heads {sorted(found)} of what attention returns"
                site = replace(at_attention.site, head=head)
                self._note("head causality", site, len(found ^ {head}), 0.0, note)
        for kind, name in _AT_SEAM.items():
            tap, before = self.taps.get(block.site(kind)), getattr(call, name)
            if tap is not None and tap.heads is not None:
                self._check_columns(kind, block, path, tap, before)
                self._check_only_way(kind, block, path, tap, before)

    def _moved_z_heads(
        self, block: Block, path: str, mixer: Contribution | None, out: Tap | None
    ) -> Callable[[str, int], set[int]]:
        """A function of "query" or "key" and a head: which heads of z move when it is halved at the interface.

        z is the output projection's input where heads are known there, else what attention returns.
        """
        module = self.model.get_submodule(path)

        def moved(which: str, head: int) -> set[int]:
            def halve(call: SeamCall) -> SeamCall:
                if call.module is not module:
                    return call
                tensor = getattr(call, which).clone()
                tensor[:, head] *= 0.5
                return replace(call, **{which: tensor})

            with recorded_seam_calls(self.model, halve) as seams:
                if mixer is not None and out is not None:
                    run = partial(self._replay, block)
                    columns = moved_columns(run, {}, mixer.projection, self.values[mixer.projection])
                    return {h for h, own in enumerate(out.heads.columns) if columns[own.to(columns.device)].any()}
                self._replay(block, {})
            before, after = self.seams[path][block.call or 0].z, seams[path][-1].z
            far = (after - before).abs().amax((0, 1, 3)) > SMALL * before.abs().max()
            return set(far.nonzero().flatten().tolist())

        return moved

    def _check_columns(self, kind: str, block: Block, path: str, tap: Tap, before: Tensor) -> None:
        for head in sorted({0, tap.heads.heads - 1}):
            with recorded_seam_calls(self.model) as seams:
                self._replay(block, {tap.point: _nudge(tap.heads.columns[head])})
            after = getattr(seams[path][-1], _AT_SEAM[kind])
            moved = (after - before).abs().amax(dim=(0, 2, 3)) > SMALL * before.abs().max()
            wrong = int(moved.sum()) - int(moved[head])
            note = f"moved heads {moved.nonzero().flatten().tolist()} at the attention interface"
            self._note(f"{kind} edit", replace(block.site(kind), head=head), wrong if moved[head] else 1, 0.0, note)

    def _check_only_way(self, kind: str, block: Block, path: str, tap: Tap, before: Tensor) -> None:
        """The columns of the first head act through the interface alone: put back there, nothing that mixes moves."""
        module = self.model.get_submodule(path)

        def restore(call: SeamCall) -> SeamCall:
            return replace(call, **{_AT_SEAM[kind]: before.clone()}) if call.module is module else call

        mixers = [c.point for c in block.contributions if c.role == "attention"]
        seen: dict[Point, Tensor] = {}
        keep = {p: lambda x, p=p: seen.__setitem__(p, x.detach().clone()) for p in mixers}
        with recorded_seam_calls(self.model, restore):
            self._replay(block, {tap.point: _nudge(tap.heads.columns[0]), **keep})
        error = max((_relative(seen[p], self.values[p]) for p in seen), default=0.0)
        note = "put back at the attention interface, what attention adds is as before"
        self._note(f"{kind} edit", replace(block.site(kind), head=0), error, self.edits, note)

    def _check_tail(self) -> None:
        if self.tail.unembedding is None or self.tail.reason:
            return
        last = self.values[[block for block in self.blocks if not block.stack][-1].exit]
        normed = self.model.get_submodule(self.tail.norm.module)(last) if self.tail.norm else last
        logits = self.model.get_submodule(self.tail.unembedding)(normed) * self.tail.factor
        if self.tail.cap is not None:
            logits = self.tail.cap * torch.tanh(logits / self.tail.cap)
        self._note("tail", "logits", _relative(logits, self.plain), self.sums)


def affine_map(module: nn.Module, width: int, *, like: Tensor) -> tuple[Tensor, Tensor]:
    """Weight `[width, out]` and bias `[out]` of an affine module, by pushing the identity and zero through it."""
    eye = torch.eye(width, dtype=like.dtype, device=like.device)
    bias = module(torch.zeros_like(eye[:1]))[0]
    return module(eye) - bias, bias


def _largest(difference: Tensor) -> float:
    return float(difference.abs().max())


def _relative(value: Tensor, reference: Tensor) -> float:
    """Largest over positions of max|value - reference| / max|reference| at that position."""
    error = (value.float() - reference.float()).abs().amax(-1)
    return float((error / reference.float().abs().amax(-1).clamp(min=1e-30)).max())
