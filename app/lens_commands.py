"""`microtome lens [MODEL]`: a text or a data set under the logit, ridge and tuned lens, printed and as a run folder."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from microtome.app.lens_config import LensConfig
from microtome.app.settings_file import read_settings
from microtome.app.user_errors import user_errors

if TYPE_CHECKING:
    import pandas as pd
    from rich.console import Console

    from microtome.app.lens_run import LensRun

_FIELDS = LensConfig.model_fields


def _option(name: str) -> typer.models.OptionInfo:
    field = _FIELDS[name]
    said = "" if field.default in (None, False) else f" (default: {field.default})"
    return typer.Option(f"--{name.replace('_', '-')}", help=f"{field.description}{said}", show_default=False)


def lens(
    model: Annotated[
        str | None, typer.Argument(help="bundled name, hub id, folder or GGUF file (default: smollm2)")
    ] = None,
    config: Annotated[Path | None, typer.Option(help="YAML file with settings; options override it")] = None,
    text: Annotated[str | None, _option("text")] = None,
    target: Annotated[list[str] | None, typer.Option(help=_FIELDS["target"].description)] = None,
    data: Annotated[str | None, _option("data")] = None,
    text_column: Annotated[str | None, _option("text_column")] = None,
    group_column: Annotated[str | None, _option("group_column")] = None,
    texts: Annotated[int | None, _option("texts")] = None,
    max_length: Annotated[int | None, _option("max_length")] = None,
    lens: Annotated[list[str] | None, _option("lens")] = None,
    tuned: Annotated[Path | None, _option("tuned")] = None,
    fit_tuned: Annotated[bool | None, typer.Option("--fit-tuned", help=_FIELDS["fit_tuned"].description)] = None,
    depths: Annotated[str | None, typer.Option(help=f"{_FIELDS['depths'].description}, such as 5,10,15")] = None,
    start: Annotated[Literal["ridge", "zero"] | None, _option("start")] = None,
    steps: Annotated[int | None, _option("steps")] = None,
    tokens: Annotated[int | None, _option("tokens")] = None,
    optimizer: Annotated[Literal["adam", "sgd"] | None, _option("optimizer")] = None,
    rate: Annotated[float | None, _option("rate")] = None,
    top: Annotated[int | None, _option("top")] = None,
    seed: Annotated[int | None, _option("seed")] = None,
    out: Annotated[Path | None, _option("out")] = None,
    name: Annotated[str | None, _option("name")] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="print one JSON document on stdout and nothing else there")
    ] = False,
) -> None:
    """What the model says at every depth of a text, and by how much the depths of a data set differ from the end."""
    given = {key: value for key, value in locals().items() if key in _FIELDS and value is not None}
    with user_errors(as_json, flags=_FIELDS):
        if depths is not None:
            given["depths"] = _numbers(depths)
        if not lens:
            given.pop("lens", None)
        if not target:
            given.pop("target", None)
        settings = read_settings(LensConfig, config, given)
        from rich.console import Console  # late: importing rich draws from Python's random generator

        from microtome.app.lens_run import run_lens

        console = Console(stderr=as_json, highlight=False)
        found = run_lens(
            settings, progress=not as_json, say=lambda line: console.print(line, markup=False, soft_wrap=True)
        )
        if as_json:
            print(json.dumps(_plain(found), ensure_ascii=False))
        else:
            _show(console, found)


def _numbers(text: str) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() for part in parts):
        raise ValueError(f"--depths is {text!r}. Give numbers from 0 with commas between them, such as 5,10,15.")
    return tuple(map(int, parts))


def _last_token(cells: "pd.DataFrame") -> "pd.DataFrame":
    last = cells[cells["position"] == cells["position"].max()]
    followed = [name for name in cells if name.startswith(("prob of ", "rank of "))]
    return last[["lens", "depth", "word", "prob", "kl", "entropy", "rank", *followed]]


def _plain(found: "LensRun") -> dict:
    def records(table: "pd.DataFrame") -> list[dict]:
        return json.loads(table.to_json(orient="records", double_precision=10))

    said: dict = {"run": str(found.path)}
    tables = found.tables
    if "cells" in tables:
        said |= {"last_token": records(_last_token(tables["cells"])), "cells": records(tables["cells"])}
    said |= {name: records(tables[name]) for name in ("curves", "early_exit", "training") if name in tables}
    return said


def _show(console: "Console", found: "LensRun") -> None:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    from microtome.app.run_folder import RunFolder
    from microtome.lenses.early_exit import RULES

    def shown(*columns: str) -> Table:
        table = Table(box=box.SIMPLE_HEAD, header_style="bold", pad_edge=False)
        for column in columns:
            table.add_column(column, justify="left" if column in ("lens", "word") else "right", no_wrap=True)
        return table

    if "cells" in found.tables:
        for name, rows in _last_token(found.tables["cells"]).groupby("lens", sort=False):
            names = [name.removeprefix("prob of ") for name in rows if name.startswith("prob of ")]
            heads = [f"{head} {name!r}" for name in names for head in ("p", "rank")]
            table = shown("depth", "word", "p", "KL", "rank", *heads)
            for _, row in rows.iterrows():
                followed = [(f"{row[f'prob of {name}']:.3f}", f"{row[f'rank of {name}']:.0f}") for name in names]
                table.add_row(
                    str(row["depth"]),
                    Text(repr(row["word"])),
                    f"{row['prob']:.3f}",
                    f"{row['kl']:.3f}",
                    str(row["rank"]),
                    *(value for pair in followed for value in pair),
                )
            console.print(f"The last token under the {name} lens (rank: of the model's own word)", markup=False)
            console.print(table)
    if "curves" in found.tables:
        curves = found.tables["curves"]
        curves = curves[curves["sinks"] == "without"]
        names = list(dict.fromkeys(curves["lens"]))
        by_lens = {name: curves[curves["lens"] == name].set_index("depth") for name in names}
        table = shown("depth", *(f"{measure} {name}" for name in names for measure in ("KL", "agrees")))
        for depth in sorted(set(curves["depth"])):
            row = []
            for name in names:
                has = depth in by_lens[name].index
                row += [f"{by_lens[name].loc[depth, value]:.3f}" if has else "" for value in ("kl", "agrees")]
            table.add_row(str(depth), *row)
        first = curves.iloc[0]
        said = f"{first['tokens']:,} tokens of {first['documents']} documents, without first tokens"
        console.print(said, markup=False)
        console.print(table)
    if "early_exit" in found.tables:
        exits = found.tables["early_exit"]
        exits = exits[exits["rule"].isin(RULES)]
        table = shown("lens", "target", "best rule", "agrees", "blocks saved")
        for _, rows in exits.groupby(["lens", "target"], sort=False):
            best = rows.loc[rows["blocks_saved"].idxmax()]
            saved = float(best["blocks_saved"])
            told = (best["rule"], f"{best['agreement']:.3f}", f"{saved:.2f}") if saved > 0 else ("none", "", "0")
            table.add_row(best["lens"], f"{best['target']:.2f}", *told)
        console.print("Early exit (all rules are in the report)", markup=False)
        console.print(table)
    elif "curves" in found.tables:
        console.print("No early exits: rules are tuned on some documents and tested on others; this is one.")
    console.print(f"Report: {RunFolder(found.path, 'lens').shown / 'report.html'}", markup=False, soft_wrap=True)
