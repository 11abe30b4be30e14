import base64
import io
import re

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import pytest
from plotly.offline import get_plotlyjs

from microtome.figures.head_map import head_map
from microtome.figures.report import Section, html_report, html_table

EVIL = '<img src="https://example.org/x.png" onerror=alert(1)></script>&amp;'


def saved_csv(document: str) -> pd.DataFrame:
    (encoded,) = re.findall(r'href="data:text/csv;charset=utf-8;base64,([^"]*)"', document)
    return pd.read_csv(io.BytesIO(base64.b64decode(encoded)), keep_default_na=False, na_values=[""])


def test_each_figure_has_its_table_beneath(sweep_table):
    table = sweep_table(3, 2)
    sections = [
        Section("Heads", "One paragraph.\n\nAnother.", head_map(table), "Caption.", table, "heads"),
        Section("Layers", figure=go.Figure(), table=table.head(3), table_name="layers"),
    ]
    document = html_report("A title", sections, lead="Lead.", headline={"Strongest": "L1H0"}, command="microtome sweep")
    assert document.count(get_plotlyjs()) == 1
    body = document[document.index("<body>") : document.index("</main>")]
    order = [
        "A title",
        "Lead.",
        "Strongest",
        "Heads",
        "One paragraph.",
        "Another.",
        '<div class="plot"',
        "Caption.",
        "<table>",
    ]
    places = [body.index(part) for part in order]
    assert places == sorted(places)
    second = body[body.index("Layers") :]
    assert second.index('<div class="plot"') < second.index("<table>") < second.index('download="layers.csv"')
    assert body.index("Make this report again") > body.index("Layers")


def test_nothing_from_the_data_becomes_html(sweep_table):
    table = pd.DataFrame({EVIL: [EVIL], "number": [1.0]})
    section = Section(EVIL, EVIL, go.Figure(layout={"title": {"text": EVIL}}), EVIL, table, EVIL)
    document = html_report(
        EVIL, [section], lead=EVIL, headline={EVIL: EVIL}, provenance={EVIL: {EVIL: EVIL}, "b": [EVIL]}, command=EVIL
    )
    ours = document.replace(get_plotlyjs(), "")
    assert "<img" not in ours
    assert not re.search(r'(src|href)="https?:', ours)
    # title twice, headline two, heading, text, caption, column, cell, file name, lead, command, provenance four
    assert ours.count("&lt;img src=") == 16


def test_the_saved_csv_is_the_whole_table_at_full_precision():
    table = pd.DataFrame({"text": ["a,b", 'ü "q"', "x\ny"] * 500, "value": np.random.default_rng(0).normal(size=1500)})
    document = html_table(table, name="rows")
    pd.testing.assert_frame_equal(saved_csv(document), table)
    assert 'download="rows.csv"' in document
    assert document.count("<tr>") == 1001
    assert "Table, 1,500 rows. The first 1,000 are shown." in document


@pytest.mark.parametrize(("rows", "is_open"), [(1, True), (12, True), (13, False)])
def test_long_tables_are_folded(rows, is_open):
    document = html_table(pd.DataFrame({"a": range(rows)}))
    assert ("<details open>" in document) == is_open
    assert f"{rows} row{'s' if rows > 1 else ''}" in document


def test_cells_are_readable():
    table = pd.DataFrame(
        {
            "float": [0.81234, 1e-5, np.nan, 123456.7],
            "count": pd.array([3, None, 0, 12], dtype="Int64"),
            "flag": [True, False, True, False],
            "text": ["a", None, "0.5", ""],
        }
    )
    cells = re.findall(r'<td class="(\w+)">([^<]*)</td>', html_table(table))
    assert [text for _, text in cells[:4]] == ["0.812", "3", "True", "a"]
    assert [text for _, text in cells[4:8]] == ["1e-05", "–", "False", "–"]
    assert [text for _, text in cells[8:12]] == ["–", "0", "True", "0.5"]
    assert cells[12][1] == "1.235e+05"
    assert [css for css, _ in cells[:4]] == ["number", "number", "text", "text"]


def test_provenance_is_nested():
    document = html_report(
        "t", [Section("s")], provenance={"seed": 3, "model": {"dtype": "float32", "none": None}, "data": ["a", 1]}
    )
    body = document[document.index("Provenance") : document.index("</main>")]
    assert '<th scope="row">seed</th><td class="fact">3</td>' in body
    assert body.index("seed") < body.index("<summary>model</summary>") < body.index("dtype")
    assert '<th scope="row">none</th><td class="fact">–</td>' in body
    assert "[&quot;a&quot;, 1]" in body


def test_a_report_without_sections():
    with pytest.raises(ValueError, match="has no sections"):
        html_report("t", [])
