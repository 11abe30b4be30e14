"""Training of the tuned lens: all depths at once in every step, each clipped and stopped by itself.

    loss = sum over depths of the token mean of KL(model || lens_l);     grad_l (A_l and b_l) scaled to norm <= clip

One forward and one teacher distribution serve all depths; tokens x vocabulary are never built
(`kernels.vocabulary_kl`). Depths share no parameter, so that the sum trains each as if it were alone. Defaults are
those of Belrose et al. 2023 (SGD, Nesterov 0.9, rate 1.0 (1 - 0.9), weight decay 1e-3, linear decay, clip 1.0), but
clipping is by depth: jointly, the early depths' large gradients would slow the late ones.
First tokens and BOS are left out. Each depth keeps the translator of its best evaluation on held-out documents (the
start counts), and training ends when no depth has improved for `patience` evaluations. Killed at any moment, the same
call goes on from the last checkpoint and ends bit for bit where an undisturbed one ends.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from tqdm.auto import tqdm

from microtome.capture.dissect import dissect
from microtome.capture.fingerprint import new_fingerprint, tensor_bytes
from microtome.capture.models import LoadedModel
from microtome.capture.sites import Site
from microtome.data.replaced_file import replaced_file
from microtome.kernels.vocabulary_statistics import vocabulary_kl
from microtome.lenses.corpus_pass import Chunk, CorpusPass, corpus_pass
from microtome.lenses.documents import document_numbers
from microtome.lenses.lens import depths_of
from microtome.lenses.linear_map import LinearMap
from microtome.lenses.made_for import name_of, weights_of
from microtome.lenses.tuned_lens import TunedLens
from microtome.lenses.unembedding import Unembedding, unembedding_of

CHECKPOINT = "training.safetensors"


@dataclass(frozen=True)
class TunedSettings:
    """How a tuned lens is trained.

    Attributes:
        steps: at most. tokens: per step, drawn from one batch of `batch_tokens` padded tokens.
        optimizer: "sgd" (Nesterov) or "adam" (amsgrad). rate, weight_decay: None takes 0.1 and 1e-3 for sgd, 1e-3 and 0
            for adam; the rate falls linearly to 0.
        clip: of the gradient of one depth. momentum: of sgd.
        evaluate_every, checkpoint_every: steps. patience: evaluations without a better depth.
        held_out_tokens: kept in memory for evaluation, at most. held_out_share: of documents.
        seed: of the split, the order and the draws.
    """

    steps: int = 250
    tokens: int = 256
    batch_tokens: int = 1024
    optimizer: str = "sgd"
    rate: float | None = None
    weight_decay: float | None = None
    clip: float = 1.0
    momentum: float = 0.9
    evaluate_every: int = 25
    checkpoint_every: int = 25
    patience: int = 4
    held_out_tokens: int = 512
    held_out_share: float = 0.2
    seed: int = 0

    def __post_init__(self) -> None:
        if self.optimizer not in ("sgd", "adam"):
            raise ValueError(f"optimizer is {self.optimizer!r}. Give 'sgd' or 'adam'.")
        for name in ("steps", "tokens", "batch_tokens", "evaluate_every", "checkpoint_every", "patience"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}. Give at least 1.")
        for name, least in (("rate", 0), ("weight_decay", 0), ("momentum", 0), ("clip", 0), ("held_out_tokens", 1)):
            value = getattr(self, name)
            if value is not None and not least <= value < np.inf:
                raise ValueError(f"{name} is {value}. Give a finite number from {least} on.")
        if not 0 < self.held_out_share < 1:
            raise ValueError(f"held_out_share is {self.held_out_share}. Give a share of documents between 0 and 1.")

    @property
    def used_rate(self) -> float:
        """The rate at the first step."""
        return self.rate if self.rate is not None else {"sgd": 1.0 * (1 - 0.9), "adam": 1e-3}[self.optimizer]

    @property
    def used_decay(self) -> float:
        """The weight decay."""
        return self.weight_decay if self.weight_decay is not None else {"sgd": 1e-3, "adam": 0.0}[self.optimizer]


def fit_tuned_lens(
    model: LoadedModel | nn.Module,
    texts: Any,
    *,
    documents: Iterable[Any] | None = None,
    depths: Sequence[int] | None = None,
    start: Mapping[str | tuple | Site, LinearMap] | str = "zero",
    settings: TunedSettings | None = None,
    checkpoint: str | Path | None = None,
    progress: bool = False,
    **options: Any,
) -> TunedLens:
    """Train translators r_l -> r_L for a model.

    Args:
        texts: as for `capture`. documents: name or number of the document of each text, each its own if None; held-out
            ones are whole documents.
        depths: numbers 0 .. L-1 of the depths to train, all if None.
        start: "zero" (the logit lens, as in the paper), or maps r_l -> r_L by site or its name, such as ridge maps from
            moments.
        checkpoint: folder for the state; what is there of the same training is gone on with.
        options: of the texts, as `corpus_pass` takes them.

    Raises:
        ValueError: depths out of range, fewer than two documents, no token but first ones, a start that lacks a depth
            or has another width, a checkpoint of another training, other weights.
        FloatingPointError: a KL that is not finite, with step and depth; the last checkpoint stays.
    """
    with torch.inference_mode(False), torch.enable_grad():
        return _trained(
            model, texts, documents, depths, start, settings or TunedSettings(), checkpoint, progress, options
        )


def _trained(
    model: LoadedModel | nn.Module,
    texts: Any,
    documents: Iterable[Any] | None,
    depths: Sequence[int] | None,
    start: Mapping[str | tuple | Site, LinearMap] | str,
    settings: TunedSettings,
    checkpoint: str | Path | None,
    progress: bool,
    options: dict[str, Any],
) -> TunedLens:
    sites = _chosen_depths(model, depths)
    last = depths_of(model)[-1]
    loaded = model if isinstance(model, LoadedModel) else LoadedModel.from_module(model, name=name_of(model))
    texts = list(texts)
    training, held_out = _split(len(texts), documents, settings)
    options |= {"max_tokens": settings.batch_tokens, "anatomy": dissect(loaded.module)}
    planned = corpus_pass(loaded, [texts[row] for row in training], [*sites, last], **options)
    unseen = corpus_pass(loaded, [texts[row] for row in held_out], [*sites, last], **options)
    if all(text.length < 2 for text in planned.texts):
        raise ValueError("the texts to train on have no token but first ones. Give longer texts.")
    end = _float32(unembedding_of(model))
    width = end.weight.shape[1]
    facts = {
        "model": name_of(model),
        "weight_sha256": weights_of(loaded),
        "layers": len(depths_of(model)) - 1,
        "settings": asdict(settings),
        "start": start if isinstance(start, str) else "maps",
        "training_texts": len(training),
        "held_out_texts": len(held_out),
        "texts": planned.provenance["texts"],
        "held_out": unseen.provenance["texts"],
    }
    weight, bias = _started(start, sites, width, end.weight.device)
    run = _Training(settings, tuple(map(str, sites)), weight, bias, _start_digest(weight, bias))
    held = _held_out_states(unseen, sites, last, settings)
    run.kl_logit = _evaluate(torch.zeros_like(weight), torch.zeros_like(bias), held, end)
    path = None if checkpoint is None else Path(checkpoint) / CHECKPOINT
    if path is not None and path.is_file():
        run.restore(path, facts)
    if not run.history:
        run.record(_evaluate(run.weight, run.bias, held, end))
    with tqdm(total=settings.steps, initial=run.step, desc="tuned lens", disable=not progress) as bar:
        while run.step < settings.steps and run.stale < settings.patience:
            chunk = _batch(planned, run.step, settings.seed)
            rows = _drawn(chunk, run.step, settings)
            if len(rows):
                states = torch.stack([chunk.values[site][rows] for site in sites]).float()
                run.learn(states, end.normed(chunk.values[last][rows].float()), end)
            run.step += 1
            bar.update()
            if run.step % settings.evaluate_every == 0 or run.step == settings.steps:
                run.record(_evaluate(run.weight, run.bias, held, end))
                bar.set_postfix(kl=f"{run.best_kl.mean():.3f}")
            if path is not None and (run.step % settings.checkpoint_every == 0 or run.step == settings.steps):
                run.keep(path, facts)
    return TunedLens(run.sites, run.best_weight.cpu(), run.best_bias.cpu(), run.table(), facts | {"steps": run.step})


class _Training:
    """What changes from step to step, and its checkpoint."""

    def __init__(
        self, settings: TunedSettings, sites: tuple[str, ...], weight: Tensor, bias: Tensor, start: str
    ) -> None:
        self.settings, self.sites, self.start = settings, sites, start
        self.weight, self.bias = weight.clone().requires_grad_(), bias.clone().requires_grad_()
        parameters, rate, decay = [self.weight, self.bias], settings.used_rate, settings.used_decay
        if settings.optimizer == "sgd":
            self.optimizer: torch.optim.Optimizer = torch.optim.SGD(
                parameters, lr=rate, momentum=settings.momentum, nesterov=settings.momentum > 0, weight_decay=decay
            )
        else:
            self.optimizer = torch.optim.Adam(parameters, lr=rate, amsgrad=True, weight_decay=decay)
        self.best_weight, self.best_bias = weight.clone(), bias.clone()
        self.best_kl = torch.full((len(sites),), torch.inf)
        self.kl_logit = torch.zeros(len(sites))
        self.history: list[list[float]] = []
        self.step, self.stale = 0, 0

    def learn(self, states: Float[Tensor, "depth token d_model"], final: Tensor, end: Unembedding) -> None:
        """One step on the tokens of one batch."""
        with torch.autocast(states.device.type, enabled=False):
            kl = vocabulary_kl(_lensed(states, self.weight, self.bias, end), final, **_readout(end)).mean(1)
            self._require_finite(kl)
            gradients = torch.autograd.grad(kl.sum(), [self.weight, self.bias])
        norm = (gradients[0].square().sum((1, 2)) + gradients[1].square().sum(1)).sqrt()
        factor = (self.settings.clip / norm.clamp_min(1e-12)).clamp(max=1.0)
        self.weight.grad, self.bias.grad = gradients[0] * factor[:, None, None], gradients[1] * factor[:, None]
        for group in self.optimizer.param_groups:
            group["lr"] = self.settings.used_rate * (1 - self.step / self.settings.steps)
        self.optimizer.step()

    def record(self, kl: Float[Tensor, " depth"]) -> None:
        """An evaluation: keep the depths that are better than ever."""
        self._require_finite(kl)
        better = kl < self.best_kl
        self.best_kl = torch.where(better, kl, self.best_kl)
        with torch.no_grad():
            self.best_weight[better], self.best_bias[better] = self.weight[better], self.bias[better]
        self.stale = 0 if bool(better.any()) else self.stale + 1
        self.history.append([self.step, *kl.tolist()])

    def table(self) -> pd.DataFrame:
        """The evaluations, one row per step and depth."""
        first = self.history[0][1:]
        rows = [
            (int(step), site, value, float(logit), begun)
            for step, *values in self.history
            for site, value, logit, begun in zip(self.sites, values, self.kl_logit, first, strict=True)
        ]
        return pd.DataFrame(rows, columns=["step", "site", "kl", "logit_kl", "start_kl"])

    def keep(self, path: Path, facts: Mapping[str, Any]) -> None:
        """Write the checkpoint, whole or not at all."""
        tensors = {"weight": self.weight, "bias": self.bias, "best_weight": self.best_weight}
        tensors |= {"best_bias": self.best_bias, "best_kl": self.best_kl}
        for number, state in self.optimizer.state_dict()["state"].items():
            tensors |= {f"optimizer.{number}.{name}": value for name, value in state.items() if value is not None}
        state = {"facts": dict(facts), "sites": self.sites, "start": self.start, "step": self.step}
        state |= {"stale": self.stale, "history": self.history, "kl_logit": self.kl_logit.tolist()}
        path.parent.mkdir(parents=True, exist_ok=True)
        held = {name: value.detach().cpu().contiguous().clone() for name, value in tensors.items()}
        with replaced_file(path) as scratch:
            save_file(held, scratch, metadata={"state": json.dumps(state)})

    def restore(self, path: Path, facts: Mapping[str, Any]) -> None:
        """Go on from a checkpoint. ValueError for one of another training."""
        try:
            with safe_open(path, framework="pt") as file:
                state = json.loads(file.metadata()["state"])
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except SafetensorError as error:
            raise ValueError(f"{path} is damaged ({error}). Remove it; training then begins again.") from error
        ours = json.loads(json.dumps({"facts": dict(facts), "sites": self.sites, "start": self.start}))
        if changed := [name for name in ours if state[name] != ours[name]]:
            inside = [key for key in ours["facts"] if state["facts"].get(key) != ours["facts"][key]]
            raise ValueError(
                f"{path} is of another training ({', '.join(inside or changed)} differ). Give another folder, or "
                "remove it."
            )
        # a model that was loaded keeps the hash of its file, so that weights changed in memory show only here
        if not torch.allclose(torch.tensor(state["kl_logit"]), self.kl_logit, rtol=1e-3, atol=1e-5):
            raise ValueError(
                f"{path} is of another training: the same texts have another KL under the logit lens, so the model's "
                "weights were changed since it was loaded. Give another folder, or remove it."
            )
        with torch.no_grad():
            for name in ("weight", "bias", "best_weight", "best_bias"):
                getattr(self, name).copy_(tensors[name])
        self.best_kl = tensors["best_kl"]
        self.step, self.stale, self.history = state["step"], state["stale"], state["history"]
        kept: dict[int, dict[str, Tensor]] = {}
        for name, value in tensors.items():
            if name.startswith("optimizer."):
                _, number, key = name.split(".")
                kept.setdefault(int(number), {})[key] = value
        self.optimizer.load_state_dict({"state": kept, "param_groups": self.optimizer.state_dict()["param_groups"]})

    def _require_finite(self, kl: Tensor) -> None:
        if not bool(torch.isfinite(kl).all()):
            bad = [site for site, is_fine in zip(self.sites, torch.isfinite(kl).tolist(), strict=True) if not is_fine]
            raise FloatingPointError(
                f"the KL at {', '.join(bad[:3])} is not finite at step {self.step}. Lower the rate "
                f"({self.settings.used_rate:g}), or begin from zero; the last checkpoint is as it was."
            )


def _lensed(states: Tensor, weight: Tensor, bias: Tensor, end: Unembedding) -> Tensor:
    return end.normed(states + torch.bmm(states, weight) + bias[:, None])


def _readout(end: Unembedding) -> dict[str, Any]:
    return {"weight": end.weight, "bias": end.bias, "factor": end.factor, "cap": end.cap}


@torch.no_grad()
def _evaluate(weight: Tensor, bias: Tensor, held: tuple[Tensor, Tensor], end: Unembedding) -> Float[Tensor, " depth"]:
    """Token mean of the KL on the held-out tokens, by depth."""
    states, final = held
    total = torch.zeros(len(states), dtype=torch.float64)
    for rows in torch.arange(states.shape[1]).split(64):
        with torch.autocast(states.device.type, enabled=False):
            kl = vocabulary_kl(_lensed(states[:, rows], weight, bias, end), end.normed(final[rows]), **_readout(end))
        total += kl.double().sum(1).cpu()
    return (total / states.shape[1]).float()


def _chosen_depths(model: LoadedModel | nn.Module, depths: Sequence[int] | None) -> list[Site]:
    known = depths_of(model)[:-1]
    numbers = range(len(known)) if depths is None else sorted(set(depths))
    if not len(numbers) or any(not 0 <= n < len(known) for n in numbers):
        raise ValueError(f"depths are {list(numbers)}. This model has translators for depths 0 to {len(known) - 1}.")
    return [known[n] for n in numbers]


def _split(count: int, documents: Iterable[Any] | None, settings: TunedSettings) -> tuple[list[int], list[int]]:
    """Numbers of the texts for training, and of those held out: whole documents."""
    of_text = document_numbers(documents, count).tolist()
    names = sorted(set(of_text))
    if len(names) < 2:
        raise ValueError("the texts are of one document, so none is left to hold out. Give texts of several documents.")
    order = np.random.default_rng([settings.seed, 1]).permutation(len(names))
    share = min(max(1, round(settings.held_out_share * len(names))), len(names) - 1)
    kept = {names[n] for n in order[:share]}
    rows = range(count)
    return [row for row in rows if of_text[row] not in kept], [row for row in rows if of_text[row] in kept]


def _batch(planned: CorpusPass, step: int, seed: int) -> Chunk:
    """The batch of a step: every batch once in an order of its own, then again in another."""
    epoch, place = divmod(step, len(planned.batches))
    order = np.random.default_rng([seed, 2, epoch]).permutation(len(planned.batches))
    return next(planned.chunks(start=int(order[place])))


def _drawn(chunk: Chunk, step: int, settings: TunedSettings) -> Tensor:
    """Rows of a step's tokens, without first tokens and specials; the same for the same step."""
    rows = ((chunk.position > 0) & ~chunk.is_special).nonzero()[:, 0].cpu()
    order = np.random.default_rng([settings.seed, 3, step]).permutation(len(rows))[: settings.tokens]
    return rows[torch.from_numpy(np.sort(order))]


def _held_out_states(
    planned: CorpusPass, sites: Sequence[Site], last: Site, settings: TunedSettings
) -> tuple[Float[Tensor, "depth token d_model"], Float[Tensor, "token d_model"]]:
    """States of held-out tokens, kept for every evaluation: (depths + 1) x held_out_tokens x d_model, float32."""
    share = settings.held_out_tokens / max(planned.tokens, 1)
    states, finals = [], []
    for chunk in planned.chunks():
        rows = ((chunk.position > 0) & ~chunk.is_special).nonzero()[:, 0].cpu()
        wanted = len(rows) if share >= 1 else max(1, round(share * len(chunk)))
        order = np.random.default_rng([settings.seed, 4, chunk.number]).permutation(len(rows))[:wanted]
        rows = rows[torch.from_numpy(np.sort(order))]
        states.append(torch.stack([chunk.values[site][rows] for site in sites]).float())
        finals.append(chunk.values[last][rows].float())
    states, finals = torch.cat(states, 1), torch.cat(finals)
    if not len(finals):
        raise ValueError("the held-out texts have no token but first ones. Give longer texts.")
    if not bool(torch.isfinite(states).all() and torch.isfinite(finals).all()):
        raise ValueError("the stream holds NaN or infinity on the held-out texts. Load the model in float32.")
    return states, finals


def _float32(end: Unembedding) -> Unembedding:
    """The model's end in float32: itself where it is, else a copy."""
    if end.weight.dtype == torch.float32:
        return end
    norm = None if end.norm is None else deepcopy(end.norm).float()
    return replace(end, norm=norm, weight=end.weight.float(), bias=None if end.bias is None else end.bias.float())


def _started(
    start: Mapping[str | tuple | Site, LinearMap] | str, sites: Sequence[Site], width: int, device: torch.device
) -> tuple[Float[Tensor, "depth d_model d_model"], Float[Tensor, "depth d_model"]]:
    """A and b to begin with."""
    if isinstance(start, str):
        if start != "zero":
            raise ValueError(f"start is {start!r}. Give 'zero', or maps from each depth to the last by site.")
        zeros = torch.zeros(len(sites), width, width, device=device)
        return zeros, zeros[:, 0].clone()
    by_name = {str(Site.parse(site)): each for site, each in start.items()}
    if missing := [str(site) for site in sites if str(site) not in by_name]:
        raise ValueError(f"start has no map for {', '.join(missing[:3])}. Give one for each depth that is trained.")
    chosen = [by_name[str(site)] for site in sites]
    if wrong := next((each for each in chosen if (each.d_in, each.d_out) != (width, width)), None):
        raise ValueError(f"the map from {wrong.source} is {wrong.d_in} to {wrong.d_out}; the stream has {width}.")
    weight = torch.stack([each.weight.double() - torch.eye(width).double() for each in chosen])
    bias = torch.stack([each.intercept.double() for each in chosen])
    return weight.float().to(device), bias.float().to(device)


def _start_digest(weight: Tensor, bias: Tensor) -> str:
    digest = new_fingerprint()
    digest.update(tensor_bytes(weight))
    digest.update(tensor_bytes(bias))
    return digest.hexdigest()
