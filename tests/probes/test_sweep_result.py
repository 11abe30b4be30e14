import json
import math
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import save_file

from microtome.capture.activations import Activations
from microtome.probes import sweep_result
from microtome.probes.sweep_result import SelectedSite, Sweep


@pytest.fixture
def result():
    rng = np.random.default_rng(0)
    names = [f"z.{layer}.{head}" for layer in (0, 1) for head in range(3)] + ["resid_post.0", "resid_post.1"]
    auroc = rng.uniform(0.4, 0.9, 8)
    table = pd.DataFrame(
        {
            "site": names,
            "kind": ["z"] * 6 + ["resid_post"] * 2,
            "layer": pd.array([0, 0, 0, 1, 1, 1, 0, 1], dtype="Int64"),
            "head": pd.array([0, 1, 2, 0, 1, 2, None, None], dtype="Int64"),
            "auroc": auroc,
            "auroc_low": auroc - 0.05,
            "auroc_high": auroc + 0.05,
            "accuracy": auroc - 0.02,
            "control_auroc": rng.uniform(0.45, 0.55, 8),
            "p_best_site": rng.uniform(0, 1, 8),
        }
    )

    def random(*shape):
        return torch.from_numpy(rng.normal(size=shape))

    return Sweep(
        table=table,
        scores=random(8, 20),
        control_scores=random(8, 20),
        control_task_scores=random(8, 20),
        baseline_scores=random(1, 20),
        coefficients={name: random(4) for name in names[:6]} | {name: random(12) for name in names[6:]},
        intercepts=random(8),
        null=random(99),
        null_line=0.61,
        selected=SelectedSite(("z.0.0", "z.1.2"), {"auroc": 0.7, "auroc_low": 0.6, "auroc_high": 0.8}),
        baselines=pd.DataFrame({"baseline": ["words"], "auroc": [0.6]}),
        truth=torch.arange(20) % 2 == 0,
        control_truth=torch.arange(20) % 3 == 0,
        control_task_truth=torch.arange(20) % 5 == 0,
        groups=torch.arange(20) // 2,
        test=torch.arange(20) // 10 == torch.arange(2)[:, None],
        fold_strengths=random(8, 2).exp(),
        provenance={"settings": {"seed": 0}, "data": {"rows": 20}, "target": {"kind": "binary", "classes": ["a", "b"]}},
    )


def assert_same(left: Sweep, right: Sweep):
    pd.testing.assert_frame_equal(left.table, right.table)
    pd.testing.assert_frame_equal(left.baselines, right.baselines)
    for name in (
        "scores",
        "control_scores",
        "control_task_scores",
        "baseline_scores",
        "intercepts",
        "null",
        "fold_strengths",
    ):
        torch.testing.assert_close(getattr(left, name), getattr(right, name), rtol=0, atol=0)
    for name in ("truth", "control_truth", "control_task_truth", "groups", "test"):
        assert torch.equal(getattr(left, name), getattr(right, name))
    assert left.coefficients.keys() == right.coefficients.keys()
    for name, coefficient in left.coefficients.items():
        assert torch.equal(coefficient, right.coefficients[name])
    assert left.selected == right.selected
    assert left.provenance == right.provenance


def test_saving_and_loading_changes_nothing(result, tmp_path):
    assert result.save(tmp_path / "sweep") == tmp_path / "sweep"
    loaded = Sweep.load(tmp_path / "sweep")
    assert_same(loaded, result)
    assert loaded.null_line == result.null_line
    assert sorted(path.name for path in tmp_path.iterdir()) == ["sweep"]


def test_a_sweep_without_null_is_saved_too(result, tmp_path):
    bare = replace(result, null=torch.empty(0, dtype=torch.float64), null_line=math.nan)
    bare.save(tmp_path / "sweep")
    assert math.isnan(Sweep.load(tmp_path / "sweep").null_line)


def test_saving_replaces_only_when_told_and_only_a_sweep(result, tmp_path):
    result.save(tmp_path / "sweep")
    with pytest.raises(FileExistsError, match="pass overwrite=True to replace it"):
        result.save(tmp_path / "sweep")
    replace(result, null_line=0.7).save(tmp_path / "sweep", overwrite=True)
    assert Sweep.load(tmp_path / "sweep").null_line == 0.7
    assert [path.name for path in tmp_path.iterdir()] == ["sweep"]
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.txt").write_text("years of work")
    with pytest.raises(FileExistsError, match="holds no sweep, so it is left alone"):
        result.save(tmp_path / "thesis", overwrite=True)
    assert (tmp_path / "thesis" / "chapter.txt").read_text() == "years of work"


def test_an_interrupted_save_keeps_the_old_one(result, tmp_path):
    result.save(tmp_path / "sweep")
    broken = replace(result, provenance={"not json": object()})
    with pytest.raises(TypeError, match="not JSON serializable"):
        broken.save(tmp_path / "sweep", overwrite=True)
    assert_same(Sweep.load(tmp_path / "sweep"), result)
    assert [path.name for path in tmp_path.iterdir()] == ["sweep"]


def test_damage_is_noticed(result, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"it has no sweep\.json"):
        Sweep.load(tmp_path)
    folder = result.save(tmp_path / "sweep")
    table = result.table.assign(auroc=1.0)
    table.to_parquet(folder / "table.parquet")
    with pytest.raises(ValueError, match=r"table\.parquet is not the file that was saved with this sweep"):
        Sweep.load(folder)
    result.save(folder, overwrite=True)
    (folder / "arrays.safetensors").unlink()
    with pytest.raises(ValueError, match="is damaged"):
        Sweep.load(folder)
    result.save(folder, overwrite=True)
    facts = json.loads((folder / "sweep.json").read_text()) | {"format": "microtome sweep 9"}
    (folder / "sweep.json").write_text(json.dumps(facts))
    with pytest.raises(ValueError, match="in the format 'microtome sweep 9'; this version reads 'microtome sweep 2'"):
        Sweep.load(folder)
    (folder / "sweep.json").write_text("{")
    with pytest.raises(ValueError, match="is damaged"):
        Sweep.load(folder)


def test_best_is_the_head_of_the_sorted_table(result):
    best = result.best(3)
    assert best["auroc"].tolist() == sorted(result.table["auroc"], reverse=True)[:3]
    assert best.index.tolist() == [0, 1, 2]
    assert len(result.best(100)) == 8


def test_the_frame_is_a_copy(result):
    frame = result.to_frame()
    frame["auroc"] = 0.0
    assert (result.table["auroc"] > 0).all()


def test_coef_takes_every_spelling_of_a_site(result):
    assert torch.equal(result.coef("z.1.2"), result.coefficients["z.1.2"])
    assert torch.equal(result.coef(("z", 1, 2)), result.coefficients["z.1.2"])
    assert torch.equal(result.coef("blocks.1.hook_resid_post"), result.coefficients["resid_post.1"])
    with pytest.raises(KeyError, match=r"z\.1\.7 was not probed. Did you mean 'z\.1"):
        result.coef("z.1.7")


def test_intercepts_are_found_as_coefs_are(result):
    for number, name in enumerate(result.table["site"]):
        assert result.intercept(name) == result.intercepts[number]
    assert result.intercept("blocks.1.hook_resid_post") == result.intercepts[7]
    with pytest.raises(KeyError, match=r"z\.1\.7 was not probed. Did you mean 'z\.1"):
        result.intercept("z.1.7")


def test_a_sweep_of_before_has_no_baseline_scores(result, tmp_path, monkeypatch):
    monkeypatch.setattr(sweep_result, "save_file", lambda arrays, file: save_file(without_baselines(arrays), file))
    loaded = Sweep.load(result.save(tmp_path / "sweep"))
    assert loaded.baseline_scores.shape == (0,)
    assert_same(loaded, replace(result, baseline_scores=loaded.baseline_scores))


def without_baselines(arrays: dict) -> dict:
    return {name: array for name, array in arrays.items() if name != "baseline_scores"}


def test_plots_hold_the_tables_values(result):
    figures = result.plot()
    assert figures.keys() == {"head_map", "layer_curve"}
    drawn = np.array(figures["head_map"].data[0].z, dtype=float)
    np.testing.assert_allclose(drawn.T.ravel(), result.table["auroc"][:6])
    lines = {trace.name: trace for trace in figures["layer_curve"].data}
    curve = next(trace for name, trace in lines.items() if name and "residual" in name)
    np.testing.assert_allclose(curve.y, result.table["auroc"][6:])
    assert any(name and "null" in name and "0.61" in name for name in lines)
    # the null line is an AUROC: it has no place on another axis
    assert not any("null" in (trace.name or "") for trace in result.plot(value="accuracy")["layer_curve"].data)


def test_plots_leave_out_what_the_table_cannot_show(result):
    flat = replace(result, table=result.table[result.table["head"].isna()])
    assert flat.plot().keys() == {"layer_curve"}
    without_layers = replace(result, table=result.table.assign(layer=pd.array([None] * 8, dtype="Int64")))
    assert without_layers.plot() == {}


def test_repr_names_the_best_site(result):
    best = result.best(1).iloc[0]
    assert f"best {best['site']} AUROC {best['auroc']:.3f}" in repr(result)
    assert "8 probes, 20 rows in 10 groups" in repr(result)


def test_decision_scores_other_rows_by_the_refitted_probes(result):
    generator = torch.Generator().manual_seed(0)
    arrays = {name: torch.randn(5, len(w), generator=generator) for name, w in result.coefficients.items()}
    whole = {}
    for name, rows in arrays.items():
        site, _, head = name.rpartition(".")
        if name.count(".") == 2:
            whole.setdefault(site, {})[int(head)] = rows
        else:
            whole[name] = rows
    stacked = {
        name: torch.stack([rows[head] for head in sorted(rows)], 1) if isinstance(rows, dict) else rows
        for name, rows in whole.items()
    }
    logits = result.decision(Activations.from_arrays(stacked))
    for number, (name, weights) in enumerate(result.coefficients.items()):
        at = result.table["site"].tolist().index(name)
        expected = arrays[name].double() @ weights + result.intercepts[at]
        torch.testing.assert_close(logits[at], expected, msg=f"{number}: {name}")
    first = next(iter(stacked))
    with pytest.raises(ValueError, match="its probe was fitted on"):
        result.decision(Activations.from_arrays(stacked | {first: stacked[first][..., :-1]}))
