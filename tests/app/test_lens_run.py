"""`microtome lens`: a text and a data set under lenses; trained, stopped, gone on with, repeated."""

import json

import pandas as pd
import pytest
from filelock import FileLock
from typer.testing import CliRunner

from microtome.app import lens_run
from microtome.app.cli import app as command
from microtome.app.lens_config import LensConfig
from microtome.app.lens_run import run_lens
from microtome.data.runs import Run
from microtome.lenses.tuned_lens import TunedLens

TEXT = "the cat sat on the old house"
SMALL = ["--steps", "4", "--tokens", "24"]


@pytest.fixture
def model(model_folders) -> str:
    return model_folders[0]


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(*arguments: str):
    return CliRunner().invoke(command, ["lens", *arguments], catch_exceptions=True)


def test_a_text_is_printed_and_kept(model, here) -> None:
    done = run(model, "--text", TEXT)
    assert done.exit_code == 0, done.output
    assert "under the logit lens" in done.stdout
    [path] = (here / "runs").glob("lens--llama--logit--*")
    assert f"Report: runs/{path.name}/report.html" in done.stdout
    folder = Run.open(path)
    cells = folder.table("cells")
    assert len(cells) == 4 * 7
    assert folder.figures == ("table_logit",)
    assert "The text under the logit lens" in (folder.path / "report.html").read_text(encoding="utf-8")
    assert not list((here / "runs").glob(".*"))
    again = run(model, "--text", TEXT, "--json")
    assert again.exit_code == 0, again.output
    said = json.loads(again.stdout)
    assert [row["depth"] for row in said["last_token"]] == [0, 1, 2, 3]
    assert said["last_token"][-1]["rank"] == 0


def test_a_tuned_lens_is_trained_kept_and_used_again(model, here) -> None:
    flags = ["--data", "toy", "--texts", "40", "--lens", "logit", "--lens", "ridge", "--fit-tuned", *SMALL]
    done = run(model, *flags, "--name", "fit")
    assert done.exit_code == 0, done.output
    folder = Run.open("runs/fit")
    curves = folder.table("curves")
    assert list(dict.fromkeys(curves["lens"])) == ["logit", "ridge", "tuned"]
    plain = curves[curves["sinks"] == "without"].groupby("lens")["kl"].mean()
    assert plain["ridge"] < plain["logit"]
    assert set(folder.tables) == {"curves", "early_exit", "training"}
    assert folder.figures == ("curve_agrees", "curve_cross_entropy", "curve_kl")
    lens = TunedLens.load(folder.path / "tuned")
    assert lens.facts["steps"] == 4
    used = run(model, "--text", TEXT, "--lens", "tuned", "--tuned", "runs/fit/tuned", "--name", "use", "--json")
    assert used.exit_code == 0, used.output
    assert {row["lens"] for row in json.loads(used.stdout)["cells"]} == {"tuned"}


def test_a_stopped_run_goes_on(model, here, monkeypatch) -> None:
    config = LensConfig(model=model, data="toy", texts=40, fit_tuned=True, start="zero", steps=3, tokens=24, name="x")
    monkeypatch.setattr(lens_run, "TEXTS_OF_A_PART", 8)
    written, write = [], lens_run.write_statistics

    def stopped(path, found):
        if len(written) == 2:
            raise KeyboardInterrupt
        written.append(path)
        write(path, found)

    with monkeypatch.context() as patch:
        patch.setattr(lens_run, "write_statistics", stopped)
        with pytest.raises(KeyboardInterrupt):
            run_lens(config, progress=False)
    assert not (here / "runs" / "x").exists()
    with monkeypatch.context() as patch:
        patch.setattr(lens_run, "write_statistics", lambda path, found: (written.append(path), write(path, found)))
        resumed = run_lens(config, progress=False)
    assert len(written) == len(set(written))
    whole = run_lens(config.model_copy(update={"name": "y"}), progress=False)
    for name in ("curves", "training", "early_exit"):
        pd.testing.assert_frame_equal(resumed.tables[name], whole.tables[name])


def test_other_settings_under_the_same_name_are_refused(model, here) -> None:
    assert run(model, "--text", TEXT, "--name", "a").exit_code == 0
    other = run(model, "--text", TEXT, "--name", "a", "--top", "3")
    assert other.exit_code == 2
    assert "top was 5, is 3" in other.stderr
    with FileLock(here / "runs" / ".b.lock"):
        busy = run(model, "--text", TEXT, "--name", "b")
    assert busy.exit_code == 2
    assert "another process" in busy.stderr


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ([], "nothing to read"),
        (["--text", " "], "only white space"),
        (["--text", TEXT, "--lens", "ridge"], "fitted on a data set"),
        (["--text", TEXT, "--lens", "tuned"], "no tuned lens is named"),
        (["--text", TEXT, "--lens", "cloudy"], "logit"),
        (["--text", TEXT, "--lens", "logit", "--lens", "logit"], "names one twice"),
        (["--text", TEXT, "--depths", "1,b"], "numbers from 0"),
        (["--text", TEXT, "--depths", "7"], "depths 0 to 3"),
        (["--text", TEXT, "--lens", "tuned", "--tuned", "nowhere"], "there is no"),
        (["--data", "nosuch"], "nosuch"),
        (["--data", "toy", "--texts", "4", "--fit-tuned"], "fitting needs 5"),
    ],
)
def test_a_mistake_is_one_line(model, flags, said) -> None:
    done = run(model, *flags)
    assert done.exit_code == 2, done.output
    assert said in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_other_weights_are_neither_a_finished_nor_a_stopped_run(tiny, word_tokenizer, here, monkeypatch) -> None:
    def saved(seed: int) -> None:
        tiny("llama", seed=seed).save_pretrained(here / "model")
        word_tokenizer.save_pretrained(here / "model")

    saved(0)
    assert run("model", "--text", TEXT, "--name", "a").exit_code == 0
    with monkeypatch.context() as patch:
        patch.setattr(lens_run, "early_exits", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            run_lens(LensConfig(model="model", data="toy", texts=20, name="b"), progress=False)
    saved(1)
    finished = run("model", "--text", TEXT, "--name", "a")
    assert finished.exit_code == 2
    assert "other weights" in finished.stderr
    assert "finished already" not in finished.output
    stopped = run("model", "--data", "toy", "--texts", "20", "--name", "b")
    assert stopped.exit_code == 2
    assert "other settings, texts or weights" in stopped.stderr
    saved(0)
    assert run("model", "--data", "toy", "--texts", "20", "--name", "b").exit_code == 0


def test_a_file_of_texts_is_read_and_a_changed_one_is_seen(model, here) -> None:
    table = pd.DataFrame({"said": [f"{TEXT} number {n}" for n in range(12)], "of": [n // 2 for n in range(12)]})
    table.to_csv("mine.csv", index=False)
    flags = ["--data", "mine.csv", "--text-column", "said", "--group-column", "of", "--json"]
    done = run(model, *flags)
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["curves"][0]["documents"] == 6
    assert (here / "runs" / "lens--llama--mine--logit").is_dir()
    table.iloc[:-1].to_csv("mine.csv", index=False)
    changed = run(model, *flags)
    assert changed.exit_code == 2
    assert "texts_sha256" in json.loads(changed.stdout)["error"]["message"]


def test_a_mistake_leaves_nothing_that_stands_in_the_way(model, here) -> None:
    flags = ["--data", "toy", "--texts", "40", "--name", "a"]
    assert run(model, *flags, "--depths", "7").exit_code == 2
    assert not list((here / "runs").glob(".*"))
    assert run(model, *flags, "--depths", "1").exit_code == 0


def test_the_last_depth_alone_has_curves(model) -> None:
    done = run(model, "--data", "toy", "--texts", "20", "--depths", "3", "--json")
    assert done.exit_code == 0, done.output
    said = json.loads(done.stdout)
    assert {row["blocks_saved"] for row in said["early_exit"]} == {0}


def test_two_texts_are_two_runs(model, here) -> None:
    for text in (TEXT, TEXT + " again", "?!"):
        assert run(model, "--text", text).exit_code == 0
    assert len(list((here / "runs").iterdir())) == 3


def test_a_target_word_is_followed(model) -> None:
    done = run(model, "--text", TEXT, "--target", "dog", "--name", "a")
    assert done.exit_code == 0, done.output
    assert "rank 'dog'" in done.stdout
    said = json.loads(run(model, "--text", TEXT, "--target", "dog", "--name", "a", "--json").stdout)
    assert {"prob of dog", "rank of dog"} <= set(said["last_token"][0])
    assert "rank of dog" in (Run.open("runs/a").path / "report.html").read_text(encoding="utf-8")


def test_one_document_has_curves_and_no_exits(model, here) -> None:
    pd.DataFrame({"text": [f"{TEXT} {n}" for n in range(6)], "of": "a"}).to_csv("one.csv", index=False)
    flags = [model, "--data", "one.csv", "--group-column", "of"]
    done = run(*flags)
    assert done.exit_code == 0, done.output
    assert "No early exits" in done.stdout
    assert set(Run.open("runs/lens--llama--one--logit").tables) == {"curves"}
    fitted = run(*flags, "--lens", "ridge", "--name", "b")
    assert fitted.exit_code == 2
    assert "are of 1 documents; fitting needs 5" in fitted.stderr
    assert "--group-column" in fitted.stderr
