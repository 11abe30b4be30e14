"""The command `microtome`. Options are made from the settings' fields; `--config FILE.yaml` gives them all at once.

Heavy imports happen inside the commands, so that `--help` answers at once. `--json` prints one JSON document on stdout
and nothing else there. A user's error is one clear line and exit code 2 (app/user_errors.py).
"""

import sys
from importlib.metadata import version as installed_version
from pathlib import Path
from typing import Annotated, Literal

import typer
from pydantic.fields import FieldInfo

from microtome.app.config import DemoConfig
from microtome.app.heads_commands import add_heads
from microtome.app.lens_commands import lens
from microtome.app.probe_config import ProbeConfig, given_columns
from microtome.app.settings_file import as_yaml, holds_setting, read_settings
from microtome.app.steer_commands import steer
from microtome.app.transport_commands import transport
from microtome.app.user_errors import user_errors

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help="Cut thin slices out of any transformer while it runs.",
)
models = typer.Typer(no_args_is_help=True)
data = typer.Typer(no_args_is_help=True)
store = typer.Typer(no_args_is_help=True)
app.command("lens")(lens)
app.command("transport")(transport)
app.command("steer")(steer)
app.add_typer(models, name="models", help="What models there are, and what is known of one.")
app.add_typer(data, name="data", help="Labelled data sets from registry packages.")
app.add_typer(store, name="store", help="Folders of kept activations.")

_FIELDS, _PROBE_FIELDS = DemoConfig.model_fields, ProbeConfig.model_fields
Json = Annotated[bool, typer.Option("--json", help="print one JSON document on stdout and nothing else there")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="say what would be done, and what it takes, and stop")]
GridFile = Annotated[Path, typer.Argument(metavar="CONFIG.yaml", help="YAML file with the settings of the grid")]
DataNames = Annotated[list[str], typer.Argument(help="names of data sets (`microtome data list`), or all")]
StoreFolder = Annotated[Path, typer.Argument(help="folder of a store")]


def _option(name: str, *flags: str) -> typer.models.OptionInfo:
    return _flag(_FIELDS[name], *flags)


def _probe_option(name: str) -> typer.models.OptionInfo:
    return _flag(_PROBE_FIELDS[name], f"--{name.replace('_', '-')}")


def _flag(field: FieldInfo, *flags: str) -> typer.models.OptionInfo:
    default = "" if field.is_required() else f" (default: {field.default})"
    return typer.Option(*flags, help=f"{field.description}{default}", show_default=False)


def _shown_version(wanted: bool | None) -> None:
    if wanted:
        print(installed_version("microtome"))
        raise typer.Exit


@app.callback()
def _microtome(
    version: Annotated[
        bool | None, typer.Option("--version", callback=_shown_version, is_eager=True, help="print the version")
    ] = None,
) -> None:
    """Cut thin slices out of any transformer while it runs."""


@app.command()
def demo(
    config: Annotated[Path | None, typer.Option(help="YAML file with settings; options override it")] = None,
    model: Annotated[str | None, _option("model", "--model")] = None,
    data: Annotated[str | None, _option("data", "--data")] = None,
    text_column: Annotated[str | None, _option("text_column", "--text-column")] = None,
    label_column: Annotated[str | None, _option("label_column", "--label-column")] = None,
    group_column: Annotated[str | None, _option("group_column", "--group-column")] = None,
    texts: Annotated[int | None, _option("texts", "--texts")] = None,
    position: Annotated[Literal["last", "mean", "first"] | None, _option("position", "--position")] = None,
    truncate: Annotated[Literal["left", "right"] | None, _option("truncate", "--truncate")] = None,
    folds: Annotated[int | None, _option("folds", "--folds")] = None,
    inner_folds: Annotated[int | None, _option("inner_folds", "--inner-folds")] = None,
    permutations: Annotated[int | None, _option("permutations", "--permutations")] = None,
    bootstraps: Annotated[int | None, _option("bootstraps", "--bootstraps")] = None,
    seed: Annotated[int | None, _option("seed", "--seed")] = None,
    out: Annotated[Path | None, _option("out", "--out")] = None,
    name: Annotated[str | None, _option("name", "--name")] = None,
    as_json: Json = False,
) -> None:
    """From text to a per-head probe map: capture, probe every layer and head with controls, and write a report."""
    given = {key: value for key, value in locals().items() if key in _FIELDS and value is not None}
    with user_errors(as_json, flags=_FIELDS):
        settings = read_settings(DemoConfig, config, given)
        from microtome.app.demo import run_demo

        run_demo(settings, as_json=as_json)


@app.command("capture")
def capture_grid(config: GridFile, dry_run: DryRun = False, as_json: Json = False) -> None:
    """Keep the activations of every model and data set of a grid in stores; what is finished is not done again."""
    _grid(config, ("capture",), dry_run, as_json)


@app.command("probe")
def probe_features(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="SOURCE",
            help="a store, saved activations, a .npy, .npz, .parquet, .csv or .safetensors file; or a YAML file with "
            "the settings of a grid, or of one probe (features: ...)",
        ),
    ],
    label: Annotated[str | None, _probe_option("label")] = None,
    group: Annotated[str | None, _probe_option("group")] = None,
    rows: Annotated[Path | None, _probe_option("rows")] = None,
    columns: Annotated[list[str] | None, _probe_option("columns")] = None,
    positive: Annotated[str | None, _probe_option("positive")] = None,
    above: Annotated[str | None, _probe_option("above")] = None,
    target: Annotated[Literal["classes", "numbers"] | None, _probe_option("target")] = None,
    where: Annotated[str | None, _probe_option("where")] = None,
    site: Annotated[list[str] | None, typer.Option(help="a site or kind, again for more; all without it")] = None,
    method: Annotated[str | None, _probe_option("method")] = None,
    class_weight: Annotated[Literal["balanced"] | None, _probe_option("class_weight")] = None,
    types: Annotated[str | None, _probe_option("types")] = None,
    folds: Annotated[int | None, _probe_option("folds")] = None,
    inner_folds: Annotated[int | None, _probe_option("inner_folds")] = None,
    permutations: Annotated[int | None, _probe_option("permutations")] = None,
    bootstraps: Annotated[int | None, _probe_option("bootstraps")] = None,
    seed: Annotated[int | None, _probe_option("seed")] = None,
    out: Annotated[Path | None, _probe_option("out")] = None,
    name: Annotated[str | None, _probe_option("name")] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="for grids only: say what would be done, and what it takes, and stop")
    ] = False,
    as_json: Json = False,
) -> None:
    """Probe activations or features that are on disk for a label; or the stores of a grid that was captured."""
    given = {key: value for key, value in locals().items() if key in _PROBE_FIELDS and value is not None}
    with user_errors(as_json, flags=_PROBE_FIELDS):
        given |= {key: as_yaml(given[key]) for key in ("positive", "above") if key in given}
        given |= {"sites": site} if site else {}
        if columns:
            given["columns"] = given_columns(columns)
        else:
            given.pop("columns", None)
        is_settings = source.suffix.lower() in (".yaml", ".yml")
        if is_settings and not (source.is_file() and holds_setting(source, "features")):
            if given:
                raise ValueError(
                    f"{source} holds a grid, whose settings are in the file; {sorted(given)} were given too."
                )
            _grid(source, ("probe",), dry_run, as_json)
        if dry_run:
            raise ValueError("--dry-run is for a grid; a probe of features on disk says how long it takes as it runs.")
        settings = read_settings(
            ProbeConfig, source if is_settings else None, given | ({} if is_settings else {"features": source})
        )
        from microtome.app.probe_run import run_probe_of

        run_probe_of(settings, as_json=as_json)


@app.command("sweep")
def sweep_grid(config: GridFile, dry_run: DryRun = False, as_json: Json = False) -> None:
    """Capture and probe a whole grid; what is finished is not done again."""
    _grid(config, ("capture", "probe"), dry_run, as_json)


def _grid(config: Path, steps: tuple[str, ...], dry_run: bool, as_json: bool) -> None:
    with user_errors(as_json):
        from microtome.app.grid_commands import run_grid

        raise typer.Exit(run_grid(config, steps=steps, dry_run=dry_run, as_json=as_json))


@app.command()
def doctor(as_json: Json = False) -> None:
    """Look whether everything that is needed is here, and say what mends what is not (exit code 1 then)."""
    with user_errors(as_json):
        from microtome.app.doctor import diagnose, is_well, print_diagnosis

        findings = diagnose()
        print_diagnosis(findings, as_json=as_json)
        _exit_unless(is_well(findings))


@models.command("list")
def list_models(as_json: Json = False) -> None:
    """Models on this machine: bundled, converted from GGUF, and in the hub's cache."""
    with user_errors(as_json):
        from microtome.app import models_list

        models_list.list_models(as_json=as_json)


@models.command("check")
def check_model(
    name: Annotated[str, typer.Argument(help="bundled name, hub id, folder or GGUF file")],
    as_json: Json = False,
    again: Annotated[
        bool, typer.Option("--again", help="prove everything anew, not only the cheap identities")
    ] = False,
) -> None:
    """Find a model's parts, prove them, and print which sites it offers, which not and why."""
    with user_errors(as_json):
        from microtome.app import models_check

        models_check.check_model(name, as_json=as_json, again=again)


@data.command("list")
def list_data(as_json: Json = False) -> None:
    """Data sets: what they hold, which labels they have, and whether they are on this machine."""
    with user_errors(as_json):
        from microtome.app import data_commands

        data_commands.list_data(as_json=as_json)


@data.command("fetch")
def fetch_data(
    names: DataNames,
    as_json: Json = False,
) -> None:
    """Fetch data sets once; afterwards they need no network."""
    with user_errors(as_json):
        from microtome.app import data_commands

        data_commands.fetch_data_sets(names, as_json=as_json)


@data.command("verify")
def verify_data(
    names: DataNames,
    as_json: Json = False,
) -> None:
    """Check hashes and counts of data sets again (exit code 1 if one is not what it should be)."""
    with user_errors(as_json):
        from microtome.app import data_commands

        _exit_unless(data_commands.verify_data_sets(names, as_json=as_json))


@store.command("verify")
def verify_store(
    path: StoreFolder,
    discard_damaged: Annotated[
        bool, typer.Option("--discard-damaged", help="throw damaged shards away; the capture makes them anew")
    ] = False,
    as_json: Json = False,
) -> None:
    """Check every shard of a store against its record (exit code 1 if one is damaged)."""
    with user_errors(as_json):
        from microtome.app import store_commands

        _exit_unless(store_commands.verify_store(path, discard_damaged=discard_damaged, as_json=as_json))


@store.command("info")
def show_store(path: StoreFolder, as_json: Json = False) -> None:
    """What a store holds: model, data, sites, rows, size, and how much of it is finished."""
    with user_errors(as_json):
        from microtome.app import store_commands

        store_commands.show_store(path, as_json=as_json)


@store.command("merge")
def merge_stores(
    out: Annotated[Path, typer.Argument(help="folder of the new store")],
    paths: Annotated[list[Path], typer.Argument(help="folders of the stores to join, in this order")],
    allow_repeated: Annotated[
        bool, typer.Option("--allow-repeated", help="take texts that are in several of them several times")
    ] = False,
    as_json: Json = False,
) -> None:
    """Join stores of the same model and sites into a new one."""
    with user_errors(as_json):
        from microtome.app import store_commands

        store_commands.merge_stores(out, paths, allow_repeated=allow_repeated, as_json=as_json)


@store.command("export")
def export_store(
    path: StoreFolder,
    out: Annotated[Path, typer.Argument(help="file or folder to write")],
    form: Annotated[
        Literal["activations", "npy", "parquet"],
        typer.Option("--format", help="a folder that Activations.load reads, a NumPy file per site, or one table"),
    ] = "npy",
    site: Annotated[
        list[str] | None,
        typer.Option(help="a site or kind to write, again for more; all without it"),
    ] = None,
    rows: Annotated[
        str | None, typer.Option(help="which rows: a query over the row table, 'label == 1 and position > 0'")
    ] = None,
    as_json: Json = False,
) -> None:
    """Write a store, or some of its sites and rows, in a form that other programs read."""
    with user_errors(as_json):
        from microtome.app import store_commands

        store_commands.export_store(path, out, format=form, sites=site, rows=rows, as_json=as_json)


add_heads(app)


def _exit_unless(is_well: bool) -> None:
    if not is_well:
        raise typer.Exit(1)


def main() -> None:
    """Entry point of the console script. What cannot be understood is one line and exit code 2, like other mistakes."""
    try:
        sys.exit(app(prog_name="microtome", standalone_mode=False))
    except Exception as error:  # typer's own, from click or from the copy of it that typer carries
        if type(error).__name__ == "Abort":
            sys.exit(130)
        if type(error).__name__ == "NoArgsIsHelpError":
            error.show()
            sys.exit(2)
        if not hasattr(error, "format_message"):
            raise
        context = getattr(error, "ctx", None)
        path = "microtome" if context is None else context.command_path
        said = " ".join(error.format_message().split())
        with user_errors("--json" in sys.argv):
            raise ValueError(f"{said}{'' if said.endswith(('.', '?')) else '.'} See: {path} --help") from error
