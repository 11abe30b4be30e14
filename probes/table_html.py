"""A result's line of facts and its table, as notebooks show them."""

from html import escape

import pandas as pd

_MOST_ROWS = 20


def table_html(facts: str, table: pd.DataFrame) -> str:
    """The facts as a paragraph above the table, whose middle is left out where it has more than 20 rows."""
    return f"<p>{escape(facts)}</p>{table.to_html(max_rows=_MOST_ROWS, border=0)}"
