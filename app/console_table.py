"""A table in a terminal, from a data frame."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import pandas as pd

if TYPE_CHECKING:
    from rich.console import Console


def print_frame(console: "Console", title: str, frame: pd.DataFrame, said: Callable[[object], str]) -> None:
    """Title and table; numbers to the right. said: a cell in words."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, header_style="bold", pad_edge=False)
    for column in frame:
        is_text = not pd.api.types.is_numeric_dtype(frame[column])
        table.add_column(str(column), justify="left" if is_text else "right", no_wrap=True)
    for row in frame.itertuples(index=False):
        table.add_row(*map(said, row))
    console.print(title, markup=False)
    console.print(table)
