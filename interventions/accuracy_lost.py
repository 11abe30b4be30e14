"""How much of a model's own classification hangs on one direction: accuracy lost when it is ablated.

    lost = (accuracy - accuracy under ablation) / (accuracy - chance)

The model classifies by itself: logit difference of two answer words after a prompt that holds the text; the threshold
is set on development texts. The direction's coordinate is replaced by the data's mean (by kind of token), by one of
another text, or by 0, at all tokens or at chosen ones (commas), at one layer or all; the first token, a sink, is left
alone. Beside it random directions: of equal length, and of equal variance of projections, which is the fair comparison.
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
from microtome.capture.live_taps import EditContext
from microtome.capture.models import LoadedModel
from microtome.interventions.operations import Project, call_of
from microtome.interventions.positions import Positions, Tokens
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
    """Share lost with a 95 % bootstrap interval over groups; base and ablated are 1 where a text was put right.

    The ends are NaN where more than one draw in a hundred is not above chance: a share of nothing has no interval.
    """
    _, place = np.unique(np.asarray(list(groups), dtype=object).astype(str), return_inverse=True)
    counts = document_draws(int(place.max()) + 1, draws, seed)
    sizes, right, left = (np.bincount(place, weights=w) for w in (np.ones(len(place)), base, ablated))
    weights = counts @ sizes
    one, other = (counts @ right) / weights, (counts @ left) / weights
    with np.errstate(divide="ignore", invalid="ignore"):
        drawn = (one - other) / (one - chance)
    known = drawn[one > chance]
    low, high = np.quantile(known, [0.025, 0.975]) if len(known) >= 0.99 * len(drawn) else (np.nan, np.nan)
    return accuracy_lost(float(base.mean()), float(ablated.mean()), chance), float(low), float(high)


def mean_ablation(
    direction: Float[Tensor, " d"], sites: Sequence[str], means: Sequence[float], positions: Positions = "rest"
) -> Steering:
    """Set the coordinate along the direction to a mean, by site; means of 0 take it out."""
    return Steering(
        Intervention(site, Project(direction, float(mean)), positions, name="mean ablation")
        for site, mean in zip(sites, means, strict=True)
    )


@dataclass(frozen=True, eq=False)
class Resample:
    """Set the coordinate along a direction to one drawn from a pool: delta = w (pool[i] - u . x) u.

    i is a hash of text and position, so that neither batch nor cache changes what is drawn.

    Attributes:
        direction: made a unit vector; pool: coordinates of other texts' tokens there; seed: of the draw.
    """

    direction: Tensor
    pool: Tensor
    seed: int = 0

    def __post_init__(self):
        object.__setattr__(self, "direction", Project(self.direction).basis[0])
        if self.pool.ndim != 1 or not len(self.pool) or not bool(torch.isfinite(self.pool).all()):
            raise ValueError(f"pool of shape {tuple(self.pool.shape)}: give finite coordinates, at least one.")

    @property
    def width(self) -> int:
        """Channels."""
        return len(self.direction)

    @property
    def directions(self) -> Tensor:
        """For the ledger."""
        return self.direction[None]

    def delta(self, x: Tensor, weight: Tensor, at: EditContext | None) -> Tensor:
        """Towards the drawn coordinates."""
        call = call_of(at, "Resample")
        mixed = (call.texts.to(x.device)[:, None] + 1) * 2654435761 + (call.positions.to(x.device) + 1) * 40503
        drawn = ((mixed + self.seed * 69069) % 2147483647 * 48271 % 2147483647) % len(self.pool)
        unit = self.direction.to(x)
        gap = self.pool.to(x)[drawn] - x @ unit
        return weight * gap[..., None] * unit


def resample_ablation(
    direction: Float[Tensor, " d"],
    sites: Sequence[str],
    pools: Sequence[Tensor],
    positions: Positions = "rest",
    *,
    seed: int = 0,
) -> Steering:
    """Set the coordinate along the direction to that of another text's token, by site."""
    return Steering(
        Intervention(site, Resample(direction, pool, seed), positions, name="resample ablation")
        for site, pool in zip(sites, pools, strict=True)
    )


def projection_means(
    model: LoadedModel,
    texts: Sequence[str],
    sites: Sequence[str],
    directions: Float[Tensor, "direction d"],
    tokens: Tokens | None = None,
) -> tuple[Float[Tensor, "site direction"], Float[Tensor, "site direction"]]:
    """Mean and deviation of projections over the tokens of texts at each site: all of them but the first, or of these
    those of one kind, such as `Tokens.saying(model, ",")`.

    Raises ValueError where fewer than two such tokens are met.
    """
    tokenizer = model.require_tokenizer()
    ids = [list(tokenizer(text)["input_ids"]) for text in texts]
    acts = capture(model, ids, list(sites), "all", add_special_tokens=False, progress=False)
    places = list(zip(acts.rows["text"], acts.rows["position"], strict=True))
    wanted = None if tokens is None else set(tokens.ids)
    chosen = torch.tensor([at > 0 and (wanted is None or ids[text][at] in wanted) for text, at in places])
    if int(chosen.sum()) < 2:
        raise ValueError(f"{int(chosen.sum())} such tokens in {len(texts)} texts: two at least make a mean.")
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
        low, high, mixed = 0.0, 1.0, ends[0]
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
