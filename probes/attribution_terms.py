"""What adds to the residual stream up to a site, and the weight a linear probe gives it there.

Going back from the probed site, x -> s x turns w into s w, x -> x + f c adds the term (f w) . c, x -> x + v the
constant w . v. For attention with head h, w . (z_h W_O^h) = z_h . (W_O^h w): one vector of the head's width for each
head, so that no head's write is ever made.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Float64
from torch import Tensor, nn

from microtome.capture.anatomy import TERM_OF_ROLE, Anatomy, Block, coefficient
from microtome.capture.layouts import affine_weight
from microtome.capture.sites import Site
from microtome.probes.sweep_result import Sweep


@dataclass(frozen=True, eq=False)
class Term:
    """One contribution to the stream and the probe's weight where it is added."""

    site: Site
    role: str
    block: Block
    weight: Float64[Tensor, " d_model"]
    heads: Float64[Tensor, "head d_head"] | None = None  # W_O^h w
    bias: float = 0.0


def probe_weights(
    probe: Any, output: int | str | None, width: int, site: Site
) -> tuple[Float64[Tensor, " d_model"], float]:
    """Weight and intercept of one score; of several, those of `output` less the mean of all.

    Of two classes the one score is the second's; by name, the first's is its negative.
    Raises ValueError for another width, several scores without a choice, and a class that the probe has not; KeyError
    for a site that the sweep did not probe; TypeError for what has no weights.
    """
    names: list[str] = []
    if isinstance(probe, Sweep):
        coef, intercept, names = probe.coef(site), probe.intercept(site), probe.classes
    elif hasattr(probe, "coef_"):
        coef, intercept = probe.coef_, probe.intercept_
        names = [str(name) for name in getattr(probe, "classes_", ())]
    elif isinstance(probe, tuple | list) and len(probe) == 2:
        coef, intercept = probe
    else:
        raise TypeError(
            f"probe is a {type(probe).__name__}; give (weights, intercept), an estimator with coef_ and intercept_ (of "
            "a Pipeline its probe, fitted to raw features), or a Sweep."
        )
    coef, intercept = (torch.as_tensor(np.asarray(part), dtype=torch.float64) for part in (coef, intercept))
    coef, intercept = coef.reshape(-1, coef.shape[-1]), intercept.reshape(-1)
    if coef.shape[1] != width or len(coef) != len(intercept):
        raise ValueError(
            f"The probe has weights {tuple(coef.shape)} and {len(intercept)} intercept(s); the stream has {width} "
            "features. Attribution is for probes of resid_post and resid_pre."
        )
    if isinstance(output, str):
        if output not in names:
            known = f"its classes are {', '.join(map(repr, names[:8]))}" if names else "this probe names no classes"
            raise ValueError(f"output={output!r}: {known}. Give a class by name, or its number.")
        if len(coef) == 1:
            sign = 1.0 if names.index(output) == 1 else -1.0
            return sign * coef[0], sign * float(intercept[0])
        output = names.index(output)
    if len(coef) == 1:
        if output not in (None, 0):
            raise ValueError(f"output={output}, but the probe has one score.")
        return coef[0], float(intercept[0])
    if output is None or not 0 <= output < len(coef):
        by_name = f", or by name ({', '.join(map(repr, names[:8]))})" if names else ""
        raise ValueError(f"The probe has {len(coef)} classes; say which with output=0 to {len(coef) - 1}{by_name}.")
    return coef[output] - coef.mean(0), float(intercept[output] - intercept.mean())


def stream_terms(
    module: nn.Module, anatomy: Anatomy, site: Site, weight: Float64[Tensor, " d_model"]
) -> tuple[list[Term], Site, Float64[Tensor, " d_model"], float]:
    """Contributions up to the site, in order; where the stream starts, the weight there, and what is constant.

    Raises ValueError for a site off the stream and a stream that is no sum (the message says why).
    """
    anatomy.tap(site)
    blocks = [block for block in anatomy.blocks if block.stack == site.stack]
    places = [n for n, block in enumerate(blocks) if (block.layer, block.call) == (site.layer, site.call)]
    before = blocks[: places[0] + (site.kind == "resid_post")]
    weight, constant, terms = weight.clone(), 0.0, []
    for block in reversed(before):
        if not block.hops:
            raise ValueError(f"The stream could not be followed through {block.path}, so it cannot be split.")
        for hop in reversed(block.hops):
            if hop.step == "norm":
                raise ValueError(
                    f"The norm {hop.module!r} is on the trunk: the stream of this {anatomy.model_class} is no sum of "
                    "contributions, so a score cannot be split exactly. This holds for models that norm after adding "
                    "(BERT); probe a pre-norm model."
                )
            factor = coefficient(module, hop.factor, hop.vectors)
            factor = double(factor) if isinstance(factor, Tensor) else factor
            if hop.step == "scale":
                weight = weight * factor
            elif hop.step == "shift":
                constant += float((weight * factor).sum())
            else:
                role = block.contributions[hop.contribution].role
                terms.append(Term(block.site(TERM_OF_ROLE[role]), role, block, weight * factor))
    if len({term.site for term in terms}) < len(terms):
        raise ValueError("A block adds two contributions of one role, which have no site each: it cannot be split.")
    return terms[::-1], blocks[0].site("resid_pre"), weight, constant


def with_heads(term: Term, module: nn.Module, anatomy: Anatomy) -> Term:
    """The term with W_O^h w of its heads, where it is attention and has them."""
    if term.role != "attention" or (tap := anatomy.taps.get(term.block.site("head_out"))) is None:
        return term
    projection = module.get_submodule(tap.through)
    parameter = next(projection.parameters())
    dtype = parameter.dtype if parameter.is_floating_point() else torch.float32
    empty = torch.zeros(1, 1, tap.heads.columns.numel(), dtype=dtype, device=parameter.device)
    with torch.no_grad():
        back = double(affine_weight(projection, empty)) @ term.weight
        bias = float(double(projection.forward(empty))[0, 0] @ term.weight)
    return replace(term, heads=back[tap.heads.columns.cpu()], bias=bias)


def double(value: Float[Tensor, "..."]) -> Float64[Tensor, "..."]:
    """In float64 on the CPU, without a graph."""
    return value.detach().double().cpu()
