"""The result of a sweep: one table row per probe, the numbers behind it, its figures and its files.

    <folder>/table.parquet         the table
             baselines.parquet     what words, length and place alone can tell
             arrays.safetensors    out-of-fold scores, coefficients, labels, groups, folds, the null
             sweep.json            settings, provenance, size and SHA-256 of the others

A folder is written beside its place and renamed into it: an interrupted save leaves no half-written folder there.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import torch
from jaxtyping import Bool, Float64, Int64, Shaped
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from microtome.capture.activation_files import refuse_other_files, scratch_beside
from microtome.capture.activation_sites import any_site
from microtome.capture.activations import Activations
from microtome.capture.sites import Site, near_matches
from microtome.figures.head_map import head_map
from microtome.figures.layer_curve import layer_curve
from microtome.probes.site_blocks import as_activations
from microtome.probes.target import MAIN, Kind

FORMAT = "microtome sweep 2"
_TABLE, _BASELINES = "table.parquet", "baselines.parquet"
_ARRAYS, _FACTS = "arrays.safetensors", "sweep.json"
_MOST_CURVES = 4
BEST_COLUMNS = (
    *("site", "auroc", "auroc_low", "auroc_high", "r2", "r2_low", "r2_high", "spearman"),
    *("accuracy", "accuracy_low", "accuracy_high", "control_auroc", "control_r2", "selectivity"),
    *("control_task_auroc", "p_best_site"),
)


@dataclass(frozen=True)
class SelectedSite:
    """What choosing the best site is worth: each outer fold scored by the site whose inner loss was lowest."""

    sites: tuple[str, ...]  # the site chosen in each fold
    measures: dict[str, float]  # "auroc", "auroc_low", "auroc_high", "accuracy", ...; of numbers "r2", ...


@dataclass(frozen=True, eq=False, repr=False)
class Sweep:
    """Probes of every site, out of fold, with controls. Axes: probe as the table's rows, example as the data's rows.

    Table columns: site, kind (with stack and call, where there are any), layer, head; auroc and accuracy, of numbers
    r2 (each with `_low` and `_high`, the 95 % interval), and the other `measures`; the same under control labels,
    control_* (shuffled) and control_task_* (one label per type); selectivity and control_task_selectivity (the main
    measure less the control's); p_best_site and ridge_auroc or ridge_r2 (the null of the best site and what it judges);
    strength (of the refit on all rows), width (features), majority_rate (accuracy of always answering the most frequent
    class). Axis `output`: one per class where there are more than two, else none.
    """

    table: pd.DataFrame
    scores: Float64[Tensor, "probe example *output"]  # logits or predictions of the fold that held the row out
    control_scores: Float64[Tensor, "probe example *output"]  # the same for the shuffled labels
    control_task_scores: Float64[Tensor, "..."]  # the same for the control task; empty without one
    coefficients: dict[str, Tensor]  # by site: [*output, d] of the refit on all rows, per unit of the raw features
    intercepts: Float64[Tensor, " probe *output"]
    null: Float64[Tensor, " permutation"]  # ridge statistic of the best site under each shuffle; empty without shuffles
    null_line: float  # what the best site exceeds in 5 % of shuffles; NaN without shuffles
    selected: SelectedSite
    baselines: pd.DataFrame  # what can be told without the model: words, length, place; empty without texts
    baseline_scores: Float64[Tensor, "..."]  # their out-of-fold scores, [baseline, example, *output]; empty without
    truth: Shaped[Tensor, " example"]  # labels: True for the larger of two, class numbers, or numbers
    control_truth: Shaped[Tensor, " example"]
    control_task_truth: Shaped[Tensor, " _"]  # empty without a control task
    groups: Int64[Tensor, " example"]
    test: Bool[Tensor, "fold example"]  # test rows of each outer fold
    fold_strengths: Float64[Tensor, "probe fold"]
    provenance: dict[str, Any]

    @property
    def kind(self) -> Kind:
        """What the labels are: "binary", "classes" or "numbers"."""
        return self.provenance["target"]["kind"]

    @property
    def classes(self) -> list[str]:
        """Names of the classes, in the order of the outputs; none for numbers."""
        return self.provenance["target"]["classes"]

    @property
    def measure(self) -> str:
        """The table's main measure: "auroc" or "r2"."""
        return MAIN[self.kind]

    def best(self, n: int = 10) -> pd.DataFrame:
        """The n rows with the highest AUROC or R2, ties in table order, and the columns to judge them by.

        Their scores are out of fold, yet the best of many is high by luck as well: judge by p_best_site, or take
        `selected` for what the choice of a site is worth.
        """
        ranked = self.table.sort_values(self.measure, ascending=False, kind="stable").head(n)
        return ranked[[name for name in BEST_COLUMNS if name in ranked]].reset_index(drop=True)

    def to_frame(self) -> pd.DataFrame:
        """A copy of the table."""
        return self.table.copy()

    def coef(self, site: str | tuple | Site) -> Float64[Tensor, "*output feature"]:
        """Direction of a site's probe, refitted on all rows: the score's change per unit of each raw feature.

        Raises KeyError for a site that was not probed, listing near matches.
        """
        return self.coefficients[self._probed(site)]

    def intercept(self, site: str | tuple | Site) -> Float64[Tensor, "*output"]:
        """What the score of a site's probe, refitted on all rows, is where every raw feature is 0.

        Raises KeyError as `coef`.
        """
        return self.intercepts[self.table["site"].tolist().index(self._probed(site))]

    def _probed(self, site: str | tuple | Site) -> str:
        name = str(any_site(site))
        if name not in self.coefficients:
            heads = [probe for probe in self.coefficients if probe.startswith(f"{name}.")]
            hint = f"Its heads were: {', '.join(heads)}." if heads else near_matches(name, self.coefficients)
            known = "" if hint else f"Probed were {', '.join(list(self.coefficients)[:8])}."
            raise KeyError(f"{name} was not probed. {hint}{known}")
        return name

    def decision(
        self, activations: Activations | Mapping | np.ndarray | Tensor | pd.DataFrame
    ) -> Float64[Tensor, "probe row *output"]:
        """Scores of other activations under the probes refitted on all rows; rows of the table by rows of the data.

        w·x + b, with w and b in the units of the raw features; takes what `sweep` takes. For rows the sweep has seen
        take `scores`, which are out of fold. Raises KeyError for a probed site that these activations lack, ValueError
        for one of another width.
        """
        activations = as_activations(activations)
        logits = []
        for name, intercept in zip(self.table["site"], self.intercepts, strict=True):
            features, weights = activations[name].double(), self.coefficients[name]
            if features.shape[-1] != weights.shape[-1]:
                raise ValueError(
                    f"{name} has {features.shape[-1]} features; its probe was fitted on {weights.shape[-1]}. Capture "
                    "the same site of the same model."
                )
            logits.append(features.cpu() @ (weights if weights.dim() == 1 else weights.mT) + intercept)
        return torch.stack(logits)

    def plot(self, *, value: str | None = None) -> dict[str, go.Figure]:
        """Figures of a table column, by default AUROC or R2.

        "head_map" if a kind has heads and layers, "layer_curve" if any has layers.

        The map shows the first kind with heads; the curve shows kinds without heads first, at most four kinds.
        """
        value = value or self.measure
        by_layer = self.table[self.table["layer"].notna()]
        with_heads = list(dict.fromkeys(by_layer.loc[by_layer["head"].notna(), "kind"]))
        kinds = [kind for kind in dict.fromkeys(by_layer["kind"]) if kind not in with_heads] + with_heads
        figures = {}
        if with_heads:
            figures["head_map"] = head_map(self.table, value=value, kind=with_heads[0])
        if kinds:
            line = self.null_line if value == self.measure and len(self.null) else None
            figures["layer_curve"] = layer_curve(
                self.table, value=value, kinds=kinds[:_MOST_CURVES], best_site_null=line
            )
        return figures

    def save(self, folder: str | Path, *, overwrite: bool = False) -> Path:
        """Write the folder, whole or not at all, and return its path.

        Raises FileExistsError if it exists and `overwrite` is False, or if it holds something else than a sweep.
        """
        folder = Path(folder).resolve()
        if folder.exists() and not overwrite:
            raise FileExistsError(f"{folder} exists. Give another folder, or pass overwrite=True to replace it.")
        if folder.exists():
            _require_replaceable(folder)
        folder.parent.mkdir(parents=True, exist_ok=True)
        scratch = scratch_beside(folder)
        try:
            self._write(scratch)
            if folder.exists():
                previous = folder.with_name(f".{folder.name}.previous")
                shutil.rmtree(previous, ignore_errors=True)
                os.replace(folder, previous)
                os.replace(scratch, folder)
                shutil.rmtree(previous)
            else:
                os.replace(scratch, folder)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
        return folder

    @classmethod
    def load(cls, folder: str | Path) -> "Sweep":
        """Read a saved sweep. Raises FileNotFoundError if it is not there, ValueError if it is damaged."""
        folder = Path(folder).resolve()
        if not (folder / _FACTS).is_file():
            raise FileNotFoundError(f"{folder} holds no sweep: it has no {_FACTS}. Give the folder that save() wrote.")
        try:
            facts = json.loads((folder / _FACTS).read_text(encoding="utf-8"))
            if facts["format"] != FORMAT:
                raise ValueError(f"{folder} is in the format {facts['format']!r}; this version reads {FORMAT!r}.")
            for name, digest in facts["sha256"].items():
                if _sha256(folder / name) != digest:
                    raise ValueError(f"{folder / name} is not the file that was saved with this sweep. Save it again.")
            arrays = load_file(folder / _ARRAYS)
            table, baselines = pd.read_parquet(folder / _TABLE), pd.read_parquet(folder / _BASELINES)
        except (OSError, KeyError, json.JSONDecodeError, SafetensorError) as error:
            raise ValueError(f"{folder} is damaged ({error!r}). Restore it or sweep again.") from error
        coefficients = {name: arrays.pop(f"coefficients/{name}") for name in table["site"]}
        selected = SelectedSite(tuple(facts["selected"]["sites"]), facts["selected"]["measures"])
        line = float("nan") if facts["null_line"] is None else facts["null_line"]
        return cls(
            table=table,
            coefficients=coefficients,
            null_line=line,
            selected=selected,
            baselines=baselines,
            provenance=facts["provenance"],
            **{"baseline_scores": torch.empty(0, dtype=torch.float64)} | arrays,  # sweeps of before had none
        )

    def _write(self, folder: Path) -> None:
        arrays = {
            "scores": self.scores,
            "control_scores": self.control_scores,
            "intercepts": self.intercepts,
            "null": self.null,
            "control_task_scores": self.control_task_scores,
            "baseline_scores": self.baseline_scores,
            "truth": self.truth,
            "control_truth": self.control_truth,
            "control_task_truth": self.control_task_truth,
            "groups": self.groups,
            "test": self.test,
            "fold_strengths": self.fold_strengths,
        }
        arrays |= {f"coefficients/{name}": coefficient for name, coefficient in self.coefficients.items()}
        # a copy each: safetensors refuses tensors that share memory
        save_file({name: array.detach().cpu().clone().contiguous() for name, array in arrays.items()}, folder / _ARRAYS)
        self.table.to_parquet(folder / _TABLE)
        self.baselines.to_parquet(folder / _BASELINES)
        facts = {
            "format": FORMAT,
            "null_line": self.null_line if len(self.null) else None,
            "selected": asdict(self.selected),
            "sha256": {name: _sha256(folder / name) for name in (_TABLE, _BASELINES, _ARRAYS)},
            "provenance": self.provenance,
        }
        (folder / _FACTS).write_text(json.dumps(facts, indent=1, ensure_ascii=False, allow_nan=False), encoding="utf-8")
        # a rename must not reach the disk before the bytes it names
        for name in (_TABLE, _BASELINES, _ARRAYS, _FACTS):
            with open(folder / name, "rb+") as file:
                os.fsync(file.fileno())

    def __repr__(self) -> str:
        best, name = self.best(1).iloc[0], self.measure
        return (
            f"Sweep({len(self.table)} probes, {len(self.truth):,} rows in {int(self.groups.max()) + 1:,} groups; "
            f"best {best['site']} {name.upper()} {best[name]:.3f} [{best[f'{name}_low']:.3f}, "
            f"{best[f'{name}_high']:.3f}], shuffled {best[f'control_{name}']:.3f}, p {best['p_best_site']:.3g})"
        )


def _require_replaceable(folder: Path) -> None:
    """Raise FileExistsError unless the folder holds a sweep and nothing else."""
    try:
        is_sweep = json.loads((folder / _FACTS).read_text(encoding="utf-8"))["format"] == FORMAT
    except (OSError, ValueError, KeyError, TypeError):
        is_sweep = False
    if not is_sweep:
        raise FileExistsError(f"{folder} exists and holds no sweep, so it is left alone. Give another folder.")
    refuse_other_files(folder, (_TABLE, _BASELINES, _ARRAYS, _FACTS), "a sweep")


def _sha256(file: Path) -> str:
    with open(file, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
