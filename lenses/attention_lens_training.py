"""Train an attention lens: all heads of a layer at once, AdamW on KL(model || lens), stopped on held-out rows.

    step:  rows of the fit in a seeded order,  W <- AdamW(W, gradient of the mean KL),
           lr_t = lr (1 + cos(pi t / T)) / 2,
           and with `shrink` also  M_h <- M_h - lr_t shrink (M_h - M0_h),   M0 the plain unembedding of the head

(Sakarvadia et al. 2023, arXiv:2310.16270, sheet 3.6.) What differs from the authors' code, on purpose: real last tokens
instead of padding, all heads by one product, held-out KL instead of the luckiest training batch decides which weights
are kept, the best bias alone is reported beside, and no parameter of the model is in the optimiser: the model is not
even run, its states are rows that were read before. The last is also why a step costs little: 6 d_cat V.

With `folder` the state goes to disk at every evaluation; the same call goes on from there, also after kill -9, to the
same bits (on the same machine and threads).
"""

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor, nn
from tqdm.auto import tqdm

from microtome.capture.dissect import dissect
from microtome.capture.fingerprint import new_fingerprint, tensor_bytes
from microtome.capture.models import LoadedModel
from microtome.capture.running_model import running_model
from microtome.lenses.attention_lens import MODES, AttentionLens, Mode
from microtome.lenses.attention_lens_files import load_training_state, save_attention_lens, save_training_state
from microtome.lenses.attention_lens_loss import BLOCK_BYTES, best_bias, readout_kl
from microtome.lenses.attention_lens_readout import (
    FORMS,
    STARTS,
    Form,
    Readout,
    Start,
    as_lens,
    readout_input,
    readout_shape,
    starting_readout,
)
from microtome.lenses.attention_lens_rows import SHARDS, LensRows, Positions, lens_rows, require_memory
from microtome.lenses.attention_lens_scores import AttentionLensScores, score_attention_lens
from microtome.lenses.attention_lens_start import folded_unembedding, peer_r2, plain_weight
from microtome.lenses.head_writes import head_maps
from microtome.lenses.made_for import facts_of, require_same_weights
from microtome.lenses.pair_moments import PairMoments
from microtome.lenses.unembedding import Unembedding, unembedding_of

_STATE_FILE, _LENS_FILE = "training.safetensors", "lens.safetensors"
# weights, gradient, two moments of Adam, the best weights so far
_COPIES = 5


@dataclass(frozen=True, eq=False, repr=False)
class AttentionLensRun:
    """A trained lens with its record.

    Attributes:
        lens: of the step with the least KL on the validation rows.
        scores: on the test rows; `start_kl`, `closed_form_kl` beside them, nats.
        start_kl: KL on the test rows before the first step.
        closed_form_kl: KL on the test rows of the closed-form lens of the same mode.
        history: a row per evaluation: step, fit_kl (mean over the batches since the last), validation_kl.
        best_step: whose weights the lens has.
        readout: the same weights in the form in which they were learned.
    """

    lens: AttentionLens
    scores: AttentionLensScores
    start_kl: float
    closed_form_kl: float
    history: pd.DataFrame
    best_step: int
    readout: Readout

    def head_words(self, model: LoadedModel, *, shown: int = 8) -> pd.DataFrame:
        """A row per head: peer_r2, drop_kl, precision, its most frequent top words on the test rows, and the words of
        its plain unembedding; what `figures.head_words` draws."""
        return self.scores.to_frame(model, shown=shown)

    def __repr__(self) -> str:
        return (
            f"{self.scores!r}\nstart KL {self.start_kl:.3f}, best step {self.best_step} of "
            f"{int(self.history['step'].max())}"
        )


def train_attention_lens(
    model: LoadedModel | nn.Module,
    texts: Any,
    layer: int,
    *,
    documents: Iterable[Any] | None = None,
    positions: Positions = "all",
    mode: Mode = "joint",
    max_rows: int | None = None,
    validation: float = 0.15,
    test: float = 0.15,
    seed: int = 0,
    progress: bool = False,
    **training: Any,
) -> AttentionLensRun:
    """Read the rows of a layer, split them by document and fit a lens.

    Args:
        texts, documents, positions, max_rows: as for `lens_rows`.
        validation, test: shares of documents.
        training: as for `fit_attention_lens`.

    Raises:
        What `lens_rows`, `LensRows.split` and `fit_attention_lens` raise.
    """
    _check_choice("mode", mode, MODES)
    rows = lens_rows(
        model,
        texts,
        layer,
        positions=positions,
        documents=documents,
        with_stream=mode == "residual",
        max_rows=max_rows,
        seed=seed,
        progress=progress,
    )
    shards = rows.split(validation=validation, test=test, seed=seed)
    return fit_attention_lens(model, shards, mode=mode, seed=seed, progress=progress, **training)


def fit_attention_lens(
    model: LoadedModel | nn.Module,
    shards: dict[str, LensRows],
    *,
    mode: Mode = "joint",
    form: Form = "small",
    start: Start = "closed_form",
    steps: int = 200,
    batch_rows: int = 256,
    learning_rate: float = 1e-3,
    weight_decay: float = 0.0,
    shrink: float = 0.0,
    evaluate_every: int = 20,
    patience: int = 3,
    top: int = 10,
    seed: int = 0,
    folder: str | Path | None = None,
    progress: bool = False,
) -> AttentionLensRun:
    """Fit a lens on rows that are split already, so that modes, forms and seeds can share them.

    Args:
        shards: "fit", "validation" and "test" (`LensRows.split`).
        mode: "joint", "independent", "shared" or "residual" (`attention_lens`).
        form: "small", or "original" with d_model / d_head times the parameters, for comparison.
        start: "closed_form", "unembedding" (the authors') or "zero".
        steps: at most; evaluated on the validation rows every `evaluate_every`, stopped when `patience` evaluations in
            a row were not better.
        learning_rate: of the small form; AdamW moves every weight alike, so what suits the original form, which reads
            d_model / d_head times as many numbers, is some ten times smaller.
        shrink: pull of M towards the plain unembedding, as AdamW's decay pulls to zero; small form and no "shared".
        top: k of precision and words.
        seed: of the order of the rows.
        folder: where the state and the lens go; the same call resumes.
        progress: print the bytes first, and show a bar.

    Raises:
        ValueError: an unknown choice, a missing shard, rows of other weights than the model's, numbers out of range,
            rows without the stream that "residual" needs, or a folder with the state of others.
        MemoryError: the parameters with Adam's state do not fit.
    """
    for name, value, known in (("mode", mode, MODES), ("form", form, FORMS), ("start", start, STARTS)):
        _check_choice(name, value, known)
    _check_shards(shards, mode)
    for name, value in (("steps", steps), ("batch_rows", batch_rows), ("evaluate_every", evaluate_every)):
        if value < 1:
            raise ValueError(f"{name}={value}; give at least 1.")
    if not learning_rate > 0 or weight_decay < 0 or shrink < 0 or patience < 1:
        raise ValueError(
            f"learning_rate={learning_rate}, weight_decay={weight_decay}, shrink={shrink}, patience={patience}: the "
            "rate is above 0, the decays are not below 0, the patience is at least 1."
        )
    if shrink and (form != "small" or mode == "shared"):
        raise ValueError(
            f"shrink={shrink} pulls M of the small form; form={form!r}, mode={mode!r} have another matrix."
        )
    for rows in shards.values():
        require_same_weights({"weight_sha256": rows.weight_sha256, "model": "of the rows"}, model, "a shard of rows")
    module = model.module if isinstance(model, LoadedModel) else model
    anatomy, fit = dissect(module), shards["fit"]
    end, layer = unembedding_of(module, anatomy), fit.layer
    heads, d_head = fit.mixed.shape[1:]
    shapes = readout_shape(mode, form, heads, d_head, anatomy.d_model, end.vocab)
    count = sum(math.prod(shape) for shape in shapes)
    size = fit.mixed.element_size() * count * _COPIES + 3 * BLOCK_BYTES
    require_memory(
        size, f"{mode} lens, {form} form, {count:,} parameters", progress=progress, advice="Use form='small'."
    )
    settings = {
        **{"layer": layer, "mode": mode, "form": form, "start": start, "steps": steps, "batch_rows": batch_rows},
        **{"learning_rate": learning_rate, "weight_decay": weight_decay, "shrink": shrink, "seed": seed},
        **{"evaluate_every": evaluate_every, "patience": patience, "rows": _digest(shards)},
        # the teacher is what the model is now, whatever file it came from
        **{"weights": running_model(module)["weights"]},
    }
    with torch.no_grad():
        writes, attention_bias = head_maps(module, layer, anatomy)
        writes = writes.to(fit.mixed)
        folded = folded_unembedding(end)
        read = {name: readout_input(rows.mixed, writes, mode, form) for name, rows in shards.items()}
        begin = {"writes": writes, "attention_bias": attention_bias, "end": end, "folded": folded}
        first, facts = starting_readout(shards, mode, form, start, **begin)
        start_kl = _mean_kl(first, read["test"], shards["test"], end)
        if start != "closed_form":
            closed, closed_facts = starting_readout(shards, mode, "small", "closed_form", **begin)
            small_read = readout_input(shards["test"].mixed, writes, mode, "small")
            closed_kl = _mean_kl(closed, small_read, shards["test"], end)
            facts = closed_facts
            del closed, small_read
        else:
            closed_kl = start_kl
        plain = plain_weight(writes, folded).to(fit.mixed)
    best, best_step, history = _train(first, read, shards, end, settings, plain, folder, progress)
    mean = fit.mixed.mean(0)
    r2 = _peer_r2(shards)
    often = best_bias(fit.normed, end)
    bias = best_bias(fit.normed, end, stream=fit.stream) if mode == "residual" else often
    said = {"settings": settings, **facts_of(model), **facts}
    lens = as_lens(best, writes, layer=layer, mean=mean, peer_r2=r2, log_mean_p=often, facts=said)
    beside = {"bias": bias, "plain": plain, "closed_form_kl": closed_kl}
    scores = score_attention_lens(lens, shards["test"], end, top=top, **beside)
    found = {"kl": scores.kl, "kl_bias": scores.kl_bias, "explained": scores.explained, "best_step": best_step}
    lens = replace(lens, facts={**lens.facts, "scores": found | {"start_kl": start_kl, "closed_form_kl": closed_kl}})
    if folder is not None:
        save_attention_lens(lens, Path(folder) / _LENS_FILE)
    return AttentionLensRun(lens, scores, start_kl, closed_kl, history, best_step, best)


def _train(
    first: Readout,
    read: dict[str, Tensor],
    shards: dict[str, LensRows],
    end: Unembedding,
    settings: dict[str, Any],
    plain: Tensor,
    folder: str | Path | None,
    progress: bool,
) -> tuple[Readout, int, pd.DataFrame]:
    """The weights of least validation KL, their step, and the record."""
    fit = shards["fit"]
    weight, bias = nn.Parameter(first.weight), nn.Parameter(first.bias)
    weight.grad, bias.grad = torch.zeros_like(weight), torch.zeros_like(bias)
    optimiser = torch.optim.AdamW(
        [weight, bias], lr=settings["learning_rate"], weight_decay=settings["weight_decay"], fused=True
    )
    best = [weight.detach().clone(), bias.detach().clone()]
    state = {"step": 0, "best_step": 0, "waited": 0, "history": [], "since": []}
    file = None if folder is None else Path(folder) / _STATE_FILE
    saved = None
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        saved = load_training_state(file)
    if saved is None:
        start = _mean_kl(Readout(first.mode, first.form, weight, bias), read["validation"], shards["validation"], end)
        state["history"].append({"step": 0, "fit_kl": None, "validation_kl": start})
    else:
        tensors, facts = saved
        if facts["settings"] != json.loads(json.dumps(settings)):
            other = [name for name in settings if facts["settings"].get(name) != settings[name]]
            raise ValueError(f"{file} is of other {', '.join(other)}. Give another folder, or the same settings.")
        state = facts["state"]
        _restore(optimiser, (weight, bias), tensors)
        best = [tensors["best_weight"], tensors["best_bias"]]
    bar = tqdm(total=settings["steps"], initial=state["step"], unit="step", desc="lens", disable=not progress)
    target = plain.reshape(weight.shape) if settings["shrink"] else None
    while state["step"] < settings["steps"] and state["waited"] < settings["patience"]:
        rate = settings["learning_rate"] * 0.5 * (1 + math.cos(math.pi * state["step"] / settings["steps"]))
        rows = _batch(len(fit), settings["batch_rows"], state["step"], settings["seed"])
        weight.grad.zero_()
        bias.grad.zero_()
        kl = readout_kl(
            read["fit"][:, rows],
            weight.detach(),
            bias.detach(),
            fit.normed[rows],
            end,
            stream=None if first.mode != "residual" else fit.stream[rows],
            weight_gradient=weight.grad,
            bias_gradient=bias.grad,
        )
        for group in optimiser.param_groups:
            group["lr"] = rate
        optimiser.step()
        if target is not None:
            weight.data.lerp_(target, rate * settings["shrink"])
        state["step"] += 1
        state["since"].append(float(kl.mean()))
        bar.update()
        if state["step"] % settings["evaluate_every"] and state["step"] < settings["steps"]:
            continue
        now = Readout(first.mode, first.form, weight.detach(), bias.detach())
        found = _mean_kl(now, read["validation"], shards["validation"], end)
        if found < min(entry["validation_kl"] for entry in state["history"]):
            best[0].copy_(weight.detach())
            best[1].copy_(bias.detach())
            state["best_step"], state["waited"] = state["step"], 0
        else:
            state["waited"] += 1
        fit_kl = sum(state["since"]) / len(state["since"])
        state["history"].append({"step": state["step"], "fit_kl": fit_kl, "validation_kl": found})
        state["since"] = []
        bar.set_postfix(validation_kl=f"{found:.3f}")
        if file is not None:
            tensors = _state_tensors(optimiser, (weight, bias)) | {"best_weight": best[0], "best_bias": best[1]}
            save_training_state(file, tensors, {"settings": settings, "state": state})
    bar.close()
    return Readout(first.mode, first.form, *best), state["best_step"], pd.DataFrame(state["history"])


def _batch(rows: int, size: int, step: int, seed: int) -> Tensor:
    """Rows of a step, a pure function of seed and step: passes over all rows, each in an order of its own."""
    size = min(size, rows)
    steps_per_pass = rows // size
    order = np.random.default_rng([seed, step // steps_per_pass]).permutation(rows)
    place = step % steps_per_pass * size
    return torch.from_numpy(np.sort(order[place : place + size]))


def _mean_kl(readout: Readout, read: Tensor, rows: LensRows, end: Unembedding) -> float:
    """Over rows, and over heads in the independent mode."""
    stream = rows.stream if readout.mode == "residual" else None
    kl = readout_kl(read, readout.weight.detach(), readout.bias.detach(), rows.normed, end, stream=stream)
    return float(kl.mean(dtype=torch.float64))


def _peer_r2(shards: dict[str, LensRows]) -> Float[Tensor, " head"]:
    values = [shards[name].mixed.flatten(1) for name in SHARDS]
    return peer_r2(*(PairMoments.from_rows(v, v) for v in values), shards["fit"].heads)


def _state_tensors(optimiser: torch.optim.Optimizer, parameters: tuple[nn.Parameter, ...]) -> dict[str, Tensor]:
    tensors = {}
    for name, parameter in zip(("weight", "bias"), parameters, strict=True):
        kept = optimiser.state[parameter]
        tensors[name] = parameter.detach()
        tensors |= {f"{name}_{part}": kept[part] for part in ("step", "exp_avg", "exp_avg_sq")}
    return tensors


def _restore(
    optimiser: torch.optim.Optimizer, parameters: tuple[nn.Parameter, ...], tensors: dict[str, Tensor]
) -> None:
    for name, parameter in zip(("weight", "bias"), parameters, strict=True):
        with torch.no_grad():
            parameter.copy_(tensors[name])
        optimiser.state[parameter] = {
            part: tensors[f"{name}_{part}"].clone() for part in ("step", "exp_avg", "exp_avg_sq")
        }


def _digest(shards: dict[str, LensRows]) -> str:
    digest = new_fingerprint()
    for rows in shards.values():
        for tensor in (rows.mixed, rows.normed, *([] if rows.stream is None else [rows.stream])):
            digest.update(tensor_bytes(tensor))
    return digest.hexdigest()


def _check_choice(name: str, value: str, known: Sequence[str]) -> None:
    if value not in known:
        raise ValueError(f"{name}={value!r}. Give one of {', '.join(map(repr, known))}.")


def _check_shards(shards: dict[str, LensRows], mode: Mode) -> None:
    for name in ("fit", "validation", "test"):
        rows = shards.get(name)
        if rows is None or not len(rows):
            raise ValueError(f"no rows in shard {name!r}. Split the rows of more documents: rows.split().")
        if mode == "residual" and rows.stream is None:
            raise ValueError("the residual mode needs the stream: lens_rows(..., with_stream=True).")
        for kind in ("mixed", "normed", *(["stream"] if mode == "residual" else [])):
            if not bool(torch.isfinite(getattr(rows, kind)).all()):
                raise ValueError(f"shard {name!r} holds NaN or infinity in {kind}. Drop those texts.")
