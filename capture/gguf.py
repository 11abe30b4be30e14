"""A GGUF file as an ordinary float32 checkpoint: converted once, then kept in the cache folder as safetensors.

Transformers unpacks every block of a GGUF file into float32, which takes tens of seconds and happens on each load.
`converted_copy` does it once and keeps model and tokenizer under `models/` in the cache folder, keyed by the SHA-256 of
the file; the copy loads in about a second and gives bit-equal logits (tests/capture/test_gguf.py).

A copy is written into a folder of its own and renamed when it is whole, under a lock that the system lets go with its
process: two processes at once convert once, and one killed on the way leaves nothing that looks whole.
`conversion.json` in the copy holds the size, modification time and SHA-256 of each file; a copy that differs is thrown
away and made anew. Source: the GGUF specification (docs/gguf.md of ggml), versions 2 and 3, for the header. Beware:
dequantised weights are not the weights that the quantised file was made from.
"""

import json
import mmap
import shutil
import struct
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from filelock import FileLock
from gguf import GGMLQuantizationType
from tqdm.auto import tqdm
from transformers import AutoConfig, AutoTokenizer, modeling_gguf_pytorch_utils
from transformers.utils.logging import EmptyTqdm
from transformers.utils.quantization_config import GgufConfig

from microtome.capture.checkpoints import auto_class, check_complete, without_progress_bars
from microtome.capture.hashes import FileStamp, record_sha256, recorded_sha256, write_atomically
from microtome.data.registry import cache_folder, file_sha256

RECORD = "conversion.json"
LAYOUT = 1  # of the copy; a change here makes every copy anew
PLAIN_TYPES = {"F32", "F16", "BF16", "F64"}  # values as they are; every other type holds quantised blocks
SCALAR_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}  # GGUF value type: bytes
STRING, ARRAY = 8, 9  # the two GGUF value types without a fixed size


@dataclass(frozen=True)
class ConvertedCopy:
    """A GGUF file's float32 copy: its checkpoint folder, the SHA-256 of the file, its quantisation in words."""

    folder: Path
    gguf_sha256: str
    quantisation: str


@dataclass(frozen=True)
class Header:
    """What a GGUF file says before its tensors' data.

    keys: names of its metadata. tensor_types: tensors per storage type, most frequent first ({"Q4_1": 210, "F32": 61}).
    """

    keys: frozenset[str]
    tensor_types: dict[str, int]


def read_header(path: Path) -> Header:
    """Read a GGUF file's header, in time proportional to the header alone.

    Raises ValueError if the file is no GGUF file of version 2 or 3, or ends early.
    """
    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise ValueError(f"{path} does not begin with 'GGUF': it is no GGUF file, or its download is incomplete.")
        file.seek(0)
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as blob:
            try:
                return _parse_header(blob, path)
            except struct.error as error:
                raise ValueError(f"{path} ends inside its header: the file is cut off. Fetch it again.") from error


def _parse_header(blob: mmap.mmap, path: Path) -> Header:
    version, tensors, entries = struct.unpack_from("<IQQ", blob, 4)
    if version not in (2, 3):
        raise ValueError(f"{path} is GGUF version {version}; versions 2 and 3 are read. Convert it with llama.cpp.")
    position = 24
    keys: list[str] = []
    types: Counter[str] = Counter()
    for _ in range(entries):
        start, position = position + 8, _after_string(blob, position)
        keys.append(blob[start:position].decode())
        (kind,) = struct.unpack_from("<I", blob, position)
        position = _after_value(blob, position + 4, kind)
    for _ in range(tensors):
        position = _after_string(blob, position)
        (axes,) = struct.unpack_from("<I", blob, position)
        (kind,) = struct.unpack_from("<I", blob, position + 4 + 8 * axes)
        position += 4 + 8 * axes + 4 + 8
        types[GGMLQuantizationType(kind).name] += 1
    return Header(frozenset(keys), dict(types.most_common()))


def _after_string(blob: mmap.mmap, position: int) -> int:
    (length,) = struct.unpack_from("<Q", blob, position)
    return position + 8 + length


def _after_value(blob: mmap.mmap, position: int, kind: int) -> int:
    if kind == STRING:
        return _after_string(blob, position)
    if kind != ARRAY:
        return position + SCALAR_BYTES[kind]
    element, count = struct.unpack_from("<IQ", blob, position)
    position += 12
    if element in SCALAR_BYTES:
        return position + count * SCALAR_BYTES[element]
    for _ in range(count):
        position = _after_value(blob, position, element)
    return position


def quantisation_history(name: str, types: dict[str, int], converter: str) -> str:
    """The sentence that provenance keeps: storage types, and whether the weights differ from the original ones."""
    counts = ", ".join(f"{count} x {kind}" for kind, count in types.items())
    if set(types) <= PLAIN_TYPES:
        return f"not quantised: tensors in {name} are {counts}, read as float32 by {converter}"
    return (
        f"tensors in {name} are {counts}, dequantised to float32 by {converter}; these weights differ from the "
        "checkpoint that the file was made from"
    )


def converted_copy(path: Path) -> ConvertedCopy:
    """The file's float32 copy in the cache folder, made first if it is not there or does not match its record.

    The first call reads the file several times and shows a bar; later calls compare sizes and times. Raises ValueError
    if the file is no complete GGUF file or transformers does not know its architecture.
    """
    digest = recorded_sha256(path)
    models = cache_folder("models")
    folder = models / f"{path.stem}-{digest[:16]}-{LAYOUT}"
    if not folder.is_dir() or not _matches_record(folder):  # without the lock: the usual case needs none
        with FileLock(models / f".{folder.name}.lock"):
            if not folder.is_dir() or not _matches_record(folder):
                _replace(folder, path, digest)
    record = json.loads((folder / RECORD).read_text(encoding="utf-8"))
    history = quantisation_history(path.name, record["tensor_types"], record["converter"])
    return ConvertedCopy(folder, digest, history)


def _matches_record(folder: Path) -> bool:
    """Whether every recorded file is there with its size, and with its time or else its hash."""
    if not (folder / RECORD).is_file():
        return False
    record = json.loads((folder / RECORD).read_text(encoding="utf-8"))
    for name, known in record["files"].items():
        file = folder / name
        if not file.is_file() or file.stat().st_size != known["size"]:
            return False
        if file.stat().st_mtime_ns != known["mtime_ns"] and recorded_sha256(file) != known["sha256"]:
            return False
    return True


def _replace(folder: Path, path: Path, digest: str) -> None:
    """Make the copy beside its place and rename it. The caller holds the lock: leftovers are of dead processes."""
    header = read_header(path)
    for leftover in folder.parent.glob(f"{folder.name}.making-*"):
        shutil.rmtree(leftover)
    if folder.exists():
        warnings.warn(f"{folder} does not match its record and is made anew from {path}.", stacklevel=3)
        shutil.rmtree(folder)
    making = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f"{folder.name}.making-"))
    _convert(path, making, with_tokenizer="tokenizer.ggml.tokens" in header.keys)
    files = {file.name: FileStamp.of(file) for file in sorted(making.iterdir())}
    hashes = {name: file_sha256(making / name) for name in files}
    recorded = {
        name: {"size": stamp.size, "mtime_ns": stamp.mtime_ns, "sha256": hashes[name]} for name, stamp in files.items()
    }
    record = {
        "gguf": path.name,
        "gguf_sha256": digest,
        "tensor_types": header.tensor_types,
        "converter": f"transformers {transformers.__version__}",
        "files": recorded,
    }
    write_atomically(making / RECORD, json.dumps(record, indent=1))
    making.rename(folder)
    for name, stamp in files.items():
        record_sha256(FileStamp(str(folder / name), stamp.size, stamp.mtime_ns), hashes[name])


def _convert(path: Path, target: Path, *, with_tokenizer: bool) -> None:
    """Write the file's model in float32 and its tokenizer, if it has one, into the folder `target`."""
    with tqdm(total=3, desc=f"Converting {path.name} once to float32", unit="step", leave=False) as steps:
        source = {"gguf_file": path.name, "local_files_only": True}
        config = AutoConfig.from_pretrained(path.parent, **source)
        steps.update()
        # Without dequantize some families keep their blocks packed, and save_pretrained refuses the quantised model.
        unpacked = GgufConfig(gguf_file=path.name, dequantize=True)
        with without_progress_bars(), _without_gguf_bar(), torch.random.fork_rng(devices=[]):
            module, loading = auto_class(config).from_pretrained(
                path.parent,
                config=config,
                dtype=torch.float32,
                quantization_config=unpacked,
                output_loading_info=True,
                **source,
            )
            check_complete(module, loading["missing_keys"], path)
            steps.update()
            module.save_pretrained(target)
        if with_tokenizer:
            AutoTokenizer.from_pretrained(path.parent, **source).save_pretrained(target)
        steps.update()


@contextmanager
def _without_gguf_bar() -> Iterator[None]:
    """Silence the bar of transformers' GGUF reader, which does not go through its logging module."""
    bar = modeling_gguf_pytorch_utils.tqdm
    modeling_gguf_pytorch_utils.tqdm = EmptyTqdm
    try:
        yield
    finally:
        modeling_gguf_pytorch_utils.tqdm = bar
