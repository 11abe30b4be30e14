"""The plane of angular steering, and the edit in it on a tiny model; the rotation itself is tested with operations."""

import math
from dataclasses import replace

import pytest
import torch
from steering_steps import noise

from microtome.capture import capture
from microtome.interventions.angular import angle_sweep, angular, steering_plane
from microtome.interventions.contrast import contrast_rows

GOOD = ["the happy cat ran to the river .", "she liked the good film .", "a great big city .", "we saw good trees ."]
BAD = ["the sad cat sat in the house .", "she hated the bad film .", "an awful old town", "we saw bad small books ."]
SITES = ["resid_post.0", "resid_post.1", "resid_post.2"]


def test_the_plane_is_orthonormal_and_starts_at_the_most_alike():
    candidates = noise(6, 16)
    plane, chosen = steering_plane(candidates)
    assert torch.allclose(plane @ plane.T, torch.eye(2), atol=1e-6)
    cosines = torch.nn.functional.cosine_similarity(candidates[:, None], candidates[None], dim=-1).fill_diagonal_(0)
    assert chosen == int(cosines.sum(1).argmax())
    assert torch.allclose(plane[0], candidates[chosen] / candidates[chosen].norm(), atol=1e-6)


def test_a_planted_plane_is_found():
    first, second = torch.linalg.qr(noise(16, 2)).Q.T
    angles = torch.tensor([-0.7, -0.3, 0.1, 0.4, 0.9])
    candidates = 3 * (angles.cos()[:, None] * first + angles.sin()[:, None] * second)
    plane, chosen = steering_plane(candidates)
    assert chosen == 2
    projector = plane.T @ plane
    assert torch.allclose(projector @ first, first, atol=1e-5)
    assert torch.allclose(projector @ second, second, atol=1e-5)


def test_the_data_fix_the_sign():
    candidates = noise(6, 16)
    plane, _ = steering_plane(candidates)
    assert float((candidates / candidates.norm(dim=1, keepdim=True) @ plane[1]).mean()) > 0
    shuffled, _ = steering_plane(candidates.flip(0))
    assert torch.allclose(shuffled, plane, atol=1e-5)
    swapped, _ = steering_plane(-candidates)
    assert torch.allclose(swapped, -plane, atol=1e-5)


def test_lengths_of_candidates_mean_nothing():
    candidates = noise(6, 16)
    scaled = candidates * torch.tensor([1.0, 10.0, 0.1, 5.0, 2.0, 3.0])[:, None]
    assert torch.allclose(steering_plane(scaled)[0], steering_plane(candidates)[0], atol=1e-5)


@pytest.mark.parametrize("factors", [[1.0, 1.0, 1.0], [1.0, 2.0, 0.3], [1.0, -1.0, 2.0]])
def test_candidates_on_one_line_have_no_plane(factors):
    with pytest.raises(ValueError, match="one line"):
        steering_plane(torch.tensor(factors)[:, None] * noise(16))


def test_what_has_no_plane_is_refused():
    with pytest.raises(ValueError, match="two directions at least"):
        steering_plane(noise(1, 16))
    with pytest.raises(ValueError, match="zero"):
        steering_plane(noise(3, 16) * torch.tensor([[1.0], [0.0], [1.0]]))


def in_plane(x, plane):
    a, b = (x.double() @ plane.double().T).unbind(-1)
    return torch.atan2(b, a)


@pytest.mark.parametrize("degrees", [0.0, 90.0, 200.0])
def test_a_models_activations_turn_to_the_angle_and_keep_their_norm(llama, degrees):
    rows = contrast_rows(llama, GOOD, BAD, SITES)
    found = angular(llama, rows, ["resid_post.1"], degrees, adaptive=False)
    clean = capture(llama, GOOD, ["resid_post.1"], "all", progress=False)["resid_post.1"]
    edits = found.steering(llama).edits(llama)
    turned = capture(llama, GOOD, ["resid_post.1"], "all", edits=edits, progress=False)["resid_post.1"]
    plane = found.tensors["plane"][0]
    gap = torch.remainder(in_plane(turned, plane) - math.radians(degrees) + math.pi, 2 * math.pi) - math.pi
    assert gap.abs().max() < 1e-4
    assert torch.allclose(turned.norm(dim=1), clean.norm(dim=1), rtol=1e-5)
    outside = torch.eye(32) - plane.T @ plane
    assert torch.allclose(turned @ outside, clean @ outside, atol=1e-5)


def test_adaptive_leaves_tokens_on_the_other_side_alone_to_the_bit(llama):
    rows = contrast_rows(llama, GOOD, BAD, SITES)
    found = angular(llama, rows, ["resid_post.1"], 130.0)
    clean = capture(llama, GOOD + BAD, ["resid_post.1"], "all", progress=False)["resid_post.1"]
    edits = found.steering(llama).edits(llama)
    turned = capture(llama, GOOD + BAD, ["resid_post.1"], "all", edits=edits, progress=False)["resid_post.1"]
    ahead = clean @ found.tensors["plane"][0, 0] > 0
    assert ahead.any()
    assert not ahead.all()
    assert torch.equal(turned[~ahead], clean[~ahead])
    assert ((turned[ahead] - clean[ahead]).norm(dim=1) > 0).all()


def test_half_the_strength_turns_half_the_way_and_relative_adds_the_angle(llama):
    rows = contrast_rows(llama, GOOD, BAD, SITES)
    clean = capture(llama, GOOD, ["resid_post.1"], "all", progress=False)["resid_post.1"]

    def turn(artefact, strength):
        edits = artefact.steering(llama, strength=strength).edits(llama)
        new = capture(llama, GOOD, ["resid_post.1"], "all", edits=edits, progress=False)["resid_post.1"]
        plane = artefact.tensors["plane"][0]
        change = in_plane(new, plane) - in_plane(clean, plane)
        return torch.remainder(change + math.pi, 2 * math.pi) - math.pi

    absolute = angular(llama, rows, ["resid_post.1"], 100.0, adaptive=False)
    assert torch.allclose(2 * turn(absolute, 0.5), turn(absolute, 1.0), atol=1e-3)
    relative = angular(llama, rows, ["resid_post.1"], 40.0, adaptive=False, relative=True)
    assert torch.allclose(turn(relative, 1.0), torch.full((len(clean),), math.radians(40.0)).double(), atol=1e-3)


def test_swapping_the_classes_points_the_plane_the_other_way(llama):
    one = angular(llama, contrast_rows(llama, GOOD, BAD, SITES), ["resid_post.1"])
    other = angular(llama, contrast_rows(llama, BAD, GOOD, SITES), ["resid_post.1"])
    assert torch.allclose(one.tensors["plane"], -other.tensors["plane"], atol=1e-4)


def test_it_is_saved_with_its_angle(llama, tmp_path):
    found = angular(llama, contrast_rows(llama, GOOD, BAD, SITES), ["resid_post.1", "resid_post.2"], 130.0)
    found.save(tmp_path)
    again = type(found).load(tmp_path)
    assert again.options == found.options
    assert torch.equal(again.tensors["plane"], found.tensors["plane"])
    assert again.sites == found.sites


def test_a_sweep_changes_the_angle_alone(llama):
    rows = contrast_rows(llama, GOOD, BAD, SITES)
    found = angular(llama, rows, ["resid_post.1"])
    sweep = angle_sweep(found, range(0, 360, 90))
    assert list(sweep) == [0.0, 90.0, 180.0, 270.0]
    again = angular(llama, rows, ["resid_post.1"], 90.0)
    assert sweep[90.0].options == again.options
    assert torch.equal(sweep[90.0].tensors["plane"], again.tensors["plane"])
    with pytest.raises(ValueError, match="does not rotate"):
        angle_sweep(replace(found, operation="add", tensors={"vector": noise(1, 32)}, options={}), [1.0])
    with pytest.raises(ValueError, match="at least one"):
        angle_sweep(found, [])
