"""`microtome data list | fetch | verify`: the data sets, what each holds, and their state in the cache."""

import json
from collections.abc import Callable, Sequence

from microtome.data.catalogue import DATA_SETS, DataStatus, data_status, fetch_data, verify_data
from microtome.data.registry import cache_folder
from microtome.data.spoken import spoken_bytes


def list_data(as_json: bool = False) -> None:
    """Print every set: its texts, labels, group, licence and whether it is cached; no network."""
    statuses = {name: data_status(name) for name in DATA_SETS}
    if as_json:
        print(json.dumps([_set_as_dict(name) | _status_as_dict(statuses[name]) for name in DATA_SETS], indent=1))
        return
    from rich import box
    from rich.console import Console  # late: importing rich draws from Python's random generator
    from rich.table import Table

    console = Console(highlight=False)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, leading=1)
    table.add_column("name", no_wrap=True)
    table.add_column("texts", justify="right", no_wrap=True)
    table.add_column("cached", justify="right", no_wrap=True)
    table.add_column("labels (of tokens)")
    table.add_column("group", no_wrap=True)
    table.add_column("what it is, and its licence")
    for name, data_set in DATA_SETS.items():
        labels = ", ".join(data_set.labels) + (
            f" ({', '.join(data_set.token_labels)})" if data_set.token_labels else ""
        )
        table.add_row(
            name,
            f"{data_set.rows:,}",
            _cached(statuses[name]),
            labels,
            data_set.group,
            f"{data_set.says}\n{data_set.licence}",
        )
    console.print(table)
    console.print(
        f"Split by the group. Fetch with `microtome data fetch NAME`, or `all`; the cache is {cache_folder()}.",
        markup=False,
        soft_wrap=True,
    )


def fetch_data_sets(names: Sequence[str], as_json: bool = False) -> None:
    """Fetch and parse the sets ("all": every one), and print what each takes in the cache.

    Raises KeyError for an unknown name, before anything is fetched, ValueError for no name, and what `fetch` raises.
    """
    statuses = [fetch_data(name) for name in _chosen(names)]
    if as_json:
        print(json.dumps([_status_as_dict(status) for status in statuses], indent=1))
        return
    from rich.console import Console

    console = Console(highlight=False)
    for status in statuses:
        console.print(f"{status.name}: {_cached(status)}, from {_sources(status)}", markup=False, soft_wrap=True)


def verify_data_sets(names: Sequence[str], as_json: bool = False) -> bool:
    """Verify the sets ("all": every one), print which are whole and what is wrong with the others; whether all are.

    Raises KeyError for an unknown name, before anything is verified, and ValueError for no name.
    """
    wrong = {name: _complaint(verify_data, name) for name in _chosen(names)}
    if as_json:
        print(
            json.dumps([{"name": name, "is_whole": not said, "wrong": said} for name, said in wrong.items()], indent=1)
        )
        return not any(wrong.values())
    from rich.console import Console

    console = Console(highlight=False)
    for name, said in wrong.items():
        console.print(f"{name}:", style="red" if said else "green", end=" ")
        console.print(said or "whole", markup=False, soft_wrap=True)
    return not any(wrong.values())


def _chosen(names: Sequence[str]) -> list[str]:
    if not names:
        raise ValueError(f"no data set is named. Give some of {', '.join(DATA_SETS)}, or all.")
    chosen = list(DATA_SETS) if "all" in names else list(dict.fromkeys(names))
    for name in chosen:
        data_status(name)  # an unknown name is found before the first download
    return chosen


def _complaint(verify: Callable[[str], DataStatus], name: str) -> str | None:
    try:
        verify(name)
    except (ValueError, OSError) as error:
        return str(error)
    return None


def _set_as_dict(name: str) -> dict:
    data_set = DATA_SETS[name]
    return {
        "name": name,
        "says": data_set.says,
        "rows": data_set.rows,
        "labels": dict(data_set.labels),
        "token_labels": dict(data_set.token_labels),
        "group": data_set.group,
        "licence": data_set.licence,
    }


def _status_as_dict(status: DataStatus) -> dict:
    archives = [vars(archive) for archive in status.archives]
    return {"name": status.name, "is_cached": status.is_cached, "bytes": status.bytes, "archives": archives}


def _cached(status: DataStatus) -> str:
    if not status.archives:
        return "built in"
    return spoken_bytes(status.bytes) if status.is_cached else "no"


def _sources(status: DataStatus) -> str:
    packages = ", ".join(f"{archive.registry} {archive.requirement}" for archive in status.archives)
    return packages or "this package"
