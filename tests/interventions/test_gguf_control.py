"""Control vectors of other tools: written, read back to the bit, and files that are none."""

import gguf
import numpy as np
import pytest
import torch
from steering_steps import BAD, GOOD, noise

from microtome.interventions.artefact import Artefact
from microtome.interventions.contrast import contrast, contrast_rows
from microtome.interventions.generation import generate
from microtome.interventions.gguf_control import read_control_vector, write_control_vector

D = 32


@pytest.fixture(scope="module")
def vector(llama) -> Artefact:
    return contrast(llama, contrast_rows(llama, GOOD, BAD), names=("good", "bad")).only(
        ["resid_post.1", "resid_post.2"]
    )


def raw(path, tensors: dict[str, np.ndarray], architecture="controlvector") -> None:
    writer = gguf.GGUFWriter(str(path), architecture)
    writer.add_string("controlvector.model_hint", "llama")
    for name, value in tensors.items():
        writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_it_is_read_back_to_the_bit(llama, vector, tmp_path) -> None:
    write_control_vector(vector, tmp_path / "v.gguf", model_hint="llama")
    found = read_control_vector(tmp_path / "v.gguf", llama, names=("good", "bad"), positions="generated")
    assert found.sites == vector.sites
    assert torch.equal(found.tensors["vector"], vector.tensors["vector"])
    assert found.facts["model_hint"] == "llama"
    ours = generate(llama, GOOD, vector.steering(llama, strength=2.0), 4).token_ids
    assert generate(llama, GOOD, found.steering(llama, strength=2.0), 4).token_ids == ours


def test_the_layout_is_that_of_the_other_tools(vector, tmp_path) -> None:
    write_control_vector(vector, tmp_path / "v.gguf", model_hint="llama", strength=0.5)
    reader = gguf.GGUFReader(str(tmp_path / "v.gguf"))
    text = {
        name: bytes(reader.fields[name].parts[-1]).decode()
        for name in ("general.architecture", "controlvector.model_hint")
    }
    assert text == {"general.architecture": "controlvector", "controlvector.model_hint": "llama"}
    assert int(reader.fields["controlvector.layer_count"].parts[-1][0]) == 2
    named = {tensor.name: tensor.data for tensor in reader.tensors}
    assert set(named) == {"direction.1", "direction.2"}
    assert named["direction.1"].dtype == np.float32
    np.testing.assert_array_equal(named["direction.2"], 0.5 * vector.vector("resid_post.2").numpy())


def test_what_has_no_place_in_it_is_refused(llama, vector, tmp_path) -> None:
    with pytest.raises(ValueError, match="block 0"):
        write_control_vector(contrast(llama, contrast_rows(llama, GOOD, BAD)), tmp_path / "v.gguf", model_hint="llama")
    with pytest.raises(ValueError, match="added to resid_post"):
        write_control_vector(vector.moved(["mlp_out.1", "mlp_out.2"]), tmp_path / "v.gguf", model_hint="llama")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        ({"direction.0": noise(D).numpy()}, "direction.N"),
        ({"direction.-1": noise(D).numpy()}, "direction.N"),
        ({"direction.x": noise(D).numpy()}, "direction.N"),
        ({"direction.01": noise(D).numpy()}, "direction.N"),
        ({"other": noise(D).numpy()}, "no direction"),
        ({"direction.7": noise(D).numpy()}, "blocks 0 to 2"),
        ({"direction.1": noise(8).numpy()}, "8"),
        ({"direction.1": np.full(D, np.nan, dtype=np.float32)}, "NaN"),
    ],
)
def test_files_that_do_not_fit_are_refused(llama, tmp_path, tensors, said) -> None:
    raw(tmp_path / "v.gguf", tensors)
    with pytest.raises(ValueError, match=said):
        read_control_vector(tmp_path / "v.gguf", llama)


def test_other_files_are_refused(llama, tmp_path) -> None:
    raw(tmp_path / "model.gguf", {"direction.1": noise(D).numpy()}, "llama")
    with pytest.raises(ValueError, match="'llama'"):
        read_control_vector(tmp_path / "model.gguf", llama)
    (tmp_path / "broken.gguf").write_bytes(b"GGUF and then nothing")
    with pytest.raises(ValueError, match="damaged"):
        read_control_vector(tmp_path / "broken.gguf", llama)
    with pytest.raises(FileNotFoundError):
        read_control_vector(tmp_path / "none.gguf", llama)
