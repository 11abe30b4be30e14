"""The command line: help without heavy imports, settings from flags and YAML, errors in one line with exit code 2."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from pydantic import ValidationError
from typer.testing import CliRunner

from microtome.app.cli import app
from microtome.app.config import DemoConfig


def run(*arguments: str):
    return CliRunner().invoke(app, list(arguments))


def test_help_names_every_setting() -> None:
    result = run("demo", "--help")
    assert result.exit_code == 0
    plain = result.output.replace("\n", " ")
    for field in DemoConfig.model_fields:
        assert f"--{field.replace('_', '-')}" in plain, field


def test_help_imports_no_torch() -> None:
    code = (
        "import sys; from microtome.app import cli; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--data", "nowhere.csv"], "neither 'sentiment', 'toy' nor a file"),
        (["--texts", "3"], "--texts 3: input should be greater than or equal to 20"),
        (["--config", "nowhere.yaml"], "there is no settings file nowhere.yaml"),
        (["--permutations", "19"], "--permutations 19: input should be greater"),
        (["--data", "toy", "--model", "no/such-model-here"], "no bundled model"),
        (["--data", "toy", "--name", "../outside"], "name"),
    ],
)
def test_a_users_error_is_one_line_and_exit_code_2(tmp_path: Path, arguments: list[str], message: str) -> None:
    result = run("demo", "--out", str(tmp_path), *arguments)
    assert result.exit_code == 2
    assert message in result.output.replace("\n", " ")
    assert "Traceback" not in result.output


def test_settings_are_frozen_closed_and_survive_yaml(tmp_path: Path) -> None:
    settings = DemoConfig(data="toy", texts=50)
    with pytest.raises(ValidationError):
        settings.texts = 60
    with pytest.raises(ValidationError, match="Extra inputs"):
        DemoConfig(text=5)
    assert DemoConfig(**yaml.safe_load(yaml.safe_dump(settings.model_dump(mode="json")))) == settings


def test_yaml_that_holds_no_settings_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("- 1\n- 2\n")
    (tmp_path / "b.yaml").write_text("texts: [unclosed")
    assert "holds a list" in run("demo", "--config", str(tmp_path / "a.yaml")).output.replace("\n", " ")
    assert "is no YAML" in run("demo", "--config", str(tmp_path / "b.yaml")).output.replace("\n", " ")


def test_a_users_own_words_are_not_read_as_markup(tmp_path: Path) -> None:
    (tmp_path / "one.csv").write_text("text,label\na b,[/x]\nc d,[/x]\n", encoding="utf-8")
    result = run("demo", "--data", str(tmp_path / "one.csv"), "--group-column", "texts", "--out", str(tmp_path))
    assert result.exit_code == 2
    assert "[/x]" in result.output


def test_a_place_no_run_can_go_is_refused_before_any_work(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine", encoding="utf-8")
    result = run("demo", "--model", "no/such-model", "--out", str(tmp_path / "file"))
    assert result.exit_code == 2
    assert "is a file; runs go into a folder" in result.output.replace("\n", " ")
    (tmp_path / "foreign").mkdir()
    result = run("demo", "--model", "no/such-model", "--out", str(tmp_path), "--name", "foreign")
    assert "is no run folder" in result.output.replace("\n", " ")


def test_models_check_prints_the_proof(tiny, word_tokenizer, tmp_path: Path) -> None:
    tiny("llama").save_pretrained(tmp_path / "model")
    word_tokenizer.save_pretrained(tmp_path / "model")
    result = run("models", "check", str(tmp_path / "model"))
    assert result.exit_code == 0, result.output
    assert "LlamaForCausalLM" in result.output
    assert "proved in full" in result.output
    assert "head causality" in result.output
    said = json.loads(run("models", "check", str(tmp_path / "model"), "--json").stdout)
    assert said["is_whole"] is True
    assert {row["name"] for row in said["identities"]} >= {"sum", "edit", "head sum", "tail"}
    assert all(row["holds"] for row in said["proof"])
    assert run("models", "check", "no/such-model").exit_code == 2


def test_the_version_is_printed() -> None:
    assert run("--version").output.strip()
