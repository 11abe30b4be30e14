"""The model run with a reconstruction in place of one site: errors, nats and features on, added up by text.

Batches and their padding are planned once (`token_places`), and the edit counts them off: the passes of one set of
texts run the same batches in the same order.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float64, Int64
from torch import Tensor, nn

from microtome.capture.batches import PaddingRecipe, make_batch
from microtome.capture.models import LoadedModel
from microtome.capture.sites import Site
from microtome.lenses.dictionaries.dictionary import Dictionary
from microtome.lenses.dictionaries.site_rows import SiteRows
from microtome.lenses.next_token import text_nll

Rebuild = Callable[[Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class TokenPlaces:
    """Where the tokens are in each padded batch, which are sinks, and moments of the rows.

    numbers: of the texts in each batch. real, rest: `[row, column]` of each batch; rest: real tokens that are no sinks.
    mean, covariance: of rest rows; mean_all of all. tokens, rest_tokens: by text.
    """

    numbers: list[tuple[int, ...]]
    real: list[Tensor]
    rest: list[Tensor]
    mean: Float64[Tensor, " width"]
    mean_all: Float64[Tensor, " width"]
    covariance: Float64[Tensor, "width width"]
    tokens: Float64[Tensor, " text"]
    rest_tokens: Float64[Tensor, " text"]


def token_places(source: SiteRows) -> TokenPlaces:
    job = source.job
    recipe = job.anatomy.padding or PaddingRecipe()
    real, rest = [], []
    products = torch.zeros(source.width, source.width, dtype=torch.float64)
    sums = torch.zeros(2, source.width, dtype=torch.float64)
    tokens = torch.zeros(2, len(job.texts), dtype=torch.float64)
    for chunk in job.chunks():
        batch = make_batch(job.texts, job.batches[chunk.number], pad_id=job.pad, recipe=recipe, device="cpu")
        mask = batch.attention_mask.bool()
        is_rest = ~source.is_sink(chunk)
        kept = torch.zeros_like(mask)
        kept[mask] = is_rest
        real.append(mask)
        rest.append(kept)
        rows = chunk.values[source.site].flatten(1).double().cpu()
        sums += torch.stack([rows[is_rest].sum(0), rows.sum(0)])
        products += rows[is_rest].T @ rows[is_rest]
        text = chunk.text.cpu()
        tokens += torch.stack(
            [text[is_rest].bincount(minlength=len(job.texts)), text.bincount(minlength=len(job.texts))]
        )
    counts = tokens.sum(1)
    if not counts[0]:
        raise ValueError("the texts have no token but sinks. Give longer texts, or another rule.")
    mean = sums[0] / counts[0]
    covariance = products / counts[0] - mean.outer(mean)
    return TokenPlaces(list(job.batches), real, rest, mean, sums[1] / counts[1], covariance, tokens[1], tokens[0])


@dataclass(frozen=True, eq=False)
class RebuiltRun:
    """Sums by text of one reconstruction; squared errors and deviations of rest tokens, and of all."""

    name: str
    errors: np.ndarray
    deviations: np.ndarray
    nats: np.ndarray
    predicted: np.ndarray
    l0: np.ndarray
    dead: float


@dataclass(frozen=True, eq=False)
class RebuiltForwards:
    """Runs the texts with a reconstruction at the site."""

    model: LoadedModel | nn.Module
    texts: list[Any]
    site: Site
    options: dict[str, Any]
    places: TokenPlaces
    replace_sinks: bool

    def __call__(self, name: str, rebuild: Rebuild, dictionary: Dictionary | None = None) -> RebuiltRun:
        edit = _Replacement(self.places, rebuild, dictionary, self.replace_sinks)
        found = text_nll(self.model, self.texts, edits={self.site: edit}, **self.options)
        return RebuiltRun(
            name,
            edit.errors.numpy(),
            edit.deviations.numpy(),
            found.nats.numpy(),
            found.tokens.double().numpy(),
            edit.l0.numpy(),
            float("nan") if edit.fired is None else float((~edit.fired).double().mean()),
        )


class _Replacement:
    """An edit that puts x_hat in the place of x, batch after batch of the plan, and adds up what it sees."""

    def __init__(
        self, places: TokenPlaces, rebuild: Rebuild, dictionary: Dictionary | None, replace_sinks: bool
    ) -> None:
        self.places, self.rebuild, self.dictionary, self.replace_sinks = places, rebuild, dictionary, replace_sinks
        self.batch = 0
        texts = len(places.tokens)
        self.errors = torch.zeros(2, texts, dtype=torch.float64)
        self.deviations = torch.zeros(2, texts, dtype=torch.float64)
        self.l0 = torch.full((texts,), 0.0 if dictionary is not None else torch.nan, dtype=torch.float64)
        self.fired = None if dictionary is None else torch.zeros(dictionary.features, dtype=torch.bool)

    def __call__(self, value: Tensor) -> Tensor:
        real, rest = self.places.real[self.batch], self.places.rest[self.batch]
        numbers = torch.tensor(self.places.numbers[self.batch])
        if real.shape != value.shape[:2]:
            raise RuntimeError(f"batch {self.batch} is {tuple(value.shape[:2])}, planned as {tuple(real.shape)}.")
        self.batch += 1
        there = value.flatten(2)
        x = there[real.to(value.device)]
        text, is_rest = numbers[real.nonzero()[:, 0]], rest[real]
        rebuilt = self._rebuilt(x, text, is_rest)
        self._add(x, rebuilt, text, is_rest)
        chosen = (is_rest | self.replace_sinks).to(value.device)
        delta = torch.zeros_like(there)
        delta[real.to(value.device)] = torch.where(chosen[:, None], rebuilt.to(x) - x, 0)
        return delta.view_as(value)

    def _rebuilt(self, x: Tensor, text: Int64[Tensor, " token"], is_rest: Bool[Tensor, " token"]) -> Tensor:
        if self.dictionary is None:
            return self.rebuild(x)
        z = self.dictionary.encode(x)
        is_on = (z > 0).cpu()[is_rest]
        self.l0.index_add_(0, text[is_rest], is_on.sum(1).double())
        self.fired |= is_on.any(0)
        return self.dictionary.decode(z, x)

    def _add(self, x: Tensor, rebuilt: Tensor, text: Tensor, is_rest: Tensor) -> None:
        x = x.double().cpu()
        error = (rebuilt.double().cpu() - x).square().sum(1)
        for row, kept, mean in ((0, is_rest, self.places.mean), (1, is_rest | True, self.places.mean_all)):
            self.errors[row].index_add_(0, text[kept], error[kept])
            self.deviations[row].index_add_(0, text[kept], (x[kept] - mean).square().sum(1))
