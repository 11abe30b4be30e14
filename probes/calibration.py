"""Are a probe's probabilities right: calibration error beside what chance alone makes it, slope, Brier score.

A prediction is a stated confidence c_i and whether it came true r_i: of two classes or more, the probability of the
likelier class and whether it was the class (`stated`). Over bins B of equal width (15 by convention: Guo et al. 2017)
or of equally many rows,

    ECE = 1/n sum_B | sum_{i in B} (r_i - c_i) |.

Beware: ECE is never 0 on finitely many rows. With c of Beta(2, 2) probabilities and outcomes drawn from those very
probabilities it is 0.093 on 100 rows, 0.054 on 300, 0.030 on 1,000, 0.013 on 5,000 (the test measures it), so it means
nothing without `calibration_floor`, its mean if these very confidences were right. Squares can be freed of that bias
(Kumar, Liang & Ma 2019, sec. 4):

    sum_B n_B / n [ (mean r - mean c)^2 - mean r (1 - mean r) / (n_B - 1) ],

which is 0 in the mean for right confidences that are equal within a bin, and below for half of all samples. Slope and
intercept of the logistic regression of y on the logit z (1 and 0 if right; a slope below 1: too sure) need no bins.
"""

import pandas as pd
import torch
from jaxtyping import Bool, Float, Float64, Int64, Shaped
from torch import Tensor

from microtome.probes.metrics import average_ranks, class_loss_bits, log_loss_bits, refuse_nan
from microtome.probes.sweep_result import Sweep
from microtome.probes.temperature import as_classes, fitted_temperature, temperature_scaled

BINS = 15
_MOST_STEPS = 60


def stated(
    logits: Float[Tensor, "probe example *output"],
    labels: Bool[Tensor, " example"] | Int64[Tensor, " example"],
) -> tuple[Float64[Tensor, "probe example"], Bool[Tensor, "probe example"]]:
    """Probability of the likelier class, and whether it was the class. Logits have a class axis if labels are int64."""
    logits, labels = as_classes(logits, labels)
    confidence, answer = logits.softmax(dim=-1).max(dim=-1)
    return confidence, answer == labels


def calibration_error(
    confidence: Float64[Tensor, "*probe example"],
    came_true: Bool[Tensor, "*#probe example"],
    *,
    bins: int = BINS,
    equal_mass: bool = False,
) -> Float64[Tensor, "*probe"]:
    """ECE of each probe. Bins of equal width, or of equally many rows (ties stay together).

    Raises ValueError for confidences outside 0 to 1 and fewer than one bin.
    """
    bin_of_row = _bins(confidence, bins, equal_mass)
    gap = came_true.double() - confidence
    return _by_bin(gap, bin_of_row, bins).abs().sum(dim=-1) / confidence.shape[-1]


def calibration_floor(
    confidence: Float64[Tensor, "*probe example"],
    *,
    bins: int = BINS,
    equal_mass: bool = False,
    draws: int = 200,
    seed: int = 0,
) -> Float64[Tensor, "*probe"]:
    """Mean ECE of these very confidences if each were right: r_i ~ Bernoulli(c_i), `draws` times.

    All probes share their draws, so floors compare. Raises as `calibration_error`, and for no draws.
    """
    if draws < 1:
        raise ValueError(f"draws={draws}; the floor is a mean over draws, give 100 or more.")
    bin_of_row = _bins(confidence, bins, equal_mass)
    generator = torch.Generator().manual_seed(seed)
    total = torch.zeros(confidence.shape[:-1], dtype=torch.float64)
    for _ in range(draws):
        uniform = torch.rand(confidence.shape[-1], generator=generator, dtype=torch.float64)
        gap = (uniform < confidence).double() - confidence
        total += _by_bin(gap, bin_of_row, bins).abs().sum(dim=-1)
    return total / draws / confidence.shape[-1]


def squared_calibration_error(
    confidence: Float64[Tensor, "*probe example"],
    came_true: Bool[Tensor, "*#probe example"],
    *,
    bins: int = BINS,
    equal_mass: bool = True,
) -> Float64[Tensor, "*probe"]:
    """Mean squared gap between confidence and frequency, without the bias of finitely many rows; may be negative.

    Bins of a single row count nothing. Raises as `calibration_error`.
    """
    bin_of_row = _bins(confidence, bins, equal_mass)
    count = _by_bin(torch.ones_like(confidence), bin_of_row, bins)
    rate = _by_bin(came_true.double().expand_as(confidence), bin_of_row, bins) / count.clamp(min=1)
    gap = rate - _by_bin(confidence, bin_of_row, bins) / count.clamp(min=1)
    square = gap.square() - rate * (1 - rate) / (count - 1).clamp(min=1)
    return torch.where(count > 1, count * square, 0.0).sum(dim=-1) / confidence.shape[-1]


def brier_score(
    logits: Float[Tensor, "probe example *output"],
    labels: Bool[Tensor, " example"] | Int64[Tensor, " example"],
) -> Float64[Tensor, " probe"]:
    """Mean of (p - y)^2 for two classes (0.25 for a coin), of sum_k (p_k - y_k)^2 with a class axis (Brier 1950)."""
    scores, codes = as_classes(logits, labels)
    truth = torch.nn.functional.one_hot(codes, scores.shape[-1]).double()
    squares = (scores.softmax(dim=-1) - truth).square().sum(dim=-1).mean(dim=-1)
    return squares / 2 if labels.dtype == torch.bool else squares


def calibration_line(
    logits: Float[Tensor, "*probe example"], positive: Bool[Tensor, "*#probe example"]
) -> tuple[Float64[Tensor, "*probe"], Float64[Tensor, "*probe"]]:
    """Slope a and intercept b of p(y) = sigmoid(a z + b), by maximum likelihood (Cox 1958): 1 and 0 if z is right.

    Labels that z separates have the slope inf (-inf the wrong way round), a constant z NaN; both the intercept NaN.
    Raises ValueError for NaN scores and labels of one class.
    """
    refuse_nan(logits)
    if bool((positive.all(dim=-1) | ~positive.any(dim=-1)).any()):
        raise ValueError("All labels are of one class, so no slope can be fitted. Give rows of both classes.")
    z = logits.double()
    y = positive.expand(z.shape).double()
    scale = z.std(dim=-1, unbiased=False, keepdim=True)
    is_constant = (z == z[..., :1]).all(dim=-1)
    highest = {side: torch.where(y == side, z, -torch.inf).amax(dim=-1) for side in (0, 1)}
    lowest = {side: torch.where(y == side, z, torch.inf).amin(dim=-1) for side in (0, 1)}
    separated, upside_down = lowest[1] >= highest[0], highest[1] <= lowest[0]
    x = torch.stack([z / torch.where(scale > 0, scale, 1.0), torch.ones_like(z)], dim=-1)
    theta = torch.zeros(*z.shape[:-1], 2, dtype=torch.float64)

    def loss_of(theta: Tensor) -> Tensor:
        score = (x @ theta[..., None])[..., 0]
        return (torch.nn.functional.softplus(score) - y * score).sum(dim=-1)

    loss = loss_of(theta)
    for _ in range(_MOST_STEPS):
        p = torch.sigmoid((x @ theta[..., None])[..., 0])
        gradient = (x * (p - y)[..., None]).sum(dim=-2)
        curvature = torch.einsum("...ni,...n,...nj->...ij", x, p * (1 - p), x) + 1e-9 * torch.eye(2).double()
        step = torch.linalg.solve(curvature, gradient[..., None])[..., 0]
        for _ in range(30):
            trial = loss_of(theta - step)
            worse = trial > loss
            if not worse.any():
                break
            step = torch.where(worse[..., None], step / 2, step)
        accepted = trial <= loss
        theta = torch.where(accepted[..., None], theta - step, theta)
        loss = torch.where(accepted, trial, loss)
        if bool((gradient.abs().amax(dim=-1) <= 1e-9 * z.shape[-1]).logical_or(separated | upside_down).all()):
            break
    slope = theta[..., 0] / torch.where(scale > 0, scale, 1.0)[..., 0]
    slope = torch.where(separated, torch.inf, torch.where(upside_down, -torch.inf, slope))
    slope = torch.where(is_constant, torch.nan, slope)
    return slope, torch.where(slope.isfinite(), theta[..., 1], torch.nan)


def reliability(
    confidence: Float64[Tensor, " example"],
    came_true: Bool[Tensor, " example"],
    *,
    bins: int = BINS,
    equal_mass: bool = False,
) -> pd.DataFrame:
    """One row per bin that holds rows: their number, mean confidence, frequency, and where 95 % of frequencies lie.

    `low` and `high` are mean confidence -/+ 1.96 sqrt(sum c (1 - c)) / rows: the frequencies of right confidences.
    """
    bin_of_row = _bins(confidence, bins, equal_mass)
    rows = _by_bin(torch.ones_like(confidence), bin_of_row, bins)
    kept = rows > 0
    columns = {
        "rows": rows,
        "confidence": _by_bin(confidence, bin_of_row, bins) / rows.clamp(min=1),
        "frequency": _by_bin(came_true.double(), bin_of_row, bins) / rows.clamp(min=1),
    }
    reach = 1.96 * _by_bin(confidence * (1 - confidence), bin_of_row, bins).sqrt() / rows.clamp(min=1)
    columns["low"] = (columns["confidence"] - reach).clamp(min=0)
    columns["high"] = (columns["confidence"] + reach).clamp(max=1)
    return pd.DataFrame({name: column[kept].numpy() for name, column in columns.items()}).astype({"rows": int})


def calibration_table(
    logits: Float[Tensor, "probe example *output"] | Sweep,
    labels: Bool[Tensor, " example"] | Int64[Tensor, " example"] | None = None,
    test: Bool[Tensor, "fold example"] | None = None,
    *,
    bins: int = BINS,
    equal_mass: bool = False,
    draws: int = 200,
    seed: int = 0,
) -> pd.DataFrame:
    """One row per probe, from scores of rows that the probe was not fitted on: a sweep, or logits and labels.

    Columns: site (of a sweep, which brings its labels and folds); brier; ece, ece_floor and ece_excess (their
    difference); rms_calibration_error (root of the debiased square over bins of equally many rows, 0 where that is
    negative); slope and intercept (two classes; NaN with more). With the test rows of each fold: temperature (of all
    rows), and ece_scaled, ece_floor_scaled, bits_scaled after dividing the logits of each fold by the temperature of
    the other folds' rows.
    Raises ValueError for logits without labels, a sweep with labels, and a sweep of numbers.
    """
    if isinstance(logits, Sweep):
        if labels is not None or test is not None:
            raise ValueError("A sweep brings its labels and folds: give the sweep alone, or logits with labels.")
        if logits.kind == "numbers":
            raise ValueError("This sweep predicts numbers, which state no probability. Calibration is for classes.")
        options = {"bins": bins, "equal_mass": equal_mass, "draws": draws, "seed": seed}
        table = calibration_table(logits.scores, logits.truth, logits.test, **options)
        table.insert(0, "site", logits.table["site"].to_numpy())
        return table
    if labels is None:
        raise ValueError("Logits need their labels: calibration_table(logits, labels), or give a sweep.")
    confidence, right = stated(logits, labels)
    options = {"bins": bins, "equal_mass": equal_mass}
    table = {"brier": brier_score(logits, labels)}
    table["ece"] = calibration_error(confidence, right, **options)
    table["ece_floor"] = calibration_floor(confidence, **options, draws=draws, seed=seed)
    table["ece_excess"] = table["ece"] - table["ece_floor"]
    table["rms_calibration_error"] = squared_calibration_error(confidence, right, bins=bins).clamp(min=0).sqrt()
    missing = torch.full((len(logits),), torch.nan, dtype=torch.float64)
    is_binary = labels.dtype == torch.bool
    table["slope"], table["intercept"] = calibration_line(logits, labels) if is_binary else (missing, missing)
    if test is not None:
        scaled = temperature_scaled(logits, labels, test)
        table["temperature"] = fitted_temperature(logits, labels)
        confidence, right = stated(scaled, labels)
        table["ece_scaled"] = calibration_error(confidence, right, **options)
        table["ece_floor_scaled"] = calibration_floor(confidence, **options, draws=draws, seed=seed)
        table["bits_scaled"] = _bits(scaled, labels)
    return pd.DataFrame({name: column.numpy() for name, column in table.items()})


def _bits(logits: Tensor, labels: Tensor) -> Float64[Tensor, " probe"]:
    return log_loss_bits(logits, labels) if labels.dtype == torch.bool else class_loss_bits(logits, labels).mean(dim=-1)


def _bins(
    confidence: Float64[Tensor, "*probe example"], bins: int, equal_mass: bool
) -> Int64[Tensor, "*probe example"]:
    if bins < 1:
        raise ValueError(f"bins={bins}; give 1 or more, {BINS} by convention.")
    refuse_nan(confidence)
    if confidence.shape[-1] == 0 or not bool(((confidence >= 0) & (confidence <= 1)).all()):
        raise ValueError("Confidences are probabilities, 0 to 1, one or more per probe. Pass stated(logits, labels).")
    place = (average_ranks(confidence) - 0.5) / confidence.shape[-1] if equal_mass else confidence
    return (place * bins).long().clamp(max=bins - 1)


def _by_bin(values: Shaped[Tensor, "*probe example"], bin_of_row: Tensor, bins: int) -> Float64[Tensor, "*probe bin"]:
    total = torch.zeros(*values.shape[:-1], bins, dtype=torch.float64)
    return total.scatter_add_(-1, bin_of_row, values.double())
