"""The command line: help without heavy imports, settings from flags and YAML, errors in one line with exit code 2."""

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
import typer
import yaml
from pydantic import ValidationError
from typer.testing import CliRunner

import microtome.app
from microtome.app import cli, demo
from microtome.app.cli import app
from microtome.app.config import DemoConfig

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
GROUPS = {"", "models", "data", "store"}
COMMANDS = {
    *(
        "demo",
        "doctor",
        "capture",
        "probe",
        "sweep",
        "lens",
        "heads",
        "transport",
        "steer",
        "models list",
        "models check",
    ),
    *("data list", "data fetch", "data verify", "store verify", "store info", "store merge", "store export"),
}


def run(*arguments: str):
    return CliRunner().invoke(app, list(arguments))


def walk(command, name: str = "") -> Iterator[tuple[str, object]]:
    """Every group and command with its name as it is typed."""
    yield name, command
    for part, below in getattr(command, "commands", {}).items():
        yield from walk(below, f"{name} {part}".strip())


TREE = dict(walk(typer.main.get_command(app)))


def test_the_commands_are_these():
    assert {name for name, command in TREE.items() if hasattr(command, "commands")} == GROUPS
    assert TREE.keys() - GROUPS == COMMANDS


@pytest.mark.parametrize("name", TREE)
def test_everything_has_help(name: str) -> None:
    command = TREE[name]
    assert command.help.strip().endswith(".")
    for parameter in command.params:
        assert parameter.help, f"{name} {parameter.name}"
        assert "[" not in parameter.help, f"{name} {parameter.name}: rich would take it for markup and hide it"
    result = run(*name.split(), "--help")
    assert result.exit_code == 0
    assert command.help.split()[0] in result.output


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_every_command_takes_json(name: str) -> None:
    assert any("--json" in parameter.opts for parameter in TREE[name].params)


def test_commands_in_the_readme_exist() -> None:
    lines = re.findall(r"(?:`|^\$ )microtome ([a-z][^`\n]*)", README, flags=re.MULTILINE)
    assert lines
    for line in lines:
        words = line.split()
        name = " ".join(words[: 2 if words[0] in GROUPS else 1])
        assert name in COMMANDS, line
        options = {option for parameter in TREE[name].params for option in parameter.opts}
        assert {word for word in words if word.startswith("--")} <= options, line


def test_help_names_every_setting() -> None:
    result = run("demo", "--help")
    assert result.exit_code == 0
    plain = " ".join(result.output.replace("│", " ").split())
    for field, facts in DemoConfig.model_fields.items():
        assert f"--{field.replace('_', '-')}" in plain, field
        assert f"(default: {facts.default})" in plain, field


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys; from microtome.app import cli; heavy = {'torch', 'transformers', 'pandas', 'numpy', 'sklearn'};"
        "print(sorted(heavy & sys.modules.keys()), 'rich' in sys.modules)"
    )
    child = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert child.stdout == "[] False\n"


@pytest.mark.parametrize(
    "arguments",
    [["no-such-command"], ["doctor", "--no-such-option"], ["data", "nothing"], ["store", "merge"], ["data", "fetch"]],
)
def test_what_typer_refuses_has_exit_code_2(arguments: list[str]) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert "Traceback" not in result.output


@pytest.fixture
def stand_in(monkeypatch) -> Callable[..., list]:
    """`stand_in(module, function, answer)`: calls of a function of `microtome.app` are listed and answered so."""

    def put(module: str, function: str, answer: object = None) -> list:
        calls = []

        def called(*arguments: object, **options: object) -> object:
            calls.append((arguments, options))
            if isinstance(answer, BaseException):
                raise answer
            return answer

        made = ModuleType(f"microtome.app.{module}")
        setattr(made, function, called)
        monkeypatch.setitem(sys.modules, made.__name__, made)
        monkeypatch.setattr(microtome.app, module, made, raising=False)
        return calls

    return put


EXPORT = {"format": "npy", "sites": None, "rows": None, "as_json": False}


@pytest.mark.parametrize(
    ("arguments", "module", "function", "given", "options"),
    [
        ("data list --json", "data_commands", "list_data", (), {"as_json": True}),
        ("data fetch toy brown", "data_commands", "fetch_data_sets", (["toy", "brown"],), {"as_json": False}),
        ("data verify all --json", "data_commands", "verify_data_sets", (["all"],), {"as_json": True}),
        ("data verify toy", "data_commands", "verify_data_sets", (["toy"],), {"as_json": False}),
        *[
            (f"store verify a{flag}", "store_commands", "verify_store", (Path("a"),), {"as_json": False} | options)
            for flag, options in [
                ("", {"discard_damaged": False}),
                (" --discard-damaged", {"discard_damaged": True}),
                (" --json", {"discard_damaged": False, "as_json": True}),
            ]
        ],
        ("store info a", "store_commands", "show_store", (Path("a"),), {"as_json": False}),
        *[
            (f"store merge o a b{flag}", "store_commands", "merge_stores", (Path("o"), [Path("a"), Path("b")]), options)
            for flag, options in [
                (" --json", {"allow_repeated": False, "as_json": True}),
                (" --allow-repeated", {"allow_repeated": True, "as_json": False}),
            ]
        ],
        ("store export a o", "store_commands", "export_store", (Path("a"), Path("o")), EXPORT),
        (
            "store export a o --format parquet --site z.1 --site embed --rows label==1",
            *("store_commands", "export_store", (Path("a"), Path("o"))),
            EXPORT | {"format": "parquet", "sites": ["z.1", "embed"], "rows": "label==1"},
        ),
        *[
            (f"{name} c.yaml{flag}", "grid_commands", "run_grid", (Path("c.yaml"),), {"steps": steps} | options)
            for name, steps in [("capture", ("capture",)), ("probe", ("probe",)), ("sweep", ("capture", "probe"))]
            for flag, options in [
                ("", {"dry_run": False, "as_json": False}),
                (" --dry-run --json", {"dry_run": True, "as_json": True}),
            ]
        ],
    ],
)
def test_commands_hand_their_arguments_on(stand_in, arguments, module, function, given, options) -> None:
    calls = stand_in(module, function, 0 if module == "grid_commands" else True)
    result = run(*arguments.split())
    assert result.exit_code == 0, result.output
    assert calls == [(given, options)]


@pytest.mark.parametrize(
    ("arguments", "module", "function", "answer", "code"),
    [
        ("data verify toy", "data_commands", "verify_data_sets", False, 1),
        ("store verify a", "store_commands", "verify_store", False, 1),
        ("sweep c.yaml", "grid_commands", "run_grid", 3, 3),
        ("sweep c.yaml", "grid_commands", "run_grid", KeyboardInterrupt("2 of 5 cells are done."), 130),
        ("data fetch toy", "data_commands", "fetch_data_sets", PermissionError(13, "Permission denied", "/mine"), 2),
        ("models list", "models_list", "list_models", OSError(28, "No space left on device", "/mine"), 2),
        ("models check a", "models_check", "check_model", PermissionError(13, "Permission denied", "/mine"), 2),
        ("store info a", "store_commands", "show_store", IsADirectoryError(21, "Is a directory", "/mine"), 2),
        ("store merge o a", "store_commands", "merge_stores", NotADirectoryError(20, "Not a directory", "/mine"), 2),
        ("store export a o", "store_commands", "export_store", FileExistsError(17, "File exists", "/mine"), 2),
        ("data list", "data_commands", "list_data", PermissionError(13, "Permission denied", "/mine"), 2),
    ],
)
def test_exit_codes(stand_in, arguments, module, function, answer, code) -> None:
    stand_in(module, function, answer)
    result = run(*arguments.split(), "--json")
    assert result.exit_code == code
    assert "Traceback" not in result.output
    if isinstance(answer, BaseException):
        assert json.loads(result.stdout)["error"]["kind"] == type(answer).__name__
        assert result.stderr.count("\n") == 1
        assert run(*arguments.split()).stdout == ""
    else:
        assert result.output == ""


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
    assert message in result.stderr
    assert result.stderr.count("\n") == 1
    assert "Traceback" not in result.output
    said = run("demo", "--out", str(tmp_path), *arguments, "--json")
    assert said.exit_code == 2
    assert message in json.loads(said.stdout)["error"]["message"]


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


def test_a_place_no_run_can_go_is_refused_before_any_work(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "file").write_text("mine", encoding="utf-8")
    result = run("demo", "--model", "no/such-model", "--out", str(tmp_path / "file"))
    assert result.exit_code == 2
    assert "is a file; runs go into a folder" in result.output.replace("\n", " ")
    monkeypatch.setattr(demo, "can_write", lambda folder: folder != tmp_path)
    assert f"{tmp_path} cannot be written to." in run("demo", "--model", "no/such-model", "--out", str(tmp_path)).stderr
    monkeypatch.undo()
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


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["stor"], "No such command 'stor'. Did you mean 'store'"),
        (["sweep", "x.yaml", "--dryrun"], "No such option: --dryrun"),
        (["store", "info"], "Missing argument 'path'. See: microtome store info --help"),
        (["store", "export", "a", "b", "--format", "csv"], "Invalid value for '--format'"),
    ],
)
@pytest.mark.parametrize("as_json", [False, True])
def test_what_cannot_be_understood_is_one_line_too(words, said, as_json, monkeypatch, capsys) -> None:
    monkeypatch.setattr(sys, "argv", ["microtome", *words, *(["--json"] if as_json else [])])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    out, err = capsys.readouterr()
    assert ended.value.code == 2
    assert err.startswith("microtome: ")
    assert said in err
    assert err.count("\n") == 1
    assert (said in json.loads(out)["error"]["message"]) if as_json else out == ""


def test_the_console_script_keeps_exit_codes(monkeypatch, capsys) -> None:
    for words, code in ((["--version"], 0), (["store"], 2), (["store", "info", "--help"], 0)):
        monkeypatch.setattr(sys, "argv", ["microtome", *words])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        assert (ended.value.code or 0) == code, words
    assert "Usage: microtome store" in "".join(capsys.readouterr())
