"""What changes from step to step while a dictionary is trained, its checkpoint, and the dictionary it gives.

Weights live in scaled units: rows times `scale`, so that their mean norm is sqrt(width). At the end the biases are
divided by it: (x s - b) W^T + e = s ((x - b/s) W^T + e/s), and the k largest of s pre are those of pre.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Float, Int64
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import normalize

from microtome.data.replaced_file import replaced_file
from microtome.lenses.dictionaries.dictionary import Dictionary, activations_of
from microtome.lenses.dictionaries.topk_gradients import TopKWeights, topk_step, without_radial_part

_BETAS, _EPS = (0.9, 0.999), 6.25e-10
_MEDIAN_ROWS, _MEDIAN_STEPS = 8192, 100
_STATE = ("step", "epoch", "block", "place", "scale", "variance", "unexplained", "since", "history")
COLUMNS = ("step", "explained", "held_out_explained", "dead", "rate")


class TrainingState:
    """Weights, optimiser, how long each feature has been off, and the place in the data.

    Attributes:
        step: steps done. epoch, block, place: the next batch: batch `place` of that block.
        scale, variance: of the rows; variance of scaled rows, mean |x - mean|^2.
    """

    def __init__(self, weights: TopKWeights, k: int, scale: float, variance: float, settings: Any) -> None:
        self.weights, self.k, self.settings = weights, k, settings
        self.scale, self.variance = scale, variance
        device = weights.encoder.device
        fused = device.type in ("cpu", "cuda")
        self.optimizer = torch.optim.Adam(list(weights), lr=0.0, betas=_BETAS, eps=_EPS, fused=fused)
        self.off: Int64[Tensor, " feature"] = torch.zeros(len(weights.encoder), dtype=torch.int64, device=device)
        self.step = self.epoch = self.block = self.place = 0
        self.history: list[list[float]] = []
        self.unexplained, self.since = 0.0, 0

    @classmethod
    def begun(
        cls, rows: Float[Tensor, "row width"], features: int, k: int, settings: Any, device: torch.device
    ) -> "TrainingState":
        """From the first block of rows.

        Raises:
            ValueError: rows that are all alike.
        """
        width = rows.shape[1]
        norm = float(rows.norm(dim=1).double().mean())
        scale = width**0.5 / norm if norm else 1.0
        variance = float((rows - rows.mean(0)).double().square().sum(1).mean()) * scale**2
        if not variance > 0:
            raise ValueError("all rows of this site are alike: there is nothing to learn. Give other texts or sites.")
        generator = torch.Generator().manual_seed(settings.seed)
        decoder = normalize(torch.randn(features, width, generator=generator), dim=1)
        chosen = rows[torch.randperm(len(rows), generator=generator)[:_MEDIAN_ROWS]]
        bias = geometric_median(chosen * scale)
        weights = TopKWeights(decoder.clone(), torch.zeros(features), decoder, bias)
        return cls(TopKWeights(*(tensor.to(device) for tensor in weights)), k, scale, variance, settings)

    @property
    def dead(self) -> Bool[Tensor, " feature"]:
        """Features that have been off for too long."""
        return self.off >= self.settings.dead_after

    def learn(self, rows: Float[Tensor, "row width"]) -> None:
        """One step on these rows.

        Raises:
            FloatingPointError: a loss that is not finite.
        """
        k_aux = rows.shape[1] // 2 if self.settings.k_aux is None else self.settings.k_aux
        found = topk_step(
            rows * self.scale,
            self.weights,
            self.k,
            self.variance,
            dead=self.dead,
            k_aux=k_aux,
            aux_weight=self.settings.aux_weight,
        )
        if not torch.isfinite(torch.tensor([found.unexplained, found.auxiliary])).all():
            raise FloatingPointError(
                f"the loss is not finite at step {self.step}. Lower the rate; the last checkpoint is as it was."
            )
        gradients = found.gradients._replace(decoder=without_radial_part(found.gradients.decoder, self.weights.decoder))
        for weight, gradient in zip(self.weights, gradients, strict=True):
            weight.grad = gradient
        for group in self.optimizer.param_groups:
            group["lr"] = self.settings.rate_at(self.step, len(self.weights.encoder))
        self.optimizer.step()
        self.weights.decoder.copy_(normalize(self.weights.decoder, dim=1))
        self.off += len(rows)
        self.off[found.is_on] = 0
        self.unexplained += found.unexplained
        self.since += 1
        self.step += 1
        self.place += 1

    def record(self, held_out: Float[Tensor, "row width"] | None) -> dict[str, str]:
        """A row of the history: mean of the steps since the last one, and held-out rows now. Gives what a bar says."""
        explained = 1 - self.unexplained / max(self.since, 1)
        held = float("nan") if held_out is None else self.explained(held_out)
        dead = float(self.dead.double().mean())
        rate = self.settings.rate_at(self.step - 1, len(self.weights.encoder))
        self.history.append([self.step, explained, held, dead, rate])
        self.unexplained, self.since = 0.0, 0
        return {"explained": f"{explained:.3f}", "held_out": f"{held:.3f}", "dead": f"{dead:.3f}"}

    def explained(self, rows: Float[Tensor, "row width"]) -> float:
        """1 - sum |x - x_hat|^2 / sum |x - mean|^2 over these rows."""
        encoder, encoder_bias, decoder, bias = self.weights
        lost = total = 0.0
        mean = rows.mean(0)
        for part in rows.split(self.settings.batch):
            pre = torch.addmm(encoder_bias, part * self.scale - bias, encoder.T)
            rebuilt = (activations_of(pre, "topk", self.k, None) @ decoder + bias) / self.scale
            lost += float((rebuilt - part).double().square().sum())
            total += float((part - mean).double().square().sum())
        return 1 - lost / total if total else float("nan")

    def dictionary(self, facts: Mapping[str, Any], model: str) -> Dictionary:
        """In the site's own units, on the CPU."""
        encoder, encoder_bias, decoder, bias = (tensor.detach().cpu() for tensor in self.weights)
        columns = list(zip(*self.history, strict=True)) or [()] * len(COLUMNS)
        history = {
            name: [None if value != value else value for value in values]
            for name, values in zip(COLUMNS, columns, strict=True)
        }
        return Dictionary(
            encoder.T.contiguous(),
            encoder_bias / self.scale,
            decoder.clone(),
            bias / self.scale,
            "topk",
            facts["site"],
            k=self.k,
            model=model,
            facts={**facts, "steps": self.step, "history": history, "training_scale": self.scale},
        )

    def keep(self, path: Path, facts: Mapping[str, Any]) -> None:
        """Write the checkpoint, whole or not at all."""
        tensors = {name: getattr(self.weights, name) for name in TopKWeights._fields} | {"off": self.off}
        for number, state in self.optimizer.state_dict()["state"].items():
            tensors |= {f"optimizer.{number}.{name}": value for name, value in state.items()}
        state = {"facts": dict(facts), **{name: getattr(self, name) for name in _STATE}}
        path.parent.mkdir(parents=True, exist_ok=True)
        held = {name: value.detach().cpu().contiguous().clone() for name, value in tensors.items()}
        with replaced_file(path) as scratch:
            save_file(held, scratch, metadata={"state": json.dumps(state)})

    @classmethod
    def restored(
        cls, path: Path, facts: Mapping[str, Any], settings: Any, k: int, device: torch.device
    ) -> "TrainingState":
        """Go on from a checkpoint.

        Raises:
            ValueError: a damaged one, or one of another training, with what differs.
        """
        try:
            with safe_open(path, framework="pt") as file:
                said = json.loads((file.metadata() or {})["state"])
                # own, aligned memory: products of tensors that lie elsewhere in a cache line differ in the last bits
                tensors = {name: file.get_tensor(name).clone().to(device) for name in file.keys()}  # noqa: SIM118
            held = {*_STATE, "facts"} - set(said), {*TopKWeights._fields, "off"} - set(tensors)
            if missing := [name for names in held for name in sorted(names)]:
                raise KeyError(f"no {missing[0]}")
        except (SafetensorError, KeyError, TypeError, json.JSONDecodeError) as error:
            raise ValueError(f"{path} is damaged ({error}). Remove it; training then begins again.") from error
        ours = json.loads(json.dumps(dict(facts)))
        if changed := [name for name in ours if said["facts"].get(name) != ours[name]]:
            raise ValueError(
                f"{path} is of another training ({', '.join(changed)} differ). Give another folder, or remove it."
            )
        weights = TopKWeights(*(tensors[name] for name in TopKWeights._fields))
        found = cls(weights, k, said["scale"], said["variance"], settings)
        found.off = tensors["off"]
        for name in _STATE:
            setattr(found, name, said[name])
        kept: dict[int, dict[str, Tensor]] = {}
        for name, value in tensors.items():
            if name.startswith("optimizer."):
                _, number, key = name.split(".")
                kept.setdefault(int(number), {})[key] = value
        found.optimizer.load_state_dict({"state": kept, "param_groups": found.optimizer.state_dict()["param_groups"]})
        return found


def geometric_median(rows: Float[Tensor, "row width"]) -> Float[Tensor, " width"]:
    """The point with the least sum of distances to the rows (Weiszfeld's iteration, float64)."""
    rows = rows.double()
    guess = rows.mean(0)
    for _ in range(_MEDIAN_STEPS):
        weight = 1 / (rows - guess).norm(dim=1).clamp_min(1e-12)
        better = (weight @ rows) / weight.sum()
        if float((better - guess).norm()) <= 1e-7 * float(better.norm()):
            return better.float()
        guess = better
    return guess.float()
