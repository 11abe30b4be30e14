"""Erasures say what they take out."""

import torch

from microtome.probes.erasure_maps import Erasure, Erasures


def test_repr_tells_the_features_and_the_rank() -> None:
    left = torch.zeros(3, 5, 2, dtype=torch.float64)
    left[0, 1:, 0] = left[1, 2, 0] = left[1, 3, 1] = 1.0
    many = Erasures(torch.zeros(3, 5, dtype=torch.float64), left, left.mT.clone())
    assert repr(many) == "Erasures(3 sites, 5 features, ranks 0 to 2)"
    assert repr(many[1]) == "Erasure(5 features, rank 2)"
    assert isinstance(many[0], Erasure)
    same = Erasures(many.mean[:1], left[:1], many.right[:1])
    assert repr(same) == "Erasures(1 sites, 5 features, rank 1)"
