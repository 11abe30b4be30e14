"""How much of a model's own classification hangs on one direction: accuracy lost when it is ablated.

    lost = (accuracy - accuracy under ablation) / (accuracy - chance)

The model classifies by itself: logit difference of two answer words after a prompt that holds the text; the threshold
is set on development texts. The direction's coordinate is replaced by the data's mean (by kind of token), by another
text's, or by 0, at all tokens or at chosen ones (commas), at one layer or all. Beside it random directions: of equal
length, and of equal variance of projections, which is the fair comparison.
Source: Tigges et al. 2023, "Linear Representations of Sentiment", section 4.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from microtome.capture.collect import capture
from microtome.capture.models import LoadedModel
from microtome.interventions.operations import Project
from microtome.interventions.positions import Positions
from microtome.interventions.steering import Intervention, Steering
from microtome.lenses.documents import document_draws


@dataclass(frozen=True)
class WordClassifier:
    """A model that is asked: text -> logit difference of two answers.

    Attributes:
        template: holds {text}.
        yes, no: answers, with their leading space; their first tokens count.
        threshold: of the difference.
    """

    template: str
    yes: str
    no: str
    threshold: float = 0.0

    def scores(
        self, model: LoadedModel, texts: Sequence[str], steering: Steering | None = None
    ) -> Float[np.ndarray, " text"]:
        """logit(yes) - logit(no) after each text in the template."""
        tokenizer = model.require_tokenizer()
        yes, no = (tokenizer(w, add_special_tokens=False)["input_ids"][0] for w in (self.yes, self.no))
        edits = None if steering is None else steering.edits(model)
        prompts = [self.template.format(text=text) for text in texts]
        logits = capture(model, prompts, ["logits"], "last", edits=edits, progress=False)["logits"].double()
        return (logits[:, yes] - logits[:, no]).numpy()

    def fitted(self, model: LoadedModel, texts: Sequence[str], labels: Sequence[bool]) -> "WordClassifier":
        """With the threshold that is best on development texts."""
        scores, truth = self.scores(model, texts), np.asarray(labels, dtype=bool)
        ordered = np.sort(scores)
        cuts = np.concatenate([[ordered[0] - 1], (ordered[1:] + ordered[:-1]) / 2])
        accuracy = [((scores > cut) == truth).mean() for cut in cuts]
        return WordClassifier(self.template, self.yes, self.no, float(cuts[int(np.argmax(accuracy))]))


def accuracy_lost(base: float, ablated: float, chance: float = 0.5) -> float:
    """Share of the above-chance accuracy that is gone. Raises ValueError where there is none to lose."""
    if base <= chance:
        raise ValueError(f"accuracy {base:.3f} is not above chance {chance:.3f}: there is nothing to lose.")
    return (base - ablated) / (base - chance)


def lost_interval(
    base: Float[np.ndarray, " text"],
    ablated: Float[np.ndarray, " text"],
    groups: Sequence[object],
    *,
    chance: float = 0.5,
    draws: int = 2000,
    seed: int = 0,
) -> tuple[float, float, float]:
    """Share lost with a 95 % bootstrap interval over groups; base and ablated are 1 where a text was put right."""
    _, place = np.unique(np.asarray(list(groups), dtype=object).astype(str), return_inverse=True)
    counts = document_draws(int(place.max()) + 1, draws, seed)
    sizes, right, left = (np.bincount(place, weights=w) for w in (np.ones(len(place)), base, ablated))
    weights = counts @ sizes
    one, other = (counts @ right) / weights, (counts @ left) / weights
    with np.errstate(divide="ignore", invalid="ignore"):
        drawn = (one - other) / (one - chance)
    low, high = np.nanquantile(drawn[one > chance], [0.025, 0.975])
    return accuracy_lost(float(base.mean()), float(ablated.mean()), chance), float(low), float(high)


def mean_ablation(
    direction: Float[Tensor, " d"], sites: Sequence[str], means: Sequence[float], positions: Positions = "all"
) -> Steering:
    """Set the coordinate along the direction to a mean, by site."""
    return Steering(
        Intervention(site, Project(direction, mean), positions, name="mean ablation")
        for site, mean in zip(sites, means, strict=True)
    )


def projection_means(
    model: LoadedModel,
    texts: Sequence[str],
    sites: Sequence[str],
    directions: Float[Tensor, "direction d"],
    tokens: object,
) -> tuple[Float[Tensor, "site direction"], Float[Tensor, "site direction"]]:
    """Mean and deviation of projections over the tokens of texts at each site: all of them but the first, or those with
    given ids."""
    acts = capture(model, list(texts), list(sites), "all", progress=False)
    rows = acts.rows["position"].to_numpy() > 0
    if tokens is not None:
        rows &= np.isin(acts.rows["token_id"].to_numpy(), list(tokens))  # pyright: ignore[reportArgumentType]
    chosen = torch.from_numpy(rows)
    means, deviations = [], []
    for site in sites:
        projected = acts[site][chosen].float() @ directions.T
        means.append(projected.mean(0))
        deviations.append(projected.std(0))
    return torch.stack(means), torch.stack(deviations)


def matched_directions(
    activations: Float[Tensor, "row d"], direction: Float[Tensor, " d"], draws: int, *, seed: int = 0
) -> Float[Tensor, "draw d"]:
    """Unit directions, random but for the deviation of projections on them, which is the given direction's.

    Each is a mixture of a random direction of the activations' span and one of large or small variance, bisected to the
    same variance; orthogonal to the direction.

    Raises ValueError where the wanted variance lies outside what directions reach.
    """
    x = activations.double()
    x = x - x.mean(0)
    covariance = x.T @ x / (len(x) - 1)
    unit = (direction / direction.norm()).double()
    wanted = float(unit @ covariance @ unit)
    values, vectors = torch.linalg.eigh(covariance)
    generator = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(draws):
        ends = []
        for power in (-1.0, 2.0):  # mixtures that lean to small and to large variances
            weights = values.clamp_min(values[-1] * 1e-9) ** power
            one = vectors @ (torch.randn(len(values), generator=generator, dtype=torch.float64) * weights.sqrt())
            one = one - (one @ unit) * unit
            ends.append(one / one.norm())
        variances = [float(one @ covariance @ one) for one in ends]
        if not variances[0] <= wanted <= variances[1]:
            raise ValueError(f"No random direction has a variance of {wanted:.3g} (reached: {variances}).")
        low, high = 0.0, 1.0
        for _ in range(60):
            share = (low + high) / 2
            mixed = (1 - share) * ends[0] + share * ends[1]
            mixed = mixed / mixed.norm()
            if float(mixed @ covariance @ mixed) < wanted:
                low = share
            else:
                high = share
        found.append(mixed)
    return torch.stack(found).float()


def ablation_accuracies(
    model: LoadedModel,
    classifier: WordClassifier,
    texts: Sequence[str],
    labels: Sequence[bool],
    steerings: dict[str, Steering],
) -> pd.DataFrame:
    """A row per condition and text: right (1 or 0) and score; "base" is the model as it is."""
    truth = np.asarray(labels, dtype=bool)
    frames = []
    for name, steering in {"base": None, **steerings}.items():
        scores = classifier.scores(model, texts, steering)
        right = ((scores > classifier.threshold) == truth).astype(float)
        frames.append(pd.DataFrame({"condition": name, "text": range(len(scores)), "score": scores, "right": right}))
    return pd.concat(frames, ignore_index=True)
