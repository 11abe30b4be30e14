import numpy as np
import pytest
import torch

from microtome.capture.activations import Activations
from microtome.capture.sites import Site
from microtome.probes.site_blocks import as_activations, site_blocks


@pytest.fixture
def activations():
    generator = torch.Generator().manual_seed(0)
    arrays = {f"z.{layer}": torch.randn(6, 3, 4, generator=generator) for layer in (1, 2)}
    arrays |= {f"resid_post.{layer}": torch.randn(6, 5, generator=generator) for layer in (1, 2)}
    return Activations.from_arrays(arrays)


def names(blocks):
    return [str(probe) for block in blocks for probe in block.probes]


def test_heads_are_probes_of_their_own(activations):
    blocks = site_blocks(activations)
    assert names(blocks) == [f"z.{layer}.{head}" for layer in (1, 2) for head in range(3)] + [
        "resid_post.1",
        "resid_post.2",
    ]
    for block in blocks:
        for probe, features in zip(block.probes, block.features, strict=True):
            assert torch.equal(features, activations[probe])


def test_blocks_share_memory_with_the_activations(activations):
    block = site_blocks(activations, ["z.1"])[0]
    assert block.features.data_ptr() == activations["z.1"].data_ptr()


@pytest.mark.parametrize(
    ("sites", "expected"),
    [
        (["z.2.1"], ["z.2.1"]),
        (["resid_post"], ["resid_post.1", "resid_post.2"]),
        ([("z", 1), "blocks.2.hook_resid_post"], ["z.1.0", "z.1.1", "z.1.2", "resid_post.2"]),
        ([Site("resid_post", 2)], ["resid_post.2"]),
    ],
)
def test_names_choose_sites_heads_and_kinds(activations, sites, expected):
    assert names(site_blocks(activations, sites)) == expected


def test_a_mapping_becomes_activations():
    made = as_activations({"eeg.3": np.ones((2, 4), dtype=np.float32)})
    assert [str(site) for site in made.sites] == ["eeg.3"]
    with pytest.raises(TypeError, match="activations is a list"):
        as_activations([np.ones((2, 4))])


def test_wrong_names_are_refused(activations):
    with pytest.raises(KeyError, match=r"resid_post\.7 was not captured"):
        site_blocks(activations, ["resid_post.7"])
    with pytest.raises(ValueError, match=r"names z\.1\.0 twice"):
        site_blocks(activations, ["z.1", "z.1.0"])
    with pytest.raises(ValueError, match="sites is empty"):
        site_blocks(activations, [])
    with pytest.raises(TypeError, match=r"sites='z\.1' is one name. Pass a list"):
        site_blocks(activations, "z.1")


def test_nan_names_site_and_row(activations):
    broken = activations["z.2"].clone()
    broken[4, 1, 0] = float("nan")
    arrays = {"z.1": activations["z.1"], "z.2": broken}
    with pytest.raises(ValueError, match=r"z\.2 is NaN or infinite in 1 of 6 rows, first in row 4"):
        site_blocks(Activations.from_arrays(arrays, allow_nonfinite=True))


def test_constant_heads_are_named(activations):
    flat = activations["z.2"].clone()
    flat[:, 1] = torch.arange(4.0)
    with pytest.raises(ValueError, match=r"z\.2\.1: every row has the same features"):
        site_blocks(Activations.from_arrays({"z.2": flat}))
