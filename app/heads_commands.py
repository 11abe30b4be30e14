"""`microtome heads`: options from the fields of `HeadsConfig`."""

from pathlib import Path
from typing import Annotated

import typer

from microtome.app.settings_file import read_settings
from microtome.app.user_errors import user_errors


def add_heads(app: typer.Typer) -> None:
    """Add the command."""
    app.command("heads")(heads)


def heads(
    model: Annotated[str | None, typer.Argument(help="bundled name, hub id, folder or GGUF file (smollm2)")] = None,
    config: Annotated[Path | None, typer.Option(help="YAML file with settings; options override it")] = None,
    data: Annotated[str | None, typer.Option(help="a data set, or a CSV, JSONL or Parquet file (lines)")] = None,
    text_column: Annotated[str | None, typer.Option(help="the file's column of texts (text)")] = None,
    group_column: Annotated[str | None, typer.Option(help="the file's column of documents")] = None,
    texts: Annotated[int | None, typer.Option(help="how many texts, drawn at random (64)")] = None,
    max_length: Annotated[int | None, typer.Option(help="tokens of each text at most (256)")] = None,
    copy_length: Annotated[int | None, typer.Option(help="tokens of each half of the repeated texts (64)")] = None,
    made_texts: Annotated[int | None, typer.Option(help="how many repeated texts, and needles (16)")] = None,
    threshold: Annotated[list[str] | None, typer.Option(help="ROLE=NUMBER, such as sink=0.4; again for more")] = None,
    untrained: Annotated[bool | None, typer.Option(help="run a model with fresh weights too, as a control")] = None,
    bootstraps: Annotated[int | None, typer.Option(help="bootstrap draws for the intervals (1000)")] = None,
    seed: Annotated[int | None, typer.Option(help="seed of everything drawn (0)")] = None,
    out: Annotated[Path | None, typer.Option(help="folder of runs (runs)")] = None,
    name: Annotated[str | None, typer.Option(help="name of the run")] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="print one JSON document on stdout and nothing else there")
    ] = False,
) -> None:
    """What each attention head looks at: induction, previous token, sink and other roles, with controls."""
    given = {key: value for key, value in locals().items() if value is not None}
    with user_errors(as_json):
        from microtome.app.heads_config import HeadsConfig, given_thresholds
        from microtome.app.heads_run import run_heads

        given = {key: value for key, value in given.items() if key in HeadsConfig.model_fields}
        if threshold:
            given["thresholds"] = given_thresholds(threshold)
        run_heads(read_settings(HeadsConfig, config, given), as_json=as_json)
