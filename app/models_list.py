"""`microtome models list`: models on this machine. Bundled in a package, converted from GGUF, in the hub's cache.

Nothing is loaded and no network is asked.
"""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

from microtome.app.machine import folder_bytes
from microtome.data.bundled_models import BUNDLED, BundledModel
from microtome.data.registry import cache_folder
from microtome.data.spoken import spoken_bytes


@dataclass(frozen=True)
class ListedModel:
    """A model that can be named on this machine.

    name: what `load_model` takes. kind: "bundled", "converted" (a GGUF file's float32 copy in the cache) or "hub".
    is_here: whether its files are on this machine. nbytes: their size, 0 if they are not. path: where they lie, ""
    if they are not. says: what else there is to know. command: what brings it here, "" if it is here.
    """

    name: str
    kind: str
    is_here: bool
    nbytes: int
    path: str
    says: str = ""
    command: str = ""


def known_models() -> list[ListedModel]:
    """Every model that is bundled, converted or in the hub's cache."""
    return [*(_bundled(name, model) for name, model in BUNDLED.items()), *converted_models(), *_hub_models()]


def converted_models() -> list[ListedModel]:
    """Float32 copies of GGUF files in the cache folder, by name."""
    copies = []
    for record in sorted(cache_folder("models").glob("*/conversion.json")):
        folder = record.parent
        if ".making-" in folder.name:  # a copy that is being written, or was when its process died
            continue
        held = json.loads(record.read_text(encoding="utf-8"))
        says = f"float32 copy of {held['gguf']}"
        copies.append(ListedModel(str(folder), "converted", True, folder_bytes(folder), str(folder), says))
    return copies


def converted_copies_of(model: BundledModel) -> list[ListedModel]:
    """Copies of a bundled GGUF file; none for a model that needs no conversion, or was not yet used."""
    return [copy for copy in converted_models() if copy.says.endswith(f" {model.path}")]


def _bundled(name: str, model: BundledModel) -> ListedModel:
    path = model.installed_path
    if path is None:
        here = model.installed_version
        says = f"version {here} of {model.package} is installed, {model.version} is wanted" if here else "not installed"
        return ListedModel(name, "bundled", False, 0, "", says, model.pip_command)
    says = f"package {model.requirement}"
    if path.suffix == ".gguf":
        says += ", converted in the cache" if converted_copies_of(model) else ", converted when first used"
    nbytes = folder_bytes(path) if path.is_dir() else path.stat().st_size
    return ListedModel(name, "bundled", True, nbytes, str(path), says)


def _hub_models() -> list[ListedModel]:
    import huggingface_hub  # late: what a model is called needs no hub
    from huggingface_hub.errors import CacheNotFound

    try:
        held = huggingface_hub.scan_cache_dir(huggingface_hub.constants.HF_HUB_CACHE)
    except CacheNotFound:
        return []
    return [
        ListedModel(
            repo.repo_id,
            "hub",
            True,
            repo.size_on_disk,
            str(repo.repo_path),
            f"{len(repo.revisions)} revision{'s' if len(repo.revisions) > 1 else ''}",
        )
        for repo in sorted(held.repos, key=lambda repo: repo.repo_id.lower())
        if repo.repo_type == "model"
    ]


def list_models(*, as_json: bool = False) -> None:
    """Print them: a table, or one JSON document."""
    models = known_models()
    if as_json:
        print(json.dumps({"models": [dataclasses.asdict(model) for model in models]}, indent=1))
        return
    from rich import box  # late: importing rich draws from Python's random generator
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table("name", "kind", "size", "what it is", box=box.SIMPLE_HEAD, pad_edge=False)
    for model in models:
        size = spoken_bytes(model.nbytes) if model.is_here else "not here"
        name = Path(model.name).name if model.kind == "converted" else model.name
        says = model.says + (f"; run: {model.command}" if model.command else "")
        table.add_row(escape(name), model.kind, size, escape(says))
    console = Console(highlight=False)
    console.print(table)
    console.print(f"Converted copies lie in {cache_folder('models')}.", markup=False, soft_wrap=True)
