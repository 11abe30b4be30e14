import functools

import pytest
import torch
from torch import nn

from microtome.capture.live_taps import EditContext, delta_of, own_copy, query_rows, selected, with_context
from microtome.capture.sites import Site

AT = EditContext(Site("resid_post", 3), firing=2)
VALUE = torch.randn(2, 5, 4, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("shape", [(2, 5, 4), (4,), (1, 1, 4), (2, 1, 4), (1, 5, 1)])
def test_a_delta_of_a_fitting_shape_is_broadcast(shape):
    delta = torch.randn(shape)
    assert torch.equal(delta_of(lambda value, at: delta, VALUE, AT), delta.broadcast_to(2, 5, 4))


@pytest.mark.parametrize("shape", [(), (1,), (5,), (5, 4), (2, 4), (2, 5, 3), (3, 5, 4), (1, 2, 5, 4)])
def test_a_delta_of_another_shape_is_refused(shape):
    message = rf"resid_post\.3 returned a delta of shape \({', '.join(map(str, shape))},?\); expected \(2, 5, 4\)"
    with pytest.raises(ValueError, match=message):
        delta_of(lambda value, at: torch.zeros(shape), VALUE, AT)


def add_in_place(value, at):
    value += 1
    return torch.zeros_like(value)


@pytest.mark.parametrize(
    ("function", "error", "message"),
    [
        (
            lambda value, at: None,
            TypeError,
            r"returned None; expected a tensor of shape \(2, 5, 4\) to add to the value",
        ),
        (lambda value, at: 0.0, TypeError, "returned float; expected a tensor"),
        (lambda value, at: value.double(), TypeError, r"returned torch\.float64, the value is torch\.float32"),
        (lambda value, at: value.to("meta"), ValueError, "a delta on meta, the value is on cpu"),
        (add_in_place, ValueError, "changed its value in place"),
    ],
)
def test_what_an_edit_returns_is_checked(function, error, message):
    with pytest.raises(error, match=rf"The edit at resid_post\.3 {message}" if "on meta" not in message else message):
        delta_of(function, VALUE.clone(), AT)


def test_edits_work_under_inference_mode():
    with torch.inference_mode():
        value = VALUE * 1
        assert torch.equal(delta_of(lambda value, at: value, value, AT), value)


class Steering(nn.Module):
    def forward(self, value):
        return 2 * value


class Callable:
    def __call__(self, value, at):
        return at.firing * value


@pytest.mark.parametrize(
    "edit",
    [
        lambda value: 2 * value,
        lambda value, at: at.firing * value,
        lambda value, strength=2: strength * value,
        lambda value, at=None: at.firing * value,
        lambda *given: given[1].firing * given[0],
        functools.partial(torch.mul, 2.0),
        Steering(),
        Callable(),
    ],
)
def test_edits_take_the_value_and_if_they_like_the_context(edit):
    assert torch.equal(with_context(edit)(VALUE, AT), 2 * VALUE)


def test_functions_written_in_c_take_the_value():
    assert torch.equal(with_context(torch.neg)(VALUE, AT), -VALUE)
    assert torch.equal(with_context(torch.zeros_like)(VALUE, AT), torch.zeros_like(VALUE))


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (VALUE, "An edit is a function of the value that returns the delta to add. Got tensor"),
        (lambda: VALUE, r"takes 0 arguments; expected one \(the value\) or two"),
        (lambda value, at, more: VALUE, "takes 3 arguments"),
    ],
)
def test_what_is_no_edit_is_refused(edit, message):
    with pytest.raises(TypeError, match=message):
        with_context(edit)


@pytest.mark.parametrize(
    "select", [None, lambda x: x[:, -1], lambda x: x[:, [0, 2]], lambda x: x.mean(1), lambda x: x.transpose(0, 1)]
)
def test_what_is_kept_has_memory_of_its_own_and_no_more(select):
    value = VALUE.clone()
    expected = value.clone() if select is None else select(value).clone()
    kept = own_copy(selected(value, select, AT.site), value)
    value.zero_()
    assert torch.equal(kept, expected)
    assert kept.is_contiguous()
    assert kept.untyped_storage().nbytes() == expected.numel() * 4


def test_a_select_returns_a_tensor():
    with pytest.raises(TypeError, match=r"select= of resid_post\.3 returned list; expected a tensor"):
        selected(VALUE, lambda value: value.tolist(), AT.site)


def test_query_rows_count_from_either_end_and_may_differ_by_text():
    query, site = torch.zeros(2, 4, 6, 8), Site("pattern", 1)
    assert query_rows("all", query, site).tolist() == [[0, 1, 2, 3, 4, 5]]
    assert query_rows([-1, 0, 5], query, site).tolist() == [[5, 0, 5]]
    assert query_rows(torch.tensor([[1], [-2]]), query, site).tolist() == [[1], [4]]
    with pytest.raises(
        IndexError, match=r"pattern\.1: query rows \[6\] are out of range; this call has 6 queries, 0 to 5"
    ):
        query_rows([6], query, site)
    with pytest.raises(IndexError, match=r"query rows \[-7\]"):
        query_rows([-7], query, site)
