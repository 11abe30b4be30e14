"""What a thousand shuffles of the labels cost beside one fit, the site and everything else being the same.

Claims: 1,000 logistic fits of one residual site (576 features, 5,000 rows, one strength), each to a relative gradient
of 1e-6, take at most 15 times as long as the fit of the real labels alone; and so does the ridge probe of one head site
(64 features), out of fold, for 1,001 labellings against one.

Rows have correlated features of unlike size, as residuals have. Both sides of a pair run in one process, in turn.
"""

import argparse
from functools import partial

import torch
from ledger import paired, record

from microtome.probes import fit_logistic
from microtome.probes.permutation import ridge_auroc

SHUFFLES = 1000
TOLERANCE = 1e-6


def site(n_rows: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Features [1, row, feature] and labels [1 + SHUFFLES, row], the first of them real."""
    generator = torch.Generator().manual_seed(0)
    turn = torch.linalg.qr(torch.randn(width, width, generator=generator))[0]
    latent = torch.randn(1, n_rows, width, generator=generator) * torch.logspace(0.5, -1.2, width)
    features = (latent @ turn + 0.3).contiguous()
    signal = features[0] @ torch.randn(width, generator=generator)
    real = signal / signal.std() + torch.randn(n_rows, generator=generator) > signal.mean() / signal.std()
    shuffles = [real[torch.randperm(n_rows, generator=generator)] for _ in range(SHUFFLES)]
    return features, torch.stack([real, *shuffles])


def logistic(n_rows: int, width: int, pairs: int) -> None:
    """Record the price of a thousand logistic fits in fits."""
    features, labels = site(n_rows, width)
    every = torch.ones(n_rows, dtype=torch.bool)
    fit = partial(fit_logistic, features, train=every, strengths=[1 / width], tolerance=TOLERANCE)
    ratio, ratios = paired(lambda: fit(labels=labels[1:]), lambda: fit(labels=labels[:1]), pairs)
    shuffled, real = fit(labels=labels[1:]), fit(labels=labels[:1])
    record(
        f"{SHUFFLES} label permutations of one residual site, logistic, over one fit",
        ratio,
        "<= 15",
        ratio <= 15,
        "fit_logistic on the real labels alone",
        f"n={n_rows}, width {width}, C d = 1, gradient <= {TOLERANCE:g} C n in all fits; pairs {ratios}; passes "
        f"{float(shuffled.passes.double().mean()):.1f} a shuffle, {int(real.passes)} the real labels; largest gradient "
        f"{float(shuffled.gradient.max()):.1e}, {float(real.gradient.max()):.1e}",
    )


def least_squares(n_rows: int, width: int, pairs: int) -> None:
    """Record the price of a thousand and one labellings of the ridge probe in labellings."""
    features, labels = site(n_rows, width)
    test = torch.arange(n_rows) % 5 == torch.arange(5)[:, None]
    ratio, ratios = paired(
        lambda: ridge_auroc(features, labels, test), lambda: ridge_auroc(features, labels[:1], test), pairs
    )
    record(
        f"{SHUFFLES} label permutations of one head site, least squares, over one fit",
        ratio,
        "<= 15",
        ratio <= 15,
        "ridge_auroc on the real labels alone",
        f"n={n_rows}, width {width}, 5 folds, AUROC of every labelling included; pairs {ratios}",
    )


def main() -> None:
    """Run both."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=5000)
    parser.add_argument("--pairs", type=int, default=5)
    options = parser.parse_args()
    logistic(options.rows, 576, options.pairs)
    least_squares(options.rows, 64, options.pairs)


if __name__ == "__main__":
    main()
