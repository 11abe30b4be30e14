"""Controls of a direction: their lengths, their null, and labels that move between groups."""

import numpy as np
import pytest
import torch
from steering_steps import noise

from microtome.interventions.artefact import Artefact
from microtome.interventions.contrast import ContrastRows, separation
from microtome.interventions.controls import (
    asked,
    covariance_directions,
    random_directions,
    shuffled_labels,
    sign_flip,
)

SITES = ("resid_post.0", "resid_post.2")
ADD = Artefact("add", SITES, {"vector": torch.stack([noise(32), 3 * noise(32, seed=1)])}, method="mean")
TAKEN = Artefact("project", SITES, {"basis": noise(32).expand(2, 32)}, method="ablation")
SUBSPACE = Artefact("project", SITES, {"basis": noise(2, 3, 32)})
LOOP = Artefact("feedback", SITES, {"read": noise(2, 32), "write": noise(2, 32, seed=2), "setpoint": torch.ones(2)})


def test_random_directions_are_as_long_and_each_another():
    found = random_directions(ADD, 5)
    vectors = torch.stack([one.tensors["vector"] for one in found])
    assert torch.allclose(vectors.norm(dim=-1), ADD.tensors["vector"].norm(dim=-1).expand(5, 2), rtol=1e-5)
    units = (vectors / vectors.norm(dim=-1, keepdim=True)).flatten(0, 1)
    assert (units @ units.T - torch.eye(10)).abs().max() < 0.9
    again, other = random_directions(ADD, 1)[0], random_directions(ADD, 1, seed=1)[0]
    assert torch.equal(again.tensors["vector"], vectors[0])
    assert not torch.equal(other.tensors["vector"], vectors[0])
    assert found[3].method == "mean random 3"
    assert found[3].sites == SITES


def test_the_null_of_random_directions_is_centred():
    """An odd measure (a projection on something fixed) has mean 0 and the variance of a coordinate on the sphere."""
    vectors = torch.stack([one.tensors["vector"][0] for one in random_directions(ADD, 400)])
    fixed = noise(32, seed=9) / noise(32, seed=9).norm()
    effect = (vectors @ fixed) / ADD.tensors["vector"][0].norm()
    assert abs(float(effect.mean())) < 2 * float(effect.std()) / 400**0.5
    assert float(effect.var()) == pytest.approx(1 / 32, rel=0.25)


def test_covariance_directions_lie_where_the_stream_varies():
    scales = torch.linspace(0.1, 3, 32)
    rows = [noise(300, 32, seed=5) * scales + 100, noise(300, 32, seed=6) @ torch.diag(scales.flip(0))]
    found = covariance_directions(ADD, rows, 400)
    for site in range(2):
        vectors = torch.stack([one.tensors["vector"][site] for one in found])
        length = ADD.tensors["vector"][site].norm()
        assert torch.allclose(vectors.norm(dim=1), length.expand(400), rtol=1e-5)
        assert float((vectors / length).mean(0).norm()) < 0.15
        spread, wanted = (vectors / length).var(0), rows[site].var(0) / rows[site].var(0).sum()
        assert float(torch.corrcoef(torch.stack([spread, wanted]))[0, 1]) > 0.98


def test_a_direction_taken_out_everywhere_is_drawn_once():
    (one,) = random_directions(TAKEN, 1)
    basis = one.tensors["basis"]
    assert torch.equal(basis[0], basis[1])
    (other,) = covariance_directions(TAKEN, [noise(9, 32)] * 2, 1)
    assert torch.equal(other.tensors["basis"][0], other.tensors["basis"][1])
    vectors = random_directions(ADD, 1)[0].tensors["vector"]
    assert abs(float(torch.cosine_similarity(vectors[0], vectors[1], dim=0))) < 0.9


def test_subspaces_and_feedback_have_controls_too():
    for found in (*random_directions(SUBSPACE, 1), *covariance_directions(SUBSPACE, [noise(9, 32)] * 2, 1)):
        assert found.tensors["basis"].shape == (2, 3, 32)
        assert torch.allclose(found.tensors["basis"].norm(dim=-1), SUBSPACE.tensors["basis"].norm(dim=-1))
    (loop,) = random_directions(LOOP, 1)
    assert torch.equal(loop.tensors["read"], LOOP.tensors["read"])
    assert torch.allclose(loop.tensors["write"].norm(dim=1), LOOP.tensors["write"].norm(dim=1))
    assert not torch.allclose(loop.tensors["write"], LOOP.tensors["write"])


def test_flipping_twice_is_nothing():
    once = sign_flip(ADD)
    assert torch.equal(once.tensors["vector"], -ADD.tensors["vector"])
    assert torch.equal(sign_flip(once).tensors["vector"], ADD.tensors["vector"])
    with pytest.raises(ValueError, match="no sign to flip"):
        sign_flip(TAKEN)
    held = Artefact("project", SITES, {"basis": noise(2, 32), "values": torch.ones(2)})
    assert torch.equal(sign_flip(held).tensors["basis"], -held.tensors["basis"])


def test_what_has_no_direction_is_refused():
    affine = Artefact("affine", SITES, {"gain": torch.ones(2, 32), "bias": torch.zeros(2, 32)})
    with pytest.raises(ValueError, match="no direction"):
        random_directions(affine, 1)
    with pytest.raises(ValueError, match="at least one"):
        random_directions(ADD, 0)
    with pytest.raises(ValueError, match="1 sets of activations for 2 sites"):
        covariance_directions(ADD, [noise(9, 32)], 1)
    with pytest.raises(ValueError, match="several that differ"):
        covariance_directions(ADD, [torch.ones(9, 32)] * 2, 1)
    with pytest.raises(ValueError, match=r"\(9, 16\) for vectors of 32"):
        covariance_directions(ADD, [noise(9, 16)] * 2, 1)


@pytest.mark.parametrize("size", [1, 3])
def test_labels_move_between_whole_groups(size):
    groups = np.repeat(np.arange(60), size).tolist()
    labels = np.array([group < 25 for group in groups])
    moved = shuffled_labels(labels, groups, seed=3)
    assert moved.sum() == labels.sum()
    assert all(len(set(moved[np.array(groups) == group])) == 1 for group in range(60))
    assert 0.3 < (moved == labels).mean() < 0.7
    assert (shuffled_labels(labels, groups, seed=3) == moved).all()
    assert (shuffled_labels(labels, groups, seed=4) != moved).any()


def test_labels_of_mixed_groups_move_within_them_too():
    groups = np.repeat(np.arange(40), 2).tolist()
    labels = np.tile([True, False], 40)
    moved = shuffled_labels(labels, groups)
    pairs = moved.reshape(40, 2)
    assert (pairs.sum(1) == 1).all()
    assert 5 < pairs[:, 0].sum() < 35
    (one,) = {bool(pair.all()) for pair in shuffled_labels(np.array([True, False]), [0, 0])[None]}
    assert not one


def test_labels_that_cannot_move_are_refused():
    with pytest.raises(ValueError, match="cannot be exchanged"):
        shuffled_labels([True, True, False], [0, 0, 1])


def test_shuffled_labels_have_the_separation_of_noise():
    """d-prime on held-out rows: large for a real difference, about 0 for one that was fitted to shuffled labels."""
    n = 200
    labels = np.arange(n) < n // 2
    x = noise(n, 16) + 2.0 * torch.tensor(labels)[:, None] * torch.eye(16)[0]
    true = separation(ContrastRows({"resid_post.0": x}, torch.tensor(labels), "last"))["d_prime"][0]
    null = [
        separation(
            ContrastRows({"resid_post.0": x}, torch.tensor(shuffled_labels(labels, list(range(n)), seed=seed)), "last")
        )["d_prime"][0]
        for seed in range(30)
    ]
    assert true > 1.3
    assert max(null) < 0.5 * true
    assert abs(np.mean(null)) < 3 * np.std(null) / 30**0.5


def test_asking_in_words():
    assert asked(["The film", "It"], " Be glad. ") == ["Be glad. The film", "Be glad. It"]
