"""Noise ceilings of planted ratings."""

from inspect import unwrap

import numpy as np
import pandas as pd
import pytest

from microtome.probes.noise_ceiling import noise_ceiling, noise_ceiling_of_means


def planted(rows=400, raters=8, noise=2.0, seed=0):
    """Ratings, true means, and a table in which a quarter did not rate."""
    rng = np.random.default_rng(seed)
    true = rng.normal(size=rows)
    ratings = true[:, None] + noise * rng.normal(size=(rows, raters)) + 7
    ratings[rng.random(ratings.shape) < 0.25] = np.nan
    ratings[:, :2] = true[:, None] + noise * rng.normal(size=(rows, 2)) + 7
    return ratings, true


def test_the_planted_share_is_found_by_both_estimates() -> None:
    ratings, true = planted(rows=20000)
    found = noise_ceiling(ratings, draws=200, splits=10)
    means = np.nanmean(ratings, axis=1)
    share = np.corrcoef(true, means)[0, 1] ** 2  # what the true means explain
    assert found.ceiling == pytest.approx(share, abs=0.01)
    # raters differ in number by row, which Spearman and Brown's one factor only meets on average
    assert found.split_half == pytest.approx(share, abs=0.03)


def test_formulas_on_a_small_table() -> None:
    ratings = np.array([[1.0, 2.0], [4.0, 2.0], [5.0, 7.0], [0.0, 0.0]])
    found = noise_ceiling(ratings, draws=100, splits=1)
    means, errors = ratings.mean(axis=1), ratings.std(axis=1, ddof=1) / np.sqrt(2)
    assert found.ceiling == pytest.approx(1 - (errors**2).mean() / means.var(ddof=1))
    reliability = []
    for flips in range(16):  # every way to halve pairs
        sides = np.array([row[:: -1 if flips >> i & 1 else 1] for i, row in enumerate(ratings)])
        r = np.corrcoef(sides.T)[0, 1]
        reliability.append(2 * r / (1 + r))
    assert np.abs(np.array(reliability) - found.split_half).min() < 1e-12
    of_means = noise_ceiling_of_means(means, errors, draws=100)
    assert of_means.ceiling == pytest.approx(found.ceiling)
    assert np.isnan(of_means.split_half)


def test_the_interval_covers_and_groups_widen_it() -> None:
    covered = [
        found.low <= 1 / (1 + 4 / 6.5) <= found.high
        for found in (noise_ceiling(planted(150, seed=seed)[0], draws=300, splits=1) for seed in range(60))
    ]
    assert np.mean(covered) > 0.85
    ratings, _ = planted(100)
    tenfold, groups = np.repeat(ratings, 10, axis=0), np.repeat(np.arange(100), 10)
    plain, by_row, by_group = (
        noise_ceiling(table, groups=of, draws=1000, splits=5)
        for table, of in ((ratings, None), (tenfold, None), (tenfold, groups))
    )
    assert (by_group.high - by_group.low) / (plain.high - plain.low) == pytest.approx(1, abs=0.1)
    assert (by_row.high - by_row.low) < 0.5 * (by_group.high - by_group.low)
    assert (by_row.split_half_high - by_row.split_half_low) < 0.5 * (by_group.split_half_high - by_group.split_half_low)
    again = noise_ceiling(ratings, draws=1000, splits=5)
    assert again == plain


def test_bad_input_says_what_to_do() -> None:
    ratings, _ = planted(10)
    ratings[3, 1:] = np.nan
    with pytest.raises(ValueError, match=r"ratings\[3\] has 1 finite ratings of 8"):
        noise_ceiling(ratings)
    with pytest.raises(ValueError, match="must be finite, and errors 0 or more"):
        noise_ceiling_of_means(np.arange(5.0), -np.ones(5))
    with pytest.raises(ValueError, match="a ceiling needs 3 that differ"):
        noise_ceiling_of_means(np.ones(5), np.ones(5))
    with pytest.raises(ValueError, match="groups has 2 entries for 5 rows"):
        noise_ceiling_of_means(np.arange(5.0), np.ones(5), groups=np.arange(2))
    with pytest.raises(ValueError, match="level=95"):
        noise_ceiling_of_means(np.arange(5.0), np.ones(5), level=95.0)


def test_tables_lists_and_wrong_shapes() -> None:
    ratings = np.random.default_rng(0).normal(size=(30, 1)) + np.random.default_rng(1).normal(size=(30, 4))
    found = noise_ceiling(ratings, draws=50)
    assert unwrap(noise_ceiling)(pd.DataFrame(ratings), draws=50) == found
    assert unwrap(noise_ceiling)(ratings.tolist(), draws=50) == found
    without = noise_ceiling(ratings, splits=0, draws=50)
    assert without.ceiling == found.ceiling
    assert np.isnan(without.split_half)
    for bad, message in (
        ({"ratings": ratings[:, 0]}, r"shape \(30,\); give a table"),
        ({"ratings": ratings, "splits": -1}, "splits=-1"),
        ({"ratings": ratings, "draws": 0}, "draws=0"),
        ({"ratings": ratings, "groups": np.array([None, *range(29)], dtype=object)}, "no key for row 0"),
        ({"ratings": ratings, "groups": np.arange(29)}, "29 entries for 30 rows"),
    ):
        with pytest.raises(ValueError, match=message):
            unwrap(noise_ceiling)(**bad)
    with pytest.raises(ValueError, match=r"shape \(3,\), errors \(2,\)"):
        unwrap(noise_ceiling_of_means)(np.arange(3.0), np.ones(2))
