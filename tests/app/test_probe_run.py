"""`microtome probe FEATURES`: from files, stores and settings; unattended, resumed, and repeated."""

import json
import sys

import numpy as np
import pandas as pd
import pytest
from filelock import FileLock
from typer.testing import CliRunner

from microtome.app.cli import app as command
from microtome.app.probe_config import ProbeConfig
from microtome.app.probe_run import run_probe_of
from microtome.capture import LoadedModel, capture
from microtome.capture.activations import Activations
from microtome.data.runs import Run
from microtome.probes.sweep_result import Sweep

QUICK = {"folds": 3, "inner_folds": 2, "permutations": 40, "bootstraps": 100}
FLAGS = ["--folds", "3", "--inner-folds", "2", "--permutations", "40", "--bootstraps", "100"]


@pytest.fixture
def files(tmp_path, monkeypatch):
    """eeg.npy [90, 5], eeg.csv with subject, stage (three), score (numbers), is_rem; in the working directory."""
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    stage = rng.permutation(np.arange(90) % 3)
    np.save("eeg.npy", (rng.normal(size=(90, 5)) + 2 * np.eye(5)[stage]).astype(np.float32))
    table = pd.DataFrame({"subject": np.arange(90) // 3, "stage": np.array(["nrem", "rem", "wake"])[stage]})
    table = table.assign(score=stage + rng.normal(size=90), is_rem=stage == 1, visit=rng.integers(1, 4, 90))
    table.loc[[4, 7], "stage"] = None
    table.to_csv("eeg.csv", index=False)
    return tmp_path


def run(*arguments: str):
    return CliRunner().invoke(command, ["probe", *arguments], catch_exceptions=True)


def test_a_table_of_features_from_flags(files) -> None:
    done = run("eeg.npy", "--rows", "eeg.csv", "--label", "stage", "--group", "subject", *FLAGS)
    assert done.exit_code == 0, done.output
    assert "features" in done.stdout
    assert "AUROC, 95 % interval" in done.stdout
    assert "shuffled: AUROC on shuffled labels" in done.stdout
    folder = Run.open("runs/eeg--stage")
    result = Sweep.load(folder.path / "sweep")
    assert result.kind == "classes"
    assert len(result.truth) == 88  # two rows have no label
    assert result.table["auroc"][0] > 0.8
    assert "0." in (folder.path / "report.html").read_text(encoding="utf-8")
    assert not list((files / "runs").glob(".*"))


@pytest.mark.parametrize(
    ("label", "kind", "measure"),
    [
        ({"label": "score", "target": "numbers"}, "numbers", "r2"),
        ({"label": "visit", "target": "classes"}, "classes", "auroc"),
        ({"label": "stage", "positive": "rem"}, "binary", "auroc"),
        ({"label": "score", "above": "median"}, "binary", "auroc"),
    ],
)
def test_labels_of_every_kind(files, label, kind, measure) -> None:
    result = run_probe_of(ProbeConfig(features="eeg.npy", rows="eeg.csv", group="subject", **label, **QUICK))
    assert (result.kind, result.measure) == (kind, measure)


def test_a_killed_probe_goes_on_and_a_finished_one_is_not_made_again(files, monkeypatch, capsys) -> None:
    config = ProbeConfig(features="eeg.npy", rows="eeg.csv", label="is_rem", group="rows", **QUICK)
    with monkeypatch.context() as patch:

        def stopped(*arguments, **options):
            raise KeyboardInterrupt

        patch.setattr(sys.modules["microtome.probes.sweep"], "ridge_statistic", stopped)
        with pytest.raises(KeyboardInterrupt):
            run_probe_of(config)
    [kept] = (files / "runs").glob(".*.fits/fits-*")
    made = kept.stat().st_mtime_ns
    first = run_probe_of(config)
    assert not kept.exists()
    assert made
    monkeypatch.setattr("microtome.app.probe_run.sweep", lambda *a, **k: pytest.fail("it is finished"))
    again = run_probe_of(config)
    pd.testing.assert_frame_equal(again.table, first.table)
    assert "eeg--is_rem is finished already" in capsys.readouterr().out
    with pytest.raises(FileExistsError, match=r"other settings \(seed was 0, is 1\)\. Give this run another name"):
        run_probe_of(config.model_copy(update={"seed": 1}))
    np.save("eeg.npy", np.load("eeg.npy") + 1)
    with pytest.raises(FileExistsError, match="other settings"):
        run_probe_of(config)


def test_a_store_and_saved_activations_are_probed_where_they_lie(files, tiny, word_tokenizer) -> None:
    model = LoadedModel.from_module(tiny("llama"), word_tokenizer, name="tiny")
    words = ["cat", "dog", "bird", "film"]
    tones = [("bad", "good")[i % 2] for i in range(60)]
    texts = [f"the {words[i % 4]} was {tone} so {words[i // 4 % 4]} {words[i // 16]}" for i, tone in enumerate(tones)]
    labels = {"tone": tones, "author": [i // 2 for i in range(60)]}
    capture(model, texts, ["resid_post", "z"], "all", labels=labels, store="kept")
    of_tone = ["--label", "tone", "--group", "author", *FLAGS]
    done = run("kept", "--where", "position >= 3", "--site", "resid_post", *of_tone)
    assert done.exit_code == 0, done.output
    result = Sweep.load("runs/kept--tone/sweep")
    assert result.table["site"].tolist() == ["resid_post.0", "resid_post.1", "resid_post.2"]
    assert len(result.truth) == 240
    acts = capture(model, texts, ["resid_post"], "last", labels=labels)
    acts.save("acts")
    done = run("acts", "--json", *of_tone)
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["best"][0]["auroc"] > 0.5


def test_settings_from_a_file(files) -> None:
    (files / "probe.yaml").write_text(
        "features: eeg.npy\nrows: eeg.csv\nlabel: is_rem\ngroup: subject\nmethod: lda\nfolds: 3\ninner_folds: 2\n"
        "permutations: 0\nbootstraps: 100\n"
    )
    assert run("probe.yaml").exit_code == 0
    assert Run.open("runs/eeg--is_rem").config["method"] == "lda"
    repeated = run("runs/eeg--is_rem/config.yaml")
    assert repeated.exit_code == 0, repeated.output
    assert "finished already" in repeated.output
    assert run("probe.yaml", "--method", "ridge", "--name", "other").exit_code == 0
    assert Sweep.load("runs/other/sweep").provenance["settings"]["probe"] == "ridge"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["eeg.npy", "--label", "stage"], "--group is not given"),
        (["nothing.npy", "--label", "a", "--group", "rows"], "there is no nothing.npy"),
        (["eeg.npy", "--rows", "eeg.csv", "--label", "stag", "--group", "subject"], "there is no column 'stag'"),
        (["eeg.npy", "--rows", "eeg.csv", "--label", "visit", "--group", "subject"], "target: numbers"),
        (["eeg.npy", "--rows", "eeg.csv", "--label", "is_rem", "--group", "rows", "--method", "svm"], "give one of"),
        (["eeg.npy", "--rows", "eeg.csv", "--label", "stage", "--group", "rows", "--positive", "x"], "no row is 'x'"),
        (["eeg.csv", "--columns", "alpha_", "--label", "is_rem", "--group", "rows"], "alpha_"),
    ],
)
def test_mistakes_are_one_line(files, arguments, says) -> None:
    done = run(*arguments)
    assert done.exit_code == 2, done.output
    assert says in done.output
    assert "Traceback" not in done.output
    assert not (files / "runs").exists() or not list((files / "runs").glob("[!.]*"))


def test_activations_with_other_rows_are_refused(files) -> None:
    Activations.from_arrays({"a.0": np.ones((3, 2)) * [[1.0], [2.0], [3.0]]}).save("acts")
    done = run("acts", "--rows", "eeg.csv", "--label", "is_rem", "--group", "rows")
    assert done.exit_code == 2
    assert "eeg.csv has 90 rows, acts 3" in done.output


def test_other_labels_in_the_file_of_rows_are_another_run(files) -> None:
    arguments = ["eeg.npy", "--rows", "eeg.csv", "--label", "is_rem", "--group", "subject", *FLAGS]
    assert run(*arguments).exit_code == 0
    table = pd.read_csv("eeg.csv")
    table.assign(is_rem=~table["is_rem"]).to_csv("eeg.csv", index=False)
    done = run(*arguments)
    assert done.exit_code == 2
    assert "made with other settings (rows_file was" in done.output


def test_two_processes_do_not_write_one_run(files) -> None:
    arguments = ["eeg.npy", "--rows", "eeg.csv", "--label", "is_rem", "--group", "subject", *FLAGS]
    kept = files / "runs" / ".eeg--is_rem.fits"
    kept.mkdir(parents=True)
    with FileLock(kept / "lock"):
        done = run(*arguments)
    assert done.exit_code == 2
    assert "another process works on" in done.output
    assert run(*arguments).exit_code == 0
    assert not list((files / "runs").glob(".*"))


def test_a_mistake_leaves_no_folder(files) -> None:
    assert run("eeg.npy", "--rows", "eeg.csv", "--label", "nothing", "--group", "subject", *FLAGS).exit_code == 2
    assert not list((files / "runs").glob("*"))
