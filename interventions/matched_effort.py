"""Two ways of steering at the same effort: the strength at which one pushes as hard as the other.

effort = sum over layers of |delta|^2, per token on which the edit acts, on given texts (no generation)

Where layers act at different tokens, all is per token of the site that acts at most of them.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from microtome.capture.models import LoadedModel
from microtome.interventions.ledger import Ledger
from microtome.interventions.steering import Steering, anatomy_of
from microtome.lenses.corpus_pass import corpus_pass


def effort_of(model: LoadedModel, steering: Steering, texts: Sequence[str], *, prompt_tokens: int = 1) -> float:
    """Mean effort per token, texts read as they are with everything behind `prompt_tokens` as the continuation."""
    anatomy = anatomy_of(model)
    ledger = Ledger.of(steering)
    plan = corpus_pass(
        model,
        list(texts),
        f"resid_post.{anatomy.layers - 1}",
        anatomy=anatomy,
        edits=steering.edits(anatomy, ledger),
    )
    plan = replace(plan, prompt_tokens=(prompt_tokens,) * len(plan.texts))
    with torch.no_grad():
        for _ in plan.chunks():
            pass
    by_layer = ledger.by_layer()
    tokens = by_layer.groupby("site")["tokens"].max()
    return float(by_layer["effort"].sum() / max(tokens.max(), 1)) if len(by_layer) else 0.0


def strength_for_effort(
    steer: Callable[[float], Steering],
    wanted: float,
    model: LoadedModel,
    texts: Sequence[str],
    *,
    prompt_tokens: int = 1,
    start: float = 1.0,
    tolerance: float = 0.02,
    most: int = 24,
) -> float:
    """The strength at which `steer(strength)` has the wanted effort, by bracketing and bisection.

    Raises:
        ValueError: an effort, start or tolerance that is not above 0; an effort that no strength tried reaches, or that
            jumps over the wanted one.
    """
    if not wanted > 0:
        raise ValueError(f"wanted={wanted}: give an effort above 0.")
    if not start > 0 or not tolerance > 0 or most < 1:
        raise ValueError(f"start={start}, tolerance={tolerance}, most={most}: give numbers above 0.")
    low, high, size, found = 0.0, None, start, 0.0
    for _ in range(most):
        found = effort_of(model, steer(size), texts, prompt_tokens=prompt_tokens)
        if abs(found - wanted) <= tolerance * wanted:
            return size
        if found < wanted:
            low = size
        else:
            high = size
        size = 2 * size if high is None else (low + high) / 2
    if high is None:
        raise ValueError(f"No strength up to {low:g} has an effort of {wanted:g}; that one had {found:g}.")
    raise ValueError(
        f"Between strengths {low:g} and {high:g} the effort jumps over {wanted:g}, or {most} tries are too few for a "
        f"tolerance of {tolerance:g}; the last one had {found:g}. Give a larger tolerance or more tries."
    )
