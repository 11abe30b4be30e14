"""A sweep in words: the table of its strongest sites for a terminal, its headline and its sections for a report."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import pandas as pd
import plotly.graph_objects as go

from microtome.figures.report import Section
from microtome.probes.sweep_result import Sweep

if TYPE_CHECKING:
    from rich.console import Console

SHOWN = 12
NAMES = {"auroc": "AUROC", "r2": "R2"}
_BASELINES = {"bag": "words", "length": "length", "position": "position", "token": "token"}
_CAPTIONS = {
    "head_map": (
        "Heads",
        "A cross marks a head that does not stand out from the best of all sites on shuffled labels.",
    ),
    "layer_curve": ("Layers", "The line across is what the best of all sites reaches in 5 % of shuffled labellings."),
}


def print_best(console: "Console", result: Sweep) -> None:
    """The strongest sites with intervals and controls, and what the words alone reach."""
    from rich import box
    from rich.table import Table

    name = result.measure
    has_task = f"control_task_{name}" in result.table
    shown = Table(box=box.SIMPLE_HEAD, header_style="bold", pad_edge=False)
    shown.add_column("site", no_wrap=True)
    shown.add_column(f"{NAMES[name]}, 95 % interval", no_wrap=True)
    if name == "auroc":
        shown.add_column("accuracy", justify="right", no_wrap=True)
    shown.add_column("shuffled", justify="right", no_wrap=True)
    if has_task:
        shown.add_column("by token", justify="right", no_wrap=True)
    shown.add_column("p", justify="right", no_wrap=True)
    for _, row in result.table.sort_values(name, ascending=False, kind="stable").head(SHOWN).iterrows():
        shown.add_row(
            str(row["site"]),
            said_interval(row, name),
            *([f"{row['accuracy']:.3f}"] if name == "auroc" else []),
            f"{row[f'control_{name}']:.3f}",
            *([f"{row[f'control_task_{name}']:.3f}"] if has_task else []),
            "" if pd.isna(row["p_best_site"]) else f"{row['p_best_site']:.3f}",
        )
    console.print(shown)
    for line in legend(result):
        console.print(line, markup=False, soft_wrap=True)


def legend(result: Sweep) -> list[str]:
    """What the columns of `print_best` mean, and the baselines."""
    name = result.measure
    said = f"shuffled: {NAMES[name]} on shuffled labels; "
    if f"control_task_{name}" in result.table:
        said += "by token: on labels drawn once for each token (what memory of the token gives); "
    lines = [f"{said}p: that the best of all sites does as well by luck."]
    if parts := said_baselines(result):
        lines.append(f"Without the model: {parts}.")
    return lines


def said_baselines(result: Sweep) -> str:
    """`words 0.801 [0.760, 0.842], length 0.530 [...]`; empty if none were fitted."""
    rows = result.baselines
    rows = rows[rows["baseline"].isin(_BASELINES)]
    return ", ".join(
        f"{_BASELINES[row['baseline']]} {said_interval(row, result.measure)}" for _, row in rows.iterrows()
    )


def said_best_baseline(result: Sweep) -> str:
    """`words: 0.801 [0.760, 0.842]`; empty if none were fitted."""
    known = result.baselines[result.baselines["baseline"].isin(_BASELINES)]
    if known.empty:
        return ""
    best = known.loc[known[result.measure].idxmax()]
    return f"{_BASELINES[best['baseline']]}: {said_interval(best, result.measure)}"


def said_interval(values: Mapping | pd.Series, name: str) -> str:
    """`0.916 [0.883, 0.948]`."""
    return f"{values[name]:.3f} [{values[f'{name}_low']:.3f}, {values[f'{name}_high']:.3f}]"


def sweep_headline(result: Sweep) -> dict[str, str]:
    """The numbers on top of a report."""
    best, name, several = result.best(1).iloc[0], result.measure, len(result.table) > 1
    headline = {
        f"best site, {NAMES[name]}": f"{best['site']}: {said_interval(best, name)}",
        **({"the choice of a site itself": said_interval(result.selected.measures, name)} if several else {}),
        "best site on shuffled labels": f"{best[f'control_{name}']:.3f}",
        "rows": f"{len(result.truth):,} in {int(result.groups.max()) + 1:,} groups",
    }
    if best_baseline := said_best_baseline(result):
        headline["without the model, at best"] = best_baseline
    return headline


def sweep_sections(result: Sweep, figures: Mapping[str, go.Figure]) -> list[Section]:
    """Figures, all sites and the baselines, for a report."""
    sections = [
        Section(_CAPTIONS[name][0], figure=figure, caption=_CAPTIONS[name][1])
        for name, figure in figures.items()
        if name in _CAPTIONS
    ]
    sections.append(Section("All sites", table=result.best(len(result.table)), table_name="sites"))
    if len(result.baselines) > 1:  # more than the majority
        sections.append(Section("Without the model", table=result.baselines, table_name="baselines"))
    return sections
