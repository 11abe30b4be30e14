"""`microtome transport [MODEL]`: what is carried from depth to depth, printed and as a run folder."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from microtome.app.settings_file import read_settings
from microtome.app.transport_config import TransportConfig
from microtome.app.user_errors import user_errors

if TYPE_CHECKING:
    from microtome.app.transport_run import TransportRun

_FIELDS = TransportConfig.model_fields
_LISTS = ("pair", "words", "ranks")


def _option(name: str, flag: str | None = None) -> typer.models.OptionInfo:
    field = _FIELDS[name]
    said = "" if field.default in (None, ()) else f" (default: {field.default})"
    return typer.Option(flag or f"--{name.replace('_', '-')}", help=f"{field.description}{said}", show_default=False)


def transport(
    model: Annotated[
        str | None, typer.Argument(help="bundled name, hub id, folder or GGUF file (default: smollm2)")
    ] = None,
    config: Annotated[Path | None, typer.Option(help="YAML file with settings; options override it")] = None,
    data: Annotated[str | None, _option("data")] = None,
    text_column: Annotated[str | None, _option("text_column")] = None,
    group_column: Annotated[str | None, _option("group_column")] = None,
    texts: Annotated[int | None, _option("texts")] = None,
    max_length: Annotated[int | None, _option("max_length")] = None,
    every: Annotated[int | None, _option("every")] = None,
    pair: Annotated[list[str] | None, _option("pair")] = None,
    rank: Annotated[int | None, _option("rank")] = None,
    ranks: Annotated[list[int] | None, _option("ranks")] = None,
    words: Annotated[list[str] | None, _option("words", "--word")] = None,
    dictionary: Annotated[Path | None, _option("dictionary")] = None,
    directions: Annotated[Path | None, _option("directions")] = None,
    splices: Annotated[int | None, _option("splices")] = None,
    draws: Annotated[int | None, _option("draws")] = None,
    seed: Annotated[int | None, _option("seed")] = None,
    out: Annotated[Path | None, _option("out")] = None,
    name: Annotated[str | None, _option("name")] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="print one JSON document on stdout and nothing else there")
    ] = False,
) -> None:
    """What a linear map carries from depth to depth of the stream, what blocks make anew, and what a splice costs."""
    given = {key: value for key, value in locals().items() if key in _FIELDS and value is not None}
    given = {key: value for key, value in given.items() if key not in _LISTS or value}
    with user_errors(as_json, flags=_FIELDS):
        settings = read_settings(TransportConfig, config, given)
        from rich.console import Console  # late: importing rich draws from Python's random generator

        from microtome.app.run_folder import RunFolder
        from microtome.app.transport_run import run_transport
        from microtome.app.transport_words import print_transport

        console = Console(stderr=as_json, highlight=False)
        found = run_transport(
            settings, progress=not as_json, say=lambda line: console.print(line, markup=False, soft_wrap=True)
        )
        if as_json:
            print(json.dumps(_plain(found), ensure_ascii=False))
            return
        print_transport(console, found.tables)
        shown = RunFolder(found.path, "transport").shown / "report.html"
        console.print(f"Report: {shown}", markup=False, soft_wrap=True)


def _plain(found: "TransportRun") -> dict:
    """The run's folder and its tables; of features only the summary, and the number of rows."""
    said: dict = {"run": str(found.path)}
    for name, table in found.tables.items():
        if name != "features":
            said[name] = json.loads(table.to_json(orient="records", double_precision=10))
    if "features" in found.tables:
        said["features"] = len(found.tables["features"])
    return said
