"""Splicing an operator into a running model: where it acts, what it leaves alone, and where its values come from."""

import pytest
import torch
from torch import nn

from microtome.capture.tap_plan import Read
from microtome.capture.taps import taps
from microtome.lenses.linear_map import LinearMap, identity_map
from microtome.lenses.transport.operator import TransportOperator, operator_of
from microtome.lenses.transport.splice import splice_edits


def operator(width: int, source: str, target: str, route: str = "same", seed: int = 0) -> TransportOperator:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(width, width, generator=generator)
    return operator_of(LinearMap(weight, torch.randn(width, generator=generator), "drawn", source, target), route=route)


@pytest.fixture
def llama(tiny) -> nn.Module:
    return tiny("llama")


@pytest.fixture
def ids() -> torch.Tensor:
    return torch.randint(5, 100, (2, 9), generator=torch.Generator().manual_seed(1))


def test_writes_the_image_of_the_source_over_the_chosen_tokens_of_every_row(llama, ids):
    found = operator(32, "resid_post.0", "resid_post.1")
    at = torch.zeros(2, 9, dtype=torch.bool)
    at[0, 3] = at[1, 5] = at[1, 8] = True
    with torch.no_grad():
        with taps(llama, ["resid_post.0", "resid_post.1"]) as clean:
            llama(ids)
        with taps(llama, ["resid_post.0", "resid_post.1"], splice_edits(found, at)) as tape:
            llama(ids)
    assert torch.equal(tape["resid_post.0"], clean["resid_post.0"])
    assert torch.allclose(tape["resid_post.1"][at], found(clean["resid_post.0"])[at], atol=1e-5)
    assert torch.equal(tape["resid_post.1"][~at], clean["resid_post.1"][~at])


def test_the_identity_from_a_site_to_itself_changes_nothing(llama, ids):
    same = operator_of(identity_map(32, "resid_post.1", "resid_post.1"))
    with torch.no_grad():
        clean = llama(ids).logits
        with taps(llama, edits=splice_edits(same)):
            assert torch.equal(llama(ids).logits, clean)


@pytest.mark.parametrize("side", ["left", "right"])
def test_an_offset_takes_the_token_before_and_leaves_those_without_one(llama, ids, side):
    found = operator(32, "resid_post.0", "resid_post.1", "offset 2")
    is_real = torch.ones(2, 9, dtype=torch.bool)
    is_real[1, slice(0, 3) if side == "left" else slice(6, 9)] = False
    mask = is_real.long()
    with torch.no_grad():
        with taps(llama, ["resid_post.0", "resid_post.1"]) as clean:
            llama(ids, attention_mask=mask)
        with taps(llama, "resid_post.1", splice_edits(found, is_real=is_real)) as tape:
            llama(ids, attention_mask=mask)
    for row in range(2):
        columns = is_real[row].nonzero()[:, 0]
        x, y = clean["resid_post.0"][row, columns], clean["resid_post.1"][row, columns]
        got = tape["resid_post.1"][row, columns]
        assert torch.equal(got[:2], y[:2])
        assert torch.allclose(got[2:], found(x[:-2]), atol=1e-5)
    assert torch.equal(tape["resid_post.1"][~is_real], clean["resid_post.1"][~is_real])


def test_a_head_route_takes_the_token_its_head_attends_to_most(llama, ids):
    found = operator(32, "resid_post.0", "resid_post.1", "head 1.2")
    with torch.no_grad():
        with taps(llama, ["resid_post.0", "resid_post.1", Read("pattern.1.2", queries="all")]) as clean:
            llama(ids)
        with taps(llama, "resid_post.1", splice_edits(found)) as tape:
            llama(ids)
    pattern = clean["pattern.1.2"].clone()
    pattern[:, :, 0] = 0
    for row in range(2):
        assert torch.equal(tape["resid_post.1"][row, 0], clean["resid_post.1"][row, 0])
        for query in range(1, 9):
            source = clean["resid_post.0"][row, int(pattern[row, query].argmax())]
            assert torch.allclose(tape["resid_post.1"][row, query], found(source), atol=1e-5)


@pytest.mark.parametrize(("target", "is_before"), [("attn_out.1", True), ("z.1", True), ("resid_pre.1", False)])
def test_a_pattern_is_known_to_what_its_block_adds_but_not_to_what_enters(target, is_before):
    found = operator(32, "resid_post.0", target, "head 1.2")
    if is_before:
        assert len(splice_edits(found)) == 3
    else:
        with pytest.raises(ValueError, match="runs after"):
            splice_edits(found)


def test_refuses_a_head_that_runs_after_the_target_and_a_mask_of_another_batch(llama, ids):
    with pytest.raises(ValueError, match="runs after"):
        splice_edits(operator(32, "resid_post.0", "resid_post.1", "head 2.0"))
    with (
        pytest.raises(ValueError, match="give one each"),
        taps(
            llama, edits=splice_edits(operator(32, "resid_post.0", "resid_post.1"), torch.ones(2, 4, dtype=torch.bool))
        ),
    ):
        llama(ids)


def test_a_source_that_comes_later_in_the_block_is_refused_in_every_forward(llama, ids):
    edits = splice_edits(operator(32, "mlp_out.1", "attn_out.1"))
    for _ in range(2):
        with pytest.raises(ValueError, match=r"mlp_out.1 comes after attn_out.1"), taps(llama, edits=edits):
            llama(ids)


@pytest.mark.parametrize("route", ["offset 1", "head 0.1", "random 0"])
def test_a_route_is_refused_where_a_cache_keeps_earlier_tokens_out_of_the_forward(llama, ids, route):
    edits = splice_edits(operator(32, "resid_post.0", "resid_post.1", route), token_ids=ids)
    with (
        torch.no_grad(),
        taps(llama, edits=edits),
        pytest.raises(ValueError, match=r"one token does not hold its source.*use_cache=False"),
    ):
        llama.generate(ids, max_new_tokens=3, do_sample=False, use_cache=True, pad_token_id=0, eos_token_id=None)
