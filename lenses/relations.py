"""A relation as an affine map: from the state of a subject to the state that says its object (LRE).

    s = r_l at the subject's last token,   o = r_L at the last token of the prompt,
    J = mean over n examples of do/ds,     b = mean of o - J s,        LRE(s) = beta J s + b

Hernandez et al. (2024), "Linearity of Relation Decoding in Transformer Language Models", ICLR, arXiv:2308.09124,
section 3. Each example's prompt has the other examples before it. J is exact: d_model vector-Jacobian
products in batches, one backward for all depths; the tokens before the subject's last are run once and cached, since
they do not depend on s. Depth l is the stream that enters block l; depth L, after the last block, is where o is.

    faithful: the unembedding's first token for LRE(s) is the model's own at that prompt
    causal:   with s + pinv_r(J) (o' - o) in place of s the model says the object of another subject

pinv_r keeps the r largest singular values. beta > 1 makes up for J being too small at its own points (the paper's 2.25
on GPT-J); it is chosen, with depth and r, on other pairs: `relation_study`.
Beware: above depth 0 the tokens behind the subject have read it already, and J holds them fixed: even on an affine
model LRE is exact at depth 0 alone. Half precision makes J noise: load the model in float32. First tokens alone are
compared.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor, nn
from tqdm.auto import tqdm

from microtome.capture.anatomy import Anatomy
from microtome.capture.dissect import dissect
from microtome.capture.models import LoadedModel
from microtome.capture.tap_plan import Read
from microtome.capture.taps import taps
from microtome.lenses.linear_map import LinearMap
from microtome.lenses.made_for import facts_of
from microtome.lenses.relation_prompts import RelationPrompts
from microtome.lenses.shared_prefix import SharedPrefix, common_prefix, shared_prefix
from microtome.lenses.short_repr import short_repr
from microtome.lenses.unembedding import Unembedding

ROWS = 64
_MAX_TOKENS = 2048


@dataclass(frozen=True, eq=False)
class RelationStates:
    """States of prompts.

    Attributes:
        depths: l of each row of `subject`.
        subject: s at each depth.
        object: o.
        said: the model's own first token.
        wanted: the object's first token.
    """

    depths: tuple[int, ...]
    subject: Float[Tensor, "depth example d_model"]
    object: Float[Tensor, "example d_model"]
    said: Int64[Tensor, " example"]
    wanted: Int64[Tensor, " example"]

    __repr__ = short_repr

    @property
    def is_known(self) -> Bool[Tensor, " example"]:
        """Whether the model says the object by itself."""
        return self.said == self.wanted

    def at(self, depth: int) -> Float[Tensor, "example d_model"]:
        """s at this depth. Raises ValueError for a depth that was not read."""
        if depth not in self.depths:
            raise ValueError(f"depth {depth} was not read; there are {list(self.depths)}.")
        return self.subject[self.depths.index(depth)]


@dataclass(frozen=True, eq=False)
class RelationOperator:
    """LRE at several depths; float32.

    Attributes:
        depths: l of each J.
        jacobian: J: row i is the gradient of o_i.
        bias: b.
        examples: subjects averaged over.
        facts: name, weights and dtype of the model, its number of `layers`, depth `target` of o, template, pairs and
            prompts averaged over; JSON values.
    """

    depths: tuple[int, ...]
    jacobian: Float[Tensor, "depth d_model d_model"]
    bias: Float[Tensor, "depth d_model"]
    examples: tuple[str, ...] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)

    __repr__ = short_repr

    def __call__(
        self, subject: Float[Tensor, "*any d_model"], depth: int, *, beta: int | float = 1.0
    ) -> Float[Tensor, "*any d_model"]:
        """beta J s + b."""
        place = self._place(depth)
        return beta * subject @ self.jacobian[place].T + self.bias[place]

    def linear_map(self, depth: int, *, beta: int | float = 1.0) -> LinearMap:
        """The same as a map between sites, for row vectors; its facts are those here, and depth, beta and examples."""
        place, end = self._place(depth), self.facts.get("target")
        target = "last stream" if end in (None, self.facts.get("layers")) else f"depth {end}"
        facts = {**self.facts, "depth": int(depth), "beta": float(beta), "examples": list(self.examples)}
        return LinearMap(
            beta * self.jacobian[place].T, self.bias[place], "relation", f"depth {depth}", target, facts=facts
        )

    def inverse(self, depth: int, rank: int) -> Float[Tensor, "d_model d_model"]:
        """pinv_r(J) from the r largest singular values; zero ones (below 1e-6 of the largest) are never inverted.

        Raises ValueError for a rank outside 1 to d_model.
        """
        jacobian = self.jacobian[self._place(depth)].double()
        if not 1 <= rank <= len(jacobian):
            raise ValueError(f"rank is {rank}. Give 1 to {len(jacobian)}.")
        u, sizes, v = torch.linalg.svd(jacobian)
        kept = min(rank, int((sizes > 1e-6 * sizes[0]).sum()))
        return ((v[:kept].T / sizes[:kept]) @ u[:, :kept].T).float()

    def _place(self, depth: int) -> int:
        if depth not in self.depths:
            raise ValueError(f"the relation was not fitted at depth {depth}; there are {list(self.depths)}.")
        return self.depths.index(depth)


def stream_site(anatomy: Anatomy, depth: int) -> str:
    """The residual site of depth l: r_l enters block l, r_L leaves the last block. Raises ValueError outside 0 to L."""
    count = len(anatomy.blocks)
    if not 0 <= depth <= count:
        raise ValueError(f"depth {depth} is not there: this model has {count} blocks. Give 0 to {count}.")
    return "resid_pre.0" if depth == 0 else f"resid_post.{depth - 1}"


def relation_states(
    model: LoadedModel | nn.Module,
    prompts: RelationPrompts,
    depths: Sequence[int],
    unembedding: Unembedding,
    *,
    anatomy: Anatomy | None = None,
    target: int | None = None,
) -> RelationStates:
    """s at each depth, o (at depth `target`, L if None), and what the model says, for each prompt.

    Raises ValueError for a depth that is not there.
    """
    module = model.module if isinstance(model, LoadedModel) else model
    anatomy = dissect(module) if anatomy is None else anatomy
    sites = [stream_site(anatomy, depth) for depth in depths]
    final = stream_site(anatomy, len(anatomy.blocks))
    site_of_o = final if target is None else stream_site(anatomy, target)
    subject: list[Tensor] = [torch.empty(0)] * len(prompts)
    objects, ends = ([torch.empty(0)] * len(prompts) for _ in range(2))
    for rows, place, prefix, continuations in _batches(module, prompts):
        reads = [Read(site) for site in dict.fromkeys([*sites, site_of_o, final])]
        with torch.no_grad(), taps(module, reads, anatomy=anatomy, stop=True) as tape:
            prefix.run(continuations)
        for number, row in enumerate(rows):
            subject[row] = torch.stack([tape[site][number, place].float().cpu() for site in sites])
            objects[row] = tape[site_of_o][number, -1].float().cpu()
            ends[row] = tape[final][number, -1].float().cpu()
    with torch.no_grad():
        said = unembedding.logits(torch.stack(ends).to(unembedding.weight)).argmax(-1).cpu()
    return RelationStates(tuple(depths), torch.stack(subject, 1), torch.stack(objects), said, prompts.object_ids)


@torch.inference_mode(False)
def relation_operator(
    model: LoadedModel | nn.Module,
    prompts: RelationPrompts,
    depths: Sequence[int],
    *,
    anatomy: Anatomy | None = None,
    target: int | None = None,
    rows: int = ROWS,
    progress: bool = False,
) -> RelationOperator:
    """J and b of the prompts at each depth.

    Args:
        prompts: the n examples, as a rule each with the others before it.
        depths: from 0 to below `target`; all of them cost little more than the lowest.
        target: depth of o; None is L. Concept directions are often better from an earlier one.
        rows: outputs per backward; memory grows with it.

    Raises:
        ValueError: no prompts or depths, a depth that is not there, a prompt whose subject does not reach o, a module
            in training mode, or derivatives that are not finite.
    """
    module = model.module if isinstance(model, LoadedModel) else model
    anatomy = dissect(module) if anatomy is None else anatomy
    if not len(prompts) or not len(depths):
        raise ValueError("a relation needs at least one prompt and one depth.")
    target = len(anatomy.blocks) if target is None else target
    stream_site(anatomy, target)
    if max(depths) >= target:
        raise ValueError(f"depth {max(depths)} is not before o at depth {target}. Give depths of 0 to {target - 1}.")
    jacobian = torch.zeros(len(depths), anatomy.d_model, anatomy.d_model, dtype=torch.float64)
    bias = torch.zeros(len(depths), anatomy.d_model, dtype=torch.float64)
    for number in tqdm(range(len(prompts)), desc="Jacobians", disable=not progress):
        one, s, o = _jacobians(module, anatomy, prompts, number, depths, target, rows)
        if not bool(torch.isfinite(one).all() & torch.isfinite(s).all() & torch.isfinite(o).all()):
            raise ValueError(
                f"the prompt {prompts.texts[number]!r} gives NaN or infinity. Load the model in float32, or leave that "
                "pair out."
            )
        jacobian += one.double() / len(prompts)
        bias += (o.double() - torch.einsum("dij,dj->di", one.double(), s.double())) / len(prompts)
    facts = {
        **facts_of(model),
        "dtype": "+".join(sorted({str(p.dtype).removeprefix("torch.") for p in module.parameters()})),
        "layers": len(anatomy.blocks),
        "target": target,
        "template": prompts.template,
        "pairs": [[s, o] for s, o in zip(prompts.subjects, prompts.objects, strict=True)],
        "prompts": list(prompts.texts),
    }
    return RelationOperator(tuple(depths), jacobian.float(), bias.float(), tuple(prompts.subjects), facts)


def edited_logits(
    model: LoadedModel | nn.Module,
    prompts: RelationPrompts,
    depth: int,
    deltas: Float[Tensor, "example d_model"],
    unembedding: Unembedding,
    *,
    anatomy: Anatomy | None = None,
) -> Float[Tensor, "example vocab"]:
    """The model's logits at the end of each prompt when `deltas` are added to its subject's state at this depth."""
    module = model.module if isinstance(model, LoadedModel) else model
    anatomy = dissect(module) if anatomy is None else anatomy
    site, final = stream_site(anatomy, depth), stream_site(anatomy, len(anatomy.blocks))
    logits: list[Tensor] = [torch.empty(0)] * len(prompts)
    for rows, place, prefix, continuations in _batches(module, prompts):
        chosen = deltas[rows]

        def edit(value: Tensor, chosen: Tensor = chosen, place: int = place) -> Tensor:
            delta = torch.zeros_like(value)
            delta[:, place] = chosen.to(value)
            return delta

        last = Read(final, select=lambda value: value[:, -1])
        with torch.no_grad(), taps(module, [last], {site: edit}, anatomy=anatomy, stop=True) as tape:
            prefix.run(continuations)
        with torch.no_grad():
            for row, values in zip(rows, unembedding.logits(tape[final]).float().cpu(), strict=True):
                logits[row] = values
    return torch.stack(logits)


def _batches(module: nn.Module, prompts: RelationPrompts) -> Iterator[tuple[list[int], int, SharedPrefix, Tensor]]:
    """Prompts of one length and subject place, behind what they share: row numbers, place, prefix, continuations."""
    groups: dict[tuple[int, int], list[int]] = {}
    for row, (ids, place) in enumerate(zip(prompts.ids, prompts.subject_place.tolist(), strict=True)):
        groups.setdefault((len(ids), place), []).append(row)
    ends = [len(ids) + place for ids, place in zip(prompts.ids, prompts.subject_place.tolist(), strict=True)]
    everyone = common_prefix(prompts.ids, min(ends))
    last_shared: tuple[list[int], SharedPrefix] | None = None
    for (length, place), members in groups.items():
        shared = common_prefix([prompts.ids[row] for row in members], length + place)
        shared = everyone if 2 * everyone > shared else shared  # one cache for all, unless it would be short
        ids = prompts.ids[members[0]][:shared]
        if last_shared is None or last_shared[0] != ids:
            last_shared = ids, shared_prefix(module, ids)
        size = max(1, _MAX_TOKENS // (length - shared))
        for first in range(0, len(members), size):
            rows = members[first : first + size]
            yield rows, place, last_shared[1], torch.tensor([prompts.ids[row][shared:] for row in rows])


def _jacobians(
    module: nn.Module,
    anatomy: Anatomy,
    prompts: RelationPrompts,
    number: int,
    depths: Sequence[int],
    target: int,
    rows: int,
) -> tuple[Float[Tensor, "depth d_model d_model"], Float[Tensor, "depth d_model"], Float[Tensor, " d_model"]]:
    """do/ds at each depth, s and o of one prompt: the prompt `rows` times, each with the gradient of another output."""
    ids, place, width = prompts.ids[number], int(prompts.subject_place[number]), anatomy.d_model
    sites = [stream_site(anatomy, depth) for depth in depths]
    final = stream_site(anatomy, target)
    rows = min(rows, width)
    # nothing before the subject's last token depends on its state
    prefix = shared_prefix(module, ids[: len(ids) + place])
    continuation = torch.tensor([ids[len(ids) + place :]]).expand(rows, -1)
    reads = [Read(site, keep_graph=True) for site in dict.fromkeys([*sites, final])]
    with torch.enable_grad(), taps(module, reads, anatomy=anatomy, stop=True) as tape:
        prefix.run(continuation)
    end = tape[final]
    below = list(dict.fromkeys(sites))
    found = {site: end.new_zeros(width, width, dtype=torch.float32) for site in below}
    with torch.enable_grad():
        last = end[:, -1]
    for first in range(0, width, rows):
        outputs = torch.arange(first, min(first + rows, width), device=end.device)
        wanted = torch.zeros_like(last)
        wanted[torch.arange(len(outputs), device=end.device), outputs] = 1
        gradients = torch.autograd.grad(
            last, [tape[site] for site in below], wanted, retain_graph=first + rows < width, allow_unused=True
        )
        for site, gradient in zip(below, gradients, strict=True):
            if gradient is None:
                raise ValueError(f"{final} does not depend on {site}: there is no Jacobian between them.")
            found[site][outputs] = gradient[: len(outputs), place].float()
    states = torch.stack([tape[site][0, place].detach().float().cpu() for site in sites])
    return torch.stack([found[site].cpu() for site in sites]), states, last[0].detach().float().cpu()
