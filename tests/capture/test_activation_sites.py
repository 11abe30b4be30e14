"""Names of sites beyond our vocabulary, and sites in a line."""

import pytest
import torch

from microtome.capture.activation_sites import any_site, summarise
from microtome.capture.sites import Site


@pytest.mark.parametrize(
    ("name", "site"),
    [
        ("backbone", Site("backbone")),
        ("backbone.3", Site("backbone", 3)),
        ("backbone.3.1", Site("backbone", 3, 1)),
        ("model.layers.12", Site("model.layers", 12)),
        (("backbone", 3), Site("backbone", 3)),
        ("layer4.1", Site("layer4", 1)),
        ("v2", Site("v", 2)),
        ("blocks.5.attn.hook_z", Site("z", 5)),
        ("encoder.resid_post.3", Site("resid_post", 3, stack="encoder")),
        (Site("x"), Site("x")),
    ],
)
def test_names(name, site):
    assert any_site(name) == site


@pytest.mark.parametrize("name", ["backbone", "backbone.3", "backbone.3.1", "model.layers.12", "layer4.1", "z.5.3"])
def test_a_site_is_spelled_as_it_was_named(name):
    assert str(any_site(name)) == name


@pytest.mark.parametrize("name", ["z.x", "resid_post.1.2", "encoder.z.1.2.3", "final_norm.2", ""])
def test_our_kinds_are_not_taken_for_foreign_names(name):
    with pytest.raises(ValueError, match=r"."):
        any_site(name)


def test_summary_joins_layers():
    tensors = {Site("z", layer): torch.zeros(1, 9, 64) for layer in (0, 1, 2, 5, 7, 8)}
    tensors |= {Site("z", 3, 4): torch.zeros(1, 64), Site("final_norm"): torch.zeros(1, 576)}
    tensors |= {Site("resid_post", 1, stack="encoder", call=2): torch.zeros(1, 8)}
    assert summarise(tensors) == "z.0-2,5,7-8 [9 x 64], z.3.4 [64], final_norm [576], encoder.resid_post.1@2 [8]"
    assert summarise({}) == "nothing"
    assert summarise({Site(f"a{n}"): torch.zeros(1, 2) for n in range(14)}).endswith("a11 [2] and 2 more")
