"""Steering in words: tables for a terminal, figures and sections for a report."""

from typing import TYPE_CHECKING, Any

import pandas as pd

from microtome.app.console_table import print_frame
from microtome.figures.dose_response import dose_response, said
from microtome.figures.report import Section
from microtome.figures.trade_off_curves import trade_off_curves

if TYPE_CHECKING:
    from rich.console import Console

MOST_METHODS = 4  # of a dose-response figure
SHOWN_TEXTS = 8
TERMINAL_TEXTS = 3
SIDE_EFFECTS = {"perplexity": "perplexity", "distinct_2": "variety", "repetition": "repeats", "empty": "empty"}


def condition_of(method: str, strength: float) -> str:
    """Name of a method's condition at a strength."""
    return f"{method} {strength:.4g}"


def targets_of(tables: dict[str, pd.DataFrame]) -> list[str]:
    """Columns of targets, in order."""
    return [name.removesuffix("_gain") for name in tables["conditions"] if name.endswith("_gain")]


def steer_figures(tables: dict[str, pd.DataFrame], targets: list[str], limit: float) -> dict[str, Any]:
    """Figures of a run by name, from its tables."""
    table = tables["conditions"]
    methods = table.loc[~table["control"] & table["method"].notna(), "method"].drop_duplicates()
    own = table[~table["control"]]
    figures: dict[str, Any] = {}
    for number in range(0, len(methods), MOST_METHODS):
        some = methods.iloc[number : number + MOST_METHODS]
        rows = own[own["method"].isna() | own["method"].isin(some)]
        figures[f"dose_{number // MOST_METHODS}"] = dose_response(rows, targets, limit=limit)
    for target in targets:
        figures[f"trade_off_{target}"] = trade_off_curves(table, f"{target}_gain", limit=limit)
    return figures


def steer_headline(tables: dict[str, pd.DataFrame]) -> dict[str, str]:
    """The first target's gain, and the KL, of the method of the largest gain."""
    target = targets_of(tables)[0]
    chosen = tables["chosen"]
    best = chosen.loc[chosen[f"{target}_gain"].idxmax()]
    return {
        f"gain in {said(target)}": _interval(best, f"{target}_gain"),
        "KL on neutral text, nats": f"{best['kl']:.3f}",
        "perplexity": f"{best['perplexity']:.2f}",
        "method": f"{best['method']} at {best['strength']:.3g}",
    }


def steer_sections(tables: dict[str, pd.DataFrame], figures: dict[str, Any]) -> list[Section]:
    """The report, section by section."""
    sections = [
        Section(
            "Strength and what it does",
            "Means over test prompts with 95 % intervals over prompts; below them KL to the unsteered model on neutral "
            "text, with the limit as a dashed line. The dotted line is the unsteered model.",
            figure,
            table=tables["conditions"] if name == "dose_0" else None,
            table_name="conditions",
        )
        for name, figure in figures.items()
        if name.startswith("dose_")
    ]
    sections += [
        Section(
            f"{said(name.removeprefix('trade_off_')).capitalize()} against side effect",
            figure=figure,
            caption="Gain over the unsteered model on the same prompts; crosses are controls.",
        )
        for name, figure in figures.items()
        if name.startswith("trade_off_")
    ]
    sections.append(
        Section(
            "Chosen strengths",
            "By the development prompts, within the limit; numbers are of the test prompts.",
            table=tables["chosen"],
            table_name="chosen",
        )
    )
    more = {
        "depths": ("Depths tried", "Each at the strength whose KL is the limit, on development prompts."),
        "random": ("Directions at random", "Of the same length, on the sphere and from the activations' covariance."),
        "strengths": ("Strengths tried", "KL on development passages."),
        "layers": ("What the edits did", "Sizes relative to the stream, and readings on the direction."),
    }
    sections += [
        Section(heading, text, table=tables[name], table_name=name)
        for name, (heading, text) in more.items()
        if name in tables
    ]
    sections.append(Section("What was written", table=side_by_side(tables, SHOWN_TEXTS), table_name="texts"))
    return sections


def side_by_side(tables: dict[str, pd.DataFrame], count: int) -> pd.DataFrame:
    """prompt, unsteered and each chosen condition's text."""
    texts = tables["texts"]
    found = texts[texts["condition"] == "unsteered"][["text", "prompt", "completion"]].head(count)
    found = found.rename(columns={"completion": "unsteered"})
    for row in tables["chosen"].itertuples():
        name = condition_of(row.method, row.strength)
        steered = texts[texts["condition"] == name][["text", "completion"]].rename(columns={"completion": name})
        found = found.merge(steered, on="text")
    return found.drop(columns="text")


def print_steer(console: "Console", tables: dict[str, pd.DataFrame]) -> None:
    """The tables that fit into a terminal, and some of what was written."""

    def shown(title: str, frame: pd.DataFrame) -> None:
        print_frame(console, title, frame, lambda value: f"{value:.3g}" if isinstance(value, float) else str(value))

    targets = targets_of(tables)
    if "depths" in tables:
        columns = ["site", "strength", "kl", *targets]
        marked = tables["depths"]["site"] + tables["depths"]["chosen"].map({True: " *", False: ""})
        shown(
            "Depths on development prompts (* chosen)", _named(tables["depths"][columns].assign(site=marked), targets)
        )
    table = tables["conditions"]
    picked = {condition_of(row.method, row.strength) for row in tables["chosen"].itertuples()}
    names = [name + (" *" if name in picked else "") for name in table["condition"]]
    count = int(tables["texts"]["text"].nunique())
    first, second = (pd.DataFrame({"condition": names}) for _ in range(2))
    first["KL"] = table["kl"].to_numpy()
    for number, target in enumerate(targets):  # two intervals fit into a narrow terminal
        column = [_interval(row, f"{target}_gain") for _, row in table.iterrows()]
        (first if number < 2 else second)[said(target)] = column
    for name, short in SIDE_EFFECTS.items():
        second[short] = table[name].to_numpy()
    shown(f"Gain over the unsteered model, {count} test prompts (* chosen on development prompts)", first)
    shown("What it costs", second)
    for row in tables["chosen"].itertuples():
        if not row.within_limit:
            console.print(f"{row.method}: no strength is within the limit; the cheapest one is marked.", markup=False)
    if "random" in tables:
        drawn = tables["random"]
        own, rest = drawn.iloc[0], drawn.iloc[1:]
        line = f"Random directions of that length ({len(rest)}): KL {rest['kl'].min():.3g} to {rest['kl'].max():.3g}"
        line += f" (this one {own['kl']:.3g})"
        if "word_odds_gain" in drawn:
            gains = rest["word_odds_gain"]
            line += f"; log odds {gains.min():+.2f} to {gains.max():+.2f} (this one {own['word_odds_gain']:+.2f})"
        console.print(line, markup=False, soft_wrap=True)
    for _, row in side_by_side(tables, TERMINAL_TEXTS).iterrows():
        console.print(f"\n{row['prompt']} ...", markup=False, style="bold")
        for name in row.index[1:]:
            console.print(f"  {name}: {' '.join(str(row[name]).split())}", markup=False)


def _named(frame: pd.DataFrame, targets: list[str]) -> pd.DataFrame:
    return frame.rename(columns={"kl": "KL", **{name: said(name) for name in targets}})


def _interval(row: pd.Series, name: str) -> str:
    return f"{row[name]:+.2f} [{row[f'{name}_low']:+.2f}, {row[f'{name}_high']:+.2f}]"
