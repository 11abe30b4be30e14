"""Whether values are what they are taken for, by acting on them: which terms mix positions, which slices are heads.

Every wrong layout of heads passes the sum over heads, but not these two interventions. In softmax attention one head is
halved inside the attention op, and exactly its columns may move. Where there is no such op (linear attention, delta
rules) gradients find columns of the mixer's linear maps that act on both ends of one slice and on no other slice;
pushing those must move exactly that slice.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from microtome.capture.anatomy import HeadColumns, Point

Hooks = dict[Point, Callable[[Tensor], Tensor | None]]
Run = Callable[[Hooks], Any]  # runs the block again with ordinary hooks
SMALL = 1e-6  # of the largest value: below it nothing moved
MOVED = 1e-4  # of the largest value: a term has moved; rounding is 1e-6, a real dependence 1e-2 and more
POSITION = 1  # the position that is changed


def terms_move(run: Run, inputs: Sequence[Point], recorded: Mapping[Point, Tensor]) -> list[tuple[bool, bool]]:
    """For each term of a block: does it move, and at other positions, when what comes in changes at one position?

    Movement elsewhere is confirmed by a second change, two rows of the batch swapped at the position: linear maps that
    round all of their input by its largest value (quantised ones) move every position with one, but not by a swap.

    Args:
        run: the block's replay.
        inputs: the arguments to change, alike.
        recorded: each term's value `[batch, position, width]`, in the order in which they are computed; while one is
            looked at, the earlier ones are held.
    """
    points = list(recorded)
    answers = []
    for place, point in enumerate(points):
        moves, mixes = _moves(run, inputs, _nudged, _same, recorded, points[:place], point)
        if mixes:
            swap = _moves(run, inputs, _swapped, _swapped, recorded, points[:place], point)
            mixes = swap[1] or not swap[0]  # a swap of equal rows tells nothing
        answers.append((moves, mixes))
    return answers


def _moves(
    run: Run,
    inputs: Sequence[Point],
    change: Callable[[Tensor], Tensor],
    hold: Callable[[Tensor], Tensor],
    recorded: Mapping[Point, Tensor],
    earlier: Sequence[Point],
    point: Point,
) -> tuple[bool, bool]:
    seen: list[Tensor] = []
    held = {p: lambda x, p=p: hold(recorded[p]).to(x).reshape(x.shape) for p in earlier}
    run({**dict.fromkeys(inputs, change), **held, point: lambda x: seen.append(x.detach().clone())})
    if not seen:  # a point outside the block
        return False, False
    value = recorded[point]
    moved = (seen[0].reshape(value.shape) - value).abs().flatten(2).amax(-1)
    least = MOVED * value.abs().max()
    elsewhere = torch.cat([moved[:, :POSITION], moved[:, POSITION + 1 :]], 1)
    return bool(moved.max() > least), bool(elsewhere.max() > least)


def _nudged(x: Tensor) -> Tensor:
    noise = torch.randn(x.shape[-1], generator=torch.Generator().manual_seed(1))
    changed = x.clone()
    changed[:, POSITION] += (noise.to(x) * x[:, POSITION].norm(dim=-1, keepdim=True) / noise.norm()).to(x)
    return changed


def _swapped(x: Tensor) -> Tensor:
    """The first two rows of the batch change places at the position."""
    changed = x.clone()
    changed[:2, POSITION] = x[:2, POSITION].flip(0)
    return changed


def _same(x: Tensor) -> Tensor:
    return x.clone()


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


class ScaledHeads(TorchFunctionMode):
    """Multiplies each head by a number of its own in the first attention op it sees; `done` as in `HalvedHead`."""

    def __init__(self, factors: Tensor, batch: int):
        super().__init__()
        self.factors, self.batch, self.done = factors, batch, False

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        output = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        if self.done or name not in ("scaled_dot_product_attention", "softmax", "_softmax"):
            return output
        factors = self.factors.to(output)
        if output.ndim == 4 and output.shape[1] == len(factors):
            self.done = True
            return output * factors[:, None, None]
        if output.ndim == 3 and len(output) == self.batch * len(factors):
            self.done = True
            return output * factors.repeat(self.batch)[:, None, None]
        return output


def heads_in_order(run: Run, into: Point, x: Tensor, heads: HeadColumns) -> tuple[int, str]:
    """How many columns of z follow another head than their own when each is scaled by its own number in attention.

    Columns that do not follow in proportion (behind a norm) say nothing.
    """
    factors = torch.linspace(1.25, 1.75, heads.heads)
    seen: list[Tensor] = []
    with ScaledHeads(factors, len(x)) as scaled:
        run({into: lambda t: seen.append(t.detach().clone())})
    if not scaled.done or heads.heads < 2:
        return 0, "no attention op has this many heads"
    before, after = x.flatten(0, -2).double(), seen[0].flatten(0, -2).double()
    ratio = (after * before).sum(0) / before.pow(2).sum(0).clamp(min=1e-300)
    follows = (after - ratio * before).norm(dim=0) <= 0.02 * after.norm(dim=0)
    owner = torch.empty(x.shape[-1], dtype=torch.long)
    for head, columns in enumerate(heads.columns):
        owner[columns] = head
    distance = (ratio.cpu()[:, None] - factors.double()[None]).abs()
    near = distance.min(1).values < 0.25 * float(factors[1] - factors[0])
    wrong = follows.cpu() & near & (distance.argmin(1) != owner)
    told = int((follows.cpu() & near).sum())
    return int(wrong.sum()), f"{told} of {x.shape[-1]} columns followed one head's number, {int(wrong.sum())} another's"


def moved_columns(run: Run, hooks: Hooks, into: Point, x: Tensor) -> Tensor:
    """Which columns `[column]` of the projection's input differ from `x` when the block runs with these hooks."""
    seen: list[Tensor] = []
    run({**hooks, into: lambda t: seen.append(t.detach().clone())})
    return ((seen[0] - x).abs().flatten(0, -2).amax(0) > SMALL * x.abs().max()).view(-1)


def head_check(
    run: Run, into: Point, x: Tensor, heads: HeadColumns, head: int, linears: Sequence[Point]
) -> tuple[int, str]:
    """How many columns are wrong when one head is acted on, 0 if exactly its own moved, and what was seen.

    Args:
        run: the block's replay.
        into: where the output projection's input passes.
        x: its recorded value, `[batch, position, column]`.
        heads: the layout in question.
        head: the head acted on.
        linears: outputs of the mixer's linear maps, for a mixer without an attention op.
    """
    with HalvedHead(head, heads.heads, len(x)) as halved:
        moved = moved_columns(run, {}, into, x)
    what = f"halving head {head} in the attention op"
    if not halved.done:
        hooks = pushes_on_one_head(run, into, heads, head, linears)
        if not hooks:
            return (
                1,
                f"no attention op has {heads.heads} heads, and no linear map has columns that act on one head alone",
            )
        moved = moved_columns(run, hooks, into, x)
        maps = ", ".join(sorted(p.module.rpartition(".")[2] for p in hooks))
        what = f"pushing the columns of {maps} that act on head {head}"
    own = torch.zeros_like(moved)
    own[heads.columns[head].to(own.device)] = True
    missed, wrong = int((own & ~moved).sum()), int((moved & ~own).sum())
    note = f"{what} moved {int((moved & own).sum())} of its {heads.width} columns and {wrong} others"
    return (wrong if moved[own].any() and (halved.done or not missed) else max(1, wrong)), note


def pushes_on_one_head(run: Run, into: Point, heads: HeadColumns, head: int, linears: Sequence[Point]) -> Hooks:
    """Hooks that push those columns of linear maps which act on the first and last coordinate of one head alone."""
    if not linears or heads.heads < 2:
        return {}
    outputs: dict[Point, Tensor] = {}
    seen: list[Tensor] = []

    def keep(point: Point) -> Callable[[Tensor], Tensor]:
        def hook(value: Tensor) -> Tensor:
            outputs[point] = value if value.requires_grad else value.detach().clone().requires_grad_()
            return outputs[point].clone()

        return hook

    with torch.enable_grad():
        run({**{point: keep(point) for point in linears}, into: lambda t: seen.append(t)})
        z = seen[0].flatten(0, -2)
        if not z.requires_grad:
            return {}
        weights = torch.rand(z.shape, generator=torch.Generator().manual_seed(3)).to(z) + 0.5
        columns = heads.columns.to(z.device)
        others = torch.cat([columns[:head], columns[head + 1 :]]).flatten()
        reach = []
        for wanted in (columns[head, :1], columns[head, -1:], others):
            total = (z * weights)[:, wanted].sum()
            reach.append(torch.autograd.grad(total, [*outputs.values()], retain_graph=True, allow_unused=True))
    hooks: Hooks = {}
    for number, (point, output) in enumerate(outputs.items()):
        first, last, other = (_acting(grads[number], output) for grads in reach)
        if (chosen := first & last & ~other).any():
            push = chosen.to(output.dtype) * output.detach().abs().mean()
            hooks[point] = lambda value, push=push: value + push
    return hooks


def _acting(gradient: Tensor | None, output: Tensor) -> Tensor:
    """Which columns of an output have a gradient."""
    if gradient is None:
        return torch.zeros(output.shape[-1], dtype=torch.bool, device=output.device)
    size = gradient.abs().flatten(0, -2).amax(0)
    return size > SMALL * size.max().clamp(min=1e-30)
