"""Does the model use what a probe finds: its own next-token loss with a concept erased while it runs.

    change = mean over tokens of [-ln p_edited(next)] - mean over tokens of [-ln p(next)]        (nats per token)

after Elazar et al. 2021 (Amnesic Probing): a decodable but unused feature changes nothing. Beside it stands the
control, erasures of as many random directions at the same sites about the same mean: what taking out any that many
dimensions costs.

Beware: random directions of a stream hold little of its variance, so the control's edits are smaller; `moved` (mean
norm of the deltas) says how much smaller. An edit acts at every position; a first token that is an attention sink lies
far from all rows an eraser is fitted on and is moved far (`spare_first` leaves it as it is).
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float64
from torch import Tensor, nn

from microtome.capture.anatomy import Anatomy
from microtome.capture.batches import PaddingRecipe, make_batch, plan_batches
from microtome.capture.dissect import dissect
from microtome.capture.encoded_text import EncodedText, EncodedTexts
from microtome.capture.forward_arguments import input_device
from microtome.capture.limits import pad_id
from microtome.capture.models import LoadedModel
from microtome.capture.padding import call_options
from microtome.capture.sites import Site
from microtome.capture.taps import taps
from microtome.capture.texts import encode_texts
from microtome.probes.erasure_maps import Erasure

MAX_TOKENS = 1024


def amnesic(
    model: LoadedModel | nn.Module,
    texts: Any,
    edits: Mapping[str | Site, Any],
    *,
    controls: int = 3,
    spare_first: bool = False,
    seed: int = 0,
    **encoding: Any,
) -> pd.DataFrame:
    """Next-token loss as the model is, with the concept erased, and with random directions erased in its stead.

    Args:
        texts: strings, message lists or token ids, as `capture` takes them; two tokens or more each.
        edits: by site, erasures: `eraser.edit()`, or `Erasures.edits(sites)`.
        controls: random erasures, each drawn anew.
        spare_first: leave the first token of every text unedited.
        encoding: as of `encode_texts`.

    Returns one row each for "as it is", "erased" and "random 0", "random 1", ...: condition, loss (nats per predicted
    token), change (from "as it is"), change_error (standard error over texts of the change, each text weighing its
    tokens), moved (mean norm of the delta at a real token, mean over sites and batches), tokens (predicted).

    Raises:
        TypeError: an edit that is no erasure (its mean and rank are needed for the control).
        ValueError: no edits, a text of one token, ready model inputs.
    """
    module, tokenizer = (model.module, model.tokenizer) if isinstance(model, LoadedModel) else (model, None)
    if not edits:
        raise ValueError("edits is empty. Pass {'resid_post.12': eraser.edit()}.")
    for site, edit in edits.items():
        if not isinstance(edit, Erasure):
            raise TypeError(f"The edit at {site} is {edit!r:.60}; pass eraser.edit(), whose rank the control takes.")
    encoded = encode_texts(texts, tokenizer, module=module, **encoding)
    if not isinstance(encoded, EncodedTexts):
        raise ValueError("texts are ready model inputs; the loss needs strings or token ids.")
    if short := [number for number, row in enumerate(encoded.rows) if row.length < 2]:
        raise ValueError(f"text {short[0]} has one token; a next-token loss needs at least two.")
    anatomy = dissect(module)
    anatomy.tap("logits")
    conditions: dict[str, Mapping[str | Site, Erasure]] = {"as it is": {}, "erased": edits}
    for number in range(controls):
        generator = torch.Generator().manual_seed(seed + number)
        conditions[f"random {number}"] = {site: _random_like(edit, generator) for site, edit in edits.items()}
    rows, clean = [], None
    for name, some in conditions.items():
        losses, counts, moved = _losses(module, tokenizer, anatomy, list(encoded.rows), some, spare_first)
        clean = losses if clean is None else clean
        loss = float(losses.sum() / counts.sum())
        change = float((losses - clean).sum() / counts.sum())
        # of a ratio of sums over texts (Cochran 1977, eq. 6.13)
        residual = (losses - clean) - change * counts
        spread = residual.square().sum() * len(counts) / max(1, len(counts) - 1)
        error = float(spread.sqrt() / counts.sum())
        rows.append(
            {"condition": name, "loss": loss, "change": change, "change_error": error}
            | {"moved": moved, "tokens": int(counts.sum())}
        )
    return pd.DataFrame(rows)


def _random_like(edit: Erasure, generator: torch.Generator) -> Erasure:
    """As many random directions taken out about the same mean."""
    drawn = torch.randn(len(edit.mean), edit.rank, generator=generator, dtype=torch.float64)
    basis = torch.linalg.qr(drawn)[0]
    return replace(edit, left=basis, right=basis.T.contiguous())


def _losses(
    module: nn.Module,
    tokenizer: Any,
    anatomy: Anatomy,
    rows: list[EncodedText],
    edits: Mapping[str | Site, Erasure],
    spare_first: bool,
) -> tuple[Float64[Tensor, " text"], Float64[Tensor, " text"], float]:
    """Sum of losses and number of predicted tokens of every text, and the mean norm of the deltas."""
    losses, counts = (torch.zeros(len(rows), dtype=torch.float64) for _ in range(2))
    recipe = anatomy.padding or PaddingRecipe()
    limits = {"max_tokens": MAX_TOKENS} | ({} if anatomy.padding is not None else {"max_rows": 1})
    norms: list[float] = []
    for row_ids in plan_batches([row.length for row in rows], **limits):
        batch = make_batch(rows, row_ids, pad_id=pad_id(module, tokenizer), recipe=recipe, device=input_device(module))
        mask = batch.attention_mask.bool()

        def measured(edit: Erasure, mask: Tensor = mask) -> Any:
            def delta_of(value: Tensor) -> Tensor:
                delta = edit(value)
                if spare_first:
                    delta[torch.arange(len(delta)), mask.long().argmax(1).to(delta.device)] = 0
                norms.append(float(delta[mask.to(delta.device)].double().norm(dim=-1).mean()))
                return delta

            return delta_of

        acting = {site: measured(edit) for site, edit in edits.items()}
        with torch.no_grad(), taps(module, ["logits"], acting, anatomy=anatomy) as tape:
            module(**batch.model_inputs(), **call_options(module))
        logits = tape["logits"][:, :-1].float()
        nats = torch.nn.functional.cross_entropy(logits.mT, batch.input_ids[:, 1:], reduction="none").double()
        is_predicted = mask[:, 1:] & mask[:, :-1]
        losses[row_ids] = torch.where(is_predicted, nats, 0.0).sum(1).cpu()
        counts[row_ids] = is_predicted.sum(1).double().cpu()
    return losses, counts, float(np.mean(norms)) if norms else 0.0
