"""Transport in words: tables for a terminal, figures and sections for a report."""

from typing import TYPE_CHECKING, Any

import pandas as pd

from microtome.figures.carried_features import carried_features
from microtome.figures.layer_pairs import layer_pairs
from microtome.figures.report import Section
from microtome.figures.splice_bars import splice_bars
from microtome.figures.transport_curves import distance_curves, efficiency_curves

if TYPE_CHECKING:
    from rich.console import Console

_MAPS = {"r2_vw": "R2 from depth to depth", "efficiency": "Efficiency", "above_edge": "Directions carried"}
SHOWN_FEATURES = 200
SHOWN_NAMED = 20  # rows of directions in a terminal


def transport_figures(tables: dict[str, pd.DataFrame]) -> dict[str, Any]:
    """Figures of a run by name, from its tables."""
    plain = tables["pairs"][tables["pairs"]["tokens"] == "without sinks"]
    figures: dict[str, Any] = {
        f"map_{name}": layer_pairs(plain, value=name, title=said) for name, said in _MAPS.items()
    }
    if plain["distance"].notna().any():
        figures["distance"] = distance_curves(plain)
        figures["distance_sinks"] = distance_curves(
            tables["pairs"], values=("r2_vw",), by="tokens", title="With and without sinks"
        )
    for number, ((source, target), rows) in enumerate(tables["efficiency"].groupby(["source", "target"], sort=False)):
        figures[f"efficiency_{number}"] = efficiency_curves(rows, title=f"{source} → {target}")
    if "features" in tables:
        figures["features"] = carried_features(tables["features"])
    if "splices" in tables:
        for number, (_, rows) in enumerate(tables["splices"].groupby(["source", "target"], sort=False)):
            figures[f"splices_{number}"] = splice_bars(rows)
    return figures


def transport_sections(tables: dict[str, pd.DataFrame], figures: dict[str, Any]) -> list[Section]:
    """The report, section by section."""
    sections = [
        Section(
            _MAPS[name.removeprefix("map_")] if name.startswith("map_") else "By distance",
            figure=figure,
            table={"map_r2_vw": tables["pairs"], "distance": tables["by_distance"]}.get(name),
            table_name={"map_r2_vw": "pairs", "distance": "by_distance"}.get(name, "table"),
        )
        for name, figure in figures.items()
        if name.startswith(("map_", "distance"))
    ]
    curves = [name for name in figures if name.startswith("efficiency_")]
    for name in curves:
        table = tables["efficiency"] if name == curves[0] else None
        sections.append(
            Section(
                "Efficiency by rank",
                figure=figures[name],
                caption="Score and ceiling of the same test rows in one metric; the published estimators beside.",
                table=table,
                table_name="efficiency",
            )
        )
    sections.append(
        Section(
            "Size of the transport subspace",
            "How many directions are carried, each measure beside what sites that share nothing would show. Only the "
            "first two are 0 for noise.",
            table=tables["subspaces"],
            table_name="subspaces",
        )
    )
    if "features" in tables:
        shown = tables["features"]
        sections.append(
            Section(
                "Directions carried and made",
                "R2 along each direction on held-out documents, with intervals over documents: carried where surely "
                "more than half of its variance is an affine image of the source, made here where surely less is.",
                figures["features"],
                "The dotted line is the null: what an operator fitted on other documents explains.",
                shown if len(shown) <= SHOWN_FEATURES else tables["feature_summary"],
                "features" if len(shown) <= SHOWN_FEATURES else "feature_summary",
            )
        )
    drawn = [name for name in figures if name.startswith("splices_")]
    for name in drawn:
        first = name == drawn[0]
        said = (
            "The operator's output written over the target at 1, 5 or all tokens of held-out windows, beside a copy of "
            "the source, the mean, zeros and an operator of shuffled pairs."
        )
        sections.append(
            Section(
                "Splices",
                said if first else "",
                figures[name],
                "95 % intervals over documents.",
                tables["splices"] if first else None,
                "splices",
            )
        )
    return sections


def print_transport(console: "Console", tables: dict[str, pd.DataFrame]) -> None:
    """The tables that fit into a terminal."""
    from rich import box
    from rich.table import Table

    def shown(title: str, frame: pd.DataFrame, digits: int = 3) -> None:
        table = Table(box=box.SIMPLE_HEAD, header_style="bold", pad_edge=False)
        for column in frame:
            left = frame[column].dtype == object or pd.api.types.is_string_dtype(frame[column])
            table.add_column(str(column), justify="left" if left else "right", no_wrap=True)
        for row in frame.itertuples(index=False):
            table.add_row(*(_said(value, digits) for value in row))
        console.print(title, markup=False)
        console.print(table)

    near = tables["by_distance"].rename(columns={"above_edge": "directions"})
    shown("By distance (mean over pairs): R2, efficiency, directions carried", near)
    whole = tables["efficiency"].groupby(["source", "target"], sort=False)
    rows = pd.concat([part[part["rank"].isin([1, 8, 64, part["rank"].max()])] for _, part in whole])
    shown(
        "By rank: score, ceiling, efficiency, and efficiency as published",
        rows[["source", "target", "rank", "score", "ceiling", "efficiency", "published_efficiency"]],
    )
    sizes = tables["subspaces"]
    sizes = sizes[sizes["measure"].isin(["above_edge", "rank_95", "participation"])]
    columns = ["source", "target", "measure", "value", "null_mean", "null_high"]
    shown("Directions carried, beside the null", sizes[columns])
    if "feature_summary" in tables:
        columns = ["source", "target", "directions", "median_r2", "carried", "made_here", "undecided", "within_null"]
        shown("Directions", tables["feature_summary"][columns])
        named = tables["features"]
        if len(named) <= SHOWN_NAMED:
            shown("Each direction", named[["target", "name", "r2", "r2_low", "r2_high", "verdict"]])
    if "splices" in tables:
        splices = tables["splices"]
        table = splices[["source", "target", "positions", "condition", "kl", "perplexity"]].copy()
        for name in ("kl", "perplexity"):
            ends = splices[[name, f"{name}_low", f"{name}_high"]].itertuples(index=False)
            table[name] = [f"{value:.3g} [{low:.3g}, {high:.3g}]" for value, low, high in ends]
        shown("Splices: KL to the clean model in nats, perplexity of the continuation", table)


def _said(value: object, digits: int) -> str:
    if not isinstance(value, float):
        return str(value)
    is_count = value.is_integer() and abs(value) >= 2
    return "" if value != value else f"{value:,.0f}" if is_count else f"{value:.{digits}f}"
