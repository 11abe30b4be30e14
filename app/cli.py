"""The command `microtome`. Options are made from the settings' fields; `--config FILE.yaml` gives them all at once.

Heavy imports happen inside the commands, so that `--help` answers at once. `--json` prints one JSON
document on stdout and nothing else there. A user's error is one clear line and exit code 2 (app/user_errors.py).
"""

from importlib.metadata import version as installed_version
from pathlib import Path
from typing import Annotated, Literal

import typer

from microtome.app.config import DemoConfig
from microtome.app.settings_file import read_settings
from microtome.app.user_errors import user_errors

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
    with user_errors(as_json, flags=_FIELDS):
        settings = read_settings(DemoConfig, config, given)
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
    with user_errors(as_json):
        from microtome.app.models_check import check_model

        check_model(name, as_json=as_json, again=again)


def main() -> None:
    """Entry point of the console script."""
    app()
