"""The report of one probe cell: which heads, which layers, and where the numbers come from."""

from collections.abc import Mapping

import plotly.graph_objects as go

from microtome.app.grid_cells import ProbeCell, data_name, label_name, model_name, positions_name
from microtome.app.grid_story import FEW_GROUPS
from microtome.data.runs import Run
from microtome.figures.report import Section, html_report
from microtome.probes.sweep_result import Sweep

_CAPTIONS = {
    "head_map": (
        "Heads",
        "A cross marks a head that does not stand out from the best of all sites on shuffled labels.",
    ),
    "layer_curve": ("Layers", "The line across is what the best of all sites reaches in 5 % of shuffled labellings."),
}


def cell_report(run: Run, cell: ProbeCell, says: Mapping, result: Sweep, figures: Mapping[str, go.Figure]) -> str:
    """The cell as one HTML page. `says` are the facts of its binary label."""
    best = result.best(1).iloc[0]
    chosen = result.selected
    headline = {
        "best site": f"{best['site']}: {_interval(best['auroc'], best['auroc_low'], best['auroc_high'])}",
        "the choice of a site itself": _interval(chosen.auroc, chosen.auroc_low, chosen.auroc_high),
        "best site on shuffled labels": f"{best['control_auroc']:.3f}",
        "rows": f"{len(result.positive):,} in {int(result.groups.max()) + 1:,} groups",
    }
    sections = [
        Section(_CAPTIONS[name][0], figure=figure, caption=_CAPTIONS[name][1])
        for name, figure in figures.items()
        if name in _CAPTIONS
    ]
    sections.append(Section("All sites", table=result.best(len(result.table)), table_name="sites"))
    capture = cell.capture
    lead = (
        f"A linear probe at every captured site of {capture.model.name}, position {positions_name(capture.positions)}, "
        f"data {data_name(capture.data)}. Scores above 0 speak for {says['column']}: {says['positive']}; the other "
        f"class is {says['negative']}. AUROC is out of fold, folds keep groups together, intervals are from a "
        "bootstrap over groups."
    )
    if (n_groups := int(result.groups.max()) + 1) < FEW_GROUPS:
        lead += f" Beware: {n_groups} groups are few; an interval over them says little."
    title = f"{model_name(capture.model)}, {data_name(capture.data)}: {label_name(cell.label)}"
    command = f"microtome sweep {run.path.parent.parent / 'config.yaml'}"
    return html_report(title, sections, lead=lead, headline=headline, provenance=run.provenance, command=command)


def _interval(value: float, low: float, high: float) -> str:
    return f"{value:.3f} [{low:.3f}, {high:.3f}]"
