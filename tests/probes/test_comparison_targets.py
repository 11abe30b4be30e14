"""Comparisons of classes, of numbers and with baselines: against re-scoring after every exchange."""

from itertools import product

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.metrics import log_loss, roc_auc_score
from torch import Tensor

from microtome.probes.comparison import compare_scores, compare_sites, compare_sweeps
from microtome.probes.metrics import average_ranks
from microtome.probes.sweep import sweep

CASES = [(k, m) for k, ms in (("classes", ("auroc", "accuracy", "bits")), ("numbers", ("r2",))) for m in ms]
QUICK = {"groups": "rows", "permutations": 0, "bootstraps": 100, "progress": False, "folds": 3, "inner_folds": 2}


def case(kind: str, *, n: int = 48, per_group: int = 6, pairs: int = 3, seed: int = 0) -> tuple[Tensor, ...]:
    """Two lists of scores per pair, the first of the last pair better; groups in two folds, some scores tied."""
    generator = torch.Generator().manual_seed(seed)
    if kind == "numbers":
        truth = torch.randn(n, generator=generator, dtype=torch.float64)
        signal = truth
    else:
        truth = torch.randperm(n, generator=generator) % 3
        signal = torch.nn.functional.one_hot(truth, 3).double()
    noise = torch.randn(2, pairs, *signal.shape, generator=generator, dtype=torch.float64).round(decimals=1)
    first, second = signal + noise
    first[-1] = signal + 0.2 * noise[0, -1]
    groups = torch.arange(n) // per_group
    return first, second, truth, groups, groups % 2 == torch.arange(2)[:, None]


def value(scores: Tensor, truth: Tensor, test: Tensor, metric: str) -> float:
    """The metric of one probe by scikit-learn."""
    if metric == "r2":
        means = torch.empty_like(truth)
        for rows in test:
            means[rows] = truth[~rows].mean()
        return float(1 - (truth - scores).square().sum() / (truth - means).square().sum())
    if metric == "accuracy":
        return float((scores.argmax(-1) == truth).double().mean())
    if metric == "bits":
        return log_loss(truth, scores.softmax(-1)) / np.log(2)
    of_classes = []
    for code in range(3):
        won, pairs = 0.0, 0
        for rows in test:
            is_it = truth[rows] == code
            n_pairs = int(is_it.sum()) * int((~is_it).sum())
            won += roc_auc_score(is_it, scores[rows, code]) * n_pairs
            pairs += n_pairs
        of_classes.append(won / pairs)
    return float(np.mean(of_classes))


def exchangeable(scores: Tensor, test: Tensor, metric: str) -> Tensor:
    """Ranks within the fold, of each class, where the metric knows nothing else."""
    if metric != "auroc":
        return scores
    ranks = torch.empty_like(scores)
    for rows in test:
        ranks[rows] = average_ranks(scores[rows].T.contiguous()).T
    return ranks


@pytest.mark.parametrize(("kind", "metric"), CASES)
def test_values_and_p_are_those_of_scoring_every_exchange_again(kind, metric) -> None:
    first, second, truth, groups, test = case(kind, n=36, pairs=2)
    permutations = 120
    table = compare_scores(
        first, second, truth, groups, test, metric=metric, draws=100, permutations=permutations, stretch=1
    )
    generator = torch.Generator().manual_seed(0)
    signs = torch.randint(0, 2, (permutations, 6), generator=generator) * 2 - 1
    by_signs, found = {}, []
    for pair in range(len(first)):
        one, other = first[pair], second[pair]
        of_both = [value(scores, truth, test, metric) for scores in (one, other)]
        np.testing.assert_allclose(table.loc[pair, ["first", "second"]].tolist(), of_both, atol=1e-9)
        one, other = (exchangeable(scores, test, metric) for scores in (one, other))
        for pattern in product((-1, 1), repeat=6):
            turned = (torch.tensor(pattern)[groups] < 0).reshape(-1, *[1] * (one.ndim - 1))
            left, right = torch.where(turned, other, one), torch.where(turned, one, other)
            by_signs[pair, pattern] = value(left, truth, test, metric) - value(right, truth, test, metric)
        everything = np.array([by_signs[pair, pattern] for pattern in product((-1, 1), repeat=6)])
        deviation = np.sqrt((everything**2).mean())
        drawn = np.abs([by_signs[pair, tuple(row.tolist())] for row in signs])
        found.append((drawn, deviation))
    largest = np.max([drawn / deviation for drawn, deviation in found], axis=0)
    for pair, (drawn, deviation) in enumerate(found):
        reached = abs(table["difference"][pair]) - 1e-9
        assert table["p_value"][pair] == pytest.approx((1 + (drawn >= reached).sum()) / (permutations + 1))
        expected = (1 + (largest >= reached / deviation).sum()) / (permutations + 1)
        assert table["p_any"][pair] == pytest.approx(expected)


@pytest.mark.parametrize(("kind", "metric"), CASES)
def test_signs_turn_with_the_order_and_copies_change_nothing(kind, metric) -> None:
    first, second, *rest = case(kind, n=120)
    few = {"metric": metric, "draws": 200, "permutations": 199}
    table, turned = compare_scores(first, second, *rest, **few), compare_scores(second, first, *rest, **few)
    np.testing.assert_allclose(turned["difference"], -table["difference"], atol=1e-12)
    np.testing.assert_allclose(turned["low"], -table["high"], atol=1e-5)
    np.testing.assert_allclose(turned[["p_value", "p_any"]], table[["p_value", "p_any"]])
    assert ((table["low"] <= table["difference"]) & (table["difference"] <= table["high"])).all()
    axes = [1, 1, 0, 0, 1]
    copies = [x.repeat_interleave(4, dim=axis) for x, axis in zip((first, second, *rest), axes, strict=True)]
    copied = compare_scores(*copies, **few)
    np.testing.assert_allclose(copied["high"] - copied["low"], table["high"] - table["low"], rtol=2e-3)
    np.testing.assert_allclose(copied["p_value"], table["p_value"])


def test_equal_probes_are_level_for_classes_and_numbers() -> None:
    for kind in ("classes", "numbers"):
        rejected = []
        for seed in range(100):
            first, second, *rest = case(kind, n=60, per_group=2, pairs=2, seed=seed)
            table = compare_scores(first[:1], second[:1], *rest, draws=100, permutations=199, stretch=1)
            rejected.append(table["p_value"][0] <= 0.05)
        assert np.mean(rejected) < 0.12


def test_a_noisy_pair_does_not_hide_a_sure_one() -> None:
    generator = torch.Generator().manual_seed(0)
    truth = torch.randn(200, generator=generator, dtype=torch.float64)
    noise = torch.randn(3, 200, generator=generator, dtype=torch.float64)
    first = torch.stack([0.9 * truth, 20 * noise[0]])
    second = torch.stack([0.8 * truth, 20 * noise[1]])
    groups = torch.arange(200)
    test = groups % 4 == torch.arange(4)[:, None]
    table = compare_scores(first, second, truth, groups, test, draws=100, permutations=199, stretch=1)
    assert table["difference"].abs()[1] > 3 * table["difference"][0] > 0  # unstudentised, p_any would be near 1
    assert table["p_any"][0] == table["p_value"][0] == 1 / 200
    assert table["p_any"][1] >= table["p_value"][1] > 0.05
    same = compare_scores(
        first, torch.stack([second[0], first[1]]), truth, groups, test, draws=100, permutations=199, stretch=1
    )
    assert same.loc[1, ["difference", "p_value", "p_any"]].tolist() == [0, 1, 1]
    assert same["p_any"][0] == 1 / 200


def acts(n: int = 150) -> tuple[dict, pd.DataFrame]:
    rng = np.random.default_rng(0)
    codes, rating = rng.permutation(np.arange(n) % 3), rng.normal(size=n)
    shown = np.eye(4)[codes] + rating[:, None] * np.eye(4)[3]
    sites = {f"resid_post.{layer}": rng.normal(size=(n, 4)) + 1.5 * layer * shown for layer in range(3)}
    words = np.array(["red apples", "green pears", "blue plums"])
    clear = [f"{words[c if rng.random() < 0.5 else rng.integers(3)]} of row {i}" for i, c in enumerate(codes)]
    labels = {"yes": codes == 1, "kind": np.array(["a", "b", "c"])[codes], "rating": rating}
    return sites, pd.DataFrame(labels | {"text": clear})


@pytest.mark.parametrize("label", ["yes", "kind", "rating"])
def test_a_site_is_compared_with_the_words(label, tmp_path) -> None:
    sites, rows = acts()
    result = sweep(sites, rows[label].to_numpy(), texts=rows["text"].tolist(), **QUICK)
    names = result.baselines["baseline"].tolist()
    assert result.baseline_scores.shape == (len(names), *result.scores.shape[1:])
    few = {"draws": 200, "permutations": 199}
    pairs = [("resid_post.2", "bag"), ("length", "resid_post.0"), ("bag", "majority")]
    table = compare_sites(result, pairs, **few)
    assert table["first_site"].tolist() == ["resid_post.2", "length", "bag"]
    main = result.measure
    of_baseline, of_site = result.baselines.set_index("baseline")[main], result.table.set_index("site")[main]
    known = pd.concat([of_baseline, of_site])
    for side in ("first", "second"):
        np.testing.assert_allclose(table[side], known[table[f"{side}_site"]], atol=1e-9)
    assert table["difference"][0] > 0.02
    assert table["p_value"][0] < 0.05
    again = type(result).load(result.save(tmp_path / "sweep"))
    pd.testing.assert_frame_equal(compare_sites(again, pairs, **few), table)
    with pytest.raises(KeyError, match=r"words was not probed.*baselines are bag, length, majority"):
        compare_sites(result, [("resid_post.2", "words")])
    bare = sweep(sites, rows[label].to_numpy(), baselines=False, **QUICK)
    assert bare.baseline_scores.numel() == 0
    with pytest.raises(KeyError, match=r"bag was not probed.*keeps no baselines"):
        compare_sites(bare, [("resid_post.2", "bag")])
    both = compare_sweeps(result, bare, **few)
    assert (both["difference"] == 0).all()
    assert (both["p_any"] == 1).all()


def test_bad_input_is_explained() -> None:
    first, second, *rest = case("numbers")
    with pytest.raises(ValueError, match="metric='auroc' for a target of numbers; give 'r2'"):
        compare_scores(first, second, *rest, metric="auroc")
    with pytest.raises(ValueError, match=r"truth is torch\.float32"):
        compare_scores(first, second, rest[0].float(), *rest[1:])
    classes, others, *rest = case("classes")
    with pytest.raises(ValueError, match="metric='r2' for a target of classes; give 'auroc' or 'accuracy' or 'bits'"):
        compare_scores(classes, others, *rest, metric="r2")
    with pytest.raises(ValueError, match=r"they are \[pair, example, class\]"):
        compare_scores(classes[..., 0], others[..., 0], *rest)
    sites, rows = acts()
    one, other = (sweep(sites, rows[name].to_numpy(), **QUICK) for name in ("yes", "kind"))
    with pytest.raises(ValueError, match="other labels, groups or folds"):
        compare_sweeps(one, other)
