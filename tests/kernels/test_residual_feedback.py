"""Low-rank feedback: the product form is the definition, zero weights change nothing, gradients, and the bound."""

import pytest
import torch

from microtome.kernels import residual_feedback_reference as reference
from microtome.kernels.residual_feedback import feedback_delta, residual_feedback

SHAPES = [((7,), 1), ((2, 5), 3), ((3, 1, 2), 32), ((1,), 2)]


def drawn(shape, rank, d, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, d, generator=generator, dtype=dtype)
    read, write = (torch.randn(rank, d, generator=generator, dtype=dtype) / d**0.5 for _ in range(2))
    weight = torch.randn(*shape, 1, generator=generator, dtype=dtype)
    return x, read, write, torch.randn(rank, generator=generator, dtype=dtype), weight


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.float64, 1e-12)])
@pytest.mark.parametrize(("shape", "rank"), SHAPES)
@pytest.mark.parametrize("d", [1, 33, 64])
@pytest.mark.parametrize("one_sided", [False, True])
@pytest.mark.parametrize("has_weight", [False, True])
def test_it_is_the_definition(dtype, bound, shape, rank, d, one_sided, has_weight) -> None:
    x, read, write, setpoint, weight = drawn(shape, rank, d, dtype)
    weight = weight if has_weight else None
    found = feedback_delta(x, read, write, setpoint, weight, one_sided=one_sided)
    expected = reference.feedback_delta(x, read, write, setpoint, weight, one_sided=one_sided)
    size = max(float(x.abs().max()), float(expected.abs().max()))
    assert (found - expected).abs().max() < bound * size


def test_setpoints_by_row_and_in_place() -> None:
    x, read, write, _, weight = drawn((2, 5), 3, 16)
    setpoint = torch.randn(2, 5, 3, dtype=torch.float64)
    expected = x + reference.feedback_delta(x, read, write, setpoint, weight)
    torch.testing.assert_close(residual_feedback(x, read, write, setpoint, weight), expected)
    held = x.clone()
    assert residual_feedback(held, read, write, setpoint, weight, in_place=True) is held
    torch.testing.assert_close(held, expected)


def test_gain_one_reaches_the_setpoint() -> None:
    x, read, _, setpoint, _ = drawn((6,), 1, 16)
    unit = read / read.norm()
    there = residual_feedback(x, unit, unit, setpoint)
    torch.testing.assert_close(there @ unit[0], setpoint.expand(6))
    above = residual_feedback(x, unit, unit, torch.tensor([-1e3], dtype=x.dtype), one_sided=True)
    assert torch.equal(above, x)


def test_rows_of_weight_zero_are_left_alone_to_the_bit() -> None:
    x, read, write, setpoint, weight = drawn((2, 5), 4, 32, torch.float32)
    weight[0] = 0
    found = residual_feedback(x, read, write, setpoint, weight)
    assert torch.equal(found[0], x[0])
    assert not torch.equal(found[1], x[1])


def test_gradients_are_those_of_the_definition() -> None:
    x, read, write, setpoint, weight = drawn((3,), 2, 8)
    tensors = [t.requires_grad_() for t in (x, read, write, setpoint, weight)]
    assert torch.autograd.gradcheck(feedback_delta, tensors)
    ours = torch.autograd.grad(feedback_delta(*tensors).square().sum(), tensors)
    theirs = torch.autograd.grad(reference.feedback_delta(*tensors).square().sum(), tensors)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other)


def test_many_directions_are_refused() -> None:
    x, read, write, setpoint, _ = drawn((2,), 33, 64)
    with pytest.raises(ValueError, match="at most 32"):
        residual_feedback(x, read, write, setpoint)
