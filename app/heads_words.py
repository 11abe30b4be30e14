"""Head roles in words: tables of the strongest heads for a terminal, headline and sections for a report."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import pandas as pd

from microtome.figures.head_roles import head_role_grid, head_score_maps
from microtome.figures.report import Section
from microtome.lenses.head_roles import ROLE_SCORES, HeadRoles

if TYPE_CHECKING:
    from rich.console import Console

SHOWN = 4
SAYS = {
    "induction": "repeated random tokens: weight on the token behind the earlier copy",
    "previous": "weight on the previous token",
    "duplicate": "weight on earlier equal tokens",
    "retrieval": "needle: weight on the token that is to be copied",
    "self": "weight on the token itself",
    "local": "weight within 16 tokens, first token left out",
    "sink": "weight on the first token",
    "inactive": "norm of what the head writes, over the layer's mean",
}
_CONTROL = {"induction": "induction_control", "retrieval": "retrieval_control_copied"}


def print_heads(console: "Console", found: HeadRoles) -> None:
    """The strongest heads of each role, with intervals, controls and how many pass the threshold."""
    from rich import box
    from rich.table import Table

    shown = Table(box=box.SIMPLE_HEAD, header_style="bold", pad_edge=False)
    for name in ("role", "head", "kv head", "score, 95 % interval", "untrained", "control"):
        shown.add_column(name, no_wrap=True, justify="left" if name in ("role", "head") else "right")
    for role, score in ROLE_SCORES.items():
        bound = found.thresholds[role]
        count = int(found.table["roles"].str.split().map(lambda held, role=role: role in held).sum())
        sign = "<" if role == "inactive" else ">"
        for number, (_, row) in enumerate(found.strongest(role, SHOWN).iterrows()):
            place = ("", role, f"{count} {sign} {bound:g}")
            shown.add_row(
                f"{place[min(number + 1, 2)] if number < 2 else ''}",
                f"L{row['layer']}H{row['head']}",
                str(row["kv_head"]),
                _said(row, score),
                _number(row, f"fresh_{score}"),
                _number(row, _CONTROL.get(role, "")),
            )
        shown.add_section()
    console.print(shown)
    for line in legend(found):
        console.print(line, markup=False, soft_wrap=True)


def legend(found: HeadRoles) -> list[str]:
    """What the columns mean."""
    lines = [f"{role}: {says}." for role, says in SAYS.items()]
    return [
        *lines,
        f"10 > 0.3: heads of {len(found.table)} past the threshold of the role (--threshold role=0.3).",
        "untrained: the same with fresh weights. control: the same where there is nothing to repeat.",
    ]


def heads_headline(found: HeadRoles) -> Mapping[str, str]:
    """The strongest head of the roles that are read first, and how many heads have one."""
    boxes = {}
    for role in ("induction", "previous", "retrieval"):
        row = found.strongest(role, 1).iloc[0]
        boxes[f"strongest {role} head"] = f"L{row['layer']}H{row['head']}, {row[ROLE_SCORES[role]]:.2f}"
    has_sink = found.table["roles"].str.split().map(lambda held: "sink" in held)
    boxes["sink heads"] = f"{int(has_sink.sum())} of {len(found.table)}"
    return boxes


def heads_sections(found: HeadRoles) -> list[Section]:
    """Grid and scores with their table."""
    bounds = {ROLE_SCORES[role]: value for role, value in found.thresholds.items() if role != "inactive"}
    said = ", ".join(f"{role} {'<' if role == 'inactive' else '>'} {v:g}" for role, v in found.thresholds.items())
    columns = ["layer", "head", "kv_head", "roles", *ROLE_SCORES.values(), "entropy", "distance", "content_share"]
    brief = found.table[[column for column in columns if column in found.table]]
    return [
        Section(
            "Roles",
            f"A role is a score past its threshold: {said}. A head may have several; the colour is that of the most "
            f"telling one. " + " ".join(f"{role}: {says}." for role, says in SAYS.items()),
            head_role_grid(found.table, title=""),
            "Letters tell the roles; • is a sink.",
            brief,
            "head_roles",
        ),
        Section(
            "Scores",
            "Scores without a sink leave the first token out and rest on the queries that look elsewhere. Entropy is "
            "over the logarithm of the number of keys.",
            head_score_maps(found.table, thresholds=bounds, title=""),
            "A ring marks a head past the threshold of its role.",
            found.table,
            "head_scores",
        ),
    ]


def _said(row: pd.Series, name: str) -> str:
    text = f"{row[name]:.2f}"
    low, high = row.get(f"{name}_low"), row.get(f"{name}_high")
    return text if pd.isna(low) or pd.isna(high) else f"{text} [{low:.2f}, {high:.2f}]"


def _number(row: pd.Series, name: str) -> str:
    return "" if name not in row.index or pd.isna(row[name]) else f"{row[name]:.2f}"
