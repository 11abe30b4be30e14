"""What is written over a site, and what that does to the next token: a value by condition and number of positions.

From a table alone: one row per number of positions and condition, as `SpliceEffects.to_frame` gives them. Points with
95 % intervals on a logarithmic axis, where values of unlike size show beside one another; bars from zero without it,
since the length of a bar on a logarithmic axis means nothing. A dotted line is the model itself, of each number of
positions.
"""

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from microtome.figures.theme import BLUE, GREEN, LIGHT, ORANGE, PINK, plain

_COLOURS = (BLUE, ORANGE, GREEN, PINK)
_SYMBOLS = ("circle", "diamond", "square", "triangle-up")
_PAIR = ("source", "target", "route")
_LANE = 0.2  # of a condition's row, between numbers of positions
VALUES = {
    "kl": "KL(clean || spliced) from the first token written over, nats",
    "kl_spliced": "KL(clean || spliced) at the tokens written over, nats",
    "kl_later": "KL(clean || spliced) behind the tokens written over, nats",
    "perplexity": "perplexity of the continuation",
    "text_perplexity": "perplexity of the texts",
    "cross_entropy": "cross-entropy of the continuation, nats",
    "ce_increase": "cross-entropy above the model's own, nats",
    "agrees": "share of tokens whose first word is the model's",
    "recovered_mean": "share recovered of what the mean costs",
    "recovered_zero": "share recovered of what zero costs",
    "recovered_intercept": "share recovered of what the intercept costs",
    "recovered_shuffled": "share recovered of what the shuffled operator costs",
}
_LOGARITHMIC = ("kl", "kl_spliced", "kl_later", "perplexity", "text_perplexity")
_OF_THE_MODEL = ("perplexity", "text_perplexity", "cross_entropy")
_NAMES = {
    "identity": "source, copied",
    "shuffled": "operator of shuffled pairs",
    "mean": "mean of the target",
    "intercept": "intercept (x = 0)",
}


def splice_bars(
    table: pd.DataFrame, *, value: str = "perplexity", log: bool | None = None, title: str | None = None
) -> go.Figure:
    """Points or bars by condition, a colour for each number of positions.

    Args:
        table: columns positions, condition, the value, and for intervals `<value>_low` and `<value>_high`; source,
            target and route if it is about several operators, of which it must hold one.
        value: of VALUES.
        log: a logarithmic axis; None for KL and perplexity. Values of 0 are left out of it.
        title: None writes what was written where.

    Raises:
        KeyError: columns are missing.
        ValueError: another value, no row with a number, several operators, or more than four numbers of positions.
    """
    if value not in VALUES:
        raise ValueError(f"value is {value!r}. Give one of {', '.join(VALUES)}.")
    if missing := [name for name in ("positions", "condition", value) if name not in table]:
        raise KeyError(f"the table lacks {missing}. Give what SpliceEffects.to_frame returns.")
    held = [name for name in _PAIR if name in table]
    if held and len(table[held].drop_duplicates()) > 1:
        raise ValueError("the table is about several operators. Choose the rows of one source, target and route.")
    log = value in _LOGARITHMIC if log is None else log
    shown = table[(table["condition"] != "clean") & table[value].notna()]
    shown = shown[shown[value] > 0] if log else shown
    positions = list(dict.fromkeys(shown["positions"]))
    if not 1 <= len(positions) <= len(_COLOURS):
        raise ValueError(
            f"the table has {value} for {len(positions)} numbers of positions. Give one to {len(_COLOURS)}."
        )
    conditions = list(dict.fromkeys(shown["condition"]))
    row_of = {name: len(conditions) - 1 - place for place, name in enumerate(conditions)}
    figure = go.Figure()
    for number, one in enumerate(positions):
        rows = shown[shown["positions"] == one]
        shift = _LANE * ((len(positions) - 1) / 2 - number)
        lanes = [row_of[name] + shift for name in rows["condition"]]
        _draw(figure, rows, value, lanes, number, log)
        if value in _OF_THE_MODEL:
            own = table.loc[(table["condition"] == "clean") & (table["positions"] == one), value]
            for at in own:
                line = {"color": _COLOURS[number], "dash": "dot", "width": 1.2}
                figure.add_vline(x=float(at), line=line, layer="below")
    figure.update_layout(
        template=LIGHT,
        title={"text": title if title is not None else _title(table, held)},
        height=130 + 20 + 44 * len(conditions),
        barmode="overlay",
        xaxis={"title": {"text": VALUES[value]}, **_axis(shown, value, log)},
        yaxis={
            "tickvals": list(row_of.values()),
            "ticktext": [plain(_NAMES.get(name, name)) for name in row_of],
            "range": [-0.6, len(conditions) - 0.4],
            "showgrid": False,
            "ticklen": 0,
        },
        legend={"title": {"text": "tokens written over: "}, "traceorder": "normal"},
        hovermode="closest",
    )
    return figure


def _draw(figure: go.Figure, rows: pd.DataFrame, value: str, lanes: list[float], number: int, log: bool) -> None:
    common = {
        "x": rows[value],
        "y": lanes,
        "name": plain(rows["positions"].iloc[0]),
        "hovertext": [_said(row, value) for _, row in rows.iterrows()],
        "hoverinfo": "text",
        "error_x": _intervals(rows, value, _COLOURS[number]),
    }
    if log:
        marker = {"color": _COLOURS[number], "symbol": _SYMBOLS[number], "size": 9}
        figure.add_scatter(**common, mode="markers", marker=marker)
    else:
        figure.add_bar(**common, orientation="h", width=0.9 * _LANE, marker={"color": _COLOURS[number]})


def _intervals(rows: pd.DataFrame, value: str, colour: str) -> dict | None:
    low, high = f"{value}_low", f"{value}_high"
    if not {low, high} <= set(rows) or rows[low].isna().all():
        return None
    above, below = (rows[high] - rows[value]).clip(lower=0), (rows[value] - rows[low]).clip(lower=0)
    return {"type": "data", "symmetric": False, "array": above, "arrayminus": below, "color": colour, "width": 3}


def _axis(shown: pd.DataFrame, value: str, log: bool) -> dict:
    if not log:
        return {"rangemode": "tozero"}
    held = [shown[name] for name in (value, f"{value}_low", f"{value}_high") if name in shown]
    numbers = pd.concat(held)
    numbers = np.log10(numbers[numbers > 0])
    room = 0.05 * max(float(numbers.max() - numbers.min()), 0.2)
    return {
        "type": "log",
        "range": [float(numbers.min()) - room, float(numbers.max()) + room],
        "dtick": 1 if numbers.max() - numbers.min() > 1 else "D1",
    }


def _title(table: pd.DataFrame, held: list[str]) -> str:
    if not {"source", "target"} <= set(held):
        return "What is written over a site"
    first = table.iloc[0]
    route = "" if first.get("route", "same") == "same" else f", route {first['route']}"
    return plain(f"{first['source']} written over {first['target']}{route}")


def _said(row: pd.Series, value: str) -> str:
    low, high = row.get(f"{value}_low"), row.get(f"{value}_high")
    interval = "" if low is None or pd.isna(low) else f" [{low:.4g}, {high:.4g}]"
    where = f"{row['positions']} tokens" if row["positions"] != "1" else "1 token"
    return f"{plain(_NAMES.get(row['condition'], row['condition']))}, {plain(where)}<br>{row[value]:.4g}{interval}"
