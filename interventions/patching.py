"""Patching between a clean and a corrupted run: which sites, heads or directions carry the difference.

    x_corrupted <- x_corrupted + U'U (x_clean - x_corrupted)        U all of the space, or a few directions

    LD = logit(correct) - logit(wrong)       recovery = (LD_patched - LD_corrupted) / (LD_clean - LD_corrupted)

0 recovers nothing, 1 everything; more than 1 can happen. Pairs of texts must have equal numbers of tokens. The linear
proxy dLD/dx . (x_clean - x_corrupted) takes one backward pass for all sites; verify its top few exactly.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from microtome.capture.collect import capture
from microtome.capture.forward_arguments import input_device
from microtome.capture.forward_call import batch_rows
from microtome.capture.models import LoadedModel
from microtome.capture.sites import Site
from microtome.capture.tap_plan import Read
from microtome.capture.taps import taps
from microtome.interventions.operations import Swap
from microtome.interventions.positions import Positions
from microtome.interventions.steering import Intervention, Steering, anatomy_of


@dataclass(frozen=True, eq=False)
class PatchingPairs:
    """Clean and corrupted texts and the two answers.

    Attributes:
        clean, corrupted: token ids, pair by pair of one length.
        correct, wrong: ids of the answers after the clean text.
    """

    clean: list[list[int]]
    corrupted: list[list[int]]
    correct: list[int]
    wrong: list[int]

    def __post_init__(self):
        if not len(self.clean) == len(self.corrupted) == len(self.correct) == len(self.wrong) or not self.clean:
            counts = [len(x) for x in (self.clean, self.corrupted, self.correct, self.wrong)]
            raise ValueError(f"{counts} clean texts, corrupted ones, correct and wrong answers: give as many of each.")
        for number, (one, other) in enumerate(zip(self.clean, self.corrupted, strict=True)):
            if len(one) != len(other):
                raise ValueError(
                    f"Pair {number} has {len(one)} and {len(other)} tokens: patching sets token beside token. Give "
                    "texts of one length."
                )

    @classmethod
    def of(
        cls,
        model: LoadedModel,
        clean: Sequence[str],
        corrupted: Sequence[str],
        correct: Sequence[str],
        wrong: Sequence[str],
    ) -> "PatchingPairs":
        """From strings; answers with their leading space, one token each. Raises ValueError for longer answers."""
        tokenizer = model.require_tokenizer()
        ids = [[list(tokenizer(text)["input_ids"]) for text in texts] for texts in (clean, corrupted)]
        answers = []
        for texts in (correct, wrong):
            each = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
            if long := [text for text, row in zip(texts, each, strict=True) if len(row) != 1]:
                raise ValueError(f"The answer {long[0]!r} is not one token. Give answers of a single token.")
            answers.append([row[0] for row in each])
        return cls(ids[0], ids[1], answers[0], answers[1])


def logit_differences(
    model: LoadedModel, texts: Sequence[Sequence[int]], pairs: PatchingPairs, steering: Steering | None = None
) -> Float[np.ndarray, " pair"]:
    """logit(correct) - logit(wrong) at each text's last token."""
    edits = None if steering is None else steering.edits(model)
    acts = capture(
        model, [list(t) for t in texts], ["logits"], "last", edits=edits, add_special_tokens=False, progress=False
    )
    logits = acts["logits"].double()
    rows = torch.arange(len(logits))
    return (logits[rows, torch.tensor(pairs.correct)] - logits[rows, torch.tensor(pairs.wrong)]).numpy()


def patch_of(
    model: LoadedModel,
    pairs: PatchingPairs,
    sites: Sequence[str] | str,
    *,
    directions: dict[str, Tensor] | None = None,
    positions: Positions = "all",
) -> Steering:
    """The steering that writes the clean run's activations into the corrupted one.

    Args:
        sites: single sites, heads, or a kind for all layers.
        directions: by site, [k, d]: only this part is written.
        positions: which tokens.
    """
    named = [str(site) for site in anatomy_of(model).expand([sites] if isinstance(sites, str) else list(sites))]
    acts = capture(model, pairs.clean, named, "all", add_special_tokens=False, progress=False)
    text, position = (torch.tensor(acts.rows[name].to_numpy()) for name in ("text", "position"))
    longest = int(position.max()) + 1
    found = []
    for site in named:
        value = acts[site].to(torch.promote_types(acts[site].dtype, torch.float32))
        values = value.new_zeros(len(pairs.clean), longest, *value.shape[1:])
        values[text, position] = value
        held = torch.zeros(len(pairs.clean), longest, dtype=torch.bool)
        held[text, position] = True
        basis = None if directions is None else directions[site]
        found.append(Intervention(site, Swap(values, held, basis), positions, name=f"patch {site}"))
    return Steering(found)


def recovery(
    patched: Float[np.ndarray, " pair"], corrupted: Float[np.ndarray, " pair"], clean: Float[np.ndarray, " pair"]
) -> float:
    """(mean LD_patched - mean LD_corrupted) / (mean LD_clean - mean LD_corrupted).

    Raises ValueError where clean and corrupted do not differ.
    """
    span = float(clean.mean() - corrupted.mean())
    if abs(span) < 1e-9:
        raise ValueError("Clean and corrupted runs have the same logit difference: there is nothing to recover.")
    return float(patched.mean() - corrupted.mean()) / span


def patching_table(
    model: LoadedModel,
    pairs: PatchingPairs,
    sites: Sequence[str],
    *,
    directions: dict[str, Tensor] | None = None,
    positions: Positions = "all",
) -> pd.DataFrame:
    """A row per site: recovery, flip rate (share of pairs whose sign turned), logit difference.

    Raises ValueError where clean and corrupted runs do not differ.
    """
    clean, corrupted = (logit_differences(model, texts, pairs) for texts in (pairs.clean, pairs.corrupted))
    rows: list[dict[str, Any]] = []
    for site in sites:
        one = {site: directions[site]} if directions is not None else None
        steering = patch_of(model, pairs, [site], directions=one, positions=positions)
        patched = logit_differences(model, pairs.corrupted, pairs, steering)
        flips = float(((patched > 0) != (corrupted > 0)).mean())
        rows.append(
            {
                "site": site,
                "recovery": recovery(patched, corrupted, clean),
                "flips": flips,
                "logit_difference": float(patched.mean()),
            }
        )
    return pd.DataFrame(rows)


def attribution_patching(model: LoadedModel, pairs: PatchingPairs, sites: Sequence[str]) -> pd.DataFrame:
    """The linear proxy of every site's recovery, all tokens patched: sum of dLD/dx (x_clean - x_corrupted).

    One forward and backward over the corrupted texts, one forward over the clean ones, text by text.
    """
    anatomy = anatomy_of(model)
    home = input_device(model.module)
    named = [Site.parse(site) for site in sites]
    sums = dict.fromkeys(named, 0.0)
    span = 0.0
    for number in range(len(pairs.clean)):
        with batch_rows([number]), torch.no_grad(), taps(model, [*named, "logits"], anatomy=anatomy) as clean:
            model.module(input_ids=torch.tensor([pairs.clean[number]], device=home))
        reads = [*(Read(site, keep_graph=True) for site in named), Read("logits", keep_graph=True)]
        with torch.enable_grad(), taps(model, reads, anatomy=anatomy) as tape:
            model.module(input_ids=torch.tensor([pairs.corrupted[number]], device=home))
            logits = tape["logits"][0, -1]
            difference = logits[pairs.correct[number]] - logits[pairs.wrong[number]]
            values = [tape[site] for site in named]
            gradients = torch.autograd.grad(difference, values)
        for site, value, gradient in zip(named, values, gradients, strict=True):
            sums[site] += float((gradient * (clean[site] - value.detach())).sum())
        last = clean["logits"][0, -1]
        span += float(last[pairs.correct[number]] - last[pairs.wrong[number]] - difference.detach())
    if abs(span) < 1e-9:
        raise ValueError("Clean and corrupted runs have the same logit difference: there is nothing to recover.")
    return pd.DataFrame({"site": [str(site) for site in named], "recovery": [sums[site] / span for site in named]})
