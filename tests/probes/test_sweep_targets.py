"""Sweeps of classes and of numbers, with other probes, control tasks and baselines."""

from inspect import unwrap

import numpy as np
import pandas as pd
import pytest
import torch

from microtome.capture.activations import Activations
from microtome.probes import site_blocks as site_blocks_module
from microtome.probes.methods import probe_method
from microtome.probes.permutation import best_site_null, group_permutations, ridge_statistic
from microtome.probes.sweep import sweep
from microtome.probes.sweep_result import Sweep
from microtome.probes.target import target_of

QUICK = {"folds": 3, "inner_folds": 2, "permutations": 60, "bootstraps": 100, "progress": False}
N = 180


@pytest.fixture(scope="module")
def acts() -> Activations:
    """resid_post.1 tells three classes, resid_post.2 a number, resid_post.0 the token and nothing of the labels."""
    rng = np.random.default_rng(0)
    classes, numbers, token = rng.permutation(np.arange(N) % 3), rng.normal(size=N), rng.integers(0, 6, N)
    arrays = {f"resid_post.{layer}": rng.normal(size=(N, 12)) for layer in range(3)}
    arrays["resid_post.0"][:, :6] += 4 * np.eye(6)[token]
    arrays["resid_post.1"][:, :3] += 2 * np.eye(3)[classes]
    arrays["resid_post.2"][:, 4] += 2 * numbers
    words = np.array(["red apples", "green pears", "blue plums"])
    rows = pd.DataFrame(
        {
            "kind": np.array(["a", "b", "c"])[classes],
            "is_b": classes == 1,
            "rating": numbers,
            "token": [f"t{t}" for t in token],
            "string": [f"number {i} of the {words[c]}" for i, c in enumerate(classes)],
        }
    )
    return Activations.from_arrays(arrays, rows=rows)


@pytest.mark.parametrize("probe", [None, "ridge", "lda", "mass_mean", "mass_mean_corrected"])
@pytest.mark.parametrize(("label", "site"), [("is_b", 1), ("kind", 1), ("rating", 2)])
def test_the_planted_site_is_found(acts, probe, label, site, tmp_path) -> None:
    if label == "rating" and probe not in (None, "ridge"):
        with pytest.raises(ValueError, match=f"probe='{probe}' for a target of numbers: give one of ridge"):
            sweep(acts, label, groups="rows", probe=probe, **QUICK)
        return
    result = sweep(acts, label, groups="rows", probe=probe, **QUICK)
    best = result.best(3)
    name = {"rating": "r2"}.get(label, "auroc")
    assert result.measure == name
    assert best["site"][0] == f"resid_post.{site}"
    assert best[name][0] > 0.7
    assert best["p_best_site"][0] < 0.05
    assert (best["p_best_site"][1:] > 0.05).all()
    assert (best[name][1:] < {"rating": 0.1}.get(label, 0.62)).all()
    assert abs(best[f"control_{name}"][0] - {"rating": 0.0}.get(label, 0.5)) < 0.16
    assert set(result.selected.sites) == {f"resid_post.{site}"}
    again = Sweep.load(result.save(tmp_path / "sweep"))
    pd.testing.assert_frame_equal(again.table, result.table)
    assert (again.kind, again.classes) == (result.kind, result.classes)
    shape = (3, N, 3) if label == "kind" else (3, N)
    assert again.decision(acts).shape == shape
    assert repr(result).count(name.upper()) == 1
    assert result.plot()["layer_curve"].data


def test_the_control_task_is_read_where_the_token_is(acts) -> None:
    table = sweep(acts, "kind", groups="rows", **QUICK).table.set_index("site")
    assert table.loc["resid_post.0", "control_task_auroc"] > 0.9
    assert table.loc["resid_post.1", "control_task_auroc"] < 0.65
    assert table.loc["resid_post.1", "control_task_selectivity"] > 0.2
    assert table.loc["resid_post.0", "control_auroc"] < 0.62


def test_types_are_given_left_out_or_too_rare(acts) -> None:
    by_row = acts.rows.assign(token=[f"t{i}" for i in range(N)])
    rare = Activations.from_arrays({"resid_post.1": acts["resid_post.1"]}, rows=by_row)
    result = sweep(rare, "is_b", groups="rows", **QUICK)
    assert result.provenance["data"]["control_task"]["reason"] == "types come back too seldom"
    assert "control_task_auroc" not in result.table
    assert result.control_task_scores.numel() == 0
    assert "control_task_auroc" not in sweep(acts, "is_b", groups="rows", types=None, **QUICK).table
    full_stops = acts.rows.assign(token=np.where(np.arange(N) % 10 < 7, ".", acts.rows["token"]))
    alike = Activations.from_arrays({"resid_post.1": acts["resid_post.1"]}, rows=full_stops)
    result = sweep(alike, "is_b", groups="rows", **QUICK)
    assert result.provenance["data"]["control_task"]["reason"] == "most rows are of one type"
    assert "control_task_auroc" not in result.table
    given = sweep(rare, "is_b", groups="rows", types=np.arange(N) // 9, **QUICK)
    assert given.provenance["data"]["control_task"] == {
        "made": True,
        "types": 20,
        "coverage": 1.0,
        "share_of_largest_type": 0.05,
    }
    with pytest.raises(ValueError, match="are of one type"):
        sweep(rare, "is_b", groups="rows", types=["all"] * N, **QUICK)
    with pytest.raises(KeyError, match="types='colour' is no column"):
        sweep(rare, "is_b", groups="rows", types="colour", **QUICK)


def test_baselines_say_what_the_words_tell(acts) -> None:
    result = sweep(acts, "kind", groups="rows", **QUICK)
    table = result.baselines.set_index("baseline")
    assert set(table.index) >= {"bag", "length", "token", "majority"}
    assert table.loc["bag", "accuracy"] > 0.95
    assert table.loc["token", "auroc"] < 0.62
    assert table.loc["majority", "accuracy"] == pytest.approx(1 / 3, abs=0.02)
    assert sweep(acts, "kind", groups="rows", baselines=False, **QUICK).baselines.empty


def test_balanced_classes_move_the_threshold_and_not_the_order() -> None:
    rng = np.random.default_rng(3)
    label = np.arange(400) % 8 == 0
    features = rng.normal(size=(400, 6)) + label[:, None] * 0.7
    plain, level = (sweep(features, label, groups="rows", class_weight=w, **QUICK).table for w in (None, "balanced"))
    assert level["balanced_accuracy"][0] > plain["balanced_accuracy"][0] + 0.1
    assert level["auroc"][0] == pytest.approx(plain["auroc"][0], abs=0.03)
    assert sweep(features, label, groups="rows", probe="sparse_2", **QUICK).coef("features").count_nonzero() == 2
    with pytest.raises(ValueError, match="probe='sparse_K' for a target of binary: give one of"):
        sweep(features, label, groups="rows", probe="sparse_K", **QUICK)
    with pytest.raises(ValueError, match="class_weight='balanced' is for the logistic probe"):
        sweep(features, label, groups="rows", probe="lda", class_weight="balanced", **QUICK)


def test_plain_tables_and_arrays_are_features() -> None:
    rng = np.random.default_rng(0)
    label = np.arange(N) % 2 == 0
    table = pd.DataFrame(rng.normal(size=(N, 4)) + label[:, None], columns=list("wxyz"))
    from_table, from_array, from_tensor = (
        sweep(features, label, groups="rows", **QUICK)
        for features in (table, table.to_numpy(), torch.tensor(table.to_numpy()))
    )
    assert from_table.table["site"].tolist() == ["features"]
    assert torch.equal(from_table.scores, from_array.scores)
    assert torch.equal(from_table.scores, from_tensor.scores)
    with pytest.raises(TypeError, match=r"columns \['name'\] of the table hold no numbers"):
        sweep(table.assign(name="n"), label, groups="rows", **QUICK)


def test_large_sites_are_read_in_chunks(acts, monkeypatch) -> None:
    whole = sweep(acts, "kind", groups="rows", probe="lda", **QUICK | {"permutations": 0})
    monkeypatch.setattr(site_blocks_module, "LARGE", 1000)
    monkeypatch.setattr(site_blocks_module, "CHUNK", 1000)
    parts = sweep(acts, "kind", groups="rows", probe="lda", **QUICK | {"permutations": 0})
    torch.testing.assert_close(parts.scores, whole.scores, rtol=0, atol=1e-9)
    with pytest.raises(ValueError, match=r'resid_post\.0 takes .* Give probe="lda" or "ridge"'):
        sweep(acts, "kind", groups="rows", **QUICK | {"permutations": 0})
    with pytest.raises(ValueError, match="permutations=60 needs it in memory"):
        sweep(acts, "kind", groups="rows", probe="lda", **QUICK)


def test_classes_and_numbers_are_shuffled_as_two_classes_are() -> None:
    rng = np.random.default_rng(0)
    groups = np.repeat(np.arange(40), 3)
    test = (groups % 4 == np.arange(4)[:, None]).astype(bool)
    per_group, per_row = np.repeat(rng.normal(size=40), 3), rng.integers(0, 3, 120)
    for labels in (per_group, per_row):
        shuffled = group_permutations(labels, groups, test, permutations=30, seed=0)
        assert shuffled.dtype == labels.dtype
        assert (shuffled != labels).any(axis=1).all()
        for rows in test:
            assert np.array_equal(np.sort(shuffled[:, rows]), np.tile(np.sort(labels[rows]), (30, 1)))
    by_group = group_permutations(per_group, groups, test, permutations=30, seed=0).reshape(30, 40, 3)
    assert (by_group == by_group[..., :1]).all()


def test_arrangements_of_classes_are_counted() -> None:
    # one fold, 4 rows of 3 classes: 4! / 2! = 12 arrangements, too few
    labels, test = np.array([0, 0, 1, 2]), np.ones((1, 4), dtype=bool)
    with pytest.raises(ValueError, match=r"Only 12 arrangement\(s\)"):
        group_permutations(labels, np.arange(4), test, permutations=5, seed=0)
    # two groups of two rows: exchange them (2) and turn each (1 and 2): 4
    with pytest.raises(ValueError, match=r"Only 4 arrangement\(s\)"):
        group_permutations(labels, np.arange(4) // 2, test, permutations=5, seed=0)


@pytest.mark.parametrize("kind", ["classes", "numbers"])
def test_family_wise_error_of_other_targets(kind) -> None:
    rejections = 0
    for seed in range(150):
        rng = np.random.default_rng(seed)
        labels = rng.permutation(np.arange(60) % 3) if kind == "classes" else rng.normal(size=60)
        test = np.arange(60) % 4 == np.arange(4)[:, None]
        shuffled = group_permutations(labels, np.arange(60), test, permutations=39, seed=seed)
        labelled = torch.from_numpy(np.concatenate([labels[None], shuffled]))
        features = torch.tensor(rng.normal(size=(6, 60, 5)))
        null = best_site_null(ridge_statistic(features, labelled, torch.from_numpy(test), kind=kind))
        rejections += int(null.p_value.min() <= 0.05)
    assert rejections <= 17  # of 150 at 5 %: exceeded in one world of a thousand


def test_names_there_are_not_are_refused():
    with pytest.raises(ValueError, match="target='class'; give one of binary, classes, numbers"):
        unwrap(target_of)(np.arange(40) % 2, n_rows=40, kind="class")
    for weight in ({0: 1.0, 1: 5.0}, "even"):
        with pytest.raises(ValueError, match="give None or 'balanced'"):
            unwrap(probe_method)("logistic", "binary", class_weight=weight)
    for strengths in (1.0, "0.1"):
        with pytest.raises(ValueError, match=r"one as \(value,\)"):
            unwrap(sweep)(np.ones((40, 2)), np.arange(40) % 2, groups="rows", strengths=strengths)


def test_decision_takes_what_the_sweep_takes():
    rows = np.random.default_rng(0).normal(size=(40, 2))
    options = {"groups": "rows", "permutations": 0, "bootstraps": 100, "folds": 3, "inner_folds": 2, "progress": False}
    found = sweep(rows, np.arange(40) % 2, **options)
    scores = found.decision(rows)
    assert scores.shape == (1, 40)
    for other in (torch.from_numpy(rows), pd.DataFrame(rows), {"features": rows}):
        assert torch.equal(found.decision(other), scores)
