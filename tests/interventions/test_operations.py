"""What each operation does to a vector, and that strength 0 does nothing at all."""

import math

import pytest
import torch
from steering_steps import noise

from microtome.capture import capture
from microtome.interventions.operations import Add, Affine, Feedback, Function, Project, Rotate, Swap
from microtome.interventions.steering import Intervention, Steering

D = 32
ALL = {
    "add": Add(noise(D)),
    "relative": Add(noise(D), relative=True),
    "project": Project(noise(D)),
    "several": Project(noise(3, D)),
    "set": Project(noise(D), 4.0),
    "keep norm": Project(noise(D), keep_norm=True),
    "affine": Affine(1 + 0.1 * noise(D), noise(D, seed=1)),
    "bounded": Affine(1 + 0.1 * noise(D), noise(D, seed=1), -torch.ones(D), torch.ones(D)),
    "rotate to": Rotate(noise(2, D), 1.0),
    "rotate by": Rotate(noise(2, D), 1.0, "by"),
    "adaptive": Rotate(noise(2, D), 1.0, adaptive=True),
    "swap": Swap(noise(3, 12, D)),
    "swap part": Swap(noise(3, 12, D), basis=noise(2, D)),
    "feedback": Feedback(noise(2, D), noise(2, D, seed=1), torch.tensor([1.0, 2.0])),
    "one-sided": Feedback(noise(D), noise(D), 9.0, one_sided=True, cap=0.1),
    "function": Function(lambda x, at: x.sin()),
}
TEXTS = ["the cat sat .", "she liked the good old film .", "a man"]


def changed(model, operation, strength, positions="all"):
    steering = Steering(Intervention("resid_post.1", operation, positions, strength))
    acts = capture(model, TEXTS, ["resid_post.1", "logits"], "all", edits=steering.edits(model), progress=False)
    return acts["resid_post.1"], acts["logits"]


@pytest.mark.parametrize("name", ALL)
def test_strength_zero_is_the_model_as_it_is_to_the_bit(llama, name):
    clean = capture(llama, TEXTS, ["resid_post.1", "logits"], "all", progress=False)
    stream, logits = changed(llama, ALL[name], 0.0)
    assert torch.equal(stream, clean["resid_post.1"])
    assert torch.equal(logits, clean["logits"])
    moved, _ = changed(llama, ALL[name], 1.0)
    assert not torch.equal(moved, clean["resid_post.1"])


@pytest.mark.parametrize("name", ALL)
def test_a_row_of_strength_zero_is_left_alone_to_the_bit(llama, name):
    clean = capture(llama, TEXTS, ["resid_post.1"], "all", progress=False)
    stream, _ = changed(llama, ALL[name], [0.0, 1.0, 0.0])
    texts = torch.tensor(clean.rows["text"].to_numpy())
    assert torch.equal(stream[texts != 1], clean["resid_post.1"][texts != 1])
    assert not torch.equal(stream[texts == 1], clean["resid_post.1"][texts == 1])


def after(operation, strength=1.0):
    x = noise(2, 5, D, seed=7).double()
    weight = torch.full((2, 5, 1), strength, dtype=torch.float64)
    return x, x + operation.delta(x, weight, None)


def test_add():
    x, new = after(ALL["add"], 2.0)
    assert torch.allclose(new - x, (2 * noise(D).double()).expand_as(x))
    x, new = after(ALL["relative"], 0.5)
    assert torch.allclose((new - x).norm(dim=-1), 0.5 * x.norm(dim=-1) * float(noise(D).norm()))


def test_projection_is_gone_and_ablating_again_changes_nothing():
    one = ALL["project"]
    x, new = after(one)
    unit = noise(D).double() / noise(D).double().norm()
    assert ((new @ unit).abs() < 1e-6 * x.norm(dim=-1)).all()
    again = new + one.delta(new, torch.ones(2, 5, 1, dtype=torch.float64), None)
    assert torch.allclose(again, new, atol=1e-6)


def test_projecting_several_is_projecting_an_orthonormal_basis_one_by_one_in_any_order():
    several = ALL["several"]
    x, new = after(several)
    for order in ([0, 1, 2], [2, 0, 1]):
        step = x
        for row in order:
            step = step + Project(several.basis[row]).delta(step, torch.ones(2, 5, 1, dtype=torch.float64), None)
        assert torch.allclose(step, new, atol=1e-5)


def test_a_coordinate_is_set():
    unit = noise(D).double() / noise(D).double().norm()
    _, new = after(ALL["set"])
    assert torch.allclose(new @ unit, torch.full((2, 5), 4.0, dtype=torch.float64), atol=1e-5)
    x, half = after(ALL["set"], 0.5)
    assert torch.allclose(half @ unit, (x @ unit + 4) / 2, atol=1e-5)


def test_norms_are_kept_where_they_are_to_be():
    x, new = after(ALL["keep norm"])
    assert torch.allclose(new.norm(dim=-1), x.norm(dim=-1))
    for name in ("rotate to", "rotate by", "adaptive"):
        for strength in (0.3, 1.0):
            x, new = after(ALL[name], strength)
            assert torch.allclose(new.norm(dim=-1), x.norm(dim=-1), rtol=1e-6)


def test_affine_acts_within_its_support():
    x, new = after(ALL["affine"])
    assert torch.allclose(new, (1 + 0.1 * noise(D)).double() * x + noise(D, seed=1).double())
    x, new = after(ALL["bounded"])
    assert torch.equal(new == x, x.abs() > 1) or ((new == x) >= (x.abs() > 1)).all()


def angle_of(x, operation):
    a, b = (x @ operation.plane.double().T).unbind(-1)
    return torch.atan2(b, a)


def test_rotation():
    to = ALL["rotate to"]
    x, new = after(to)
    assert torch.allclose(angle_of(new, to), torch.full((2, 5), 1.0, dtype=torch.float64), atol=1e-5)
    outside = torch.eye(D, dtype=torch.float64) - to.plane.double().T @ to.plane.double()
    assert torch.allclose(new @ outside, x @ outside, atol=1e-5)
    again = new + to.delta(new, torch.ones(2, 5, 1, dtype=torch.float64), None)
    assert torch.allclose(again, new, atol=1e-5)
    x, turned = after(ALL["rotate by"])
    turn = torch.remainder(angle_of(turned, to) - angle_of(x, to), 2 * math.pi)
    assert torch.allclose(turn, torch.full((2, 5), 1.0, dtype=torch.float64), atol=1e-5)


def test_rotating_to_the_own_angle_changes_nothing_and_the_sign_of_b2_is_a_mirror():
    to = ALL["rotate to"]
    x = noise(1, 1, D, seed=9).double()
    own = Rotate(to.plane, float(angle_of(x, to)))
    one = torch.ones(1, 1, 1, dtype=torch.float64)
    assert torch.allclose(own.delta(x, one, None), torch.zeros_like(x), atol=1e-5)
    mirrored = Rotate(to.plane * torch.tensor([[1.0], [-1.0]]), -1.0)
    x, new = after(to)
    assert torch.allclose(x + mirrored.delta(x, torch.ones(2, 5, 1, dtype=torch.float64), None), new, atol=1e-5)


def test_an_adaptive_rotation_leaves_the_other_side_alone_to_the_bit():
    x, new = after(ALL["adaptive"])
    there = x @ ALL["adaptive"].plane[0].double() > 0
    assert there.any()
    assert not there.all()
    assert torch.equal(new[~there], x[~there])
    assert not torch.equal(new[there], x[there])


def test_feedback_is_what_it_says():
    one = ALL["feedback"]
    x, new = after(one, 0.5)
    gap = one.setpoint.double() - x @ one.read.double().T
    assert torch.allclose(new - x, 0.5 * gap @ one.write.double(), atol=1e-6)
    x, new = after(ALL["one-sided"])
    assert ((new - x).norm(dim=-1) <= 0.1 * x.norm(dim=-1) * (1 + 1e-6)).all()


def test_order_matters_where_it_should(llama):
    add, project = Intervention("resid_post.1", ALL["add"]), Intervention("resid_post.1", Project(noise(D)))

    def stream(*both):
        steering = Steering(list(both))
        return capture(llama, TEXTS, ["resid_post.1"], "all", edits=steering.edits(llama), progress=False)[
            "resid_post.1"
        ]

    unit = noise(D) / noise(D).norm()
    assert (stream(add, project) @ unit).abs().max() < 1e-4
    assert torch.allclose(stream(project, add) @ unit, noise(D).norm().expand(len(stream(add))), atol=1e-4)
    twice = Steering([add, add]).edits(llama)
    double = Steering(Intervention("resid_post.1", ALL["add"], strength=2.0)).edits(llama)
    one, other = (capture(llama, TEXTS, ["logits"], "last", edits=e, progress=False)["logits"] for e in (twice, double))
    assert torch.allclose(one, other, atol=1e-4)


def test_the_stream_leaving_a_block_is_the_one_entering_the_next(llama):
    project = Intervention("resid_pre.2", Project(noise(D)))
    add = Intervention("resid_post.1", ALL["add"])
    edits = Steering([project, add]).edits(llama)
    out = capture(llama, TEXTS, ["resid_pre.2"], "all", edits=edits, progress=False)["resid_pre.2"]
    assert (out @ (noise(D) / noise(D).norm())).abs().max() < 1e-4  # resid_pre.2 comes later, whatever the order given


def test_heads_are_edited_alone(llama):
    steering = Steering(Intervention("z.1.2", Add(noise(8))))
    clean = capture(llama, TEXTS, ["z.1"], "all", progress=False)["z.1"]
    new = capture(llama, TEXTS, ["z.1"], "all", edits=steering.edits(llama), progress=False)["z.1"]
    assert torch.allclose(new[:, 2] - clean[:, 2], noise(8).expand(len(clean), 8), atol=1e-5)
    assert torch.equal(new[:, [0, 1, 3]], clean[:, [0, 1, 3]])


def test_swapping_in_ones_own_activations_changes_nothing(llama):
    acts = capture(llama, TEXTS, ["resid_post.1"], "all", progress=False)
    values = torch.zeros(3, 12, D)
    values[acts.rows["text"].tolist(), acts.rows["position"].tolist()] = acts["resid_post.1"]
    stream, _ = changed(llama, Swap(values), 1.0)
    assert torch.allclose(stream, acts["resid_post.1"], atol=1e-6)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Add(torch.zeros(D)), "zero"),
        (lambda: Add(torch.full((D,), torch.nan)), "NaN"),
        (lambda: Add(noise(2, D)), "one vector"),
        (lambda: Project(torch.stack([noise(D), 2 * noise(D)])), "dependent"),
        (lambda: Project(noise(2, D), 1.0), "single direction"),
        (lambda: Rotate(torch.stack([noise(D), noise(D)]), 1.0), "parallel"),
        (lambda: Rotate(noise(2, D), math.nan), "angle"),
        (lambda: Feedback(noise(2, D), noise(D), 1.0), "as many"),
        (lambda: Affine(noise(D), noise(D - 1)), "channels"),
        (lambda: Intervention("resid_post.1", Add(noise(D)), strength=math.nan), "finite"),
        (lambda: Intervention("resid_post.1", Add(noise(D)), strength=[]), "finite"),
        (lambda: Steering([]), "nothing to do"),
    ],
)
def test_what_would_do_nothing_or_nonsense_is_refused(make, said):
    with pytest.raises(ValueError, match=said):
        make()


@pytest.mark.parametrize("strength", ["2", True, None])
def test_strengths_are_numbers(strength):
    with pytest.raises(TypeError, match="strength"):
        Intervention("resid_post.1", Add(noise(D)), strength=strength)
