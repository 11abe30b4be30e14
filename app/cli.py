"""The command `microtome`. Options are made from the settings' fields; `--config FILE.yaml` gives them all at once.

Heavy imports happen inside the commands, so that `--help` answers at once. A user's error is one clear line and exit
code 2.
"""

import sys
from importlib.metadata import version as installed_version
from pathlib import Path
from types import TracebackType
from typing import Annotated, Literal

import typer
import yaml
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from microtome.app.config import DemoConfig

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help="Cut thin slices out of any transformer while it runs.",
)
_FIELDS = DemoConfig.model_fields


def _option(name: str, *flags: str) -> typer.models.OptionInfo:
    return typer.Option(
        *flags, help=f"{_FIELDS[name].description} [default: {_FIELDS[name].default}]", show_default=False
    )


def _shown_version(wanted: bool | None) -> None:
    if wanted:
        print(installed_version("microtome"))
        raise typer.Exit


@app.callback()
def _microtome(
    version: Annotated[
        bool | None, typer.Option("--version", callback=_shown_version, is_eager=True, help="print the version")
    ] = None,
) -> None:
    """Cut thin slices out of any transformer while it runs."""


@app.command()
def demo(
    config: Annotated[Path | None, typer.Option(help="YAML file with settings; options override it")] = None,
    model: Annotated[str | None, _option("model", "--model")] = None,
    data: Annotated[str | None, _option("data", "--data")] = None,
    text_column: Annotated[str | None, _option("text_column", "--text-column")] = None,
    label_column: Annotated[str | None, _option("label_column", "--label-column")] = None,
    group_column: Annotated[str | None, _option("group_column", "--group-column")] = None,
    texts: Annotated[int | None, _option("texts", "--texts")] = None,
    position: Annotated[Literal["last", "mean", "first"] | None, _option("position", "--position")] = None,
    truncate: Annotated[Literal["left", "right"] | None, _option("truncate", "--truncate")] = None,
    folds: Annotated[int | None, _option("folds", "--folds")] = None,
    inner_folds: Annotated[int | None, _option("inner_folds", "--inner-folds")] = None,
    permutations: Annotated[int | None, _option("permutations", "--permutations")] = None,
    bootstraps: Annotated[int | None, _option("bootstraps", "--bootstraps")] = None,
    seed: Annotated[int | None, _option("seed", "--seed")] = None,
    out: Annotated[Path | None, _option("out", "--out")] = None,
    name: Annotated[str | None, _option("name", "--name")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print the result as JSON")] = False,
) -> None:
    """From text to a per-head probe map: capture, probe every layer and head with controls, and write a report."""
    given = {key: value for key, value in locals().items() if key in _FIELDS and value is not None}
    with _user_errors():
        settings = _settings(config, given)
        from microtome.app.demo import run_demo

        run_demo(settings, as_json=as_json)


models = typer.Typer(no_args_is_help=True, help="What is known of a model.")
app.add_typer(models, name="models")


@models.callback()
def _models() -> None:
    """What is known of a model."""


@models.command()
def check(
    name: Annotated[str, typer.Argument(help="bundled name, hub id, folder or GGUF file")],
    as_json: Annotated[bool, typer.Option("--json", help="print everything as JSON")] = False,
    again: Annotated[
        bool, typer.Option("--again", help="prove everything anew, not only the cheap identities")
    ] = False,
) -> None:
    """Find a model's parts, prove them, and print which sites it offers, which not and why."""
    with _user_errors():
        from microtome.app.models_check import check_model

        check_model(name, as_json=as_json, again=again)


def _settings(config: Path | None, given: dict) -> DemoConfig:
    held: dict = {}
    if config is not None:
        if not config.is_file():
            raise FileNotFoundError(f"there is no settings file {config}; the working directory is {Path.cwd()}.")
        try:
            held = yaml.safe_load(config.read_text(encoding="utf-8")) or {}
        except yaml.YAMLError as error:
            raise ValueError(f"{config} is no YAML: {str(error).splitlines()[0]}.") from error
        if not isinstance(held, dict):
            raise ValueError(f"{config} holds a {type(held).__name__}; settings are names with values, 'texts: 640'.")
    return DemoConfig(**(held | given))


class _user_errors:
    """Turn what a user can mend into one line and exit code 2; anything else keeps its traceback."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if isinstance(error, ValidationError):
            _fail("; ".join(_sentence(e) for e in error.errors()))
        if isinstance(error, (ValueError, KeyError, IndexError, TypeError, FileNotFoundError, FileExistsError)):
            while trace.tb_next is not None:
                trace = trace.tb_next
            if trace.tb_frame.f_globals.get("__name__", "").startswith("microtome."):  # a check of ours, not a crash
                _fail(error.args[0] if isinstance(error, KeyError) else str(error))


def _sentence(error: ErrorDetails) -> str:
    """One of pydantic's errors in words of the command line."""
    option = "--" + "-".join(str(part).replace("_", "-") for part in error["loc"])
    said = error["msg"].removeprefix("Value error, ")
    if error["type"] == "extra_forbidden":
        return f"{option[2:]!r} is no setting; there are {', '.join(_FIELDS)}"
    return said if option == "--" else f"{option} {error.get('input')!r}: {said[0].lower()}{said[1:]}"


def _fail(message: str) -> None:
    from rich.console import Console  # late: importing rich draws from Python's random generator

    console = Console(stderr=True, highlight=False)
    console.print("microtome:", style="red", end=" ")
    console.print(message, soft_wrap=True, markup=False)
    sys.exit(2)


def main() -> None:
    """Entry point of the console script."""
    app()
