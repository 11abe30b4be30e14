"""`microtome steer`: methods, controls and texts; chosen on other prompts; stopped, repeated; bad input."""

import json
import shutil

import pandas as pd
import pytest
import yaml
from filelock import FileLock
from typer.testing import CliRunner

from microtome.app import steer_run
from microtome.app.cli import app as command
from microtome.app.steer_config import SteerConfig
from microtome.app.steer_data import lines_of, two_classes
from microtome.app.steer_run import run_steer
from microtome.data.runs import Run
from microtome.interventions.artefact import Artefact
from microtome.interventions.evaluation import Evaluation

NEUTRAL = ["the river ran to the old city .", "a small tree in the house .", "he sat by the green river .", "a day ."]
SMALL = {
    **{"data": "mine.csv", "text_column": "review", "label_column": "verdict", "positive": "good"},
    **{"group_column": "author", "contrast": 40, "prompts": 8, "dev_prompts": 6, "words": 2, "tokens": 4, "random": 4},
    **{"wanted": ("good", "great"), "unwanted": ("bad", "awful")},
}


@pytest.fixture
def model(model_folders) -> str:
    return model_folders[0]


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch, reviews):
    monkeypatch.chdir(tmp_path)
    shutil.copy(reviews, tmp_path / "mine.csv")
    (tmp_path / "neutral.txt").write_text("\n".join(NEUTRAL), encoding="utf-8")
    return tmp_path


@pytest.fixture
def config(model, here):
    def build(**changes) -> SteerConfig:
        return SteerConfig(**{"model": model, "neutral_file": here / "neutral.txt", **SMALL, **changes})

    return build


def run(*arguments: str):
    return CliRunner().invoke(command, ["steer", *arguments], catch_exceptions=True)


def flags(settings: dict) -> list[str]:
    found = ["--neutral-file", "neutral.txt"]
    for name, value in settings.items():
        for one in value if isinstance(value, tuple) else (value,):
            found += [f"--{name.replace('_', '-')}", str(one)]
    return found


def test_everything_is_measured_printed_and_kept(model, here) -> None:
    arguments = [model, *flags(SMALL), "--method", "mean", "--method", "iti", "--instruction", "a happy film ."]
    done = run(*arguments)
    assert done.exit_code == 0, done.output
    plain = " ".join(done.stdout.split())
    for said in ("Depths on development prompts", "Gain over the unsteered model, 8 test prompts", "sign flip"):
        assert said in plain
    assert "Random directions of that length (8): KL" in plain
    assert "Report: runs/steer--llama--mine/report.html" in done.stdout
    path = here / "runs" / "steer--llama--mine"
    folder = Run.open(path)
    conditions = folder.table("conditions")
    assert conditions["condition"].iloc[0] == "unsteered"
    assert conditions["control"].sum() == 5 + steer_run.NEAREST
    assert set(conditions["method"].dropna()) >= {"mean", "iti", "sign flip"}
    controls = conditions.loc[conditions["control"], "condition"]
    assert {"prompt only", "wrong layer", "shuffled labels", "P, equal effort"} <= set(controls)
    own = conditions[~conditions["control"] & conditions["method"].notna()]
    assert own.groupby("method").size().tolist() == [5, 5]
    assert (own["kl"] > 0).all()
    chosen = folder.table("chosen").set_index("method")
    assert set(chosen.index) == {"mean", "iti"}
    texts = folder.table("texts")
    assert texts.groupby("condition").size().eq(8).all()
    assert {"dose_0", "trade_off_word_odds"} <= set(folder.figures)
    assert "What was written" in (path / "report.html").read_text(encoding="utf-8")
    assert Artefact.load(path / "artefacts" / "mean").operation == "add"
    assert not list((here / "runs").glob(".*"))
    again = run(*arguments, "--json")
    assert again.exit_code == 0, again.output
    said = json.loads(again.stdout)
    assert said["texts"] == len(texts)
    assert [row["method"] for row in said["chosen"]] == ["mean", "iti"]
    other = run(*arguments, "--tokens", "5")
    assert other.exit_code != 0
    assert "other settings" in other.output


def test_strength_is_chosen_on_development_prompts_within_the_limit(config, here) -> None:
    found = run_steer(config(strengths=(0.5, 1.0, 400.0), site="resid_post.1", name="x"), progress=False)
    tables = found.tables
    assert "depths" not in tables
    assert "strengths" not in tables
    dev = tables["development"].set_index("strength")
    within = dev[dev["kl"] <= 0.25].drop(index=float("nan"), errors="ignore")
    first = next(name.removesuffix("_gain") for name in dev if name.endswith("_gain"))
    assert 400.0 not in within.index
    row = tables["chosen"].iloc[0]
    assert row["strength"] == within[first].idxmax()
    assert row["within_limit"]
    told = tables["conditions"].set_index("strength").loc[row["strength"]]
    assert row["kl"] == told[~told["control"]]["kl"].iloc[0] if isinstance(told, pd.DataFrame) else told["kl"]
    beyond = run_steer(config(strengths=(300.0, 400.0), site="resid_post.1", name="y", random=0), progress=False)
    assert not beyond.tables["chosen"]["within_limit"].any()
    assert beyond.tables["chosen"]["strength"].iloc[0] == 300.0


def test_a_vector_that_is_there_and_prompts_of_ones_own(config, here) -> None:
    first = run_steer(config(site="resid_post.1", strengths=(1.0,), random=0, name="x"), progress=False)
    (here / "mine.txt").write_text("the cat was\n\na film of\n", encoding="utf-8")
    found = run_steer(
        config(
            artefact=first.path / "artefacts" / "mean",
            prompt_file=here / "mine.txt",
            strengths=(1.0, 2.0),
            random=0,
            name="y",
        ),
        progress=False,
    )
    texts = found.tables["texts"]
    assert texts[texts["condition"] == "unsteered"]["prompt"].tolist() == ["the cat was", "a film of"]
    layers = found.tables["layers"].set_index("condition")
    chosen = found.tables["chosen"].iloc[0]
    assert layers.loc[f"mean {chosen['strength']:.4g}", "site"] == "resid_post.1"
    settings = yaml.safe_load((found.path / "config.yaml").read_text(encoding="utf-8"))
    assert settings["prompt_file"] == str(here / "mine.txt")


def test_a_stopped_run_goes_on_with_what_it_had(config, here, monkeypatch) -> None:
    settings = config(site="resid_post.1", name="x", random=2)
    measured, seen = Evaluation._measured, []

    def stopping(self, name, *rest):
        if len(seen) == 6:
            raise KeyboardInterrupt
        seen.append(name)
        return measured(self, name, *rest)

    monkeypatch.setattr(Evaluation, "_measured", stopping)
    with pytest.raises(KeyboardInterrupt):
        run_steer(settings, progress=False)
    assert len(list((here / "runs" / ".x.fits" / "records").rglob("record.json"))) == 6
    with pytest.raises(FileExistsError, match="other settings"):
        run_steer(settings.model_copy(update={"seed": 1}), progress=False)
    again: list[str] = []
    monkeypatch.setattr(
        Evaluation, "_measured", lambda self, name, *rest: again.append(name) or measured(self, name, *rest)
    )
    found = run_steer(settings, progress=False)
    assert len(again) == 2 + 5 + 5 + 4 + 3 - 6
    assert not (here / "runs" / ".x.fits").exists()
    monkeypatch.setattr(Evaluation, "_measured", measured)
    plain = run_steer(settings.model_copy(update={"name": "y"}), progress=False)
    for name, table in plain.tables.items():
        same = [column for column in table if column != "tokens_per_second"]
        pd.testing.assert_frame_equal(table[same], found.tables[name][same])


def test_two_processes_do_not_make_one_run(config, here) -> None:
    (here / "runs").mkdir()
    with FileLock(here / "runs" / ".x.lock"), pytest.raises(BlockingIOError, match="another process"):
        run_steer(config(name="x"), progress=False)


def test_the_wanted_class_is_named(model, here) -> None:
    small = {name: value for name, value in SMALL.items() if name != "positive"}
    without = run(model, *flags(small))
    assert without.exit_code == 2
    assert "positive: name the class that is wanted: bad or good" in " ".join(without.output.split())
    done = run(model, *flags(small | {"random": 0}), "--positive", "bad", "--site", "resid_post.1", "--strength", "2")
    assert done.exit_code == 0, done.output
    assert "from good to bad" in next((here / "runs").glob("*/report.html")).read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (("--method", "caa"), "give one of mean"),
        (("--site", "resid_post.99"), "resid_post.99"),
        (("--strength", "0"), "0 is the unsteered model"),
        (("--strength", "nan"), "finite"),
        (("--wanted", "good"), "words of both"),
        (("--artefact", "none"), "there is nothing at"),
        (("--data", "none.csv"), "neither a data set"),
        (("--limit", "0"), "greater than 0"),
    ],
)
def test_bad_settings_are_one_line(model, here, changes, said) -> None:
    rest = {name: value for name, value in SMALL.items() if name not in ("wanted", "unwanted")}
    done = run(model, *flags(rest), *changes)
    assert done.exit_code == 2, done.output
    assert said in " ".join(done.output.split())
    assert not list(here.glob("runs/*"))


def test_classes_and_lines() -> None:
    assert two_classes(pd.Series([True, False]), None) == ("True", "False")
    assert two_classes(pd.Series(["a", "b"]), "b") == ("b", "a")
    for labels in (["a"], ["a", "b", "c"], ["a", None]):
        with pytest.raises(ValueError, match="two classes"):
            two_classes(pd.Series(labels), "a")
    with pytest.raises(ValueError, match="none of"):
        two_classes(pd.Series(["a", "b"]), "c")


def test_a_file_without_text_is_refused(here) -> None:
    (here / "empty.txt").write_text("\n \n", encoding="utf-8")
    with pytest.raises(ValueError, match="holds no text"):
        lines_of(here / "empty.txt", "text")
