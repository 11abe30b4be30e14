import json

import numpy as np
import pandas as pd
import pytest
import torch

from microtome.capture.activations import Activations
from microtome.probes.groups import merged_groups
from microtome.probes.nested_fit import nested_fits
from microtome.probes.sweep import sweep
from microtome.probes.sweep_result import Sweep

# few and cheap: what is tested here does not depend on how many
QUICK = {
    "strengths": (0.001, 0.1),
    "folds": 4,
    "inner_folds": 2,
    "permutations": 99,
    "bootstraps": 200,
    "progress": False,
}


def noise(n, *shape, seed=0):
    return torch.randn(n, *shape, generator=torch.Generator().manual_seed(seed))


def balanced(n, seed=0):
    return np.random.default_rng(seed).permutation(np.arange(n) % 2 == 0)


@pytest.fixture(scope="module")
def planted():
    """One head of thirty carries the label; so does one of two residual layers, less."""
    labels = balanced(200)
    arrays = {f"z.{layer}": noise(200, 10, 6, seed=layer) for layer in range(3)}
    arrays |= {f"resid_post.{layer}": noise(200, 12, seed=10 + layer) for layer in range(2)}
    arrays["z.1"][:, 7, 2] += torch.from_numpy(labels) * 1.6
    arrays["resid_post.1"][:, 3] += torch.from_numpy(labels) * 1.0
    rows = pd.DataFrame({"text": np.arange(200), "positive": labels, "question": np.arange(200) // 2})
    activations = Activations.from_arrays(arrays, rows=rows)
    return activations, sweep(activations, "positive", groups="question", **QUICK | {"permutations": 199})


def test_the_planted_head_is_first_and_only(planted):
    _, result = planted
    best = result.best(2)
    assert best["site"].tolist() == ["z.1.7", "resid_post.1"]
    assert best["p_best_site"][0] <= 0.01
    others = result.table[~result.table["site"].isin(["z.1.7", "resid_post.1"])]
    assert (others["p_best_site"] > 0.05).all()
    assert others["auroc"].mean() == pytest.approx(0.5, abs=0.03)
    assert set(result.selected.sites) == {"z.1.7"}


def test_shuffled_labels_score_half_everywhere(planted):
    _, result = planted
    assert result.table["control_auroc"].mean() == pytest.approx(0.5, abs=0.03)
    top = result.table.set_index("site").loc["z.1.7"]
    assert abs(top["control_auroc"] - 0.5) < 0.13
    assert top["selectivity"] > 0.2
    shuffled, real = result.control_truth, result.truth
    assert (shuffled != real).any()
    for rows in result.test:
        assert shuffled[rows].sum() == real[rows].sum()


def test_the_table_has_one_row_per_site_and_head(planted):
    _, result = planted
    expected = [f"z.{layer}.{head}" for layer in range(3) for head in range(10)] + ["resid_post.0", "resid_post.1"]
    assert result.table["site"].tolist() == expected
    assert result.scores.shape == (32, 200)
    promised = "site kind layer head auroc auroc_low auroc_high accuracy accuracy_low accuracy_high control_auroc "
    promised += "control_accuracy selectivity p_best_site strength"
    assert set(promised.split()) <= set(result.table.columns)
    assert result.coef("z.1.7").shape == (6,)
    assert result.coef("z.1.7").abs().argmax().item() == 2
    assert result.coef("resid_post.1").shape == (12,)


def test_groups_stay_whole_and_every_row_is_scored(planted):
    _, result = planted
    assert (result.test.sum(dim=0) == 1).all()
    for rows in result.test:
        assert not np.isin(result.groups[rows], result.groups[~rows]).any()
    assert result.scores.isfinite().all()


def test_each_probe_is_fitted_as_alone(planted):
    activations, result = planted
    alone = sweep(activations, "positive", groups="question", sites=["z.1.7"], **QUICK | {"permutations": 199})
    assert torch.equal(alone.test, result.test)
    assert torch.equal(alone.control_truth, result.control_truth)
    row = result.table["site"].tolist().index("z.1.7")
    torch.testing.assert_close(alone.scores[0], result.scores[row], rtol=0, atol=1e-6)
    columns = [name for name in alone.table.columns if name != "p_best_site"]
    pd.testing.assert_frame_equal(
        alone.table[columns], result.table.loc[[row], columns].reset_index(drop=True), atol=1e-6, rtol=0
    )
    # the only site has no rivals, so luck has fewer chances
    assert alone.table["p_best_site"][0] <= result.table["p_best_site"][row]


def test_same_seed_same_sweep():
    arrays, labels = {"z.0": noise(60, 2, 3)}, balanced(60)
    first, second = (sweep(arrays, labels, groups="rows", **QUICK, seed=4) for _ in range(2))
    pd.testing.assert_frame_equal(first.table, second.table, rtol=0, atol=0)
    assert torch.equal(first.scores, second.scores)
    assert torch.equal(first.null, second.null)
    assert first.provenance["data"] == second.provenance["data"]
    other = sweep(arrays, labels, groups="rows", **QUICK, seed=5)
    assert not torch.equal(other.test, first.test)


def test_intervals_cover_chance_on_noise():
    # each site is an independent draw of features; the labels are shared
    arrays = {f"noise.{number}": noise(120, 4, seed=number) for number in range(100)}
    table = sweep(arrays, balanced(120), groups="rows", **QUICK | {"permutations": 0}).table
    for metric in ("auroc", "control_auroc", "accuracy"):
        covered = ((table[f"{metric}_low"] <= 0.5) & (table[f"{metric}_high"] >= 0.5)).mean()
        assert covered >= 0.90, metric  # 95 % nominal: fewer than 90 of 100 happens in 1 % of worlds
    # without the widening for cross-validation the same intervals fall short
    narrow = (table["auroc"] - 0.5).abs() <= (table["auroc_high"] - table["auroc_low"]) / 2 / 1.5
    assert narrow.mean() < 0.93


def test_twins_are_refused_as_rows_and_score_half_as_groups():
    entity = np.repeat(np.arange(80), 2)
    labels = np.tile([True, False], 80)
    features = noise(80, 24)[entity] + 0.4 * noise(160, 24, seed=1)
    texts = [f"The city of number {number} is large." for number in entity]
    with pytest.raises(ValueError, match=r"80 text value\(s\) occur in more than one group"):
        sweep({"resid_post.0": features}, labels, groups="rows", texts=texts, **QUICK)
    with pytest.raises(ValueError, match="80 entity key in column 'city' value"):
        sweep({"resid_post.0": features}, labels, groups="rows", entities={"city": entity}, **QUICK)
    leaky = sweep({"resid_post.0": features}, labels, groups="rows", **QUICK).table["auroc"][0]
    honest = sweep({"resid_post.0": features}, labels, groups=merged_groups("rows", texts), texts=texts, **QUICK)
    assert leaky < 0.4
    assert honest.table["auroc"][0] == pytest.approx(0.5, abs=0.08)
    assert honest.provenance["data"]["texts_checked"]
    # a pair's labels flip together in the shuffles, and stay one true and one false
    assert (honest.control_truth.reshape(80, 2).sum(dim=1) == 1).all()


def test_all_positions_of_a_text_need_its_group():
    text = np.repeat(np.arange(40), 3)
    rows = pd.DataFrame({"text": text, "position": np.tile([0, 1, 2], 40), "string": [f"text {t}" for t in text]})
    activations = Activations.from_arrays({"resid_post.0": noise(120, 4)}, rows=rows)
    labels = balanced(40)[text]
    with pytest.raises(ValueError, match="40 text value"):
        sweep(activations, labels, groups="rows", **QUICK)
    result = sweep(activations, labels, groups="text", **QUICK)
    assert result.groups.unique().numel() == 40
    assert (result.control_truth.reshape(40, 3).float().std(dim=1) == 0).all()


def test_tokens_of_unlike_texts_get_a_control_that_is_none_of_the_real_label():
    # one label per text, every text of another length: kept to their lengths, no label would move
    text = np.repeat(np.arange(60), np.random.default_rng(0).permutation(60) + 3)
    labels = balanced(60)[text]
    features = noise(60, 8)[text] + 0.3 * noise(len(text), 8, seed=1)
    features[:, 0] += torch.from_numpy(labels) * 4.0
    rows = pd.DataFrame({"text": text, "position": 0, "string": [f"text {t}" for t in text]})
    activations = Activations.from_arrays({"resid_post.0": features}, rows=rows)
    controls = []
    for seed in range(8):
        result = sweep(activations, labels, groups="text", **QUICK, seed=seed)
        assert result.table["auroc"][0] > 0.95
        assert result.table["p_best_site"][0] == 0.01
        controls.append(result.table["control_auroc"][0])
    assert np.mean(controls) == pytest.approx(0.5, abs=0.12)


def test_scores_are_those_of_the_nested_fit():
    features, labels = noise(80, 5), balanced(80)
    result = sweep({"resid_post.0": features}, labels, groups="rows", **QUICK)
    labellings = torch.stack([result.truth, result.control_truth])
    settings = result.provenance["settings"]
    assert set(map(tuple, settings["strengths"].values())) == {(0.001, 0.1)}
    assert settings["interval_stretch"] == pytest.approx((1 + 4 / 3) ** 0.5)
    # the inner folds are not kept: any inner folds give the same scores when there is one strength to choose from
    single = sweep({"resid_post.0": features}, labels, groups="rows", **QUICK | {"strengths": (0.01,)})
    inner = torch.stack([~rows[None] & (torch.arange(80) % 2 == torch.arange(2)[:, None]) for rows in single.test])
    [fit] = nested_fits(features[None], labellings, single.test, inner, (0.01,))
    torch.testing.assert_close(single.scores[0], fit.scores[0], rtol=0, atol=1e-3)
    torch.testing.assert_close(single.control_scores[0], fit.scores[1], rtol=0, atol=1e-3)
    assert (single.fold_strengths == 0.01).all()


def test_provenance_is_json_and_survives_saving(planted, tmp_path):
    _, result = planted
    facts = json.loads(json.dumps(result.provenance, allow_nan=False))
    assert facts["data"] | {} == {
        "rows": 200,
        "groups": 100,
        "rows_declared_independent": False,
        "texts_checked": False,
        "control_task": {"made": False, "reason": "no types"},
        "classes": ["False", "True"],
        "rows_of_class": [100, 100],
        "labels_sha256": facts["data"]["labels_sha256"],
        "folds_sha256": facts["data"]["folds_sha256"],
    }
    assert facts["settings"]["seed"] == 0
    assert facts["activations"] == {"source": "arrays"}
    result.save(tmp_path / "sweep")
    pd.testing.assert_frame_equal(Sweep.load(tmp_path / "sweep").table, result.table)


def test_progress_can_be_silent(capsys):
    arrays, labels = {"a.0": noise(40, 2)}, balanced(40)
    sweep(arrays, labels, groups="rows", **QUICK)
    assert capsys.readouterr().err == ""
    sweep(arrays, labels, groups="rows", **QUICK | {"progress": True})
    assert "probes" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"labels": np.ones(40)}, ValueError, r"holds 1 different value \(1\.0\)\. A probe needs"),
        ({"labels": np.arange(40)}, ValueError, r"40 whole numbers .* Say which: target="),
        ({"labels": np.where(np.arange(40) == 3, np.nan, np.arange(40) % 2)}, ValueError, r"first: row 3"),
        ({"labels": balanced(39)}, ValueError, r"labels has shape \(39,\), activations 40 rows"),
        ({"labels": "polarity"}, KeyError, "labels='polarity' is no column of activations.rows"),
        ({"groups": "question"}, KeyError, 'question.* is no column.* or "rows", or pass one value'),
        ({"groups": np.arange(39)}, ValueError, "groups has 39 entries for 40 rows"),
        ({"groups": np.arange(40) // 20}, ValueError, "2 groups cannot fill 4 folds"),
        ({"strengths": (0.1, 0.01)}, ValueError, r"strengths=\(0\.1, 0\.01\); give positive values"),
        ({"strengths": (0.0, 1.0)}, ValueError, "give positive values"),
        ({"strengths": ()}, ValueError, "give positive values"),
        ({"bootstraps": 0}, ValueError, "bootstraps=0"),
        ({"activations": {"a.0": torch.full((40, 2), torch.nan)}}, ValueError, r"a\.0 is NaN.*first in row 0"),
        ({"activations": {"a.0": torch.ones(40, 2)}}, ValueError, r"a\.0: every row has the same features"),
        ({"sites": ["a.9"]}, KeyError, r"a\.9 was not captured"),
        ({"texts": ["same"] * 40}, ValueError, r"'same' in groups 0, 1, 2"),
    ],
)
def test_errors_name_what_to_do(change, error, message):
    call = {"activations": {"a.0": noise(40, 2)}, "labels": balanced(40), "groups": "rows"} | QUICK | change
    with pytest.raises(error, match=message):
        sweep(call.pop("activations"), call.pop("labels"), **call)


def test_labels_that_only_shuffle_into_one_class_are_refused():
    # two positive groups in a sea of negatives: 4 folds cannot each test one
    labels, groups = np.arange(40) < 10, np.arange(40) // 5
    with pytest.raises(ValueError, match="hold no row of class True"):
        sweep({"a.0": noise(40, 2)}, labels, groups=groups, **QUICK)


def test_rows_of_one_text_and_texts_of_the_same_tokens_must_share_a_group():
    rng = np.random.default_rng(0)
    features = {"a.0": rng.normal(size=(120, 6))}
    labels = balanced(120)
    rows = pd.DataFrame({"text": np.repeat(np.arange(40), 3)})
    with pytest.raises(ValueError, match="text"):
        sweep(Activations.from_arrays(features, rows=rows), labels, groups="rows", **QUICK)
    alike = pd.DataFrame({"token_ids": [f"{n // 2} 7" for n in range(120)]})
    with pytest.raises(ValueError, match="7"):
        sweep(Activations.from_arrays(features, rows=alike), labels, groups="rows", **QUICK)
    sweep(Activations.from_arrays(features, rows=rows), labels, groups=rows["text"], **QUICK)


@pytest.mark.parametrize(("name", "value"), [("permutations", 19), ("bootstraps", 99)])
def test_too_few_draws_to_mean_anything(name, value):
    with pytest.raises(ValueError, match=f"{name}={value}"):
        sweep({"a.0": np.zeros((120, 2))}, balanced(120), groups="rows", **QUICK | {name: value})
