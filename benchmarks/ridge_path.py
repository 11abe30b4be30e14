"""Ridge for a path of penalties with leave-one-group-out, against a loop over scikit-learn's Ridge and GroupKFold.

Claim: 25 penalties x 30 layers at least 20 x faster than fitting Ridge for every layer, penalty and left-out fold, the
folds being GroupKFold's on both sides; every left-out residual agrees to 1e-8 of the target's deviation.

Rows are random with the anisotropy of residual streams (deviations over four decades, here scaled inside the call as
`RidgeProbe` does), grouped in fives. Both sides get the same scaled float64 rows; scikit-learn's solver is its default,
Cholesky. With more folds, scikit-learn fits more often and ours solves smaller blocks; --folds says how many.
"""

import argparse
import os

import numpy as np
import torch
from ledger import record, timed
from sklearn.linear_model import Ridge
from sklearn.model_selection import GroupKFold

from microtome.probes.ridge_path import ridge_path


def bench_rows(layers: int, rows: int, width: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Scaled rows `[layer, row, feature]`, a target that is half noise, and groups of five rows."""
    rng = np.random.default_rng(0)
    mix = np.linalg.qr(rng.normal(size=(width, width)))[0] * np.logspace(0, -4, width)
    x = rng.normal(size=(layers, rows, width)) @ mix
    x = (x - x.mean(axis=1, keepdims=True)) / x.std(axis=1, keepdims=True)
    y = x[0] @ rng.normal(size=width)
    return x, y / y.std() + rng.normal(size=rows), rng.permutation(np.arange(rows) // 5)


def scikit_learn(x: np.ndarray, y: np.ndarray, groups: np.ndarray, penalties: list[float], folds: int) -> np.ndarray:
    """Left-out residuals `[layer, penalty, row]` by refits."""
    residuals = np.empty((len(x), len(penalties), len(y)))
    for layer, rows in enumerate(x):
        for train, held_out in GroupKFold(folds).split(rows, y, groups):
            for level, penalty in enumerate(penalties):
                fitted = Ridge(alpha=penalty).fit(rows[train], y[train])
                residuals[layer, level, held_out] = y[held_out] - fitted.predict(rows[held_out])
    return residuals


def ours(x: np.ndarray, y: np.ndarray, groups: np.ndarray, penalties: list[float], folds: int) -> np.ndarray:
    """The same in one call."""
    fold = np.empty(len(y), dtype=np.int64)
    for number, (_, held_out) in enumerate(GroupKFold(folds).split(x[0], y, groups)):
        fold[held_out] = number
    path = ridge_path(torch.from_numpy(x), torch.from_numpy(y)[:, None], penalties, torch.from_numpy(fold))
    return path.left_out_residuals[:, :, 0].numpy()


def main() -> None:
    """Run the claim."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--rows", type=int, default=1000)
    parser.add_argument("--width", type=int, default=576)
    parser.add_argument("--penalties", type=int, default=25)
    parser.add_argument("--folds", type=int, default=10)
    parser.add_argument("--pairs", type=int, default=3)
    options = parser.parse_args()
    x, y, groups = bench_rows(options.layers, options.rows, options.width)
    penalties = np.logspace(-1, 5, options.penalties).tolist()
    case = (y, groups, penalties, options.folds)
    scikit_learn(x[:1], *case), ours(x[:1], *case)
    ratios, seconds, answers = [], [], {}
    for _ in range(options.pairs):
        pair = [timed(lambda side=side: answers.update({side: side(x, *case)})) for side in (ours, scikit_learn)]
        seconds.append([round(value, 2) for value in pair])
        ratios.append(pair[1] / pair[0])
    gap = float(np.abs(answers[ours] - answers[scikit_learn]).max() / y.std())
    ratio = float(np.median(ratios))
    record(
        f"ridge path: {options.penalties} penalties x {options.layers} layers, leave-one-group-out, times faster",
        ratio,
        ">= 20",
        ratio >= 20 and gap <= 1e-8,
        f"loop over Ridge (default solver) and GroupKFold({options.folds}), same folds, same float64 rows",
        f"n={options.rows} rows, width {options.width}; pairs {[round(value, 1) for value in ratios]}; seconds ours, "
        f"theirs {seconds}; largest gap of a left-out residual {gap:.1e} target deviations; {os.cpu_count()} cores",
    )


if __name__ == "__main__":
    main()
