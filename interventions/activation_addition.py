"""Activation addition: the difference of two short prompts, added at the front of another (Turner et al. 2023).

    delta[p] = z_k[p] of "Love" - z_k[p] of "Hate",     p = 0, 1, ... n - 1

Both prompts are brought to the same number of tokens with spaces behind the shorter one. Added at absolute positions of
the prompt, whose keys and values stay; nothing is added to what is written.
"""

import torch

from microtome.capture.collect import capture
from microtome.capture.models import LoadedModel
from microtome.capture.sites import Site
from microtome.interventions.operations import call_of
from microtome.interventions.steering import Intervention, Steering


def activation_addition(
    model: LoadedModel, plus: str, minus: str, site: str, *, strength: float = 1.0, front: int = 0
) -> Steering:
    """The steering of two prompts.

    Args:
        plus, minus: what is added and what is subtracted.
        site: of the residual stream, such as resid_post.6.
        front: the first position it is added at; position 0 holds the massive activations of the first token in many
            models, where both prompts read alike and the difference is about 0.

    Raises:
        ValueError: equal prompts, or ones that spaces do not bring to one length.
    """
    if plus == minus:
        raise ValueError("The two prompts are the same: their difference is zero. Give two.")
    tokenizer = model.require_tokenizer()
    ids = [list(tokenizer(text)["input_ids"]) for text in (plus, minus)]
    n = max(map(len, ids))
    space = tokenizer(" ", add_special_tokens=False)["input_ids"]
    if len(space) != 1 and min(map(len, ids)) < n:
        raise ValueError("A space is no token of this model: give two prompts of the same number of tokens.")
    padded = [row + space * (n - len(row)) for row in ids]
    acts = capture(model, padded, [site], "all", progress=False, add_special_tokens=False)[site]
    difference = acts[:n].float() - acts[n:].float()
    return Steering(
        Intervention(
            Site.parse(site),
            FrontAddition(difference[front:], front),
            tuple(range(front, n)),
            strength,
            name="activation addition",
        )
    )


class FrontAddition:
    """delta[p] = w vectors[p - first], by absolute position. Attributes: vectors, first."""

    def __init__(self, vectors: torch.Tensor, first: int):
        if not bool(vectors.any()):
            raise ValueError("The two prompts read the same at these positions: nothing would be added.")
        self.vectors, self.first = vectors.float(), first

    @property
    def width(self) -> int:
        """Channels."""
        return self.vectors.shape[1]

    directions = None

    def delta(self, x, weight, at):
        """Nothing beyond the last vector."""
        places = (call_of(at, "Activation addition").positions.to(x.device) - self.first).clamp(
            0, len(self.vectors) - 1
        )
        return weight * self.vectors.to(x)[places]
