"""`microtome probe FEATURES`: from files, stores and settings; unattended, resumed, and repeated."""

import json
import os
import sys

import numpy as np
import pandas as pd
import pytest
from filelock import FileLock
from typer.testing import CliRunner

from microtome.app.cli import app as command
from microtome.app.probe_config import ProbeConfig
from microtome.app.probe_run import run_probe_of
from microtome.app.run_folder import RunFolder
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
    with pytest.raises(FileExistsError, match=r"^eeg\.npy has changed since /.*--is_rem was made of it\. Give"):
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
    assert Run.open("runs/eeg--is_rem--lda").config["method"] == "lda"
    repeated = run("runs/eeg--is_rem--lda/config.yaml")
    assert repeated.exit_code == 0, repeated.output
    assert "finished already" in repeated.output
    assert run("probe.yaml", "--method", "ridge", "--name", "other").exit_code == 0
    assert Sweep.load("runs/other/sweep").provenance["settings"]["probe"] == "ridge"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["eeg.npy", "--label", "stage"], "--group is not given"),
        (["nothing.npy", "--label", "a", "--group", "rows"], "there is no nothing.npy"),
        (["eeg.npy", "--rows", "eeg.csv", "--label", "stag", "--group", "subject"], "eeg.csv has no column 'stag'"),
        (["eeg.npy", "--rows", "eeg.csv", "--label", "visit", "--group", "subject"], "target: numbers"),
        (["eeg.npy", "--rows", "eeg.csv", "--label", "is_rem", "--group", "rows", "--method", "svm"], "give one of"),
        (["eeg.npy", "--rows", "eeg.csv", "--label", "stage", "--group", "rows", "--positive", "x"], "no row is 'x'"),
        (
            ["eeg.csv", "--label", "stage", "--group", "rows", "--columns", "a=sc", "--columns", "v"],
            "v is no SITE=NAME",
        ),
        (["eeg.csv", "--label", "stage", "--group", "rows", "--columns", "scora"], "Did you mean 'score'?"),
        (["eeg.csv", "--label", "is_rem", "--group", "rows", "--columns", "is_rem"], "a feature and a label"),
        (["eeg.npy", "--label", "a", "--group", "rows", "--dry-run"], "--dry-run is for a grid"),
        (["eeg.npy", "--label", "a", "--group", "rows", "--rows", "no.csv"], "there is no no.csv"),
        (
            ["eeg.npy", "--rows", "eeg.csv", "--label", "stage", "--group", "rows", "--out", "eeg.csv/runs"],
            "written to",
        ),
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
    assert "eeg.csv has changed since" in done.output


def test_a_mistake_leaves_no_folder(files) -> None:
    assert run("eeg.npy", "--rows", "eeg.csv", "--label", "nothing", "--group", "subject", *FLAGS).exit_code == 2
    assert not list((files / "runs").glob("*"))


@pytest.fixture
def numbers(tmp_path, monkeypatch):
    """num.csv: frontal_0 to frontal_9, occipital_0 to occipital_2, trial, sid (30 subjects), y (0 or 1); no text."""
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(1)
    names = [f"frontal_{n}" for n in range(10)] + [f"occipital_{n}" for n in range(3)]
    table = pd.DataFrame(rng.normal(size=(90, 13)), columns=names)
    table.assign(trial=np.arange(90) % 7, sid=np.arange(90) // 3, y=rng.integers(0, 2, 90)).to_csv(
        "num.csv", index=False
    )
    return tmp_path


OF_Y = ["num.csv", "--label", "y", "--group", "sid", *FLAGS]


def test_label_group_types_and_filter_are_no_features_and_the_features_are_said(numbers) -> None:
    done = run(*OF_Y, "--types", "trial", "--where", "occipital_2 < 9", "--json")
    assert done.exit_code == 0, done.output
    assert "12 features: frontal_0 ... frontal_9, occipital_0, occipital_1" in done.stderr
    assert json.loads(done.stdout)["best"][0]["auroc"] < 0.9
    facts = Run.open("runs/num--y").provenance["features"]
    assert facts["columns"] == {"features": [f"frontal_{n}" for n in range(10)] + ["occipital_0", "occipital_1"]}
    assert len(facts["xxh3_128"]) == 32
    done = run(*OF_Y, "--name", "stray")
    assert "14 features: frontal_0 ... frontal_9, occipital_0 ... occipital_2, trial" in done.stdout


def test_columns_again_and_by_site_from_flags_and_from_a_file(numbers) -> None:
    done = run(*OF_Y, "--columns", "occipital_", "--columns", "frontal_1", "--json", "--name", "two")
    assert "4 features: occipital_0, occipital_1, occipital_2, frontal_1\n" in done.stderr
    by_site = ["--columns", "eeg.0=frontal_", "--columns", "eeg.1=occipital_", "--columns", "eeg.1=trial"]
    done = run(*OF_Y, *by_site, "--json", "--name", "sites")
    assert done.exit_code == 0, done.output
    assert "eeg.0: 10 features: frontal_0 ... frontal_9; eeg.1: 4 features: occipital_0" in done.stderr
    assert {row["site"] for row in json.loads(done.stdout)["best"]} == {"eeg.0", "eeg.1"}
    (numbers / "probe.yaml").write_text(
        "features: num.csv\nlabel: y\ngroup: sid\ncolumns: {eeg.0: frontal_, eeg.1: [occipital_, trial]}\nname: sites\n"
        "folds: 3\ninner_folds: 2\npermutations: 40\nbootstraps: 100\n"
    )
    assert "sites is finished already" in run("probe.yaml").stdout


def test_a_copy_of_the_label_is_warned_of(numbers) -> None:
    table = pd.read_csv("num.csv")
    table.assign(answer=np.where(table["y"] == 1, 7, 3)).to_csv("num.csv", index=False)
    done = run(*OF_Y)
    assert done.exit_code == 0, done.output
    assert "Beware: 'answer' tells the label exactly" in done.stdout
    assert "'answer' tells the label" in (numbers / "runs/num--y/report.html").read_text(encoding="utf-8").replace(
        "&#x27;", "'"
    )


def test_a_finished_run_is_told_by_contents_wherever_the_files_lie(numbers, monkeypatch) -> None:
    assert run(*OF_Y).exit_code == 0
    os.utime("num.csv", (1, 1))
    assert "finished already" in run(*OF_Y).stdout
    elsewhere = numbers / "else where"
    elsewhere.mkdir()
    config = numbers / "runs/num--y/config.yaml"
    monkeypatch.chdir(elsewhere)
    assert "finished already" in run(str(config)).stdout
    (numbers / "runs").rename(numbers / "my runs")
    assert run(str(numbers / "my runs/num--y/config.yaml")).exit_code == 0  # made again where it was
    held = Run.open(numbers / "runs/num--y").config
    assert (held["features"], held["out"]) == (str(numbers / "num.csv"), str(numbers / "runs"))


def test_a_store_is_told_by_its_shards(files, tiny, word_tokenizer) -> None:
    model = LoadedModel.from_module(tiny("llama"), word_tokenizer, name="tiny")
    texts = [f"the {word} was {tone}" for word in ("cat", "dog", "bird", "film", "book") for tone in ("good", "bad")]
    labels = {"tone": ["good", "bad"] * 5}
    capture(model, texts, ["resid_post"], "last", labels=labels, store="kept")
    config = ProbeConfig(features="kept", label="tone", group="rows", **QUICK | {"folds": 2})
    run_probe_of(config)
    manifest = files / "kept/manifest.json"
    manifest.write_text(manifest.read_text(encoding="utf-8") + "\n", encoding="utf-8")
    run_probe_of(config)
    log = files / "kept/shards.jsonl"
    record = json.loads(log.read_text(encoding="utf-8"))
    log.write_text(json.dumps(record | {"tensors_digest": "0" * 32}) + "\n", encoding="utf-8")
    with pytest.raises(FileExistsError, match="kept has changed since"):
        run_probe_of(config)


def test_one_process_at_a_time(numbers) -> None:
    (numbers / "runs").mkdir()
    with FileLock(numbers / "runs/.num--y.lock"):
        done = run(*OF_Y)
    assert done.exit_code == 2
    assert "num--y is being made by another process. Wait for it" in done.output
    assert run(*OF_Y).exit_code == 0
    assert [path.name for path in (numbers / "runs").iterdir()] == ["num--y"]


def test_a_run_that_another_process_finished_meanwhile_is_taken(numbers, monkeypatch) -> None:
    config = ProbeConfig(features="num.csv", label="y", group="sid", **QUICK)
    first = run_probe_of(config)
    seen = iter([False, True])
    monkeypatch.setattr(RunFolder, "is_finished", property(lambda folder: next(seen)))
    monkeypatch.setattr(RunFolder, "require_free", lambda folder: None)
    monkeypatch.setattr("microtome.app.probe_run.sweep", lambda *a, **k: pytest.fail("it is finished"))
    pd.testing.assert_frame_equal(run_probe_of(config).table, first.table)


def test_stopped_while_the_run_is_written_the_same_command_goes_on(numbers, monkeypatch) -> None:
    def stopped(*arguments, **options):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("microtome.app.probe_run.html_report", stopped)
        assert run(*OF_Y).exit_code == 130
    assert not (numbers / "runs/num--y").exists()
    assert list((numbers / "runs").glob(".num--y.fits/num--y/tables/*"))
    assert run(*OF_Y).exit_code == 0
    assert [path.name for path in (numbers / "runs").iterdir()] == ["num--y"]


def test_names_with_spaces_and_of_other_alphabets(numbers) -> None:
    (numbers / "run s").mkdir()
    (numbers / "num.csv").rename(numbers / "мои данные.csv")
    done = run("мои данные.csv", "--out", "run s", *OF_Y[1:])
    assert done.exit_code == 0, done.output
    [folder] = (numbers / "run s").iterdir()
    assert folder.name.isascii()
    assert f"microtome probe '{folder}/config.yaml'" in (folder / "report.html").read_text(encoding="utf-8").replace(
        "&#x27;", "'"
    ).replace("&#39;", "'")


def test_what_is_there_and_no_probe_is_left_alone(numbers) -> None:
    (numbers / "runs/num--y").mkdir(parents=True)
    done = run(*OF_Y)
    assert done.exit_code == 2
    assert "num--y is there and no finished probe run. Give this run another name (--name)." in done.output


def test_help_says_what_a_dry_run_is_for() -> None:
    assert "for grids only" in " ".join(run("--help").output.replace("│", " ").split())
