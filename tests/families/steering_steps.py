"""For tests of steering: seeded noise, and the logits of every step of a greedy generation, by hand."""

from collections.abc import Sequence

import torch

from microtome.capture import LoadedModel, taps
from microtome.capture.forward_call import batch_rows
from microtome.interventions.steering import Steering

STEPS = 4

GOOD = [
    "the happy cat ran to the river .",
    "she liked the good film .",
    "a great big city .",
    "we saw good green trees .",
]
BAD = ["the sad cat sat in the house .", "she hated the bad film .", "an awful old city .", "we saw bad small books ."]


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    """Standard normal numbers."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def step_logits(
    model: LoadedModel, prompts: Sequence[str], steering: Steering | None, *, use_cache: bool
) -> list[torch.Tensor]:
    """Next-token logits of each step, rows padded on the left; every step takes the likeliest token of the cached run's
    kind, so that both ways go the same path while they agree."""
    ids = [model.tokenizer(text)["input_ids"] for text in prompts]
    width = max(map(len, ids))
    rows = torch.tensor([[0] * (width - len(row)) + row for row in ids])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in ids])
    found = []
    past = None
    edits = {} if steering is None else steering.edits(model)
    with batch_rows(range(len(ids)), [len(row) for row in ids]), taps(model, (), edits), torch.no_grad():
        for step in range(STEPS):
            fed = rows if past is None else rows[:, -1:]
            places = (mask.cumsum(1) - 1).clamp_min(0)[:, -fed.shape[1] :]
            out = model.module(input_ids=fed, attention_mask=mask, position_ids=places, cache=past, use_cache=use_cache)
            past = out.past_key_values if use_cache else None
            found.append(out.logits[:, -1].clone())
            rows = torch.cat([rows, torch.full((len(ids), 1), 5 + step)], 1)
            mask = torch.cat([mask, torch.ones(len(ids), 1, dtype=torch.long)], 1)
    return found
