"""The run folder: what one command leaves behind, and the only place that knows its layout.

    <root>/<name>/config.yaml  provenance.json  report.html
                  tables/<name>.parquet  arrays/<name>.safetensors  figures/<name>.json (Plotly)  values/<name>.json

Command line, notebooks and app read and write the same folders. Every file is written beside its place and renamed into
it, so that a reader sees the old file or the new one and an interrupted write keeps the old one. Replacing a whole run
keeps the replaced one as `.<name>.previous` until the next replacement.
Beware: two processes may write different files of one run, but the last writer of the same file wins.
"""

import difflib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import plotly.io
import pyarrow
import torch
import yaml
from pydantic import BaseModel
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from microtome.data.provenance import environment
from microtome.data.replaced_file import replaced_file

_SUFFIX = {"tables": ".parquet", "arrays": ".safetensors", "figures": ".json", "values": ".json"}
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]*")


@dataclass(frozen=True)
class Run:
    """One run folder. Make it with `Run.create` or `Run.open`. path: the folder, absolute."""

    path: Path

    @classmethod
    def create(
        cls,
        root: str | Path,
        name: str,
        config: BaseModel | Mapping,
        *,
        seed: int | None = None,
        overwrite: bool = False,
    ) -> "Run":
        """Make `root/name` with the configuration and the facts of this process.

        config: the command's settings, from which the run can be repeated. overwrite: put a run that is there already
        aside, as `root/.name.previous`, in place of the one that was there before it.
        Raises ValueError for a name with anything but letters, digits and `_ . -`; FileExistsError if the folder is
        there and overwrite is False, or holds something that is no run; TypeError for a setting that YAML cannot hold.
        """
        path = cls.require_free(root, name, overwrite=overwrite)
        settings = config.model_dump(mode="json") if isinstance(config, BaseModel) else dict(config)
        try:
            text = yaml.safe_dump(settings, sort_keys=False, allow_unicode=True)
        except yaml.representer.RepresenterError as error:
            raise TypeError(
                f"config holds {error.args[1]!r}, which YAML cannot. Use plain values, lists and dicts."
            ) from error
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{name}.", dir=path.parent) as scratch:
            fresh = Path(scratch) / name
            fresh.mkdir()
            (fresh / "config.yaml").write_text(text, encoding="utf-8")
            facts = {"name": name, "seed": seed, "environment": environment()}
            (fresh / "provenance.json").write_text(_json_text(facts), encoding="utf-8")
            if path.exists():
                previous = cls(path).previous
                if previous.exists():
                    shutil.rmtree(previous)
                os.replace(path, previous)
            os.replace(fresh, path)
        return cls(path)

    @classmethod
    def require_free(cls, root: str | Path, name: str, *, overwrite: bool = False) -> Path:
        """The folder a run would get. Raises what `create` raises for it, before any work is done."""
        _check_name(name, "a run")
        path = Path(root).resolve() / name
        if path.parent.exists() and not path.parent.is_dir():
            raise FileExistsError(f"{path.parent} is a file; runs go into a folder. Give another one.")
        if path.exists() and not overwrite:
            raise FileExistsError(f"{path} is there already. Give another name, or pass overwrite=True to replace it.")
        if path.exists() and not _is_run(path):
            raise FileExistsError(f"{path} is there and is no run folder, so it is left alone. Give another name.")
        return path

    @classmethod
    def open(cls, path: str | Path) -> "Run":
        """The run in a folder. Raises FileNotFoundError, naming the runs beside it; ValueError for another folder."""
        path = Path(path).resolve()
        if not path.is_dir():
            beside = [run.path.name for run in list_runs(path.parent)]
            raise FileNotFoundError(f"there is no run {path}. Runs in {path.parent}: {beside or 'none'}.")
        if not _is_run(path):
            raise ValueError(f"{path} is no run folder: config.yaml or provenance.json is missing. Give a runs/<name>.")
        return cls(path)

    @property
    def previous(self) -> Path:
        """Where the run of this name is kept that this one replaced; there is none if it replaced none."""
        return self.path.with_name(f".{self.path.name}.previous")

    @property
    def name(self) -> str:
        """The folder's name."""
        return self.path.name

    @property
    def config(self) -> dict:
        """The settings, as plain values."""
        return self._read(self.path / "config.yaml", lambda path: yaml.safe_load(path.read_text(encoding="utf-8")))

    @property
    def provenance(self) -> dict:
        """The facts of the process that made the run, and what `record` added."""
        return self._read(self.path / "provenance.json", _load_json)

    def record(self, **facts: object) -> None:
        """Add facts to provenance.json: `model=`, `data=` (hashes), `seconds=`, ... A fact given again is replaced.

        Raises ValueError for a fact that `create` recorded itself, TypeError for one that JSON cannot hold.
        """
        if clash := sorted(set(facts) & {"name", "seed", "environment"}):
            raise ValueError(f"{clash} are recorded when the run is made and stay as they are. Use other names.")
        text = _json_text(self.provenance | facts)
        with replaced_file(self.path / "provenance.json") as scratch:
            scratch.write_text(text, encoding="utf-8")

    def write_table(self, name: str, table: pd.DataFrame) -> Path:
        """Keep a table; returns its file. Raises TypeError for a column that Parquet cannot hold (make it str)."""
        with self._write("tables", name) as scratch:
            try:
                table.to_parquet(scratch)
            except (pyarrow.ArrowInvalid, pyarrow.ArrowTypeError, pyarrow.ArrowNotImplementedError) as error:
                raise TypeError(
                    f"table {name!r} cannot be stored: {error}. Make that column str or numbers."
                ) from error
        return self._file("tables", name)

    def write_arrays(self, name: str, arrays: Mapping[str, torch.Tensor | np.ndarray]) -> Path:
        """Keep named arrays in one file; returns it. They come back as CPU tensors of the same dtype."""
        # a copy each: safetensors refuses tensors that share memory or are not contiguous
        tensors = {key: torch.as_tensor(value).detach().cpu().clone().contiguous() for key, value in arrays.items()}
        with self._write("arrays", name) as scratch:
            save_file(tensors, scratch)
        return self._file("arrays", name)

    def write_figure(self, name: str, figure: go.Figure) -> Path:
        """Keep a Plotly figure as JSON; returns its file."""
        with self._write("figures", name) as scratch:
            scratch.write_text(figure.to_json(), encoding="utf-8")
        return self._file("figures", name)

    def write_json(self, name: str, value: object) -> Path:
        """Keep a plain value (numbers, text, lists, dicts; NumPy and paths are converted). NaN is a ValueError."""
        text = _json_text(value)
        with self._write("values", name) as scratch:
            scratch.write_text(text, encoding="utf-8")
        return self._file("values", name)

    def write_report(self, html: str) -> Path:
        """Keep the HTML report; returns its file."""
        with replaced_file(self.path / "report.html") as scratch:
            scratch.write_text(html, encoding="utf-8")
        return self.path / "report.html"

    def table(self, name: str) -> pd.DataFrame:
        """A table by name. This and its three siblings: KeyError if it is not there, ValueError if it is damaged."""
        return self._read(self._existing("tables", name), pd.read_parquet)

    def arrays(self, name: str) -> dict[str, torch.Tensor]:
        """Named arrays, as CPU tensors."""
        return self._read(self._existing("arrays", name), load_file)

    def figure(self, name: str) -> go.Figure:
        """A Plotly figure."""
        return self._read(self._existing("figures", name), lambda path: plotly.io.from_json(path.read_text("utf-8")))

    def json(self, name: str) -> object:
        """A plain value."""
        return self._read(self._existing("values", name), _load_json)

    @property
    def tables(self) -> tuple[str, ...]:
        """Names of the tables, sorted; likewise `array_files`, `figures`, `values`."""
        return self._names("tables")

    @property
    def array_files(self) -> tuple[str, ...]:
        """Names that `arrays` takes, sorted."""
        return self._names("arrays")

    @property
    def figures(self) -> tuple[str, ...]:
        """Names that `figure` takes, sorted."""
        return self._names("figures")

    @property
    def values(self) -> tuple[str, ...]:
        """Names that `json` takes, sorted."""
        return self._names("values")

    def _file(self, kind: str, name: str) -> Path:
        _check_name(name, f"a file in {kind}")
        return self.path / kind / f"{name}{_SUFFIX[kind]}"

    def _names(self, kind: str) -> tuple[str, ...]:
        files = (self.path / kind).glob(f"*{_SUFFIX[kind]}")
        return tuple(sorted(file.name.removesuffix(_SUFFIX[kind]) for file in files if not file.name.startswith(".")))

    def _existing(self, kind: str, name: str) -> Path:
        path = self._file(kind, name)
        if not path.is_file():
            names = self._names(kind)
            near = difflib.get_close_matches(name, names, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise KeyError(f"run {self.name} has nothing called {name!r} in {kind}; it has {list(names)}.{hint}")
        return path

    @contextmanager
    def _write(self, kind: str, name: str) -> Iterator[Path]:
        path = self._file(kind, name)
        path.parent.mkdir(exist_ok=True)
        with replaced_file(path) as scratch:
            yield scratch

    def _read(self, path: Path, load: Callable):
        try:
            return load(path)
        except FileNotFoundError as error:
            raise ValueError(f"{path} is missing, so {self.path} is no whole run. Restore it or run again.") from error
        except (OSError, ValueError, yaml.YAMLError, SafetensorError) as error:
            raise ValueError(f"{path} is damaged ({error}). Restore it, or run again with overwrite=True.") from error


def list_runs(root: str | Path) -> list[Run]:
    """The runs in a folder, by name; none if the folder is not there. Hidden folders (replaced runs) are left out."""
    root = Path(root).resolve()
    folders = sorted(root.iterdir()) if root.is_dir() else []
    return [Run(folder) for folder in folders if not folder.name.startswith(".") and _is_run(folder)]


def _is_run(path: Path) -> bool:
    return (path / "config.yaml").is_file() and (path / "provenance.json").is_file()


def _check_name(name: str, what: str) -> None:
    if not isinstance(name, str) or not _NAME.fullmatch(name) or ".." in name:
        raise ValueError(
            f"{name!r} is no name for {what}. Use letters, digits, '_', '-' and single dots, none first; no folders."
        )


def _load_json(path: Path) -> object:
    return json.loads(path.read_text(encoding="utf-8"))


def _json_text(value: object) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False, default=_plain)


def _plain(value: object) -> object:
    if isinstance(value, np.generic | np.ndarray | torch.Tensor):
        return value.tolist()
    if isinstance(value, Path | torch.dtype | torch.device):
        return str(value)
    if isinstance(value, date):
        return value.isoformat()
    raise TypeError(f"JSON cannot hold {value!r} ({type(value).__name__}). Use numbers, text, lists and dicts.")
