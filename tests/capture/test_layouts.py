import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from microtome.capture.layouts import (
    Columns,
    HeadAxis,
    HeadWrite,
    Passing,
    Remember,
    StreamBetween,
    Whole,
    affine_weight,
)

PLAIN = torch.arange(12).view(3, 4)
INTERLEAVED = torch.arange(12).view(4, 3).T.contiguous()  # head h holds columns h, h + 3, ...
LATER = PLAIN + 8
LAYOUTS = {
    "whole": (Whole(), (2, 5, 12)),
    "plain columns": (Columns.of(PLAIN, None), (2, 5, 12)),
    "one of them": (Columns.of(PLAIN, 1), (2, 5, 12)),
    "interleaved columns": (Columns.of(INTERLEAVED, None), (2, 5, 12)),
    "one of those": (Columns.of(INTERLEAVED, 2), (2, 5, 12)),
    "columns of a fused map": (Columns.of(LATER, None), (2, 5, 24)),
    "columns of a tensor already split": (Columns.of(PLAIN, None), (2, 5, 3, 4)),
    "head axis of q": (HeadAxis(1, None), (2, 3, 5, 4)),
    "one head of q": (HeadAxis(1, 2), (2, 3, 5, 4)),
    "head axis of z": (HeadAxis(2, None), (2, 5, 3, 4)),
    "one head of z": (HeadAxis(2, 0), (2, 5, 3, 4)),
}


def random(shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", LAYOUTS)
def test_what_is_added_is_what_is_presented_and_nothing_else_moves(name):
    layout, shape = LAYOUTS[name]
    tensor, passing = random(shape), Passing(nn.Identity())
    before, value = tensor.clone(), layout.present(tensor, passing)
    delta = random(value.shape, 1)
    changed = layout.add(tensor, delta, passing)
    assert changed.shape == tensor.shape
    assert torch.equal(tensor, before)
    assert torch.equal(layout.present(changed, passing), value + delta)
    assert ((changed - tensor) != 0).sum() == delta.numel()
    assert torch.equal(layout.add(tensor, torch.zeros_like(value), passing), tensor)


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_value_put_back_gives_the_tensor_and_a_way_for_gradients(name):
    layout, shape = LAYOUTS[name]
    tensor, passing = random(shape), Passing(nn.Identity())
    value = layout.present(tensor, passing).clone().requires_grad_()
    again = layout.put(tensor, value, passing)
    assert torch.equal(again, tensor)
    (gradient,) = torch.autograd.grad((again * random(shape, 1)).sum(), value)
    assert torch.equal(gradient, layout.present(random(shape, 1), passing))


def test_heads_are_presented_by_batch_position_head():
    tensor, passing = random((2, 5, 12)), Passing(nn.Identity())
    assert torch.equal(Columns.of(INTERLEAVED, None).present(tensor, passing)[1, 3, 2], tensor[1, 3, [2, 5, 8, 11]])
    assert torch.equal(Columns.of(INTERLEAVED, 2).present(tensor, passing)[1, 3], tensor[1, 3, [2, 5, 8, 11]])
    q = random((2, 3, 5, 4))
    assert torch.equal(HeadAxis(1, None).present(q, passing)[1, 4, 2], q[1, 2, 4])
    assert torch.equal(HeadAxis(1, 2).present(q, passing)[1, 4], q[1, 2, 4])


class Shifted(nn.Module):
    """An affine map of no class that is known."""

    def __init__(self):
        super().__init__()
        self.matrix = nn.Parameter(random((12, 6), 3))

    def forward(self, x):
        return x @ self.matrix + 7


@pytest.mark.parametrize("projection", [nn.Linear(12, 6), Conv1D(6, 12), Shifted()], ids=lambda m: type(m).__name__)
def test_heads_write_what_the_projection_gives_without_bias(projection):
    z = random((2, 5, 12))
    out = projection(z)
    passing = Passing(projection, args=(z,))
    writes = HeadWrite(Columns.of(INTERLEAVED, None)).present(out, passing)
    assert writes.shape == (2, 5, 3, 6)
    torch.testing.assert_close(writes.sum(2), out - projection(torch.zeros(12)), rtol=0, atol=1e-5)
    for head in range(3):
        only = torch.zeros_like(z)
        only[..., INTERLEAVED[head]] = z[..., INTERLEAVED[head]]
        one = HeadWrite(Columns.of(INTERLEAVED, head)).present(out, passing)
        torch.testing.assert_close(one, projection(only) - projection(torch.zeros(12)), rtol=0, atol=1e-5)
        torch.testing.assert_close(one, writes[:, :, head], rtol=0, atol=1e-6)
    torch.testing.assert_close(z @ affine_weight(projection, z), out - projection(torch.zeros(12)), rtol=0, atol=1e-5)


def test_writes_include_what_was_added_to_them_before():
    projection, z = nn.Linear(12, 6), random((2, 5, 12))
    out, passing = projection(z), Passing(projection, args=(z,))
    clean = HeadWrite(Columns.of(PLAIN, None)).present(out, passing)
    to_all, to_one = random((2, 5, 3, 6), 1), random((2, 5, 6), 2)
    first = HeadWrite(Columns.of(PLAIN, None)).add(out, to_all, passing)
    second = HeadWrite(Columns.of(PLAIN, 1)).add(first, to_one, passing)
    torch.testing.assert_close(second, out + to_all.sum(2) + to_one)
    added = to_all.clone()
    added[:, :, 1] += to_one
    torch.testing.assert_close(HeadWrite(Columns.of(PLAIN, None)).present(second, passing), clean + added)
    for head in range(3):
        one = HeadWrite(Columns.of(PLAIN, head)).present(second, passing)
        torch.testing.assert_close(one, (clean + added)[:, :, head], rtol=0, atol=1e-5)


def test_a_deferred_write_holds_its_own_copy_of_z():
    projection, z = nn.Linear(12, 6), random((2, 5, 12))
    passing = Passing(projection, args=(z,))
    layout = HeadWrite(Columns.of(PLAIN, 1))
    expected = layout.present(projection(z), passing).detach()
    later = layout.deferred(passing, keep_graph=False)
    z.zero_()
    assert torch.equal(later(), expected)
    assert not later().requires_grad


def test_the_stream_between_is_its_terms_with_their_factors():
    entry, earlier, mixer = random((2, 5, 4)), random((2, 5, 4), 1), random((2, 5, 4), 2)
    parts = [Remember(0, tensor=entry), Remember(0, tensor=earlier)]
    layout, passing = StreamBetween(0.5, [(parts[0], 2.0), (parts[1], 3.0)]), Passing(nn.Identity())
    stream = layout.present(mixer, passing)
    torch.testing.assert_close(stream, 2 * entry + 3 * earlier + 0.5 * mixer)
    delta = random((2, 5, 4), 3)
    torch.testing.assert_close(layout.present(layout.add(mixer, delta, passing), passing), stream + delta)


def test_what_is_remembered_is_a_copy():
    remember, tensor = Remember(0), random((2, 5, 4))
    before = tensor.clone()
    assert remember.apply(tensor, Passing(nn.Identity())) is tensor
    tensor.zero_()
    assert torch.equal(remember.tensor, before)
