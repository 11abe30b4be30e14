import json
import re
from html.parser import HTMLParser

import plotly.graph_objects as go
import pytest
from plotly.offline import get_plotlyjs

from microtome.figures.page import figure_block, page
from microtome.figures.theme import DARK, LIGHT

EVIL = '</script><script>alert("x")</script><!-- &amp;'


class Elements(HTMLParser):
    """Every start tag with its attributes, and the text of each script."""

    def __init__(self, document: str):
        super().__init__()
        self.tags, self.scripts = [], []
        self.feed(document)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag == "script":
            self.scripts.append("")

    def handle_data(self, data):
        if self.scripts and self.lasttag == "script":
            self.scripts[-1] += data


@pytest.fixture
def elements():
    return Elements


def test_plotly_is_there_once_and_nothing_is_loaded():
    document = page("Title", figure_block(go.Figure()) * 3)
    assert document.count(get_plotlyjs()) == 1
    ours = document.replace(get_plotlyjs(), "")
    parsed = Elements(ours)
    for tag, attributes in parsed.tags:
        assert tag not in ("link", "iframe", "img", "object", "embed", "base")
        assert "src" not in attributes
        assert not attributes.get("href", "data:").startswith("http")
    assert not re.search(r"@import|url\(|https?://", ours)
    (policy,) = [a["content"] for tag, a in parsed.tags if tag == "meta" and "http-equiv" in a]
    assert policy.startswith("default-src 'none';")
    assert not re.search(r"https?:|\*", policy)


def test_no_button_sends_the_figure_anywhere():
    script = Elements(page("Title", "").replace(get_plotlyjs(), "")).scripts[-1]
    assert "modeBarButtons: buttons" in script
    assert '[["toImage", "zoom2d", "pan2d", "resetScale2d"]]' in script
    assert 'plotlyServerURL: ""' in script


def test_a_figure_comes_back_from_the_page_whole():
    figure = go.Figure(go.Scatter(x=[1, 2], y=[3.0, 4.0], text=[EVIL, "ü"]), layout={"title": {"text": EVIL}})
    parsed = Elements(page("Title", figure_block(figure)).replace(get_plotlyjs(), ""))
    source = next(
        text
        for (tag, a), text in zip([t for t in parsed.tags if t[0] == "script"], parsed.scripts, strict=True)
        if a.get("class") == "figure"
    )
    assert json.loads(source) == json.loads(figure.to_json())


def test_text_is_escaped():
    document = page(EVIL, figure_block(go.Figure(), caption=EVIL)).replace(get_plotlyjs(), "")
    assert EVIL not in document
    # in the title and in the caption
    assert document.count("&lt;/script&gt;&lt;script&gt;") == 2
    # templates, figure, Plotly's place, our script
    assert len(Elements(document).scripts) == 4


def test_both_looks_are_in_the_page():
    parsed = Elements(page("Title", "").replace(get_plotlyjs(), ""))
    (source,) = [text for text in parsed.scripts if text.startswith("{")]
    looks = json.loads(source)
    assert looks["light"]["layout"] == json.loads(LIGHT.to_json())["layout"]
    assert looks["dark"]["layout"] == json.loads(DARK.to_json())["layout"]


def test_room_is_kept_for_the_figure():
    assert 'style="height:250px"' in figure_block(go.Figure(layout={"height": 250}))
    assert 'style="height:400px"' in figure_block(go.Figure())
