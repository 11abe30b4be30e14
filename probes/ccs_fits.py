"""Contrast-consistent search: the direction along which a statement and its negation get opposite answers, no labels.

Burns et al. (2023, sec. 3). Each side is centred by its own mean over the training pairs (and divided by its deviation
if asked to), which takes out what marks the side; then, for p± = sigmoid(w . x̂± + b),

    L = mean [(p+ - (1 - p-))²] + mean [min(p+, p-)²],      answer = (p+ + 1 - p-) / 2,

consistency and confidence. AdamW over all pairs at once, 1000 steps at rate 1e-3 with decay 0.01, ten starts, of which
the one of lowest training loss counts (the authors' settings). Starts of a site go side by side.

What differs from the authors' code: test pairs are centred by the training means, not by their own; the direction's
sign, which the loss leaves open, is fixed on training labels (as few as ten do), not by the better of two test
accuracies, which lies above chance for a useless direction. Exchanging the sides of all pairs changes neither the loss
nor the direction.

Beware: any salient feature with two values is a minimum of L, not the truth alone. Report CCS beside PCA of the
differences x+ - x- and random directions. It shows what is salient, not that the model takes it for true.
"""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Float32, Float64
from torch import Tensor

from microtome.probes.site_threads import side_by_side

_BLOCK_BYTES = 2**25  # float32 pairs of the sites that step together
_LARGEST = 1e100


@dataclass(frozen=True, eq=False)
class CcsFits:
    """The best start of every site and fold. A positive score says that the positive side is the true one."""

    coefficients: Float64[Tensor, "site fold feature"]  # w, per unit of the features as given, positive side
    negative_coefficients: Float64[Tensor, "site fold feature"]  # the same but for the scale of the negative side
    intercept: Float64[Tensor, "site fold"]  # of the positive side
    negative_intercept: Float64[Tensor, "site fold"]
    loss: Float64[Tensor, "site fold"]  # on the training pairs
    losses: Float64[Tensor, "site fold start"]  # of every start
    sign: Float64[Tensor, "site fold"]  # 1 or -1, by the labels of training pairs; coefficients do not hold it

    def scores(
        self, positive_side: Float[Tensor, "site pair feature"], negative_side: Float[Tensor, "site pair feature"]
    ) -> Float64[Tensor, "site fold pair"]:
        """2 answer - 1 with the sign fixed: from -1, the negative side is true, to 1, the positive one is."""
        sides = []
        for side, weight, bias in (
            (positive_side, self.coefficients, self.intercept),
            (negative_side, self.negative_coefficients, self.negative_intercept),
        ):
            sides.append(torch.sigmoid(weight @ side.double().mT + bias[..., None]))
        return self.sign[..., None] * (sides[0] - sides[1])


def fit_ccs(
    positive_side: Float[Tensor, "site pair feature"],
    negative_side: Float[Tensor, "_ _ _"],
    train: Bool[Tensor, "fold _"],
    labels: Bool[Tensor, " _"],
    *,
    labelled: Bool[Tensor, " _"] | None = None,
    restarts: int = 10,
    steps: int = 1000,
    learning_rate: int | float = 1e-3,
    weight_decay: int | float = 0.01,
    divide: bool = False,
    seed: int = 0,
) -> CcsFits:
    """Fit every site and fold.

    Args:
        positive_side, negative_side: activations of the statement and of its negation, pair by pair.
        train: the pairs each fold trains on; no other pair is read.
        labels: True where the positive side is the true one. They fix the sign, nothing else.
        labelled: the pairs whose labels may be used (training ones among them count); all if None.
        restarts, steps, learning_rate, weight_decay: as described above.
        divide: also divide each side by its deviation over the training pairs, feature by feature.
        seed: of the start values, the same at every site and fold (uniform within ±1/sqrt(features)).

    Raises ValueError for sides, masks or labels that do not match, NaN or infinite features, a fold that trains on
    fewer than two pairs or on no labelled one, and counts below 1.
    """
    usable = torch.ones_like(labels) if labelled is None else labelled
    _check(positive_side, negative_side, train, labels, usable, restarts, steps)
    n_sites, _, width = positive_side.shape
    generator = torch.Generator().manual_seed(seed)
    start = (2 * torch.rand(width + 1, restarts, generator=generator) - 1) / math.sqrt(width)
    together = max(1, _BLOCK_BYTES // (8 * int(train.sum(1).max()) * (width + 4 * restarts)))
    together = min(together, -(-n_sites // torch.get_num_threads()))
    tasks = [(fold, block) for fold in range(len(train)) for block in torch.arange(n_sites).split(together)]

    def fit(task: tuple[int, Tensor]) -> tuple[Tensor, ...]:
        fold, block = task
        rows = train[fold]
        sides = [side[block][:, rows].double() for side in (positive_side, negative_side)]
        means = [side.mean(1) for side in sides]
        scales = [
            _deviation(side) if divide else torch.ones_like(mean) for side, mean in zip(sides, means, strict=True)
        ]
        centred = [
            ((side - mean[:, None]) / scale[:, None]).float()
            for side, mean, scale in zip(sides, means, scales, strict=True)
        ]
        weight, bias, losses = _descend(centred, start, steps, float(learning_rate), float(weight_decay))
        best = losses.argmin(1)
        site = torch.arange(len(block))
        weight, bias = weight[site, :, best].double(), bias[site, 0, best].double()
        raw = [weight / scale for scale in scales]
        intercepts = [bias - (w * mean).sum(-1) for w, mean in zip(raw, means, strict=True)]
        known = rows & usable
        answers = [
            torch.sigmoid((side[block][:, known].double() @ w[..., None])[..., 0] + b[:, None])
            for side, w, b in zip((positive_side, negative_side), raw, intercepts, strict=True)
        ]
        is_right = ((answers[0] > answers[1]) == labels[known]).double().mean(1)
        sign = torch.where(is_right >= 0.5, 1.0, -1.0).double()
        return (*raw, *intercepts, losses[site, best].double(), losses.double(), sign)

    parts = side_by_side(fit, tasks)
    per_fold = len(parts) // len(train)
    by_fold = [parts[at : at + per_fold] for at in range(0, len(parts), per_fold)]
    fields = [
        torch.stack([torch.cat([part[field] for part in of_fold]) for of_fold in by_fold], 1) for field in range(7)
    ]
    return CcsFits(*fields)


def _descend(
    sides: list[Float32[Tensor, "site pair feature"]],
    start: Float32[Tensor, "inputs start"],
    steps: int,
    learning_rate: float,
    weight_decay: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Weights `[site, feature, start]`, biases `[site, 1, start]` and final losses `[site, start]`."""
    n_sites, n_pairs, width = sides[0].shape
    n_starts = start.shape[1]
    shapes = [(n_sites, width, n_starts), (n_sites, 1, n_starts)]
    lengths = [math.prod(shape) for shape in shapes]
    flat = torch.zeros(sum(lengths))
    flat.grad = torch.zeros_like(flat)

    def views(values: Tensor) -> list[Tensor]:
        return [part.view(shape) for part, shape in zip(values.split(lengths), shapes, strict=True)]

    (weight, bias), (weight_slope, bias_slope) = views(flat), views(flat.grad)
    weight.copy_(start[:-1])
    bias.copy_(start[-1:])
    adam = torch.optim.AdamW([flat], lr=learning_rate, weight_decay=weight_decay, fused=True)
    for _ in range(steps):
        ours, theirs = (torch.baddbmm(bias, side, weight).sigmoid_() for side in sides)
        excess = ours + theirs - 1
        is_ours = torch.where(ours < theirs, 1.0, torch.where(ours > theirs, 0.0, 0.5))
        # dL/dz of either side; at a tie the lower one is both by half, so that exchanging the sides changes nothing
        slopes = [
            (excess + share * p) * p * (1 - p) * (2 / n_pairs) for p, share in ((ours, is_ours), (theirs, 1 - is_ours))
        ]
        torch.bmm(sides[0].mT, slopes[0], out=weight_slope)
        weight_slope += torch.bmm(sides[1].mT, slopes[1])
        torch.sum(slopes[0] + slopes[1], 1, keepdim=True, out=bias_slope)
        adam.step()
    ours, theirs = (torch.baddbmm(bias, side, weight).sigmoid_().double() for side in sides)
    losses = ((ours + theirs - 1).square() + torch.minimum(ours, theirs).square()).mean(1)
    return weight, bias, losses


def _deviation(side: Float64[Tensor, "site pair feature"]) -> Float64[Tensor, "site feature"]:
    is_constant = (side == side[:, :1]).all(1)
    return torch.where(is_constant, 1.0, side.std(1, correction=0))


def _check(positive_side, negative_side, train, labels, labelled, restarts: int, steps: int) -> None:
    if positive_side.shape != negative_side.shape:
        raise ValueError(
            f"The sides have shapes {list(positive_side.shape)} and {list(negative_side.shape)}; each pair needs both."
        )
    n_pairs = positive_side.shape[1]
    for name, given in (("train", train), ("labels", labels), ("labelled", labelled)):
        if given.shape[-1] != n_pairs:
            raise ValueError(f"{name} covers {given.shape[-1]} pairs, the sides have {n_pairs}; give one entry each.")
    for name, side in (("positive_side", positive_side), ("negative_side", negative_side)):
        if not bool(side.abs().amax() < _LARGEST):  # nor is NaN
            site, pair, feature = (~(side.abs() < _LARGEST)).nonzero()[0].tolist()
            raise ValueError(
                f"{name} holds NaN, inf or numbers past {_LARGEST:g}, first at site {site}, pair {pair}, feature "
                f"{feature}; drop the pair or fix the capture."
            )
    if restarts < 1 or steps < 1:
        raise ValueError(f"restarts={restarts}, steps={steps}; give at least 1 of each.")
    for fold, rows in enumerate(train):
        n_train, n_labelled = int(rows.sum()), int((rows & labelled).sum())
        if n_train < 2 or n_labelled < 1:
            raise ValueError(
                f"fold {fold} trains on {n_train} pairs, {n_labelled} of them labelled; centring needs 2, and the sign "
                "a labelled one, better ten."
            )
