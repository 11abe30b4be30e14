from inspect import unwrap

import numpy as np
import pandas as pd
import pytest
import torch
from scipy.stats import kendalltau

from microtome.probes.bootstrap import bootstrap_accuracy
from microtome.probes.comparison import _drawn_means, compare_scores, compare_sites, compare_sweeps
from microtome.probes.metrics import fold_auroc, log_loss_bits
from microtome.probes.rank_stability import _tau, rank_stability
from microtome.probes.sweep import sweep


def case(n=300, *, gains=(0.0, 0.6), seed=0):
    """Scores of two probes per pair that err on the same rows; the first of pair k is better by gains[k]."""
    generator = torch.Generator().manual_seed(seed)
    positive = torch.rand(n, generator=generator) < 0.5
    shared = torch.randn(n, generator=generator, dtype=torch.float64) + positive
    own = 0.5 * torch.randn(2, len(gains), n, generator=generator, dtype=torch.float64)
    gain = torch.tensor(gains, dtype=torch.float64)[:, None] * (positive.double() - 0.5)
    groups = torch.arange(n) // 3
    test = groups % 5 == torch.arange(5)[:, None]
    return shared + own[0] + gain, shared + own[1], positive, groups, test


@pytest.mark.parametrize("metric", ["auroc", "accuracy", "bits"])
def test_differences_are_those_of_the_metric_and_signs_turn_with_the_order(metric):
    first, second, positive, groups, test = case()
    table = compare_scores(first, second, positive, groups, test, metric=metric, draws=400, permutations=199, stretch=1)
    values = {
        "auroc": lambda scores: fold_auroc(scores, positive, test),
        "accuracy": lambda scores: ((scores > 0) == positive).double().mean(-1),
        "bits": lambda scores: log_loss_bits(scores, positive),
    }[metric]
    np.testing.assert_allclose(table["first"], values(first))
    np.testing.assert_allclose(table["difference"], values(first) - values(second), atol=1e-12)
    assert ((table["low"] <= table["difference"]) & (table["difference"] <= table["high"])).all()
    turned = compare_scores(
        second, first, positive, groups, test, metric=metric, draws=400, permutations=199, stretch=1
    )
    np.testing.assert_allclose(turned["difference"], -table["difference"], atol=1e-12)
    np.testing.assert_allclose(turned["low"], -table["high"], atol=1e-6)
    np.testing.assert_allclose(turned["p_value"], table["p_value"])
    assert table["p_value"][1] == 1 / 200
    assert table["p_value"][0] > 0.05
    assert (table["p_any"] >= table["p_value"]).all()


def test_p_values_of_equal_probes_are_level():
    rejected = []
    for seed in range(200):
        first, second, *rest = case(n=90, gains=(0.0,), seed=seed)
        table = compare_scores(first, second, *rest, metric="auroc", draws=100, permutations=199, stretch=1)
        rejected.append(table["p_value"][0] <= 0.05)
    assert 0.01 < np.mean(rejected) < 0.095


def test_p_any_holds_for_the_family():
    rejected = []
    for seed in range(100):
        first, second, *rest = case(n=90, gains=(0.0,) * 12, seed=seed)
        table = compare_scores(first, second, *rest, metric="accuracy", draws=100, permutations=199, stretch=1)
        rejected.append([(table["p_any"] <= 0.05).any(), (table["p_value"] <= 0.05).any()])
    corrected, uncorrected = np.mean(rejected, axis=0)
    assert corrected < 0.12 < 0.2 < uncorrected


@pytest.mark.parametrize("metric", ["auroc", "accuracy", "bits"])
def test_ten_copies_of_every_row_in_its_group_change_nothing(metric):
    first, second, positive, groups, test = case(n=150)
    copies = [x.repeat_interleave(10, dim=-1) for x in (first, second, positive, groups, test)]
    alone = compare_scores(first, second, positive, groups, test, metric=metric, draws=300, permutations=199)
    copied = compare_scores(*copies, metric=metric, draws=300, permutations=199)
    np.testing.assert_allclose(copied["high"] - copied["low"], alone["high"] - alone["low"], rtol=1e-3)
    np.testing.assert_allclose(copied["p_value"], alone["p_value"])
    # the wrong answer: copies taken for independent rows
    as_rows = compare_scores(*copies[:3], torch.arange(1500), copies[4], metric=metric, draws=300, permutations=199)
    assert (as_rows["high"] - as_rows["low"] < 0.5 * (alone["high"] - alone["low"])).all()


def test_sites_and_sweeps_are_matched_by_name():
    rng = np.random.default_rng(0)
    positive = rng.permutation(np.arange(120) % 2 == 0)
    sites = {f"resid_post.{layer}": rng.normal(size=(120, 4)) + layer * positive[:, None] for layer in range(3)}
    options = {"groups": "rows", "permutations": 0, "bootstraps": 100, "progress": False}
    one = sweep(sites, positive, **options)
    noisy = {name: values + rng.normal(size=values.shape) for name, values in reversed(sites.items())}
    other = sweep(noisy | {"resid_post.9": sites["resid_post.0"]}, positive, **options)
    rest = one.truth, one.groups, one.test
    few = {"draws": 200, "permutations": 199}
    table = compare_sweeps(one, other, **few)
    assert table["site"].tolist() == list(sites)
    expected = compare_scores(one.scores, other.scores[[2, 1, 0]], *rest, **few)
    pd.testing.assert_frame_equal(table.drop(columns="site"), expected)
    np.testing.assert_allclose(table["first"], one.table["auroc"])
    table = compare_sites(one, [("resid_post.2", "resid_post.0")], **few)
    assert table.loc[0, ["first_site", "second_site"]].tolist() == ["resid_post.2", "resid_post.0"]
    expected = compare_scores(one.scores[2:], one.scores[:1], *rest, **few)
    pd.testing.assert_frame_equal(table.drop(columns=["first_site", "second_site"]), expected)
    assert table["p_value"][0] == 1 / 200
    with pytest.raises(KeyError, match=r"z\.9 was not probed"):
        compare_sites(one, [("z.9", "resid_post.0")])
    with pytest.raises(ValueError, match="other labels, groups or folds"):
        compare_sweeps(one, sweep(sites, positive, **options, seed=1))
    with pytest.raises(ValueError, match="share no site"):
        compare_sweeps(one, sweep({"attn_out.0": sites["resid_post.1"]}, positive, **options))


def test_drawn_means_weigh_groups_by_their_rows():
    right = torch.rand(3, 200, generator=torch.Generator().manual_seed(0)) < 0.7
    groups = (torch.arange(200) ** 0.5).long()
    drawn = _drawn_means(right.double(), groups, draws=50, seed=4)
    torch.testing.assert_close(drawn.float(), bootstrap_accuracy(right, groups, draws=50, seed=4))


def test_tau_is_scipys():
    rng = np.random.default_rng(0)
    for decimals in (8, 1):
        first, second = rng.normal(size=(2, 40)).round(decimals)
        second = (second + first).round(decimals)
        found = _tau(torch.from_numpy(first), torch.from_numpy(second)).item()
        assert found == pytest.approx(kendalltau(first, second).statistic)


def test_clear_rankings_are_stable_and_noise_is_not():
    generator = torch.Generator().manual_seed(0)
    positive = torch.rand(400, generator=generator) < 0.5
    noise = torch.randn(20, 400, generator=generator, dtype=torch.float64)
    clear = noise + 0.25 * torch.arange(20)[:, None] * positive
    groups, test = torch.arange(400), torch.arange(400) % 5 == torch.arange(5)[:, None]
    stable = rank_stability(clear, positive, groups, test, top=5, draws=100)
    unstable = rank_stability(noise, positive, groups, test, top=5, draws=100)
    assert stable.tau > 0.85 > 0.6 > unstable.tau
    assert stable.tau_low <= stable.tau <= stable.tau_high
    assert stable.jaccard > 0.7 > unstable.jaccard > unstable.jaccard_by_chance == 5 / 35
    assert stable.in_top.sum().item() == pytest.approx(5)
    assert stable.in_top[-2:].min() > 0.95
    assert stable.in_top[:10].max() < 0.05


def test_bad_input_is_explained():
    first, second, *rest = case()
    with pytest.raises(ValueError, match="draws=10"):
        compare_scores(first, second, *rest, draws=10)
    with pytest.raises(ValueError, match="NaN"):
        compare_scores(first * float("nan"), second, *rest)
    with pytest.raises(ValueError, match="top=2 of 2 probes"):
        rank_stability(first, *rest, top=2)
    with pytest.raises(ValueError, match="draws=3"):
        rank_stability(first, *rest, top=1, draws=3)


def test_other_metrics_and_lengths_are_refused():
    first, second, positive, groups, test = case()
    with pytest.raises(ValueError, match="metric='balanced_accuracy' for a target of binary; give 'auroc' or"):
        unwrap(compare_scores)(first, second, positive, groups, test, metric="balanced_accuracy")
    with pytest.raises(ValueError, match="give at least one pair, both alike"):
        unwrap(compare_scores)(first[:0], second[:0], positive, groups, test)
    with pytest.raises(ValueError, match=r"290 groups and folds \[5, 300\] for scores of 300 rows"):
        unwrap(compare_scores)(first, second, positive, groups[:290], test, metric="accuracy")
    with pytest.raises(ValueError, match=r"folds \[5, 290\] for scores of 300 rows"):
        unwrap(compare_scores)(first, second, positive, groups, test[:, :290], metric="accuracy")


def test_cross_validation_widens_the_interval_and_the_null():
    first, second, *rest = case()
    narrow, wide = (compare_scores(first, second, *rest, draws=100, permutations=199, stretch=s) for s in (1, None))
    assert (wide["p_value"] >= narrow["p_value"]).all()
    assert (wide["p_value"] > narrow["p_value"]).any()
    by = (wide["high"] - wide["difference"]) / (narrow["high"] - narrow["difference"])
    np.testing.assert_allclose(by, 1.5)  # five folds
