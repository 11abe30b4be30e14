"""The cells of a grid: which captures and which probes, in the order in which they run, each with a name of its own.

    smollm2--cities--resid_post+z--last            a capture
    smollm2--cities--resid_post+z--last--label     a probe cell of it

Models are outermost, so that each is loaded once. A name depends on its own cell alone, never on what else is in the
grid: cells may be added later and find the folders of the ones before. Names are safe in every file system, and two
that differ in upper and lower case alone count as the same.
"""

import hashlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from microtome.app.grid_config import CatalogueData, FileData, GridConfig, LabelSettings, ModelSettings

_LONGEST = 44  # of a part: five of them, and what writing adds, stay below the 255 bytes of a file name


@dataclass(frozen=True)
class CaptureCell:
    """Activations of one model on one data set, at sites and positions."""

    model: ModelSettings
    data: CatalogueData | FileData
    sites: tuple[str, ...]
    positions: str | int

    @property
    def name(self) -> str:
        """`model--data--sites--positions`."""
        sites = shortened("+".join(self.sites))
        return "--".join((model_name(self.model), data_name(self.data), sites, positions_name(self.positions)))


@dataclass(frozen=True)
class ProbeCell:
    """Probes of every captured site for one label."""

    capture: CaptureCell
    label: LabelSettings

    @property
    def name(self) -> str:
        """The capture's name and the label's."""
        return f"{self.capture.name}--{label_name(self.label)}"


def capture_cells(config: GridConfig) -> list[CaptureCell]:
    """Every combination of model, data set, sites and positions; models vary slowest.

    Raises ValueError for two combinations of one name, such as a model that is listed twice.
    """
    cells = [
        CaptureCell(model, data, sites, positions)
        for model in config.models
        for data in config.data
        for sites in config.sites
        for positions in config.positions
    ]
    _refuse_twins("models", map(model_name, config.models))
    _refuse_twins("data", map(data_name, config.data))
    _refuse_twins("cells", (cell.name for cell in cells))
    return cells


def probe_cells(capture: CaptureCell, labels: Sequence[LabelSettings]) -> list[ProbeCell]:
    """One cell per label. Raises ValueError for two labels of one name."""
    cells = [ProbeCell(capture, label) for label in labels]
    _refuse_twins(f"the labels of {data_name(capture.data)}", (label_name(cell.label) for cell in cells))
    return cells


def model_name(model: ModelSettings) -> str:
    """`called`, the last part of a path, or the hub id with a dash for the slash; `-untrained-SEED` without weights."""
    if model.called is not None:
        return shortened(model.called)
    if model.untrained is not None:
        trained = model_name(model.model_copy(update={"untrained": None}))
        return shortened(f"{trained}-untrained-{model.untrained}")
    path = model.name.rstrip("/\\")
    is_hub_id = path.count("/") == 1 and path[0] not in "./~" and not path.endswith(".gguf")
    return shortened(path.replace("/", "-") if is_hub_id else re.split(r"[/\\]", path)[-1])


def data_name(data: CatalogueData | FileData) -> str:
    """`called`, the catalogue's name, or the file's without its suffix."""
    if data.called is not None:
        return shortened(data.called)
    return shortened(data.file.stem if isinstance(data, FileData) else data.name)


def positions_name(positions: str | int) -> str:
    """The word, or `at3`, `at-1` for an index."""
    return positions if isinstance(positions, str) else f"at{positions}"


def label_name(label: LabelSettings) -> str:
    """`kind`, `kind-is-humour`, `length-above-median`, `length-as-numbers`."""
    if label.positive is not None:
        return shortened(f"{label.column}-is-{label.positive}")
    if label.target is not None:
        return shortened(f"{label.column}-as-{label.target}")
    return shortened(label.column if label.above is None else f"{label.column}-above-{_number(label.above)}")


def shortened(text: str) -> str:
    """The text with letters, digits and `_ . + -` alone; a hash tells apart what that makes alike or cuts off."""
    safe = re.sub(r"-{2,}", "-", re.sub(r"[^A-Za-z0-9_.+\-]+|\.{2,}", "-", text)).strip("-.")
    if safe == text and len(safe) <= _LONGEST:
        return safe
    digest = hashlib.sha256(text.encode("utf-8")).hexdigest()[:6]
    return f"{safe[: _LONGEST - 7].rstrip('-.')}-{digest}".lstrip("-")


def _number(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:g}" if float(f"{value:g}") == value else repr(value)


def _refuse_twins(what: str, names: Iterable[str]) -> None:
    seen: set[str] = set()
    for name in names:
        if name.casefold() in seen:
            raise ValueError(
                f"{what}: {name!r} is there twice. Names tell the folders apart: take one out, or give it another "
                "name with 'called' (models and data sets have it)."
            )
        seen.add(name.casefold())
