"""Which way of padding leaves a model's activations as they are without padding: tried, not looked up.

Texts of unequal length run alone and in one padded batch, on either side, with and without explicit position ids
(`cumsum(mask) - 1`). A recipe passes if the last block's output at every real position agrees to 1e-4 of the largest
value, 2e-2 in half precision and where linear maps round their inputs.
GPT-2 kinds need the ids on the left side; RoBERTa kinds, which count from their padding index, must not get them.
"""

import math

import torch
from torch import Tensor, nn

from microtome.capture.anatomy import Point
from microtome.capture.batches import PaddingRecipe
from microtome.capture.forward_arguments import accepted_arguments
from microtome.capture.plain_hooks import plain_hooks
from microtome.capture.precision import precision

LIMIT = 1e-4
ROUNDED_LIMIT = 2e-2  # float16 and bfloat16 round by 1e-3 and 1e-2, int8 inputs by 1e-2; wrong recipes miss by 0.05
RECIPES = tuple(PaddingRecipe(side, ids) for side in ("right", "left") for ids in ("none", "cumsum"))


def call_options(model: nn.Module) -> dict[str, bool]:
    """Keyword arguments for a plain forward of this model: no cache, where the signature has one."""
    accepted = accepted_arguments(model)
    return {"use_cache": False} if "use_cache" in accepted or "kwargs" in accepted else {}


def limit_for(model: nn.Module) -> float:
    """The relative error up to which a recipe passes in the model's precision."""
    return LIMIT if precision(model) == "full" else ROUNDED_LIMIT


def padding_errors(
    model: nn.Module, exit: Point, sequences: list[Tensor], *, pad_id: int
) -> dict[PaddingRecipe, float]:
    """Relative error of the last block's output for every recipe, padded against alone.

    Args:
        model: in eval mode.
        exit: where the stream leaves the last block.
        sequences: token ids of at least two lengths, each `[position]`.
        pad_id: filler under the mask.

    Returns:
        Largest difference over largest value at real positions, per recipe; recipes whose arguments the model does
        not take are left out.
    """
    accepts_ids = "position_ids" in accepted_arguments(model)
    alone = [_exit_value(model, exit, ids[None], torch.ones_like(ids)[None], None)[0] for ids in sequences]
    errors = {}
    for recipe in RECIPES:
        if recipe.position_ids == "cumsum" and not accepts_ids:
            continue
        ids, mask = _padded(sequences, recipe.side, pad_id)
        position_ids = (mask.cumsum(-1) - 1).clamp(min=0) if recipe.position_ids == "cumsum" else None
        together = _exit_value(model, exit, ids, mask, position_ids)
        if together.shape[:2] != mask.shape or any(len(a) != len(ids) for a, ids in zip(alone, sequences, strict=True)):
            errors[recipe] = math.inf  # the stream has other positions than the tokens
            continue
        pairs = [(together[i][mask[i].bool()], alone[i]) for i in range(len(sequences))]
        errors[recipe] = max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)
    return errors


def _padded(sequences: list[Tensor], side: str, pad_id: int) -> tuple[Tensor, Tensor]:
    longest = max(map(len, sequences))
    ids = torch.full((len(sequences), longest), pad_id, dtype=torch.long, device=sequences[0].device)
    mask = torch.zeros_like(ids)
    for i, row in enumerate(sequences):
        real = slice(0, len(row)) if side == "right" else slice(longest - len(row), longest)
        ids[i, real] = row
        mask[i, real] = 1
    return ids, mask


def _exit_value(model: nn.Module, exit: Point, ids: Tensor, mask: Tensor, position_ids: Tensor | None) -> Tensor:
    seen: list[Tensor] = []
    extra = {} if position_ids is None else {"position_ids": position_ids}
    with torch.no_grad(), plain_hooks(model, {exit: lambda x: seen.append(x.detach().clone())}):
        model(input_ids=ids, attention_mask=mask, **extra, **call_options(model))
    return seen[-1].float()
