"""The null of the best site: how high the best of all sites scores when the labels carry nothing.

For every shuffle b of the labels a ridge probe is fitted at each site s and fold, and its out-of-fold AUROC t_sb taken
(`fold_auroc`). With T_b = max_s t_sb, the p-value of site s against the best of all sites is

    p_s = (1 + #{b : T_b >= t_s}) / (B + 1),

the single-step max-T of Westfall & Young (1993, sec. 2.6): it bounds the chance of any false discovery among the sites,
and adapts to how alike they are. The scores are linear in the labels, Z = H_test,train Y, so one product per fold
serves all shuffles. Real labels go through the very same product. The ridge probe minimises ||y - X w||^2 + lambda
||w||^2 on features standardised in the training fold, lambda = RIDGE x training rows: as much weight on the penalty as
one standardised feature carries, which stays clear of interpolation where features outnumber rows. Of several classes
the statistic is the mean AUROC of each against the others, of numbers the out-of-fold R2.

Shuffles respect groups: within a fold, groups of equal size exchange their labels, then the rows inside each group do.
A label that is constant in a group so moves group by group; a true/false pair flips its sign. Exchange stays within a
fold because folds were stratified by the real labels: across folds, real and shuffled labels would not be alike.
Groups of one label whose size is rare in their fold (tokens of texts: every length occurs once) would keep the real
labels. Where they hold more than a tenth of a fold's rows they exchange with those of the nearest sizes, or the shuffle
would be none: the number of positive groups then stays what it was, that of positive rows roughly so.

Beware: a group with rows of both labels and a size of its own is shuffled inside alone, so what the group as a whole
tells of its share of positive rows stays in the shuffles. Fewer than 20 arrangements of the labels are an error, since
p could not reach 0.05.
"""

import math
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from einops import rearrange
from jaxtyping import Bool, Float, Float32, Float64, Int64, Shaped
from scipy.special import gammaln
from torch import Tensor

from microtome.probes.metrics import auroc
from microtome.probes.target import Kind

RIDGE = 1.0
_FEWEST_ARRANGEMENTS = 20
_FEWEST_EXCHANGED = 5  # groups of one label and size that are fewer are rare
_MOST_RARE = 0.1  # share of a fold's rows in rare groups from which they exchange with other sizes
_SHUFFLES_TRIED, _SHUFFLES_AT_ONCE = 100, 10
_CHUNK_BYTES = 2**23  # scores of one chunk of sites stay near the cache


@dataclass(frozen=True)
class BestSiteNull:
    """Real out-of-fold AUROC of the ridge probe at each site, against the best site under shuffled labels."""

    statistic: Float64[Tensor, " site"]  # AUROC with the real labels
    p_value: Float64[Tensor, " site"]  # adjusted for all sites; never below 1 / (permutations + 1)
    maximum: Float64[Tensor, " permutation"]  # AUROC of the best site under each shuffle
    line: float  # AUROC that the best site exceeds in 5 % of shuffles


def group_permutations(
    labels: Shaped[np.ndarray, " example"],
    groups: Int64[np.ndarray, " example"],
    test: Bool[np.ndarray, "fold example"],
    *,
    permutations: int,
    seed: int,
) -> Shaped[np.ndarray, "permutation example"]:
    """Shuffled labels (Booleans, class numbers or numbers): equal-size groups of a fold exchange theirs, then the rows
    inside each group.

    `test` assigns every row to one fold and keeps groups whole (`grouped_folds`). Every shuffle keeps each fold's class
    counts, unless groups of one label and a rare size exchange with others (see above). Raises ValueError if fewer than
    20 different label rows can come out.
    """
    rng = np.random.default_rng(seed)
    blocks, mingled = _exchangeable(labels, groups, test)
    log_arrangements = sum(_log_arrangements(labels[rows]) for rows in blocks)
    log_arrangements += sum(_log_arrangements(_one_label_each(labels, members)[:, None]) for members in mingled)
    if log_arrangements < math.log(_FEWEST_ARRANGEMENTS - 0.5):
        arrangements = round(math.exp(log_arrangements))
        raise ValueError(
            f"Only {arrangements} arrangement(s) of the labels respect the groups within folds, so no p-value "
            f"below {1 / arrangements:.2g} exists. Labels move between groups of equal size in one fold and between "
            "rows of a group: use fewer folds, groups of equal size, or more groups."
        )
    shuffled = np.empty((permutations, len(labels)), dtype=labels.dtype)
    for rows in blocks:
        order = rng.permuted(np.tile(np.arange(len(rows)), (permutations, 1)), axis=1)
        moved = labels[rows][order]
        if rows.shape[1] > 1:
            moved = rng.permuted(moved, axis=2)
        shuffled[:, rows] = moved
    for members in mingled:
        label = _one_label_each(labels, members)
        moved = rng.permuted(np.tile(label, (permutations, 1)), axis=1)
        shuffled[:, np.concatenate(members)] = np.repeat(moved, [len(rows) for rows in members], axis=1)
    return shuffled


def shuffled_control(
    labels: Shaped[np.ndarray, " example"],
    groups: Int64[np.ndarray, " example"],
    test: Bool[np.ndarray, "fold example"],
    train: Bool[np.ndarray, "mask example"],
    *,
    seed: int,
) -> Shaped[np.ndarray, " example"]:
    """The first of 100 shuffles of `group_permutations` under which every training mask holds every class.

    Numbers (float64) have no classes, and the first shuffle does. Raises ValueError if none does, and as
    `group_permutations`.
    """
    for start in range(0, _SHUFFLES_TRIED, _SHUFFLES_AT_ONCE):
        shuffles = group_permutations(labels, groups, test, permutations=_SHUFFLES_AT_ONCE, seed=seed + start)
        for shuffle in shuffles:
            if labels.dtype == np.float64 or _holds_every_class(shuffle, train):
                return shuffle
    raise ValueError(
        f"Each of {_SHUFFLES_TRIED} shuffles of the labels leaves a training fold without a class, so there is no "
        "shuffled-label control. Too few groups carry one of the classes: add groups, or ask for fewer folds."
    )


def _holds_every_class(labels: np.ndarray, masks: Bool[np.ndarray, "mask example"]) -> bool:
    return all((masks & (labels == code)).any(axis=1).all() for code in np.unique(labels))


def ridge_auroc(
    features: Float[Tensor, "site example feature"],
    positive: Bool[Tensor, "labelling example"],
    test: Bool[Tensor, "fold example"],
    *,
    ridge: float = RIDGE,
) -> Float64[Tensor, "site labelling"]:
    """Out-of-fold AUROC of the ridge probe for every site under every labelling, over pairs of one test fold.

    Standardisation and fit see training rows only; they are done in float64, the product with the labels in float32.
    Raises ValueError if a labelling leaves no fold with both classes.
    """
    wins = torch.zeros(len(features), len(positive), dtype=torch.float64)
    pairs = torch.zeros(len(positive), dtype=torch.float64)
    signs = positive.to(torch.float32) - 0.5
    for rows in test:
        held_out = positive[:, rows]
        n_positive = held_out.sum(dim=1).to(torch.float64)
        pairs += n_positive * (rows.sum() - n_positive)
        chunk = max(1, _CHUNK_BYTES // (4 * held_out.numel() + 8 * features.shape[2] * len(rows)))
        for start in range(0, len(features), chunk):
            scores = _held_out_scores(features[start : start + chunk], signs, rows, ridge)
            wins[start : start + chunk] += _wins(scores, held_out)
    if (pairs == 0).any():
        raise ValueError("A labelling has no fold with both classes in its test rows; AUROC needs a pair to compare.")
    return wins / pairs


def ridge_statistic(
    features: Float[Tensor, "site example feature"],
    labellings: Shaped[Tensor, "labelling example"],
    test: Bool[Tensor, "fold example"],
    *,
    kind: Kind = "binary",
    ridge: float = RIDGE,
) -> Float64[Tensor, "site labelling"]:
    """What the null compares: `ridge_auroc` of two classes, its mean over classes, or the R2 of numbers.

    R2 = 1 - sum (y - prediction)^2 / sum (y - training mean)^2 over all held-out rows. Raises as `ridge_auroc`.
    """
    if kind == "binary":
        return ridge_auroc(features, labellings, test, ridge=ridge)
    if kind == "numbers":
        return _ridge_r2(features, labellings, test, ridge)
    classes = labellings[0].unique()
    return torch.stack([ridge_auroc(features, labellings == code, test, ridge=ridge) for code in classes]).mean(dim=0)


def _ridge_r2(
    features: Float[Tensor, "site example feature"],
    numbers: Float[Tensor, "labelling example"],
    test: Bool[Tensor, "fold example"],
    ridge: float,
) -> Float64[Tensor, "site labelling"]:
    missed = torch.zeros(len(features), len(numbers), dtype=torch.float64)
    total = torch.zeros(len(numbers), dtype=torch.float64)
    unit = numbers[0].std().clamp(min=1e-300)  # float32 products of numbers of any size
    for rows in test:
        gap = (numbers - numbers[:, ~rows].mean(dim=1, keepdim=True)) / unit
        total += gap[:, rows].square().sum(dim=1)
        chunk = max(1, _CHUNK_BYTES // (4 * gap[:, rows].numel() + 8 * features.shape[2] * len(rows)))
        for start in range(0, len(features), chunk):
            scores = _held_out_scores(features[start : start + chunk], gap.to(torch.float32), rows, ridge)
            missed[start : start + chunk] += (gap[:, rows] - scores).square().sum(dim=-1)
    return 1 - missed / total


def best_site_null(statistics: Float64[Tensor, "site labelling"]) -> BestSiteNull:
    """Null and adjusted p-values from `ridge_auroc` of the real labels (first) and their shuffles (the others).

    Raises ValueError without any shuffle.
    """
    if statistics.shape[1] < 2:
        raise ValueError("statistics holds the real labels only; give them first and at least one shuffle after them.")
    real, maximum = statistics[:, 0], statistics[:, 1:].max(dim=0).values
    reached = (maximum >= real[:, None]).sum(dim=1)
    return BestSiteNull(
        statistic=real,
        p_value=(1 + reached.to(torch.float64)) / (len(maximum) + 1),
        maximum=maximum,
        line=torch.quantile(maximum, 0.95, interpolation="higher").item(),
    )


def _exchangeable(
    labels: np.ndarray, groups: np.ndarray, test: np.ndarray
) -> tuple[list[Int64[np.ndarray, "group row"]], list[list[np.ndarray]]]:
    """Rows of the groups that may exchange labels: [group, row] tables, one per fold and size, and lists of groups of
    several sizes with one label each."""
    tables = _by_fold_and_size(groups, test)
    mingled = []
    for fold, of_test in enumerate(test):
        rare = [
            key
            for key, rows in tables.items()
            if key[0] == fold and len(rows) < _FEWEST_EXCHANGED and (labels[rows] == labels[rows[:, :1]]).all()
        ]
        if len(rare) < 2 or sum(tables[key].size for key in rare) <= _MOST_RARE * of_test.sum():
            continue
        members = [group for key in rare for group in tables.pop(key)]  # by size, ascending
        bounds = np.linspace(0, len(members), max(1, len(members) // _FEWEST_EXCHANGED) + 1).astype(int)
        mingled += [members[first:stop] for first, stop in pairwise(bounds)]
    blocks = list(tables.values())
    return blocks, mingled


def _by_fold_and_size(groups: np.ndarray, test: np.ndarray) -> dict[tuple[int, int], Int64[np.ndarray, "group row"]]:
    """Rows of the groups of each fold and size, ascending by both."""
    by_group = np.argsort(groups, kind="stable")
    _, start, size = np.unique(groups[by_group], return_index=True, return_counts=True)
    fold = test.argmax(axis=0)[by_group[start]]
    tables = {}
    for f, k in sorted(set(zip(fold.tolist(), size.tolist(), strict=True))):
        first = start[(fold == f) & (size == k)]
        tables[f, k] = by_group[first[:, None] + np.arange(k)]
    return tables


def _one_label_each(labels: np.ndarray, members: list[np.ndarray]) -> Shaped[np.ndarray, " group"]:
    return labels[[rows[0] for rows in members]]


def _log_arrangements(labels: Shaped[np.ndarray, "group row"]) -> float:
    """Log of the number of label tables that exchanging groups, then rows inside them, can give."""
    n_groups, size = labels.shape
    held, times = np.unique(np.sort(labels, axis=1), axis=0, return_counts=True)
    exchanges = gammaln(n_groups + 1) - gammaln(times + 1).sum()
    # runs of one label in the sorted rows of each kind of group
    starts = np.concatenate([np.ones((len(held), 1), dtype=bool), held[:, 1:] != held[:, :-1]], axis=1)
    runs = np.diff(np.append(np.flatnonzero(starts), held.size))
    alike = np.zeros(len(held))
    np.add.at(alike, np.nonzero(starts)[0], gammaln(runs + 1))
    return float(exchanges + (times * (gammaln(size + 1) - alike)).sum())


def _held_out_scores(
    features: Float[Tensor, "site example feature"],
    signs: Float32[Tensor, "labelling example"],
    rows: Bool[Tensor, " example"],
    ridge: float,
) -> Float32[Tensor, "site labelling held_out"]:
    train = features[:, ~rows].to(torch.float64)
    mean, scale = train.mean(dim=1, keepdim=True), train.std(dim=1, keepdim=True, correction=0)
    scale = torch.where(scale > 0, scale, 1.0)
    train, held_out = (train - mean) / scale, (features[:, rows].to(torch.float64) - mean) / scale
    n_sites, n_train, n_features = train.shape
    n_held_out = held_out.shape[1]
    is_wide = n_features > n_train
    gram = train @ train.mT if is_wide else train.mT @ train
    gram.diagonal(dim1=1, dim2=2).add_(ridge * n_train)
    factor = torch.linalg.cholesky(gram)
    # scores = labels @ left @ right, bracketed so that the products with all labellings stay thin
    left, right = (None, held_out @ train.mT) if is_wide else (train, held_out)
    right = torch.cholesky_solve(right.mT, factor)
    if left is not None and n_features * (n_train + n_held_out) > n_train * n_held_out:
        left, right = None, left @ right
    labels = signs[:, ~rows]
    if left is not None:
        thin = rearrange(left.to(torch.float32), "site example feature -> example (site feature)")
        labels = rearrange(labels @ thin, "labelling (site feature) -> site labelling feature", site=n_sites)
    return labels @ right.to(torch.float32)


def _wins(
    scores: Float32[Tensor, "site labelling held_out"], positive: Bool[Tensor, "labelling held_out"]
) -> Float64[Tensor, "site labelling"]:
    """Pairs won by the positive row, ties half, for every score row under its own labels.

    The label rides in the last mantissa bit, so that one plain sort, an order of magnitude faster than a sort with
    indices, orders scores and labels together; rows where that bit decided an order are counted again by ranks.
    """
    n = positive.shape[1]
    n_positive = positive.sum(dim=1).to(torch.float64)
    # adding zero turns -0.0 into 0.0, which must tie
    bits = (scores + 0.0).numpy().view(np.int32)
    np.bitwise_and(bits, ~np.int32(1), out=bits)
    np.bitwise_or(bits, positive.numpy().astype(np.int32), out=bits)
    bits.view(np.float32).sort(axis=-1)
    label = (bits & 1).astype(np.float32 if n <= 4096 else np.float64)
    rank_sum = torch.from_numpy(label @ np.arange(1, n + 1, dtype=label.dtype)).to(torch.float64)
    wins = rank_sum - n_positive * (n_positive + 1) / 2
    # neighbours that differ in the label bit alone
    tied = torch.from_numpy(np.any((bits[..., 1:] ^ bits[..., :-1]) == 1, axis=-1))
    tied &= (n_positive > 0) & (n_positive < n)
    if tied.any():
        labels = positive.expand(len(scores), -1, -1)[tied]
        pairs = (n_positive * (n - n_positive)).expand_as(tied)[tied]
        wins[tied] = auroc(scores[tied], labels) * pairs
    return wins
