"""The file is what the safetensors library reads, its hash that of its bytes, and it is there whole or not at all."""

import hashlib

import pytest
import torch
import xxhash
from safetensors.torch import load_file

from microtome.capture.fingerprint import file_fingerprint
from microtome.capture.safetensors_file import write_safetensors

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


def layout_of(tensors: dict[str, torch.Tensor]) -> dict:
    return {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}


def test_the_library_reads_it(tmp_path) -> None:
    tensors = {f"z.{i}@é": torch.randn(7, 3, i + 1).to(dtype) for i, dtype in enumerate(DTYPES)}
    tensors["one"] = torch.randn(5, 4).t()  # not contiguous
    facts = write_safetensors(tmp_path / "f", layout_of(tensors), tensors.values())
    data = (tmp_path / "f").read_bytes()
    assert (facts.bytes, facts.digest) == (len(data), xxhash.xxh3_128(data).hexdigest())
    assert int.from_bytes(data[:8], "little") % 8 == 0
    found = load_file(tmp_path / "f")
    assert found.keys() == tensors.keys()
    assert all(found[name].dtype == tensors[name].dtype and torch.equal(found[name], tensors[name]) for name in found)


def test_any_digest_is_told_all_bytes(tmp_path) -> None:
    facts = write_safetensors(tmp_path / "f", {"a": (torch.float32, (1,))}, [torch.ones(1)], hashlib.sha256())
    assert facts.digest == hashlib.sha256((tmp_path / "f").read_bytes()).hexdigest()
    assert file_fingerprint(tmp_path / "f") == xxhash.xxh3_128((tmp_path / "f").read_bytes()).hexdigest()


def test_pieces_of_rows_give_the_same_bytes(tmp_path) -> None:
    tensors = {"a": torch.randn(10, 3), "b": torch.randn(4, 2)}
    whole = write_safetensors(tmp_path / "whole", layout_of(tensors), tensors.values())
    made = (piece.clone() for tensor in tensors.values() for piece in tensor.split(3))
    assert write_safetensors(tmp_path / "parts", layout_of(tensors), made) == whole
    assert (tmp_path / "parts").read_bytes() == (tmp_path / "whole").read_bytes()


@pytest.mark.parametrize(
    ("pieces", "said"),
    [
        ([torch.zeros(2, 2)], "the pieces have .* bytes, the layout says"),
        ([torch.zeros(3, 2), torch.zeros(1)], "the pieces have .* bytes, the layout says"),
        ([torch.zeros(3, 2, dtype=torch.float64)], r"a piece is torch\.float64, the layout has \['torch\.float32'\]"),
    ],
)
def test_what_is_not_as_planned_leaves_the_old_file(tmp_path, pieces, said) -> None:
    layout = {"a": (torch.float32, (3, 2))}
    write_safetensors(tmp_path / "f", layout, [torch.ones(3, 2)])
    old = (tmp_path / "f").read_bytes()
    with pytest.raises(ValueError, match=said):
        write_safetensors(tmp_path / "f", layout, pieces)
    assert (tmp_path / "f").read_bytes() == old
    assert [file.name for file in tmp_path.iterdir()] == ["f"]


def test_a_dtype_that_the_file_does_not_know(tmp_path) -> None:
    with pytest.raises(ValueError, match=r"a is torch\.int64; a file of activations holds torch\.float64, "):
        write_safetensors(tmp_path / "f", {"a": (torch.int64, (1,))}, [])


def test_a_full_disk_is_an_error_and_leaves_nothing(tmp_path, monkeypatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("microtome.capture.safetensors_file.os.fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_safetensors(tmp_path / "f", {"a": (torch.float32, (1,))}, [torch.ones(1)])
    assert not list(tmp_path.iterdir())
