"""`microtome steer [MODEL]`: move a model along a direction, say what it does and what it costs, as a run folder."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from microtome.app.settings_file import read_settings
from microtome.app.steer_config import SteerConfig
from microtome.app.user_errors import user_errors

if TYPE_CHECKING:
    from microtome.app.steer_run import SteerRun

_FIELDS = SteerConfig.model_fields
_LISTS = ("methods", "strengths", "wanted", "unwanted")


def _option(name: str, flag: str | None = None) -> typer.models.OptionInfo:
    field = _FIELDS[name]
    default = field.default
    shown = ", ".join(map(str, default)) if isinstance(default, tuple) else default
    said = "" if default in (None, ()) else f" (default: {shown})"
    return typer.Option(flag or f"--{name.replace('_', '-')}", help=f"{field.description}{said}", show_default=False)


def steer(
    model: Annotated[
        str | None, typer.Argument(help="bundled name, hub id, folder or GGUF file (default: smollm2)")
    ] = None,
    config: Annotated[Path | None, typer.Option(help="YAML file with settings; options override it")] = None,
    data: Annotated[str | None, _option("data")] = None,
    text_column: Annotated[str | None, _option("text_column")] = None,
    label_column: Annotated[str | None, _option("label_column")] = None,
    positive: Annotated[str | None, _option("positive")] = None,
    group_column: Annotated[str | None, _option("group_column")] = None,
    methods: Annotated[list[str] | None, _option("methods", "--method")] = None,
    site: Annotated[str | None, _option("site")] = None,
    positions: Annotated[str | None, _option("positions")] = None,
    strengths: Annotated[list[float] | None, _option("strengths", "--strength")] = None,
    limit: Annotated[float | None, _option("limit")] = None,
    contrast: Annotated[int | None, _option("contrast")] = None,
    prompts: Annotated[int | None, _option("prompts")] = None,
    dev_prompts: Annotated[int | None, _option("dev_prompts")] = None,
    prompt_file: Annotated[Path | None, _option("prompt_file")] = None,
    words: Annotated[int | None, _option("words")] = None,
    tokens: Annotated[int | None, _option("tokens")] = None,
    wanted: Annotated[list[str] | None, _option("wanted")] = None,
    unwanted: Annotated[list[str] | None, _option("unwanted")] = None,
    neutral_file: Annotated[Path | None, _option("neutral_file")] = None,
    random: Annotated[int | None, _option("random")] = None,
    instruction: Annotated[str | None, _option("instruction")] = None,
    artefact: Annotated[Path | None, _option("artefact")] = None,
    seed: Annotated[int | None, _option("seed")] = None,
    out: Annotated[Path | None, _option("out")] = None,
    name: Annotated[str | None, _option("name")] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="print one JSON document on stdout and nothing else there")
    ] = False,
) -> None:
    """Move a model along a direction: what it does to the text it writes, beside controls and what it costs."""
    given = {key: value for key, value in locals().items() if key in _FIELDS and value is not None}
    given = {key: value for key, value in given.items() if key not in _LISTS or value}
    with user_errors(as_json, flags=_FIELDS):
        settings = read_settings(SteerConfig, config, given)
        from rich.console import Console  # late: importing rich draws from Python's random generator

        from microtome.app.run_folder import RunFolder
        from microtome.app.steer_run import run_steer
        from microtome.app.steer_words import print_steer

        console = Console(stderr=as_json, highlight=False)
        found = run_steer(
            settings, progress=not as_json, say=lambda line: console.print(line, markup=False, soft_wrap=True)
        )
        if as_json:
            print(json.dumps(_plain(found), ensure_ascii=False))
            return
        print_steer(console, found.tables)
        shown = RunFolder(found.path, "steer").shown / "report.html"
        console.print(f"Report: {shown}", markup=False, soft_wrap=True)


def _plain(found: "SteerRun") -> dict:
    """The run's folder and its tables; of texts only the number of rows."""
    said: dict = {"run": str(found.path)}
    for name, table in found.tables.items():
        if name == "texts":
            said[name] = len(table)
        else:
            said[name] = json.loads(table.to_json(orient="records", double_precision=10))
    return said
