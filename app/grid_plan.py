"""What a grid will do, known before it does anything: data loaded, labels checked, finished cells compared.

A cell that is there already must have been made with the settings that are wanted now, data included. How it is run
(batch and shard sizes, report, what else is in the grid) may change at any time; what is computed may not.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import pandas as pd

from microtome.app.grid_cells import CaptureCell, ProbeCell, capture_cells, data_name, probe_cells
from microtome.app.grid_config import GridConfig, LabelSettings
from microtome.app.grid_data import GridData, load_grid_data
from microtome.app.grid_folder import GridFolder
from microtome.capture.sites import Site
from microtome.data.table import table_sha256

_SHOWN = 5


@dataclass(frozen=True, eq=False)
class ProbePlan:
    """A probe cell and the settings that its result depends on, as plain values."""

    cell: ProbeCell
    settings: dict


@dataclass(frozen=True, eq=False)
class CapturePlan:
    """A capture, its data, the settings that it depends on, and its probe cells."""

    cell: CaptureCell
    data: GridData
    settings: dict
    probes: tuple[ProbePlan, ...]


def plan_grid(config: GridConfig) -> list[CapturePlan]:
    """The cells in the order in which they run.

    Raises ValueError or KeyError for names that are there twice, unknown sites, data that cannot be loaded, and labels
    that cannot be probed: whatever can be known before a model is loaded.
    """
    cells = capture_cells(config)
    for name in (name for sites in config.sites for name in sites):
        Site.parse(name)
    data, texts_sha256 = {}, {}
    for source in config.data:
        name = data_name(source)
        data[name] = load_grid_data(source, name, source.labels or config.labels or (), config.seed)
        texts_sha256[name] = _texts_sha256(data[name].table["text"])

    @cache  # the same for every model and site
    def labels_at(name: str, positions: str | int, wanted: tuple[LabelSettings, ...] | None) -> list[tuple]:
        labels = data[name].labels_at(positions, wanted)
        return [(label, _label_settings(label, data[name], config)) for label in labels]

    plans = []
    for cell in cells:
        name = data_name(cell.data)
        settings = _capture_settings(cell, texts_sha256[name], config)
        labels, of_labels = zip(*labels_at(name, cell.positions, cell.data.labels or config.labels), strict=True)
        probes = tuple(
            ProbePlan(probe, settings | of_label)
            for probe, of_label in zip(probe_cells(cell, labels), of_labels, strict=True)
        )
        plans.append(CapturePlan(cell, data[name], settings, probes))
    return plans


def refuse_other_settings(folder: GridFolder, plans: list[CapturePlan]) -> None:
    """Raise ValueError if a capture or a finished cell that is on disk was made with other settings."""
    differing = []
    for plan in plans:
        held = folder.capture_facts(plan.cell)
        if held is not None and folder.store(plan.cell).is_dir() and held["settings"] != plan.settings:
            differing.append(f"captures/{plan.cell.name} ({_difference(held['settings'], plan.settings)})")
        for probe in plan.probes:
            held = folder.probe_facts(probe.cell)
            if held is not None and held["settings"] != probe.settings:
                differing.append(f"cells/{probe.cell.name} ({_difference(held['settings'], probe.settings)})")
    if differing:
        more = f"; and {len(differing) - _SHOWN} more" if len(differing) > _SHOWN else ""
        raise ValueError(
            f"{folder.path} holds {len(differing)} cell(s) made with other settings: "
            f"{'; '.join(differing[:_SHOWN])}{more}. Nothing was done. Give this grid another name, or take back the "
            "change."
        )


def needs_capture(folder: GridFolder, plan: CapturePlan, steps: Sequence[str]) -> bool:
    """Whether a capture is still to be done: it is not whole, and something is to be probed in it or it is wanted."""
    if folder.is_captured(plan.cell):
        return False
    has_open_probes = any(folder.probe_facts(probe.cell) is None for probe in plan.probes)
    was_deleted = bool((folder.capture_facts(plan.cell) or {}).get("is_deleted"))
    return has_open_probes or ("probe" not in steps and not was_deleted)


def _capture_settings(cell: CaptureCell, texts_sha256: str, config: GridConfig) -> dict:
    return {
        "model": cell.model.name,
        "untrained": cell.model.untrained,
        "texts_sha256": texts_sha256,
        "sites": list(cell.sites),
        "positions": cell.positions,
        "dtype": config.capture.dtype,
        "truncate": config.capture.truncate,
    }


def _label_settings(label: LabelSettings, data: GridData, config: GridConfig) -> dict:
    columns = ["text", "group"] + ([] if label.column in data.token_labels else [label.column])
    return {
        "label": label.model_dump(mode="json", exclude_none=True),
        "labels_sha256": table_sha256(data.table[columns]),
        "probe": config.probe.model_dump(mode="json"),
        "seed": config.seed,
    }


def _texts_sha256(texts: pd.Series) -> str:
    digest = hashlib.sha256()
    for text in texts:
        encoded = text.encode("utf-8", errors="surrogatepass")
        digest.update(f"{len(encoded)} ".encode() + encoded)
    return digest.hexdigest()


def _difference(held: Mapping, wanted: Mapping) -> str:
    """The settings that differ: `probe.folds was 5, is 4`."""
    found = []
    for name in dict.fromkeys([*held, *wanted]):
        before, now = held.get(name), wanted.get(name)
        if isinstance(before, dict) and isinstance(now, dict):
            found += [f"{name}.{part}" for part in [_difference(before, now)] if part]
        elif before != now and name.endswith("_sha256"):
            found.append(f"the {name.removesuffix('_sha256')} are others")
        elif before != now:
            found.append(f"{name} was {before}, is {now}")
    return ", ".join(found)
