import json

import numpy as np
import pandas as pd
import pytest
from filelock import FileLock
from typer.testing import CliRunner

from microtome.app.cli import app as command
from microtome.app.heads_config import HeadsConfig
from microtome.app.heads_run import run_heads
from microtome.capture import LoadedModel, load_model
from microtome.data.runs import Run
from microtome.lenses import head_pass

FLAGS = ["--data", "texts.csv", "--texts", "6", "--made-texts", "2", "--copy-length", "8", "--bootstraps", "100"]


@pytest.fixture
def model(tiny, word_tokenizer, tmp_path, monkeypatch):
    """A tiny llama under the name `tiny`, and texts.csv; in the working directory."""
    monkeypatch.chdir(tmp_path)
    words = ["the", "cat", "saw", "a", "big", "dog", "and", "ran", "to", "it", "."]
    rng = np.random.default_rng(0)
    texts = [" ".join(rng.choice(words, 18 + i)) for i in range(8)]
    pd.DataFrame({"text": texts, "book": [i // 2 for i in range(8)]}).to_csv("texts.csv", index=False)
    loaded = LoadedModel.from_module(tiny("llama"), word_tokenizer, name="tiny")

    monkeypatch.setattr(
        "microtome.app.heads_run.load_model", lambda name: loaded if name == "tiny" else load_model(name)
    )
    return loaded


def run(*arguments: str):
    return CliRunner().invoke(command, ["heads", *arguments], catch_exceptions=True)


def test_a_run_of_heads(model, tmp_path) -> None:
    done = run("tiny", *FLAGS, "--group-column", "book")
    assert done.exit_code == 0, done.output
    for said in ("induction", "kv head", "score, 95 % interval", "untrained", "control", "Report: runs/heads--tiny"):
        assert said in done.stdout
    folder = Run.open("runs/heads--tiny--texts")
    table = folder.table("heads")
    assert len(table) == 12
    assert {"induction", "induction_low", "fresh_induction", "induction_control"} <= set(table)
    assert folder.figures == ("roles", "scores")
    assert "Letters tell the roles" in (folder.path / "report.html").read_text(encoding="utf-8")
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["heads--tiny--texts"]
    again = run("--config", "runs/heads--tiny--texts/config.yaml")
    assert "is finished already" in again.stdout, again.output


def test_json_is_one_document(model) -> None:
    done = run("tiny", *FLAGS, "--json", "--no-untrained", "--threshold", "sink=0.01", "--threshold", "self=0.9")
    assert done.exit_code == 0, done.output
    held = json.loads(done.stdout)
    assert held["thresholds"]["sink"] == 0.01
    assert held["thresholds"]["self"] == 0.9
    best = held["heads"]["induction"][0]
    assert {"layer", "head", "kv_head", "roles", "induction", "induction_low", "induction_high"} == set(best)


def test_a_killed_run_goes_on_and_a_finished_one_is_not_made_again(model, tmp_path, monkeypatch, capsys) -> None:
    config = HeadsConfig(model="tiny", data="texts.csv", texts=6, made_texts=2, copy_length=8, bootstraps=100)
    real, count = head_pass.see_calls, [0]

    def stops(plan, number, see):
        count[0] += 1
        if count[0] == 4:
            raise KeyboardInterrupt
        return real(plan, number, see)

    monkeypatch.setattr(head_pass, "see_calls", stops)
    with pytest.raises(KeyboardInterrupt):
        run_heads(config)
    assert list((tmp_path / "runs").glob(".heads--tiny--texts.fits/passes/*.safetensors"))
    assert not (tmp_path / "runs/heads--tiny--texts").exists()
    count[0] = 10
    first = run_heads(config)
    resumed = count[0]
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["heads--tiny--texts"]
    count[0] = 10
    run_heads(config.model_copy(update={"name": "whole"}))
    assert count[0] == resumed + 3
    whole = Run.open("runs/whole").table("heads")
    assert whole.equals(first.table)
    monkeypatch.setattr("microtome.app.heads_run.head_roles", lambda *a, **k: pytest.fail("it is finished"))
    again = run_heads(config)
    assert again.table.equals(first.table)
    assert "heads--tiny--texts is finished already" in capsys.readouterr().out
    with pytest.raises(FileExistsError, match=r"other settings \(seed was 0, is 1; texts.*\)\. Give this run another"):
        run_heads(config.model_copy(update={"seed": 1}))


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["./no/thing", *FLAGS], "no/thing"),
        (["tiny", "--data", "nowhere"], "'nowhere' is neither a data set (sentiment"),
        (["tiny", *FLAGS, "--threshold", "sink"], "--threshold sink is no ROLE=NUMBER"),
        (["tiny", *FLAGS, "--threshold", "copying=1"], "no role 'copying'; there are induction"),
        (["tiny", *FLAGS, "--text-column", "txt"], "txt"),
        (["tiny", *FLAGS, "--texts", "1"], "texts"),
        (["tiny", *FLAGS, "--out", "texts.csv/runs"], "written to"),
        (["tiny", "--config", "no.yaml"], "no.yaml"),
    ],
)
def test_mistakes_are_one_line(model, tmp_path, arguments, says) -> None:
    done = run(*arguments)
    assert done.exit_code == 2, done.output
    assert says in done.output
    assert "Traceback" not in done.output
    assert not list((tmp_path / "runs").glob("[!.]*"))


def test_what_is_there_is_left_alone_and_one_process_runs_at_a_time(model, tmp_path) -> None:
    (tmp_path / "runs/mine").mkdir(parents=True)
    done = run("tiny", *FLAGS, "--name", "mine")
    assert done.exit_code == 2
    assert "mine is there and no finished heads run" in done.output
    with FileLock(tmp_path / "runs/.other.lock"):
        done = run("tiny", *FLAGS, "--name", "other")
    assert done.exit_code == 2
    assert "other is being made by another process" in done.output
