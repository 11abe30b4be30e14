"""The report of one probe cell: which heads, which layers, and where the numbers come from."""

from collections.abc import Mapping

import pandas as pd
import plotly.graph_objects as go

from microtome.app.grid_cells import ProbeCell, data_name, label_name, model_name, positions_name
from microtome.app.grid_story import FEW_GROUPS
from microtome.data.runs import Run
from microtome.figures.report import Section, html_report
from microtome.probes.sweep_result import Sweep

_MOST_CLASSES = 20
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
    chosen, name = result.selected, result.measure
    headline = {
        "best site": f"{best['site']}: {_interval(best, name)}",
        "the choice of a site itself": _interval(chosen.measures, name),
        "best site on shuffled labels": f"{best[f'control_{name}']:.3f}",
        "rows": f"{len(result.truth):,} in {int(result.groups.max()) + 1:,} groups",
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
        f"data {data_name(capture.data)}. {_target(says)} Scores are out of fold, folds keep groups together, "
        "intervals are from a bootstrap over groups."
    )
    if (n_groups := int(result.groups.max()) + 1) < FEW_GROUPS:
        lead += f" Beware: {n_groups} groups are few; an interval over them says little."
    title = f"{model_name(capture.model)}, {data_name(capture.data)}: {label_name(cell.label)}"
    command = f"microtome sweep {run.path.parent.parent / 'config.yaml'}"
    return html_report(title, sections, lead=lead, headline=headline, provenance=run.provenance, command=command)


def _target(says: Mapping) -> str:
    column = says["column"]
    if "numbers" in says:
        return f"The probe predicts {column}, {says['numbers']}; R2 is against the mean of the training rows."
    if "classes" in says:
        shown = ", ".join(says["classes"][:_MOST_CLASSES])
        return f"Classes of {column}: {shown}. AUROC is the mean of each class against the others."
    return f"Scores above 0 speak for {column}: {says['positive']}; the other class is {says['negative']}."


def _interval(values: Mapping | pd.Series, name: str) -> str:
    return f"{values[name]:.3f} [{values[f'{name}_low']:.3f}, {values[f'{name}_high']:.3f}]"
