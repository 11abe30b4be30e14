"""A report as one HTML file: headline, sections of a figure with its table beneath, and where the numbers come from.

Everything that comes from data is escaped: a text in a table is shown as it stands and never read as HTML. Each table
can be saved as CSV, all rows and columns at full precision, from inside the file.
"""

import base64
import html
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pandas as pd
import plotly.graph_objects as go

from microtome.figures.page import figure_block, page

_OPEN_ROWS = 12
_MOST_ROWS = 1000


@dataclass(frozen=True)
class Section:
    """One part of a report.

    heading, text, caption: plain text; blank lines part the text's paragraphs, the caption goes under the figure.
    figure and table: drawn in this order. table_name: the saved CSV's name, without suffix.
    """

    heading: str
    text: str = ""
    figure: go.Figure | None = None
    caption: str = ""
    table: pd.DataFrame | None = None
    table_name: str = "table"


def html_report(
    title: str,
    sections: Sequence[Section],
    *,
    lead: str = "",
    headline: Mapping[str, str] | None = None,
    provenance: Mapping | None = None,
    command: str = "",
) -> str:
    """The report as HTML text, about 5 MB (Plotly's code), for a file that opens offline.

    lead: a sentence or two under the title. headline: what to take away, as label and value, in boxes. provenance:
    nested plain values, shown at the end. command: how to make the report again.
    Raises ValueError for a report without sections.
    """
    if not sections:
        raise ValueError("the report has no sections. Pass at least one Section.")
    parts = [f"<h1>{html.escape(title)}</h1>"]
    if lead:
        parts.append(_paragraphs(lead, css="lead"))
    if headline:
        boxes = (
            f"<div><dt>{html.escape(name)}</dt><dd>{html.escape(text)}</dd></div>" for name, text in headline.items()
        )
        parts.append(f'<dl class="headline">{"".join(boxes)}</dl>')
    parts.extend(_section(section) for section in sections)
    if command:
        parts.append(f"<section><h2>Make this report again</h2><pre>{html.escape(command)}</pre></section>")
    if provenance:
        parts.append(f"<section><h2>Provenance</h2>{_provenance(provenance)}</section>")
    return page(title, "\n".join(parts))


def html_table(table: pd.DataFrame, *, name: str = "table") -> str:
    """The table as HTML, folded away beyond 12 rows and cut at 1,000, with a link that saves all of it as CSV."""
    shown = table.head(_MOST_ROWS)
    is_number = [pd.api.types.is_numeric_dtype(kind) and not pd.api.types.is_bool_dtype(kind) for kind in table.dtypes]
    classes = ["number" if number else "text" for number in is_number]
    head = "".join(
        f'<th scope="col" class="{css}">{html.escape(str(column))}</th>'
        for css, column in zip(classes, table.columns, strict=True)
    )
    rows = (
        "<tr>"
        + "".join(f'<td class="{css}">{_cell(value)}</td>' for css, value in zip(classes, row, strict=True))
        + "</tr>"
        for row in shown.itertuples(index=False, name=None)
    )
    csv = base64.b64encode(table.to_csv(index=False).encode("utf-8")).decode("ascii")
    link = f'<a download="{html.escape(name)}.csv" href="data:text/csv;charset=utf-8;base64,{csv}">Save as CSV</a>'
    rest = f" The first {_MOST_ROWS:,} are shown." if len(table) > _MOST_ROWS else ""
    count = f"{len(table):,} {'row' if len(table) == 1 else 'rows'}"
    body = f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'
    is_open = " open" if len(table) <= _OPEN_ROWS else ""
    return f'<details{is_open}><summary>Table, {count}.{rest}</summary>{body}</details><p class="note">{link}</p>'


def _section(section: Section) -> str:
    parts = [f"<section><h2>{html.escape(section.heading)}</h2>", _paragraphs(section.text)]
    if section.figure is not None:
        parts.append(figure_block(section.figure, caption=section.caption))
    if section.table is not None:
        parts.append(html_table(section.table, name=section.table_name))
    return "".join(parts) + "</section>"


def _paragraphs(text: str, *, css: str = "") -> str:
    opening = f'<p class="{css}">' if css else "<p>"
    return "".join(f"{opening}{html.escape(part.strip())}</p>" for part in text.split("\n\n") if part.strip())


def _cell(value: object) -> str:
    if value is None or (not isinstance(value, list | tuple | dict) and pd.isna(value)):
        return "–"
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 0.001 or abs(value) >= 1e5 else f"{value:.3f}"
    return html.escape(str(value))


def _provenance(facts: Mapping) -> str:
    """A table of the plain facts, then each nested mapping folded beneath: full width, so that it reads on a phone."""
    rows, nested = [], []
    for name, value in facts.items():
        if isinstance(value, Mapping):
            nested.append(f"<details><summary>{html.escape(str(name))}</summary>{_provenance(value)}</details>")
            continue
        plain = json.dumps(value, ensure_ascii=False, default=str) if isinstance(value, list | tuple) else str(value)
        shown = "–" if value is None else html.escape(plain)
        rows.append(f'<tr><th scope="row">{html.escape(str(name))}</th><td class="fact">{shown}</td></tr>')
    table = f'<div class="scroll"><table><tbody>{"".join(rows)}</tbody></table></div>' if rows else ""
    return table + "".join(nested)
