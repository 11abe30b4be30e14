"""Transport in words: tables for a terminal, figures and sections for a report."""

from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from microtome.app.console_table import print_frame
from microtome.figures.carried_features import carried_features
from microtome.figures.layer_pairs import layer_pairs
from microtome.figures.origin_curves import origin_curves
from microtome.figures.report import Section
from microtome.figures.splice_bars import splice_bars
from microtome.figures.transport_curves import distance_curves, efficiency_curves

if TYPE_CHECKING:
    from rich.console import Console

_MAPS = {"r2_vw": "R2 from depth to depth", "efficiency": "Efficiency", "above_edge": "Directions carried"}
SHOWN_FEATURES = 200
SHOWN_DISTANCES = 8
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
    if "origins" in tables:
        for number, (target, rows) in enumerate(tables["origins"].groupby("target", sort=False)):
            some = rows[rows["name"].isin(list(dict.fromkeys(rows["name"]))[:6])]
            figures[f"origins_{number}"] = origin_curves(some, title=f"Where directions read at {target} come from")
    if "splices" in tables:
        for number, (_, rows) in enumerate(tables["splices"].groupby(["source", "target"], sort=False)):
            figures[f"splices_{number}"] = splice_bars(rows, value="kl")
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
    for name in (name for name in figures if name.startswith("origins_")):
        sections.append(
            Section(
                "Where directions come from",
                figure=figures[name],
                caption="Depths of this run; what a block made is counted from the depth before. R2 on test documents.",
                table=tables["origins"] if name == "origins_0" else None,
                table_name="origins",
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

    def shown(title: str, frame: pd.DataFrame) -> None:
        print_frame(console, title, frame, _said)

    near = tables["by_distance"].astype({"distance": int})
    near = near.iloc[np.unique(np.linspace(0, len(near) - 1, SHOWN_DISTANCES).round().astype(int))]
    near = near[["distance", "pairs", "r2_vw", "r2_ua", "r2_wh", "efficiency", "above_edge"]]
    shown(
        "Means over pairs of a distance: R2 by variance, by channel, whitened; efficiency; directions carried",
        near.rename(columns={"above_edge": "directions"}),
    )
    sizes = tables["subspaces"].set_index(["source", "target", "measure"])
    for pair, rows in tables["efficiency"].groupby(["source", "target"], sort=False):
        kept = rows[rows["rank"].isin([1, 8, 64, rows["rank"].max()])]
        columns = ["rank", "score", "ceiling", "efficiency", "published_efficiency"]
        size = sizes.loc[pair, "value"]
        null = sizes.loc[pair, "null_mean"]
        shown(
            f"{pair[0]} → {pair[1]}: {size['above_edge']:.0f} directions carried (null {null['above_edge']:.1f}); the "
            f"published size is {size['participation']:.0f} (null {null['participation']:.0f})",
            kept[columns].rename(columns={"published_efficiency": "as published"}),
        )
    if "feature_summary" in tables:
        columns = ["target", "directions", "median_r2", "carried", "made_here", "undecided"]
        table = tables["feature_summary"]
        said = table[columns].rename(columns={"directions": "of", "median_r2": "R2", "made_here": "made here"})
        said.insert(0, "from", table["source"])
        shown("Directions: median R2, and how many are carried", said.rename(columns={"target": "to"}))
        named = tables["features"]
        if len(named) <= SHOWN_NAMED:
            rows = named[["source", "target", "name", "verdict"]].copy()
            rows.insert(3, "R2", _interval(named, "r2", 3))
            shown("Each direction", rows)
    if "origins" in tables:
        by_name = tables["origins"].groupby(["target", "name"], sort=False)
        rows = pd.DataFrame([_appears(*key, rows) for key, rows in by_name])
        shown("From which of these depths on more than half of a direction is there", rows)
    if "splices" in tables:
        for pair, rows in tables["splices"].groupby(["source", "target"], sort=False):
            table = pd.DataFrame({"at": rows["positions"], "written": rows["condition"]})
            table["KL, nats"], table["perplexity"] = _interval(rows, "kl", 4), _interval(rows, "perplexity", 1)
            shown(f"{pair[0]} → {pair[1]}: KL to the clean model, and perplexity behind the splice", table)


def _interval(table: pd.DataFrame, name: str, digits: int) -> list[str]:
    ends = table[[name, f"{name}_low", f"{name}_high"]].itertuples(index=False)
    return [f"{_short(value, digits)} [{_short(low, digits)}, {_short(high, digits)}]" for value, low, high in ends]


def _short(value: float, digits: int) -> str:
    return f"{value:.{digits}f}" if abs(value) < 1000 else f"{value:.1e}"


def _appears(target: str, name: str, rows: pd.DataFrame) -> dict[str, object]:
    """The first depth that holds half of a direction, and what random directions have there."""
    there = rows[rows["carried_to_target"] > 0.5].iloc[0]  # at the target itself it is 1
    said = {"target": target, "name": name, "from": there["site"], "R2": f"{there['carried_to_target']:.2f}"}
    low, high = there.get("carried_to_target_control_low"), there.get("carried_to_target_control_high")
    return said | ({} if low is None else {"random directions": f"[{low:.2f}, {high:.2f}]"})


def _said(value: object, digits: int = 3) -> str:
    if not isinstance(value, float):
        return str(value)
    is_count = value.is_integer() and abs(value) >= 2
    return "" if value != value else f"{value:,.0f}" if is_count else f"{value:.{digits}f}"
