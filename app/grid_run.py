"""Run the cells of a grid, one after the other, unattended.

What is finished is skipped, what was killed goes on where it stopped, and what fails is written down while the rest
goes on. A model is loaded when the first of its captures needs it, and once. Several processes may share a grid: each
takes the cells that no other holds, and goes round again while others finish theirs.
"""

import shutil
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby

import pandas as pd
import torch

from microtome.app.grid_cells import CaptureCell, ProbeCell
from microtome.app.grid_config import GridConfig, ModelSettings
from microtome.app.grid_folder import CellIsBusy, GridFolder
from microtome.app.grid_log import GridLog, said_error
from microtome.app.grid_plan import CapturePlan, ProbePlan, needs_capture
from microtome.app.grid_probe import run_probe
from microtome.app.grid_story import said_capture, said_end, said_result, said_rows, said_start
from microtome.app.grid_summary import write_summary
from microtome.capture import LoadedModel, capture, load_model, store_info
from microtome.capture.batches import MAX_TOKENS
from microtome.capture.token_labels import ROW_COLUMNS
from microtome.capture.untrained import untrained
from microtome.data.spoken import spoken_seconds

STEPS = ("capture", "probe")


def run_cells(
    config: GridConfig, folder: GridFolder, plans: Sequence[CapturePlan], steps: Sequence[str], log: GridLog
) -> pd.DataFrame:
    """Do the steps ("capture", "probe") of every cell and return the summary. The folder is there.

    An error of a cell goes to its file under errors/ and is a line of the log. Ctrl-C and SIGTERM end the run: the log
    says so, and KeyboardInterrupt is raised.
    """
    return _GridRun(config, folder, plans, steps, log).run()


class _GridRun:
    """One process at work on a grid."""

    def __init__(self, config, folder, plans, steps, log):
        self.config: GridConfig = config
        self.folder: GridFolder = folder
        self.plans: Sequence[CapturePlan] = plans
        self.steps: Sequence[str] = steps
        self.log: GridLog = log
        self.settled: set[str] = set()  # cells this process has finished, found finished, or seen fail
        self.worked = 0  # cells it has finished or seen fail
        self.busy: set[str] = set()  # cells another process held when this one came to them
        self.seconds = dict.fromkeys(("loading", "captures", "probes"), 0.0)

    def run(self) -> pd.DataFrame:
        started = time.perf_counter()
        with _stopped_like_ctrl_c():
            try:
                self.log.line(said_start(self.folder, self.plans, self.steps))
                self._write_summary()
                while True:
                    worked = self.worked
                    self.busy.clear()
                    self._go_round()
                    # others may have finished, or died, while this process was at its own cells
                    if not self.busy or self.worked == worked:
                        break
            except KeyboardInterrupt:
                self.log.line("stopped by hand. The same command goes on from here.")
                self._write_summary()
                raise KeyboardInterrupt(
                    f"What is finished is in {self.folder.path}; the same command goes on from here."
                ) from None
        table = self._write_summary()
        seconds = time.perf_counter() - started
        self.log.line(said_end(self.folder, self.plans, table, seconds, self.seconds))
        return table

    def _go_round(self) -> None:
        for model, plans in groupby(self.plans, key=lambda plan: plan.cell.model):
            load = _once(lambda model=model: self._load(model))
            for plan in plans:
                if "capture" in self.steps:
                    self._attempt(plan.cell, lambda plan=plan, load=load: self._capture(plan, load))
                if "probe" in self.steps:
                    for probe in plan.probes:
                        self._probe_if_captured(plan, probe)
                    self._delete_if_done(plan)

    def _attempt(self, cell: CaptureCell | ProbeCell, work: Callable[[], bool]) -> None:
        """Do a cell's work under its lock; `work` says if there was any. Whatever it raises is the cell's alone."""
        if cell.name in self.settled:
            return
        try:
            with self.folder.locked(cell), warnings.catch_warnings(record=True) as warned:
                was_open = work()
        except (CellIsBusy, BlockingIOError):
            self.busy.add(cell.name)
            self.log.line(f"left to another process: {cell.name}")
            return
        except Exception as error:
            self.folder.write_error(cell, error)
            file = self.folder.error_file(cell).relative_to(self.folder.path)
            self.log.line(f"FAILED {cell.name}: {said_error(error)} (all of it in {file})")
            was_open = True
        else:
            self.folder.error_file(cell).unlink(missing_ok=True)
            for said in dict.fromkeys(f"{warning.category.__name__}: {warning.message}" for warning in warned):
                self.log.line(f"warning in {cell.name}: {said}")
        self.settled.add(cell.name)
        if was_open:
            self.worked += 1
            self._write_summary()

    def _capture(self, plan: CapturePlan, load: Callable[[], LoadedModel]) -> bool:
        cell = plan.cell
        if not needs_capture(self.folder, plan, self.steps):
            return False
        loaded = load()
        table, settings, path = plan.data.table, self.config.capture, self.folder.store(cell)
        begun = self.folder.store_info(cell)
        # a store goes on with the columns that it began with, though labels were added since
        columns = (self.folder.capture_facts(cell) or {}).get("columns") if begun is not None else None
        columns = [name for name in columns or table if name in table and name not in ROW_COLUMNS]
        self.log.line(
            f"capturing {cell.name}: {len(table):,} texts"
            + (f", {begun.finished} of {begun.shards} shards are there already" if begun is not None else "")
        )
        self.folder.write_capture_facts(cell, {"settings": plan.settings, "columns": columns})
        sizes = {} if settings.shard_mb is None else {"shard_bytes": settings.shard_mb * 10**6}
        started = time.perf_counter()
        try:
            store = capture(
                loaded,
                table["text"].tolist(),
                list(cell.sites),
                cell.positions,
                labels=table[columns],
                token_labels=plan.data.token_labels if cell.positions == "all" else None,
                truncate=settings.truncate,
                dtype=getattr(torch, settings.dtype),
                max_tokens=settings.max_tokens or MAX_TOKENS,
                store=path,
                progress=sys.stderr.isatty(),
                **sizes,
            )
        finally:
            seconds = time.perf_counter() - started
            self.seconds["captures"] += seconds
        whole = store_info(path)
        facts = {
            "settings": plan.settings,
            "columns": columns,
            "texts": len(table),
            "tokens": whole.tokens,
            "rows": store.n_rows,
            "sites": len(store.sites),
            "nbytes": store.nbytes,
            "seconds_capture": whole.seconds,  # of all shards, those of before an interruption too
        }
        self.folder.write_capture_facts(cell, facts)
        self.log.line(f"captured {cell.name} in {spoken_seconds(seconds)}: {said_capture(facts)}")
        return True

    def _probe_if_captured(self, plan: CapturePlan, probe: ProbePlan) -> None:
        if probe.cell.name in self.settled:
            return
        if plan.cell.name in self.busy:
            self.busy.add(probe.cell.name)
        elif self.folder.error(plan.cell) is not None and "capture" in self.steps:
            self.log.line(f"not run, because its capture failed: {probe.cell.name}")
            self.settled.add(probe.cell.name)
        else:
            self._attempt(probe.cell, lambda: self._probe(plan, probe))

    def _probe(self, plan: CapturePlan, probe: ProbePlan) -> bool:
        if self.folder.probe_facts(probe.cell) is not None:
            self.folder.delete_checkpoint(probe.cell)  # of a process that was killed before it could
            return False
        begun = ", with fits that are there already" if self.folder.checkpoint(probe.cell).is_dir() else ""
        self.log.line(f"probing {probe.cell.name}{begun}")
        started = time.perf_counter()
        try:
            row = run_probe(plan, probe, self.folder, self.config)
        finally:
            seconds = time.perf_counter() - started
            self.seconds["probes"] += seconds
        self.folder.delete_checkpoint(probe.cell)
        size = said_rows(row)
        self.log.line(f"probed {probe.cell.name} in {spoken_seconds(seconds)}: {size}; {said_result(row)}")
        return True

    def _delete_if_done(self, plan: CapturePlan) -> None:
        """Give back the disk of a capture whose labels are all probed, if that is wanted."""
        store = self.folder.store(plan.cell)
        if self.config.keep_activations or not store.is_dir():
            return
        if all(self.folder.probe_facts(probe.cell) is not None for probe in plan.probes):
            try:
                with self.folder.locked(plan.cell):
                    facts = self.folder.capture_facts(plan.cell) or {}
                    self.folder.write_capture_facts(plan.cell, facts | {"is_deleted": True})
                    shutil.rmtree(store)
            except CellIsBusy:
                return
            self.log.line(f"deleted the activations of {plan.cell.name} (keep_activations: false)")

    def _load(self, model: ModelSettings) -> LoadedModel:
        started = time.perf_counter()
        try:
            loaded = load_grid_model(model)
        finally:
            seconds = time.perf_counter() - started
            self.seconds["loading"] += seconds
        self.log.line(f"loaded {model.name} in {spoken_seconds(seconds)}")
        return loaded

    def _write_summary(self) -> pd.DataFrame:
        return write_summary(self.folder, self.plans, with_captures="probe" not in self.steps)


def load_grid_model(model: ModelSettings) -> LoadedModel:
    """The model, or its architecture with fresh weights."""
    loaded = load_model(model.name)
    return loaded if model.untrained is None else untrained(loaded, seed=model.untrained)


def _once(load: Callable[[], LoadedModel]) -> Callable[[], LoadedModel]:
    """`load`, called at the first need alone; an error comes again without another attempt."""
    held: list[LoadedModel | Exception] = []

    def loaded() -> LoadedModel:
        if not held:
            try:
                held.append(load())
            except Exception as error:  # every capture of this model fails with it
                held.append(error)
        if isinstance(held[0], Exception):
            raise held[0]
        return held[0]

    return loaded


@contextmanager
def _stopped_like_ctrl_c() -> Iterator[None]:
    """SIGTERM raises KeyboardInterrupt in here, as Ctrl-C does."""
    if threading.current_thread() is not threading.main_thread():  # where Python allows no signal handlers
        yield
        return

    def stop(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL if before is None else before)
