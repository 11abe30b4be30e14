"""INLP: its projection, when it stops, and that LEACE changes less for the same guardedness."""

from inspect import unwrap

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from torch import Tensor

from microtome.probes.inlp import inlp
from microtome.probes.leace import leace, one_hot


def rows(sites: int = 3, n: int = 600, width: int = 12, classes: int = 2, seed: int = 0) -> tuple[Tensor, Tensor]:
    rng = np.random.default_rng(seed)
    y = rng.integers(classes, size=n)
    mixing = rng.normal(size=(sites, width, width)) * np.logspace(-1, 1, width)
    moved = 2 * rng.normal(size=(sites, classes, width))
    return torch.tensor(rng.normal(size=(sites, n, width)) @ mixing + moved[:, y]), torch.tensor(y)


@pytest.mark.parametrize("classes", [2, 3])
def test_an_orthogonal_projection_without_any_stored_direction(classes: int) -> None:
    X, y = rows(classes=classes)
    fit = inlp(X, y, iterations=3, held_out=0)
    assert fit.iterations.tolist() == [3, 3, 3]
    for site in range(len(X)):
        P = fit.erasures[site].matrix
        torch.testing.assert_close(P, P.T, rtol=0, atol=1e-12)
        torch.testing.assert_close(P @ P, P, rtol=0, atol=1e-12)
        stored = fit.directions[site].flatten(0, 1)
        torch.testing.assert_close(stored.norm(dim=1), torch.ones(len(stored), dtype=torch.float64))
        assert float((stored @ P).abs().max()) < 1e-10
        assert fit.erasures[site].rank == 12 - int(torch.linalg.matrix_rank(P)) == 3 * (1 if classes == 2 else 3)


def test_the_first_direction_is_the_logistic_probe() -> None:
    X, y = rows(sites=2)
    fit = inlp(X, y, iterations=1, held_out=0)
    for site in range(2):
        Z = ((X[site] - X[site].mean(0)) / X[site].std(0, correction=0)).numpy()
        probe = LogisticRegression(C=1.0, class_weight="balanced", solver="newton-cholesky", tol=1e-12).fit(Z, y)
        raw = probe.coef_[0] / X[site].std(0, correction=0).numpy()
        np.testing.assert_allclose(fit.directions[site, 0, 0], raw / np.linalg.norm(raw), atol=1e-6)


def test_it_stops_at_chance_site_by_site() -> None:
    X, y = rows()
    X[1] = torch.tensor(np.random.default_rng(5).normal(size=X[1].shape))  # nothing to erase
    fit = inlp(X, y, iterations=12)
    assert int(fit.iterations[1]) == 0
    assert fit.erasures[1].rank == 0
    torch.testing.assert_close(fit.erasures.apply(X)[1], X[1])
    assert 0 < int(fit.iterations[0]) < 12
    stopped = fit.held_out_auroc[0, int(fit.iterations[0])]
    assert float(fit.held_out_auroc[0, 0]) > 0.75 > 0.6 > float(stopped)
    assert bool(fit.held_out_auroc[0, int(fit.iterations[0]) + 1 :].isnan().all())


def test_when_everything_is_taken_out_nothing_is_left() -> None:
    X, y = rows(width=4)
    fit = inlp(X, y, iterations=6, held_out=0)
    assert fit.iterations.tolist() == [4, 4, 4]  # then there is nothing to fit, and rounding is no feature
    torch.testing.assert_close(fit.erasures.apply(X), X.mean(1, keepdim=True).expand(X.shape), rtol=0, atol=1e-9)


def test_leace_changes_less_at_equal_guardedness() -> None:
    X, y = rows()
    fit = inlp(X, y, iterations=12)
    change = (fit.erasures.apply(X) - X).square().mean((1, 2))
    least = (leace(X, one_hot(y, 2)).apply(X) - X).square().mean((1, 2))
    assert bool((least < change).all())


def test_held_out_groups_stay_whole_and_seeds_repeat() -> None:
    X, y = rows(n=400)
    groups = np.arange(400) // 4
    one, two = (inlp(X, y, iterations=2, groups=groups, seed=3) for _ in range(2))
    assert torch.equal(one.directions, two.directions)
    # rows of one group that differ in nothing but the label cannot be judged by a probe that saw their twins
    assert not torch.equal(one.directions, inlp(X, y, iterations=2, groups=groups, seed=4).directions)


def test_the_held_out_rows_do_not_move_the_directions() -> None:
    X, y = rows(n=400)
    first = inlp(X, y, iterations=1)
    moved = [inlp(X.index_fill(1, torch.tensor([row]), 1e9), y, iterations=1) for row in range(8)]
    unmoved = sum(torch.equal(first.directions, other.directions) for other in moved)
    assert 0 < unmoved < 8  # those of the eight that are held out, and only those


def test_bad_input_says_what_is_wrong() -> None:
    X, y = rows(n=40)
    with pytest.raises(ValueError, match="one class only"):
        inlp(X, torch.zeros(40, dtype=torch.int64))
    with pytest.raises(ValueError, match="iterations=0"):
        inlp(X, y, iterations=0)
    with pytest.raises(ValueError, match=r"a share in \[0, 1\)"):
        inlp(X, y, held_out=1.0)
    with pytest.raises(ValueError, match="39 entries for 40 rows"):
        inlp(X, y, groups=np.arange(39))


def test_codes_are_class_numbers_of_every_row():
    features = torch.from_numpy(np.random.default_rng(0).normal(size=(1, 40, 3)))
    codes = torch.arange(40) % 2
    for bad in (codes[:-1], codes.double(), codes[:, None]):
        with pytest.raises(ValueError, match="for 40 rows; give class numbers"):
            unwrap(inlp)(features, bad)
    found = [inlp(features, one, held_out=0).directions for one in (codes, codes.int())]
    assert torch.equal(*found)
