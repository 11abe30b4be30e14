"""A map is x W + c, comes back from its files, and refuses files that do not belong together."""

import pytest
import torch

from microtome.lenses.linear_map import LinearMap, identity_map


@pytest.fixture
def found() -> LinearMap:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(4, 3, generator=generator, dtype=torch.float64)
    return LinearMap(weight, torch.arange(3.0).double(), "ridge", "resid_pre.0", "resid_post.1", 1e-3, 2, {"count": 9})


def test_it_is_x_times_weight_plus_intercept_in_the_dtype_of_x(found):
    x = torch.randn(2, 5, 4)
    assert found(x).dtype == torch.float32
    torch.testing.assert_close(found(x), (x.double() @ found.weight + found.intercept).float())


def test_one_map_after_another(found):
    back = LinearMap(found.weight.T.contiguous(), torch.ones(4, dtype=torch.float64), "back")
    x = torch.randn(6, 4, dtype=torch.float64)
    torch.testing.assert_close(found.then(back)(x), back(found(x)))
    assert torch.equal(identity_map(4)(x), x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_it_comes_back_from_its_files(found, tmp_path, dtype):
    found = found.to(dtype)
    found.save(tmp_path / "new" / "resid_pre.0")
    again = LinearMap.load(tmp_path / "new" / "resid_pre.0")
    assert torch.equal(again.weight, found.weight)
    assert torch.equal(again.intercept, found.intercept)
    assert again.weight.dtype == dtype
    names = ("kind", "source", "target", "strength", "rank", "facts")
    assert [getattr(again, name) for name in names] == [getattr(found, name) for name in names]
    assert {file.name for file in (tmp_path / "new").iterdir()} == {"resid_pre.0.json", "resid_pre.0.safetensors"}


def test_files_that_do_not_belong_together_are_refused(found, tmp_path):
    found.save(tmp_path / "one")
    found.then(identity_map(3)).save(tmp_path / "two")
    (tmp_path / "two.safetensors").write_bytes((tmp_path / "one.safetensors").read_bytes()[:-1] + b"x")
    with pytest.raises(ValueError, match="damaged, or of another save"):
        LinearMap.load(tmp_path / "two")
    (tmp_path / "one.json").write_text('{"format": 9}')
    with pytest.raises(ValueError, match="format 9"):
        LinearMap.load(tmp_path / "one")
    with pytest.raises(FileNotFoundError):
        LinearMap.load(tmp_path / "none")


def test_damaged_files_and_whole_numbers_are_refused(found, tmp_path):
    found.save(tmp_path / "map")
    for text, message in (("{", "map.json is damaged"), ("[]", "has format None"), ("{}", "has format None")):
        (tmp_path / "map.json").write_text(text)
        with pytest.raises(ValueError, match=message):
            LinearMap.load(tmp_path / "map")
    with pytest.raises(ValueError, match=r"x is torch.int64, in which a weight would be cut"):
        type(found).__call__.__wrapped__(found, torch.ones(2, found.d_in, dtype=torch.int64))


def test_bad_input_says_what_to_do(found):
    with pytest.raises(ValueError, match="x has 3 channels; the map ridge reads 4"):
        found(torch.zeros(2, 3))
    with pytest.raises(ValueError, match="writes 3 channels, the second reads 4"):
        found.then(found)
    with pytest.raises(TypeError, match="not JSON serializable"):
        LinearMap(found.weight, found.intercept, facts={"x": object()}).save("unwritten")
