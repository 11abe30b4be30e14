"""SHA-256 of files, of a model's tensors and of a tokenizer's rules: 64 hex digits that tell one model from another.

Hashing gigabytes takes longer than loading them, so a file's hash is recorded in the cache folder together with the
file's size and modification time, and read from there while both are the same. Beware: the hash of a state_dict and
that of the file it came from differ.
"""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from microtome.capture.fingerprint import tensor_bytes
from microtome.data.registry import cache_folder, file_sha256
from microtome.data.replaced_file import replaced_file


@dataclass(frozen=True)
class FileStamp:
    """A file as it was at one moment: absolute path, size in bytes, modification time in nanoseconds."""

    path: str
    size: int
    mtime_ns: int

    @classmethod
    def of(cls, path: Path) -> "FileStamp":
        """The file at `path` as it is now."""
        status = path.stat()
        return cls(str(path.absolute()), status.st_size, status.st_mtime_ns)

    def sha256(self) -> str:
        """SHA-256 of the file's bytes. Raises ValueError if the file is not the one that was stamped."""
        path = Path(self.path)
        if not path.is_file() or FileStamp.of(path) != self:
            raise ValueError(
                f"{self.path} changed or went away since it was read (it had {self.size} bytes), so the hash of what "
                "was read can no longer be told. Load the model again."
            )
        return recorded_sha256(path)


def text_sha256(text: str) -> str:
    """SHA-256 of the text's UTF-8 bytes."""
    return hashlib.sha256(text.encode()).hexdigest()


def recorded_sha256(path: Path) -> str:
    """SHA-256 of a file's bytes, computed once while its size and modification time stay the same.

    Records lie in the cache folder, one a path, replaced atomically: processes at once do not disturb each other.
    Raises ValueError if the file changes while it is read.
    """
    stamp = FileStamp.of(path)
    known = _record(stamp)
    if known.exists():
        record = json.loads(known.read_text(encoding="utf-8"))
        if (record["size"], record["mtime_ns"]) == (stamp.size, stamp.mtime_ns):
            return record["sha256"]
    digest = file_sha256(path)
    if FileStamp.of(path) != stamp:
        raise ValueError(f"{path} changed while it was read. Wait until it is written, then try again.")
    record_sha256(stamp, digest)
    return digest


def record_sha256(stamp: FileStamp, digest: str) -> None:
    """Record the hash of a file whose bytes were hashed elsewhere, e.g. while it was written."""
    record = {"path": stamp.path, "size": stamp.size, "mtime_ns": stamp.mtime_ns, "sha256": digest}
    write_atomically(_record(stamp), json.dumps(record))


def _record(stamp: FileStamp) -> Path:
    return cache_folder("hashes") / f"{text_sha256(stamp.path)[:32]}.json"


def write_atomically(path: Path, text: str) -> None:
    """Write a text file so that a reader sees the old one or the whole new one."""
    with replaced_file(path) as scratch:
        scratch.write_text(text, encoding="utf-8")


def state_dict_sha256(module: nn.Module) -> str:
    """SHA-256 over name, dtype, shape and bytes of each tensor in the state_dict, in the order of the names.

    Tensors come to the CPU one at a time. Raises ValueError for tensors without data (on the meta device).
    """
    tensors = {name: value for name, value in module.state_dict().items() if isinstance(value, torch.Tensor)}
    if missing := [name for name, tensor in tensors.items() if tensor.is_meta]:
        raise ValueError(
            f"{len(missing)} tensors hold no data, e.g. {missing[0]!r} (on the meta device: offloaded, or not loaded). "
            "Load the whole model onto one device, or wrap it before it is offloaded: "
            "LoadedModel.from_module(model, ...), then cpu_offload(model) or dispatch_model(model, ...)."
        )
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor_bytes(tensor))
    return digest.hexdigest()


def tokenizer_sha256(tokenizer: PreTrainedTokenizerBase) -> str:
    """SHA-256 of what the tokenizer does to a text, whatever padding and truncation its last call asked for."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    special = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
    if backend is None:
        rules = json.dumps({"class": type(tokenizer).__name__, "vocabulary": tokenizer.get_vocab()}, sort_keys=True)
    else:  # serialised as version, truncation, padding, added_tokens, ...: the rules begin at the fourth
        _, start, rest = backend.to_str().partition('"added_tokens":')
        rules = start + rest
    return text_sha256(rules + json.dumps(special, sort_keys=True))
