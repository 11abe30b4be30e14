"""table_html: facts are escaped, long tables cut."""

import pandas as pd

from microtome.probes.table_html import table_html


def test_facts_stand_above_the_table_and_tags_in_them_are_text() -> None:
    shown = table_html("A(<site>, 2 & 3)", pd.DataFrame({"site": ["z.0.1"], "gain": [0.25]}))
    assert shown.startswith("<p>A(&lt;site&gt;, 2 &amp; 3)</p><table")
    assert "<td>z.0.1</td>" in shown


def test_the_middle_of_a_long_table_is_left_out() -> None:
    shown = table_html("A", pd.DataFrame({"site": [f"z.0.{head}" for head in range(100)]}))
    assert shown.count("<tr>") == 21
    assert "z.0.0<" in shown
    assert "z.0.99<" in shown
    assert "z.0.50<" not in shown
