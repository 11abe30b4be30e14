"""Wrong sites that pass one identity are caught by another: each test plants one and names what exposes it."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import nn

from microtome.capture.anatomy import Anatomy, Block, HeadColumns, Identity, Point, Tap
from microtome.capture.dissect import dissect, probe_batches
from microtome.capture.proof import Proof
from microtome.capture.sites import Site
from microtome.capture.tail import Tail


@pytest.fixture(scope="module")
def model(tiny) -> nn.Module:
    return tiny("llama")


@pytest.fixture(scope="module")
def anatomy(model: nn.Module) -> Anatomy:
    return dissect(model)


@pytest.fixture
def proved(model: nn.Module, anatomy: Anatomy) -> Callable[..., list[Identity]]:
    """Identities that fail after one tap or one block of layer 1 is replaced by a wrong one."""

    def prove(
        *, tap: Tap | None = None, block: Callable[[Block], Block] = lambda b: b, cap: float | None = None
    ) -> list[Identity]:
        taps = [tap if tap is not None and t.site == tap.site else t for t in anatomy.taps.values()]
        blocks = [block(b) if k == 1 else b for k, b in enumerate(anatomy.blocks)]
        norm = Point(anatomy.final_norm, "out", None)
        tail = Tail(Point("", "out", "logits"), norm, anatomy.unembedding, anatomy.logits_factor, cap)
        with torch.no_grad():
            return [i for i in Proof(model, blocks, taps, tail, probe_batches(model)[1]).record if not i.holds]

    return prove


def test_nothing_fails_where_nothing_is_wrong(proved) -> None:
    assert proved() == []


@pytest.mark.parametrize(
    "columns",
    [
        torch.arange(32).view(8, 4).T.contiguous().view(4, 8),  # [d_head, head] for [head, d_head]
        torch.randperm(32, generator=torch.Generator().manual_seed(0)).view(4, 8),
        torch.arange(32).view(4, 8).flip(0),
    ],
    ids=["transposed", "shuffled", "heads in reverse"],
)
def test_a_wrong_head_layout_passes_the_sum_and_fails_causality(
    proved, anatomy: Anatomy, columns: torch.Tensor
) -> None:
    failed = proved(tap=replace(anatomy.tap("head_out.1"), heads=HeadColumns(columns)))
    names = {i.name for i in failed if i.site.startswith("z.1")}
    assert "head sum" not in names
    assert "head causality" in names


def test_twice_as_many_half_heads_are_refused(proved, anatomy: Anatomy) -> None:
    halves = HeadColumns(torch.arange(32).view(8, 4))
    failed = proved(tap=replace(anatomy.tap("head_out.1"), heads=halves, head_count=8))
    assert {i.name for i in failed if i.site.startswith("z.1")} >= {"head causality"}


def test_a_wrong_factor_fails_the_sum(proved) -> None:
    def halved(block: Block) -> Block:
        return replace(block, hops=tuple(replace(h, factor=0.5) if h.contribution == 0 else h for h in block.hops))

    failed = {(i.name, i.site) for i in proved(block=halved)}
    assert ("sum", "resid_post.1") in failed
    assert not any(site == "resid_post.0" for _, site in failed)


def test_reading_one_module_and_writing_another_fails_the_edit(proved, anatomy: Anatomy) -> None:
    def wrong_place(block: Block) -> Block:
        mixer, mlp = block.contributions
        return replace(block, contributions=(replace(mixer, point=anatomy.blocks[0].contributions[0].point), mlp))

    assert {("sum", "resid_post.1"), ("edit", "attn_out.1")} <= {(i.name, i.site) for i in proved(block=wrong_place)}


def test_swapped_key_and_value_columns_are_caught(proved, anatomy: Anatomy) -> None:
    failed = proved(tap=replace(anatomy.tap("k.1"), point=anatomy.tap("v.1").point))
    assert {i.name for i in failed} == {"k edit"}


def test_a_wrong_cap_fails_the_tail(proved) -> None:
    assert {i.name for i in proved(cap=30.0)} == {"tail"}


def test_a_contribution_of_no_size_is_not_vouched_for(tiny) -> None:
    model = tiny("llama")
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight.mul_(1e-7)
    anatomy = dissect(model)
    with pytest.raises(KeyError, match="not empty"):
        anatomy.tap("mlp_out.1")
    assert Site("mlp_out", 0) in anatomy.taps


def test_a_norm_across_heads_is_not_offered_as_heads(tiny) -> None:
    class NormAcrossHeads(nn.Module):
        """A norm over all of z before the projection, as BitNet has: one head's columns then depend on every head."""

        def __init__(self, linear: nn.Linear):
            super().__init__()
            self.norm, self.linear = nn.LayerNorm(32), linear

        def forward(self, z: torch.Tensor) -> torch.Tensor:
            return self.linear(self.norm(z))

    model = tiny("llama")
    for layer in model.model.layers:
        layer.self_attn.o_proj = NormAcrossHeads(layer.self_attn.o_proj)
    anatomy = dissect(model.eval())
    with pytest.raises(KeyError, match="no split into heads"):
        anatomy.tap("head_out.0")
