"""The report of one probe cell: which heads, which layers, and where the numbers come from."""

from collections.abc import Mapping

import plotly.graph_objects as go

from microtome.app.grid_cells import ProbeCell, data_name, label_name, model_name, positions_name
from microtome.app.grid_story import FEW_GROUPS
from microtome.app.sweep_words import sweep_headline, sweep_sections
from microtome.data.runs import Run
from microtome.figures.report import html_report
from microtome.probes.sweep_result import Sweep

_MOST_CLASSES = 20


def cell_report(run: Run, cell: ProbeCell, says: Mapping, result: Sweep, figures: Mapping[str, go.Figure]) -> str:
    """The cell as one HTML page. `says` are the facts of its binary label."""
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
    return html_report(
        title,
        sweep_sections(result, figures),
        lead=lead,
        headline=sweep_headline(result),
        provenance=run.provenance,
        command=command,
    )


def _target(says: Mapping) -> str:
    column = says["column"]
    if "numbers" in says:
        return f"The probe predicts {column}, {says['numbers']}; R2 is against the mean of the training rows."
    if "classes" in says:
        shown = ", ".join(says["classes"][:_MOST_CLASSES])
        return f"Classes of {column}: {shown}. AUROC is the mean of each class against the others."
    return f"Scores above 0 speak for {column}: {says['positive']}; the other class is {says['negative']}."
