"""What a model is made of, as found by `dissect` and proved on the model at hand.

An `Anatomy` is data only: where each site is tapped (`Tap`), how its value lies in the tapped tensor
(`HeadColumns`), which blocks and contributions there are, and the record of every identity that was
checked. `microtome.capture.taps` acts on it, `microtome.capture.dissect` and `proof` make it.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Literal

import pandas as pd
from torch import Tensor, nn

from microtome.capture.batches import PaddingRecipe
from microtome.capture.sites import KINDS, Site, near_matches


@dataclass(frozen=True)
class Point:
    """Where in the running model a tensor passes by.

    Attributes:
        module: dotted path of the module.
        side: "in" (its argument), "out" (its output), "seam" (transformers' attention interface, called by it) or
            "cache" (the recurrent state that its call leaves in a cache).
        slot: for "in" the argument's index or keyword; for "out" the element of a tuple or list, None when the
            output is the tensor itself; for "seam" one of "q" "k" "v" "z" "pattern"; for "cache" its layer there.
        call: where the module runs several times in one forward, the number of the call; else None.
    """

    module: str
    side: Literal["in", "out", "seam", "cache"]
    slot: int | str | None = None
    call: int | None = None


@dataclass(frozen=True)
class HeadColumns:
    """How heads lie in the last axis of a tapped tensor, once axes after (batch, position) are flattened.

    Attributes:
        columns: `[head, d_head]` int64, the flat column of each head's each coordinate.
    """

    columns: Tensor

    @property
    def heads(self) -> int:
        """Number of heads."""
        return self.columns.shape[0]

    @property
    def width(self) -> int:
        """Width of one head."""
        return self.columns.shape[1]


@dataclass(frozen=True)
class Tap:
    """How one whole site (all heads) is read and written.

    Attributes:
        site: the site, without a head.
        point: where its tensor passes by.
        heads: layout of heads in that tensor; None where the site has no heads, or the tensor already is
            `[batch, head, position, d_head]` at the seam.
        head_count: number of heads (key-value heads for k, v, k_rot); None where the site has none.
        width: size of the value's last axis; 0 where it depends on the text (pattern).
        through: for `head_out` the output projection's path; for a `resid_mid` that is only read where the MLP
            reads it, the site whose edit stands for it. None otherwise.
        after: for a `resid_mid`, how many hops of the block's trunk are before it; None: all before the MLP is added.
        edited_at: for a router that returns the logits it has already used, its input, where edits act.
        factor: number with which a contribution, or the one behind a `through` site, enters the stream.
        vectors: paths of parameters by which it is multiplied as well, coordinate by coordinate.
        rows_of: where the module works on tokens without a batch axis, the point whose `[batch, position]` they are.
        others: where several modules make up one term side by side, those that run before `point`, each with the number
            by which its output counts against the one there; the site's value is their sum.
    """

    site: Site
    point: Point
    heads: HeadColumns | None = None
    head_count: int | None = None
    width: int = 0
    through: str | None = None
    after: int | None = None
    edited_at: Point | None = None
    factor: float = 1.0
    vectors: tuple[str, ...] = ()
    rows_of: Point | None = None
    others: tuple[tuple[Point, float], ...] = ()


Role = Literal["attention", "mixer", "mlp", "cross", "extra"]
TERM_OF_ROLE: dict[Role, str] = {
    "attention": "attn_out",
    "mixer": "mixer_out",
    "mlp": "mlp_out",
    "cross": "cross_out",
    "extra": "extra_out",
}


def coefficient(model: nn.Module, factor: float, vectors: tuple[str, ...]) -> float | Tensor:
    """A number times the parameters and buffers at the given paths, coordinate by coordinate."""
    value: float | Tensor = factor
    for path in vectors:
        value = value * attrgetter(path)(model).detach().flatten()
    return value


@dataclass(frozen=True)
class Contribution:
    """One term added to the residual stream of a block.

    Attributes:
        role: "attention" if it moves information between positions by a softmax over them, "mixer" if it does so in
            another way (a recurrence, a convolution), "mlp" if it does not; "cross" if it reads another sequence (an
            encoder's), "extra" if it reads another input at its own position.
        point: the module output that is this very term.
        factor: the number it is multiplied by before it is added.
        projection: the input of the last linear map before the term leaves, None if there is none.
        vectors: paths of parameters by which it is multiplied as well, coordinate by coordinate.
    """

    role: Role
    point: Point
    factor: float
    projection: Point | None
    vectors: tuple[str, ...] = ()


@dataclass(frozen=True)
class Hop:
    """One step of the trunk from a block's input to its output.

    Attributes:
        step: "add" a contribution, "scale" by a number or vectors, "shift" by vectors, or "norm" by a module.
        contribution: index into the block's contributions, for "add".
        factor: the number, for "scale" and "shift", and the contribution's factor, for "add".
        module: path of the norm, for "norm".
        vectors: paths of parameters by which the number is multiplied, coordinate by coordinate.
    """

    step: Literal["add", "scale", "shift", "norm"]
    contribution: int | None = None
    factor: float = 1.0
    module: str | None = None
    vectors: tuple[str, ...] = ()


@dataclass(frozen=True)
class Block:
    """One block: `resid_post` is its hops applied to `resid_pre`.

    Attributes:
        path: dotted path of its module.
        entry: where the stream comes in, or is made, where the block is given it at several arguments.
        exit: where it leaves.
        contributions: its terms, in the order in which they are computed.
        hops: the trunk from entry to exit; empty when it could not be walked.
        is_parallel: whether the MLP reads the same stream as the mixer, so that there is no stream between them.
        layer: number of its module in the stack.
        stack: name of its stack, "" for the main one.
        call: number of its call in one forward, where its module runs several times; else None.
        inputs: the arguments by which it comes in; several where they are query, key and value of the same stream.
    """

    path: str
    entry: Point
    exit: Point
    contributions: tuple[Contribution, ...] = ()
    hops: tuple[Hop, ...] = ()
    is_parallel: bool = False
    layer: int = 0
    stack: str = ""
    call: int | None = None
    inputs: tuple[Point, ...] = ()

    def site(self, kind: str) -> Site:
        """The site of that kind in this block."""
        return Site(kind, self.layer, stack=self.stack, call=self.call)


@dataclass(frozen=True)
class Identity:
    """One checked statement: name, site it is about, measured error, its limit, and whether it held."""

    name: str
    site: str
    error: float
    limit: float
    holds: bool
    note: str = ""


# kinds that most blocks have nothing for
_WHERE = {
    "z_attn": "where a gate or norm follows what transformers' attention interface returns",
    "mixer_out": "where a block mixes positions without a softmax over them",
    "state": "where a mixer keeps a recurrent state in transformers' cache",
    "router": "where an MLP chooses experts",
    "cross_out": "where a block reads another sequence",
    "extra_out": "where a block adds another input at its own position",
}


@dataclass(frozen=True, repr=False)
class Anatomy:
    """A model's parts, its offered sites, and the proof.

    Attributes:
        model_class: name of the model's class.
        blocks: the blocks of every stack, in the order in which they run; those of the main stack are `main`.
        d_model: width of the residual stream.
        taps: every offered site (without heads) and how it is tapped.
        unavailable: sites that are not offered, each with the reason.
        proof: every identity that was checked.
        padding: the first padding recipe that passed, None if none did.
        padding_errors: relative error of each tried recipe, padded against alone.
        final_norm: path of the norm before the unembedding, None if there is none.
        unembedding: path of the linear map to the vocabulary, None if the model has none.
        logits_factor: number by which the unembedding's output is multiplied to give the logits.
        logits_cap: c in `c tanh(x / c)`, None without a cap.
        seconds: time that discovery and proof took, or, from the store, the cheap identities.
        proved_at: when every identity was checked (UTC).
        repeated: how many identities were checked again when the anatomy came from the store.
    """

    model_class: str
    blocks: tuple[Block, ...]
    d_model: int
    taps: dict[Site, Tap]
    unavailable: dict[Site, str] = field(default_factory=dict)
    proof: tuple[Identity, ...] = ()
    padding: PaddingRecipe | None = None
    padding_errors: dict[str, float] = field(default_factory=dict)
    final_norm: str | None = None
    unembedding: str | None = None
    logits_factor: float = 1.0
    logits_cap: float | None = None
    seconds: float = 0.0
    proved_at: str = ""
    repeated: int = 0

    def __repr__(self) -> str:
        held = sum(identity.holds for identity in self.proof)
        kinds = dict.fromkeys(str(replace(s, layer=None, call=None)) for s in self.sites)
        return (
            f"Anatomy({self.model_class}: {self.layers} layers, d_model {self.d_model}, {held} of {len(self.proof)} "
            f"identities hold; {len(self.taps)} sites: {', '.join(kinds)}; {len(self.unavailable)} not available)"
        )

    @property
    def layers(self) -> int:
        """Number of block modules in the main stack."""
        return len({block.layer for block in self.main})

    @property
    def main(self) -> tuple[Block, ...]:
        """The blocks of the stack whose end is the model's output, in the order in which they run."""
        return tuple(block for block in self.blocks if not block.stack)

    @property
    def stacks(self) -> dict[str, int]:
        """Block modules of each stack by its name; "" is the main one."""
        names = dict.fromkeys(block.stack for block in self.blocks)
        return {name: len({block.layer for block in self.blocks if block.stack == name}) for name in names}

    @property
    def sites(self) -> list[Site]:
        """Every offered site without heads, in the order of the forward pass's kinds and layers."""
        order = list(KINDS)
        return sorted(
            self.taps, key=lambda s: (s.stack, order.index(s.kind), -1 if s.layer is None else s.layer, s.call or 0)
        )

    def tap(self, name: "str | tuple | Site") -> Tap:
        """The tap of one site; a head in the name is checked but not part of the answer.

        Raises:
            KeyError: not offered on this model (with the reason), or unknown (with near matches).
            IndexError: layer or head out of range.
        """
        site = Site.parse(name)
        if (tap := self.taps.get(site.whole)) is None:
            if calls := self._calls_of(site):
                raise KeyError(
                    f"{site} is ambiguous: its module runs {len(calls)} times in one forward. Name a call: {calls[0]} "
                    f"to {calls[-1]}."
                )
            self._refuse(site)
        if site.head is not None and not 0 <= site.head < (tap.head_count or 0):
            raise IndexError(
                f"{site}: head {site.head} is out of range. {site.whole} has {tap.head_count} heads, 0 to "
                f"{(tap.head_count or 0) - 1}{' (key-value heads)' if site.kind in ('k', 'v', 'k_rot') else ''}."
            )
        return tap

    def expand(self, names: "Iterable[str | tuple | Site] | str | tuple | Site") -> list[Site]:
        """Every single site that the names stand for: a kind without layer stands for all layers that offer it.

        Raises:
            KeyError: a name stands for nothing on this model.
            ValueError: a site is asked for twice, or both whole and by head.
        """
        if isinstance(names, (str, Site)) or (
            isinstance(names, tuple) and names and all(isinstance(n, int) for n in names[1:])
        ):
            names = [names]
        expanded: list[Site] = []
        for name in names:
            site = Site.parse(name)
            if KINDS[site.kind].per_layer and site.layer is None:
                found = [s for s in self.sites if s.kind == site.kind and s.stack == site.stack]
                if not found:
                    self._refuse(site)
                expanded += found
            elif site.whole not in self.taps and (calls := self._calls_of(site)):
                for each in calls:
                    self.tap(each)
                expanded += calls
            else:
                self.tap(site)
                expanded.append(site)
        if twice := sorted({str(s) for s in expanded if expanded.count(s) > 1}):
            raise ValueError(f"Sites asked for twice: {', '.join(twice)}. Name each site once.")
        if both := sorted({str(s) for s in expanded if s.head is not None and s.whole in expanded}):
            raise ValueError(
                f"{', '.join(both)}: the whole site is asked for as well and has this head. Name one of them."
            )
        return expanded

    def _calls_of(self, site: Site) -> list[Site]:
        """The site at every call of its module, where it is offered by call only."""
        if site.call is not None:
            return []
        return sorted(replace(s, head=site.head) for s in self.taps if replace(s, call=None) == site.whole)

    def coverage(self) -> pd.DataFrame:
        """One row per stack and kind of site: how many blocks offer it, of how many, and why others do not.

        Columns: stack ("" is the main one), kind, offered, of (blocks, or 1 for a place in the whole model), reason.
        """
        rows = []
        known = [*self.taps, *self.unavailable]
        for stack in self.stacks:
            for kind in dict.fromkeys(name for name in KINDS if any((s.stack, s.kind) == (stack, name) for s in known)):
                offered = sum((s.stack, s.kind) == (stack, kind) for s in self.taps)
                why = [r for s, r in self.unavailable.items() if (s.stack, s.kind) == (stack, kind)]
                rows.append((stack, kind, offered, offered + len(why), "; ".join(dict.fromkeys(why))))
        return pd.DataFrame(rows, columns=["stack", "kind", "offered", "of", "reason"])

    @property
    def is_whole(self) -> bool:
        """Whether every identity held, and every block of the main stack offers what it adds, and heads of each mixer.

        Each block has a mixer (attn_out or mixer_out) with heads (z), and an MLP (mlp_out).
        """
        needed = {(block.layer, block.call, kind) for block in self.main for kind in ("mixes", "mlp_out", "z")}
        offered = {
            (site.layer, site.call, "mixes" if site.kind in ("attn_out", "mixer_out") else site.kind)
            for site in self.taps
            if not site.stack
        }
        return needed <= offered and all(identity.holds for identity in self.proof)

    def proof_table(self) -> pd.DataFrame:
        """The proof as a table: identity, site, error, limit, holds, note."""
        return pd.DataFrame([vars(identity) for identity in self.proof])

    def _refuse(self, site: Site) -> None:
        offered_there = any((s.kind, s.stack) == (site.kind, site.stack) for s in self.taps)
        if site.layer is None and KINDS[site.kind].per_layer and offered_there:
            first = next(s for s in self.sites if (s.kind, s.stack) == (site.kind, site.stack))
            raise KeyError(
                f"{site} stands for every layer; name one, such as {str(first)!r}. expand({str(site)!r}) lists all."
            )
        for known, reason in self.unavailable.items():
            same_layer = site.layer is None or known.layer in (None, site.layer)
            if known.kind == site.kind and known.stack == site.stack and same_layer:
                raise KeyError(f"{site} is not available on this {self.model_class}: {reason}")
        offered = [s for s in self.taps if s.kind == site.kind and s.stack == site.stack]
        layers = self.stacks.get(site.stack, self.layers)
        if offered and site.layer is not None and site.layer >= layers:
            raise IndexError(
                f"{site}: layer {site.layer} is out of range. This {self.model_class} has {layers} layers, "
                f"0 to {layers - 1}."
            )
        stacks = sorted({s.stack for s in self.taps if s.stack != site.stack and s.kind == site.kind})
        hint = f"Name a stack: {', '.join(f'{s}.{site.kind}'.lstrip('.') for s in stacks)}. " if stacks else ""
        if where := _WHERE.get(site.kind):
            hint += f"{site.kind} is offered {where}. "
        raise KeyError(
            f"This {self.model_class} offers no site {str(site)!r}. {hint}"
            f"{near_matches(str(site), map(str, self.taps))} "
            f"Kinds on offer: {', '.join(dict.fromkeys(s.kind for s in self.sites))}."
        )
