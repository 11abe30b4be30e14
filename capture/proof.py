"""The identities that a site rests on, checked on a second batch with ordinary hooks.

    fires          every tapped module runs exactly once in a forward
    chain          resid_post.k is resid_pre.k+1, bit for bit
    sum            resid_post = trunk(resid_pre, contributions), with the factors that were found
    edit           the contributions replaced by their values, one changed at random, give what the formula says
    not empty      a contribution is at least 1e-3 of the stream, so that nothing above holds vacuously
    act decides    with mlp_act held at its value, a changed block input leaves the MLP's contribution as it was
    head sum       sum over heads of z_h W_O^h, plus the bias, is the output projection's output
    head split     quantised models: the output projection run on the z of all heads put together gives its output
    head causality halving one head's queries (or its pattern) moves that head's columns of z and no others
    key groups     halving key head j moves z of the query heads j g .. j g + g - 1 and of no others
    q, k, v edit   changing the columns of one head changes that head at the attention interface, and no other
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
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from microtome.capture.anatomy import TERM_OF_ROLE, Block, HeadColumns, Identity, Point, Tap
from microtome.capture.attention_seam import SeamCall
from microtome.capture.opgraph import elements, map_tensors
from microtome.capture.padding import call_options
from microtome.capture.plain_hooks import plain_hooks
from microtome.capture.precision import precision
from microtome.capture.seam_record import recorded_seam_calls
from microtome.capture.sites import Site
from microtome.capture.tail import Tail


class Proof:
    """Runs the identities of a model once; `record` holds them all.

    Attributes:
        record: every identity that was checked, in order.
    """

    def __init__(self, model: nn.Module, blocks: list[Block], taps: list[Tap], tail: Tail, batch: dict[str, Any]):
        self.model, self.blocks, self.tail, self.batch = model, blocks, tail, batch
        self.record: list[Identity] = []
        self._whole: dict[str, str] = {}
        self.points = list(dict.fromkeys([*self._stream_points(), *(t.point for t in taps if t.point.side != "seam")]))
        self.taps = {tap.site: tap for tap in taps}
        self.precision = precision(model)
        self.sums, self.edits = (1e-5, 1e-4) if self.precision == "full" else (2e-2, 2e-2)
        self._forward()
        self._check_whole()
        for block in blocks:
            self._check_block(block)
            self._check_heads(block)
        self._check_tail()

    def holds(self, name: str, site: str) -> bool:
        """Whether an identity was checked at a site and held."""
        return any(i.holds for i in self.record if i.name == name and i.site == site)

    def checked(self, name: str, site: str) -> list[tuple[str, str]]:
        """Every check of an identity at a site or its heads, as (name, site)."""
        return [(i.name, i.site) for i in self.record if i.name == name and self._whole.get(i.site) == site]

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

    def _forward(self) -> None:
        """One plain forward, one with every hook handing on its value plus zero, and one with the seam observed."""
        options = call_options(self.model)
        self.values: dict[Point, Tensor] = {}
        self.counts = dict.fromkeys(self.points, 0)
        self.arguments: dict[tuple[str, int], tuple[tuple, dict]] = {}
        self.calls_before: dict[tuple[str, int], dict[str, int]] = {}
        made: Counter[str] = Counter()
        thread = threading.get_ident()

        def keep(point: Point) -> Callable[[Tensor], Tensor]:
            def hook(x: Tensor) -> Tensor:
                self.values[point] = x.detach().clone()
                self.counts[point] += 1
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
        with plain_hooks(self.model, {point: keep(point) for point in self.points}):
            hooked = self._output(self.model(**self.batch, **options))
        for handle in handles:
            handle.remove()
        self._note("null edit", "logits", _largest(hooked - self.plain), 0.0)
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

    def _formula(self, block: Block, entry: Tensor, contributions: list[Tensor]) -> Tensor:
        x = entry
        for hop in block.hops:
            if hop.step == "add":
                x = x + hop.factor * contributions[hop.contribution].reshape(x.shape)
            elif hop.step == "scale":
                x = x * hop.factor
            else:
                x = self.model.get_submodule(hop.module)(x)
        return x

    def _replay(self, block: Block, hooks: dict[Point, Callable]) -> Tensor:
        which = (block.path, block.call or 0)
        args, kwargs = map_tensors(self.arguments[which], Tensor.clone)
        with plain_hooks(self.model, hooks, calls_before=self.calls_before[which]):
            output = self.model.get_submodule(block.path)(*args, **kwargs)
        return dict(elements(output))[block.exit.slot]

    def _check_block(self, block: Block) -> None:
        if not block.contributions:
            return
        entry, exit = self.values[block.entry], self.values[block.exit]
        terms = [self.values[c.point] for c in block.contributions]
        self._note("sum", block.site("resid_post"), _relative(self._formula(block, entry, terms), exit), self.sums)
        for i, contribution in enumerate(block.contributions):
            site = block.site(TERM_OF_ROLE[contribution.role])
            noise = torch.randn(terms[i].shape, generator=torch.Generator().manual_seed(2 + i)).to(terms[i])
            changed = [t + noise * t.abs().mean() if j == i else t for j, t in enumerate(terms)]
            hooks = {c.point: lambda x, new=changed[j]: new.clone() for j, c in enumerate(block.contributions)}
            expected = self._formula(block, entry, changed)
            self._note("edit", site, _relative(self._replay(block, hooks), expected), self.edits)
            share = float(terms[i].float().norm() / exit.float().norm())
            self._note("not empty", site, max(0.0, 1e-3 - share), 0.0, f"{share:.3g} of the stream's norm")

        act = self.taps.get(block.site("mlp_act"))
        mlp = next((i for i, c in enumerate(block.contributions) if c.role == "mlp"), None)
        if act is not None and mlp is not None:
            self._check_act(block, act.point, block.contributions[mlp].point, terms[mlp])

    def _check_act(self, block: Block, act: Point, mlp: Point, before: Tensor) -> None:
        seen: list[Tensor] = []
        noise = torch.randn(self.values[block.entry].shape, generator=torch.Generator().manual_seed(1))
        hooks = {
            block.entry: lambda x: x + noise.to(x) * x.abs().mean(),
            act: lambda x: self.values[act].clone(),
            mlp: lambda x: seen.append(x.detach().clone()),
        }
        self._replay(block, hooks)
        self._note("act decides", block.site("mlp_act"), _relative(seen[0], before), self.edits)

    def _check_heads(self, block: Block) -> None:
        out = self.taps.get(block.site("head_out"))
        mixer = next((c for c in block.contributions if c.role == "mixer"), None)
        if out is None or mixer is None or mixer.projection is None:
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
        self._check_causality(block, mixer.projection, x, out.heads)
        if (pattern := self.taps.get(block.site("pattern"))) is not None:
            self._check_seam(block, pattern.point, mixer.projection, x, out.heads)

    def _check_causality(self, block: Block, into: Point, x: Tensor, heads: HeadColumns) -> None:
        """Halve one head inside the attention op; only its columns of the projection's input may move."""
        for head in sorted({0, 1 % heads.heads, heads.heads - 1}):
            site = replace(block.site("z"), head=head)
            with HalvedHead(head, heads.heads, len(x)) as halved:
                moved = self._moved(block, into, x)
            own = torch.zeros_like(moved)
            own[heads.columns[head].to(own.device)] = True
            wrong = int((moved & ~own).sum())
            hit = bool((moved & own).any())
            if not halved.done:
                self._note("head causality", site, 1, 0.0, "no attention op with this many heads was seen")
            else:
                note = f"moved {int(moved.sum())} columns, {wrong} of them not of head {head}"
                self._note("head causality", site, wrong if hit else 1, 0.0, note)

    def _moved(self, block: Block, into: Point, x: Tensor) -> Tensor:
        """Which columns of the projection's input differ from the recorded ones when the block runs now."""
        seen: list[Tensor] = []
        self._replay(block, {into: lambda t: seen.append(t.detach().clone())})
        return ((seen[0] - x).abs().flatten(0, -2).amax(0) > 1e-6 * x.abs().max()).view(-1)

    def _check_seam(self, block: Block, at: Point, into: Point, x: Tensor, heads: HeadColumns) -> None:
        path, number = at.module, at.call
        calls = self.seams.get(path, [])
        is_there = len(calls) == 1 if number is None else number < len(calls)
        self._note("fires", self.seam_label(at), not is_there, 0.0, f"{len(calls)} calls")
        if not is_there:
            return
        calls = calls[number or 0 :]
        z = self.taps.get(block.site("z"))
        if z is not None and z.point.side == "seam":
            is_alike = x[..., heads.columns].shape == calls[0].z.shape
            error = _largest(x[..., heads.columns] - calls[0].z) if is_alike else 1.0
            self._note(
                "seam parity", block.site("z"), error, 0.0, f"{calls[0].z.shape[2]} heads at the attention interface"
            )
        groups = calls[0].query.shape[1] // calls[0].key.shape[1]
        if calls[0].query.shape[1] == heads.heads:
            self._check_key_groups(block, path, into, x, heads, groups)
        for kind, before in (("q", calls[0].query), ("k", calls[0].key), ("v", calls[0].value)):
            tap = self.taps.get(block.site(kind))
            if tap is not None and tap.heads is not None:
                self._check_columns(kind, block, path, tap, before)

    def _check_key_groups(
        self, block: Block, path: str, into: Point, x: Tensor, heads: HeadColumns, group: int
    ) -> None:
        module = self.model.get_submodule(path)
        count = heads.heads // group
        for j in sorted({0, count - 1}):

            def halve(call: SeamCall, j: int = j) -> SeamCall:
                key = call.key.clone()
                key[:, j] *= 0.5
                return replace(call, key=key) if call.module is module else call

            with recorded_seam_calls(self.model, halve):
                moved = self._moved(block, into, x)
            found = {h for h in range(heads.heads) if moved[heads.columns[h].to(moved.device)].any()}
            expected = set(range(j * group, (j + 1) * group))
            note = f"halving key head {j} moved z heads {sorted(found)}, expected {sorted(expected)}"
            self._note("key groups", replace(block.site("k"), head=j), len(found ^ expected), 0.0, note)

    def _check_columns(self, kind: str, block: Block, path: str, tap: Tap, before: Tensor) -> None:
        for head in sorted({0, tap.heads.heads - 1}):
            columns = tap.heads.columns[head]

            def nudge(value: Tensor, columns: Tensor = columns) -> Tensor:
                flat = value.flatten(2).clone()
                flat[..., columns] += value.abs().mean()
                return flat.view(value.shape)

            with recorded_seam_calls(self.model) as seams:
                self._replay(block, {tap.point: nudge})
            now = seams[path][-1]
            after = {"q": now.query, "k": now.key, "v": now.value}[kind]
            moved = (after - before).abs().amax(dim=(0, 2, 3)) > 1e-6 * before.abs().max()
            wrong = int(moved.sum()) - int(moved[head])
            note = f"moved heads {moved.nonzero().flatten().tolist()} at the attention interface"
            self._note(f"{kind} edit", replace(block.site(kind), head=head), wrong if moved[head] else 1, 0.0, note)

    def _check_tail(self) -> None:
        if self.tail.unembedding is None or self.tail.reason:
            return
        last = self.values[[block for block in self.blocks if not block.stack][-1].exit]
        normed = self.model.get_submodule(self.tail.norm.module)(last) if self.tail.norm else last
        logits = self.model.get_submodule(self.tail.unembedding)(normed) * self.tail.factor
        if self.tail.cap is not None:
            logits = self.tail.cap * torch.tanh(logits / self.tail.cap)
        self._note("tail", "logits", _relative(logits, self.plain), self.sums)


class HalvedHead(TorchFunctionMode):
    """Halves one head inside the first attention op it sees: the queries of `scaled_dot_product_attention`, or the
    probabilities after a softmax `[batch, head, query, key]` or `[batch * head, query, key]`. `done` tells whether
    there was one with that many heads."""

    def __init__(self, head: int, heads: int, batch: int):
        super().__init__()
        self.head, self.heads, self.batch, self.done = head, heads, batch, False

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if self.done:
            return func(*args, **kwargs)
        is_attention = func is functional.scaled_dot_product_attention and args and args[0].ndim == 4
        if is_attention and args[0].shape[1] == self.heads:
            self.done = True
            query = args[0].clone()
            query[:, self.head] *= 0.5
            return func(query, *args[1:], **kwargs)
        output = func(*args, **kwargs)
        is_softmax = getattr(func, "__name__", "") in ("softmax", "_softmax")
        if is_softmax and output.ndim == 4 and output.shape[1] == self.heads:
            self.done = True
            output = output.clone()
            output[:, self.head] *= 0.5
        elif is_softmax and output.ndim == 3 and len(output) == self.batch * self.heads:
            self.done = True
            output = output.clone()
            output[self.head :: self.heads] *= 0.5
        return output


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
