"""One self-contained HTML page: Plotly's code once, each figure's JSON, a style for light, dark, wide and narrow.

The page loads nothing: its content policy forbids every request, so that it opens offline and tells nobody. A figure's
colours follow the reader's setting (prefers-color-scheme) by swapping its template.
"""

import html

import plotly.graph_objects as go
from plotly.offline import get_plotlyjs

from microtome.figures.theme import DARK, LIGHT

# scripts and styles are inline; blob and data images are what Plotly's "save as picture" makes
_POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"

_STYLE = """
:root { color-scheme: light dark; --text: #1f2328; --soft: #5b636d; --line: #d5d9de; --ground: #fff; --raised: #f5f6f8;
  --link: #1f6feb; }
@media (prefers-color-scheme: dark) { :root { --text: #e6e8eb; --soft: #9aa3ad; --line: #343a42; --ground: #16181d;
  --raised: #1f2329; --link: #6cb0ff; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--ground); color: var(--text);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
main { max-width: 1120px; margin: 0 auto; padding: 24px 24px 64px; }
h1 { font-size: 1.7rem; line-height: 1.25; margin: 0 0 .4rem; overflow-wrap: anywhere; }
h2 { font-size: 1.2rem; margin: 2.6rem 0 .5rem; padding-top: 1.2rem; border-top: 1px solid var(--line); }
p { margin: .4rem 0; max-width: 75ch; }
.lead, figcaption, .note { color: var(--soft); }
figure { margin: 1rem 0 .5rem; }
figcaption, .note { font-size: .875rem; max-width: 85ch; }
figcaption { margin-top: 6px; }
.plot { width: 100%; min-height: 120px; }
dl.headline { display: grid; grid-template-columns: repeat(auto-fit, minmax(180px, 1fr)); gap: 12px; margin: 1.2rem 0; }
dl.headline div { background: var(--raised); border: 1px solid var(--line); border-radius: 8px; padding: 10px 14px; }
dl.headline dt { color: var(--soft); font-size: .8125rem; }
dl.headline dd { margin: 0; font-size: 1.1rem; font-weight: 600; overflow-wrap: anywhere; }
.scroll { overflow-x: auto; border: 1px solid var(--line); border-radius: 8px; margin: .5rem 0; max-height: 70vh; }
table { border-collapse: collapse; font-size: .8125rem; width: 100%; font-variant-numeric: tabular-nums; }
th, td { padding: 4px 10px; text-align: left; border-bottom: 1px solid var(--line); vertical-align: top; }
thead th { position: sticky; top: 0; background: var(--raised); white-space: nowrap; }
td.number, th.number { text-align: right; white-space: nowrap; }
th[scope=row] { width: 1%; white-space: nowrap; }
td.fact { overflow-wrap: anywhere; }
details details { padding-left: 14px; }
td.text { min-width: 9em; max-width: 60ch; overflow-wrap: anywhere; }
tbody tr:last-child > * { border-bottom: 0; }
summary { cursor: pointer; padding: 4px 0; }
a { color: var(--link); }
pre { background: var(--raised); border: 1px solid var(--line); border-radius: 8px; padding: 10px 14px;
  white-space: pre-wrap; overflow-wrap: anywhere; font-size: .8125rem; }
@media (max-width: 600px) { main { padding: 16px 14px 48px; } h1 { font-size: 1.35rem; }
  dl.headline { grid-template-columns: repeat(2, 1fr); } dl.headline dd { font-size: 1.05rem; } }
@media print { details:not([open]) > * { display: block; } .scroll { max-height: none; } }
"""

_SCRIPT = """
(function () {
  const isDark = matchMedia("(prefers-color-scheme: dark)");
  const templates = JSON.parse(document.getElementById("templates").textContent);
  // a list of our own: the default one has a button that sends the figure to a server
  const buttons = [["toImage", "zoom2d", "pan2d", "resetScale2d"]];
  const settings = { responsive: true, displaylogo: false, plotlyServerURL: "", modeBarButtons: buttons };
  function draw() {
    for (const source of document.querySelectorAll("script.figure")) {
      const figure = JSON.parse(source.textContent);
      figure.layout.template = isDark.matches ? templates.dark : templates.light;
      const meta = figure.layout.meta;
      if (isDark.matches && meta && meta.colorscale_on_dark) {
        figure.layout.coloraxis.colorscale = meta.colorscale_on_dark;
      }
      // a finger on a figure scrolls the page; a mouse drags a zoom box
      if (matchMedia("(pointer: coarse)").matches) figure.layout.dragmode = false;
      settings.displayModeBar = innerWidth < 600 ? false : "hover";
      Plotly.react(source.previousElementSibling, figure.data, figure.layout, settings);
    }
  }
  isDark.addEventListener("change", draw);
  draw();
})();
"""


def page(title: str, body: str) -> str:
    """The whole document around `body` (HTML; figures from `figure_block`). title: text, escaped here."""
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{html.escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n<main>\n{body}\n</main>\n"
        f"{_json_script('templates', _templates())}\n"
        f"<script>{get_plotlyjs()}</script>\n<script>{_SCRIPT}</script>\n</body>\n</html>\n"
    )


def figure_block(figure: go.Figure, *, caption: str = "") -> str:
    """A `<figure>` that the page's script draws, its caption (text, escaped here) beneath."""
    height = figure.layout.height or 400
    source = _inside_script(figure.to_json())
    return (
        f'<figure><div class="plot" style="height:{height:g}px"></div>'
        f'<script type="application/json" class="figure">{source}</script>'
        f"<noscript><p>This figure needs JavaScript; the table beneath holds its numbers.</p></noscript>"
        + (f"<figcaption>{html.escape(caption)}</figcaption>" if caption else "")
        + "</figure>"
    )


def _templates() -> str:
    looks = {"light": LIGHT, "dark": DARK}
    return (
        "{"
        + ",".join(
            f'"{name}":{go.Figure(layout={"template": look}).layout.template.to_json()}' for name, look in looks.items()
        )
        + "}"
    )


def _json_script(name: str, source: str) -> str:
    return f'<script type="application/json" id="{name}">{_inside_script(source)}</script>'


def _inside_script(source: str) -> str:
    # in JSON every < is inside a string, where the escape means the same; no text can then close the script element
    return source.replace("<", "\\u003c")
