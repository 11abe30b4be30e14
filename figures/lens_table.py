"""A text under a lens: depth by token, the lens's first word in every cell, and where the final word is on its way.

Depth grows upwards, so that the top row is the model's own answer. The arrow before a word says how the rank of the
model's final word moved against the depth below: ▲ it came forward, ▼ it fell back, ● it is first. Colour: KL to the
model, entropy, or the probability of the lens's word; the pale end is near the model, unsure, unlikely.
"""

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from microtome.figures.theme import LIGHT, plain

_COLOURS = {"kl": "KL to the model (nats)", "entropy": "entropy (nats)", "prob": "probability of the word"}
_NEEDED = ("depth", "position", "token", "word", "words", "probs", "kl", "entropy", "prob", "rank")
_LETTERS, _ROW_PIXELS, _TEXT_SIZE = 9, 20, 10.5
_KEY = "<br><sup>the model's final word: ● is first here, ▲ came forward, ▼ fell back, · neither</sup>"
# pale where words are dark and dark where they are white
_SCALE = ((0.0, "#f3f6fb"), (0.35, "#b9d0ea"), (0.7, "#5d93cb"), (1.0, "#1f4e86"))


def lens_table(
    table: pd.DataFrame,
    *,
    colour: str = "kl",
    positions: tuple[int, int] | None = None,
    letters: int = _LETTERS,
    title: str | None = None,
) -> go.Figure:
    """Heat map with words.

    table: one lens's rows, as `lenses.lens_table` gives them: columns depth, position, token, word, prob, words, probs,
    kl, entropy, rank. colour: "kl", "entropy" or "prob". positions: first and one past the last token shown; some 14 fit
    a page. letters: of a word in its cell, longer ones are cut with an ellipsis. title: None writes what is coloured.
    Raises KeyError for missing columns; ValueError for another colour, no rows, or rows of several lenses.
    """
    if missing := [name for name in _NEEDED if name not in table]:
        raise KeyError(f"the table lacks {missing}. Give the rows of one lens from lens_table(...).table.")
    if colour not in _COLOURS:
        raise ValueError(f"colour is {colour!r}. Give one of {', '.join(_COLOURS)}.")
    if positions is not None:
        table = table[(table["position"] >= positions[0]) & (table["position"] < positions[1])]
    if table.empty:
        raise ValueError(f"the table has no rows{'' if positions is None else f' at positions {positions}'}.")
    if table.duplicated(["depth", "position"]).any():
        raise ValueError("the table has several rows for one cell. Give the rows of one lens and one text.")
    grid = table.pivot(index="depth", columns="position")
    depths, places = grid.index.to_numpy(), grid["kl"].columns.to_numpy()
    values = grid[colour].to_numpy(dtype=float)
    ranks, words = grid["rank"].to_numpy(dtype=float), grid["word"].to_numpy()
    arrows = _arrows(ranks)
    cells = np.array(
        [
            [f"{arrow} {_shown(word, letters)}" for arrow, word in zip(*row, strict=True)]
            for row in zip(arrows, words, strict=True)
        ]
    )
    top = _upper(values, colour)
    figure = go.Figure(
        go.Heatmap(
            x=np.arange(len(places)),
            y=np.arange(len(depths)),
            z=values,
            hovertext=_hovers(grid, depths, places),
            hoverinfo="text",
            xgap=1,
            ygap=1,
            coloraxis="coloraxis",
        )
    )
    # words as annotations of two colours: on a dark cell a dark word cannot be read
    dark = values > 0.6 * top
    for is_dark, ink in ((False, "#1f2328"), (True, "#ffffff")):
        at = np.argwhere(dark == is_dark)
        figure.add_scatter(
            x=at[:, 1],
            y=at[:, 0],
            mode="text",
            text=[cells[row, column] for row, column in at],
            textfont={"size": _TEXT_SIZE, "color": ink},
            hoverinfo="skip",
            showlegend=False,
        )
    tokens = [_shown(grid["token"].iloc[0, column], letters) for column in range(len(places))]
    step = 1 if len(depths) <= 40 else 2
    figure.update_layout(
        template=LIGHT,
        title={"text": f"{title if title is not None else f'First word at every depth; colour: {_COLOURS[colour]}'}{_KEY}"},
        height=int(len(depths) * _ROW_PIXELS + 165),
        margin={"t": 70},
        xaxis={
            "title": {"text": "token of the text; its column says what follows it"},
            "tickvals": np.arange(len(places)),
            "ticktext": tokens,
            "tickangle": 0 if max(map(len, tokens)) * len(tokens) < 110 else -40,
            "showgrid": False,
            "range": [-0.5, len(places) - 0.5],
        },
        yaxis={
            "title": {"text": "depth (blocks)"},
            "tickvals": np.arange(len(depths))[::step],
            "ticktext": [str(depth) for depth in depths][::step],
            "showgrid": False,
            "range": [-0.5, len(depths) - 0.5],
        },
        coloraxis={
            "colorscale": _SCALE,
            "cmin": 0,
            "cmax": top,
            "colorbar": {"thickness": 12, "outlinewidth": 0, "nticks": 6, "xpad": 6},
        },
    )
    return figure


def _arrows(ranks: np.ndarray) -> np.ndarray:
    """Against the depth below: the final word is first (●), came forward (▲), fell back (▼), or neither (·)."""
    before = np.vstack([ranks[:1], ranks[:-1]])
    return np.select([ranks == 0, ranks < before, ranks > before], ["●", "▲", "▼"], "·")


def _upper(values: np.ndarray, colour: str) -> float:
    if colour == "prob":
        return 1.0
    finite = values[np.isfinite(values)]
    # one huge first column would leave all others pale
    return max(float(np.quantile(finite, 0.9)) if len(finite) else 1.0, 1e-3)


def _shown(word: object, letters: int) -> str:
    """A word as it fits a cell: spaces as low marks, line ends as ⏎, long ones cut."""
    text = str(word).replace("\n", "⏎").replace("\t", "⇥").replace("\r", "␍")
    text = "␣" if not text.strip() and text else text.strip() if len(text.strip()) == len(text) else f"_{text.strip()}"
    return plain(text if len(text) <= letters else text[: letters - 1] + "…")


def _hovers(grid: pd.DataFrame, depths: np.ndarray, places: np.ndarray) -> list[list[str]]:
    hovers = []
    for row, depth in enumerate(depths):
        line = []
        for column, place in enumerate(places):

            def cell(name: str, row: int = row, column: int = column) -> object:
                return grid[name].iloc[row, column]

            listed = "<br>".join(
                f"{prob:7.3f}  {plain(repr(word))}"
                for word, prob in zip(cell("words"), cell("probs"), strict=True)
            )
            line.append(
                f"depth {depth}, token {place} {plain(repr(cell('token')))}<br>{listed}<br>KL {cell('kl'):.3f}, entropy "
                f"{cell('entropy'):.3f} nats<br>rank of the model's word: {cell('rank')}"
            )
        hovers.append(line)
    return hovers
