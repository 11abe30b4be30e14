"""The demo on a tiny saved model: a whole run folder, the same numbers again, and a user's own file."""

import json
from pathlib import Path

import pandas as pd
import pytest
import torch
from typer.testing import CliRunner

from microtome.app.cli import app
from microtome.app.config import DemoConfig
from microtome.app.demo import demo_data, run_demo
from microtome.data.runs import Run
from microtome.data.toy import toy_sentiment

SMALL = {"data": "toy", "texts": 120, "folds": 3, "inner_folds": 2, "permutations": 20, "bootstraps": 100}


@pytest.fixture(scope="module")
def tiny_folder(tiny, word_tokenizer, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tiny("llama").save_pretrained(folder)
    word_tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def finished(tiny_folder: Path, tmp_path_factory):
    return run_demo(DemoConfig(model=str(tiny_folder), out=tmp_path_factory.mktemp("runs"), **SMALL))


def test_every_site_has_a_row_with_interval_control_and_null(finished) -> None:
    table = finished.run.table("sites")
    assert len(table) == 3 + 3 * 4
    assert set(table["kind"]) == {"resid_post", "z"}
    for column in ("auroc", "auroc_low", "auroc_high", "accuracy", "control_auroc", "selectivity", "p_best_site"):
        assert table[column].notna().all(), column
    assert (table["auroc_low"] <= table["auroc"]).all()
    assert (table["auroc"] <= table["auroc_high"]).all()
    assert torch.allclose(
        torch.tensor(table["selectivity"].to_numpy()),
        torch.tensor((table["auroc"] - table["control_auroc"]).to_numpy()),
    )


def test_the_run_folder_opens_and_says_where_it_is_from(finished) -> None:
    run = Run.open(finished.run.path)
    assert {"sites", "texts", "proof", "best_site_null"} <= set(run.tables)
    assert {"head_map", "layer_curve"} <= set(run.figures)
    facts = run.provenance
    assert facts["model"]["model_class"] == "LlamaForCausalLM"
    assert len(facts["data"]["table_sha256"]) == 64
    assert facts["seconds"].keys() >= {"load", "dissect", "capture", "sweep"}
    report = (run.path / "report.html").read_text(encoding="utf-8")
    assert "probe map" in report
    assert 'src="http' not in report


def test_the_same_settings_give_the_same_numbers(finished, tiny_folder: Path, tmp_path: Path) -> None:
    again = run_demo(DemoConfig(model=str(tiny_folder), out=tmp_path, **SMALL))
    pd.testing.assert_frame_equal(again.run.table("sites"), finished.run.table("sites"), rtol=1e-6)


def test_a_users_own_file(tiny_folder: Path, tmp_path: Path) -> None:
    toy = toy_sentiment(60, seed=1)
    labels = toy["label"].map({True: "positive", False: "negative"})
    pd.DataFrame({"review": toy["text"], "verdict": labels}).to_csv(tmp_path / "mine.csv", index=False)
    arguments = ["--data", str(tmp_path / "mine.csv"), "--text-column", "review", "--label-column", "verdict"]
    arguments += ["--group-column", "texts"]
    for name, value in SMALL.items():
        arguments += [f"--{name.replace('_', '-')}", str(value)] if name != "data" else []
    result = CliRunner().invoke(
        app,
        ["demo", "--model", str(tiny_folder), "--out", str(tmp_path / "runs"), "--name", "mine", "--json", *arguments],
    )
    assert result.exit_code == 0, result.output
    said = json.loads(result.stdout)  # one document and nothing else
    assert len(said["best"]) > 0
    run = Run.open(said["run"])
    assert run.config["label_column"] == "verdict"
    assert run.provenance["data"]["positive_class"] == "positive"
    assert set(run.table("texts")["class_name"]) == {"positive", "negative"}


def test_a_file_without_groups_is_refused(tmp_path: Path) -> None:
    pd.DataFrame({"text": ["a b", "c d"], "label": [0, 1]}).to_csv(tmp_path / "two.csv", index=False)
    with pytest.raises(ValueError, match="group_column: rows that share an author"):
        DemoConfig(data=str(tmp_path / "two.csv"))


def test_folds_that_cannot_be_filled_are_refused_before_the_model_runs(tmp_path: Path) -> None:
    config = DemoConfig(model="no/such-model", out=tmp_path, **SMALL | {"folds": 200})
    with pytest.raises(ValueError, match="200 folds"):
        run_demo(config)


def test_labels_of_three_values_are_refused(tmp_path: Path) -> None:
    pd.DataFrame({"text": ["a b", "c d", "e f"], "label": [0, 1, 2]}).to_csv(tmp_path / "three.csv", index=False)
    with pytest.raises(ValueError, match="has 3 values"):
        demo_data(DemoConfig(data=str(tmp_path / "three.csv"), group_column="texts"))
