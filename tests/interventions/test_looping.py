"""Blocks run again and blocks left out: identities, powers of a linear map, caches, threads, and what is refused."""

import copy
import threading

import numpy as np
import pytest
import torch
from steering_steps import BAD, GOOD, noise
from tiny_families import tiny_family
from torch import nn
from transformers.cache_utils import DynamicCache, StaticCache

from microtome.capture import LoadedModel, capture
from microtome.capture.block_range import blocks_looped
from microtome.interventions.generation import generate
from microtome.interventions.looping import loop_ranges, loop_report, loop_weights, looped, skipped
from microtome.interventions.steering import anatomy_of

TEXTS = [*GOOD, *BAD]
D = 32


def logits(model) -> torch.Tensor:
    return capture(model, TEXTS, ["logits"], "all", progress=False)["logits"]


class LinearBlock(nn.Module):
    """z <- z + z A'."""

    def __init__(self, matrix: torch.Tensor):
        super().__init__()
        self.matrix = nn.Parameter(matrix)

    def forward(self, hidden_states: torch.Tensor, **_):
        return hidden_states + hidden_states @ self.matrix.T


@pytest.fixture
def linear(llama):
    """A llama whose three blocks are linear maps of the stream."""
    module = copy.deepcopy(llama.module)
    anatomy = anatomy_of(module)
    matrices = [0.2 * noise(D, D, seed=layer) for layer in range(3)]
    for layer, matrix in enumerate(matrices):
        module.model.layers[layer] = LinearBlock(matrix)
    return module, anatomy, [torch.eye(D) + matrix for matrix in matrices]


def last_state(module, ids) -> torch.Tensor:
    held = []
    handle = module.model.norm.register_forward_pre_hook(lambda _, inputs: held.append(inputs[0]))
    with torch.no_grad():
        module(input_ids=ids, use_cache=False)
    handle.remove()
    return held[0]


@pytest.mark.parametrize("weighting", ["uniform", "average", "plain"])
def test_one_repeat_is_the_model(llama, weighting) -> None:
    clean = logits(llama)
    with looped(llama, 0, 2, 1, weighting):
        assert torch.equal(logits(llama), clean)
    assert torch.equal(logits(llama), clean)


@pytest.mark.parametrize("weights", [[1.0, 1.0, 1.0], [0.5, 0.5], [0.3, 0.9, 0.2]])
@pytest.mark.parametrize(("first", "stop"), [(0, 1), (1, 3), (0, 3)])
def test_loops_of_linear_blocks_are_powers(linear, weights, first, stop) -> None:
    module, anatomy, maps = linear
    ids = torch.tensor([[5, 9, 11, 7]])
    z = module.model.embed_tokens(ids).detach()
    whole = torch.eye(D)
    for layer in range(first, stop):
        whole = maps[layer] @ whole
    expected = z
    for layer in range(first):
        expected = expected @ maps[layer].T
    for weight in weights:
        expected = expected @ ((1 - weight) * torch.eye(D) + weight * whole).T
    for layer in range(stop, 3):
        expected = expected @ maps[layer].T
    with blocks_looped(module, anatomy, first, stop, weights):
        found = last_state(module, ids)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_a_block_that_writes_nothing_may_be_left_out(tiny, word_tokenizer) -> None:
    module = tiny("llama")
    anatomy_of(module)  # found while the block still writes
    with torch.no_grad():
        module.model.layers[1].self_attn.o_proj.weight.zero_()
        module.model.layers[1].mlp.down_proj.weight.zero_()
    model = LoadedModel.from_module(module, word_tokenizer, name="idle block")
    clean = logits(model)
    with skipped(model, 1):
        torch.testing.assert_close(logits(model), clean)
    with skipped(model, 0):
        assert (logits(model) - clean).abs().max() > 1e-3


@pytest.mark.parametrize("kind", ["llama", "gpt2", "neox"])
@pytest.mark.parametrize("layer", [0, 1, 2])
def test_a_block_left_out_hands_on_what_it_is_given(loaded, kind, layer) -> None:
    model = loaded(kind)
    sites = [f"resid_pre.{layer}", "resid_post.2"] if layer == 2 else [f"resid_pre.{layer}", f"resid_pre.{layer + 1}"]
    with skipped(model, layer):
        acts = capture(model, TEXTS, sites, "all", progress=False)
    assert torch.equal(acts[sites[0]], acts[sites[1]])


@pytest.mark.parametrize("kind", ["llama", "gpt2", "gemma2"])
@pytest.mark.parametrize("how", ["loop", "loop of one", "skip", "skip first"])
def test_cached_is_uncached(loaded, kind, how) -> None:
    model = loaded(kind)
    contexts = {
        "loop": lambda: looped(model, 0, 2, 3),
        "loop of one": lambda: looped(model, 1, 2, 2, "plain"),
        "skip": lambda: skipped(model, 1),
        "skip first": lambda: skipped(model, [0, 2]),
    }
    texts = [GOOD[0], GOOD[2], "the cat"]
    with contexts[how]():
        cached = generate(model, texts, None, 6).token_ids
        plain = generate(model, texts, None, 6, use_cache=False).token_ids
    assert cached == plain
    ids = torch.tensor([[5, 9, 11, 7, 8]])
    with contexts[how](), torch.no_grad():
        whole = model.module(input_ids=ids, use_cache=False).logits
        cache = DynamicCache(config=model.module.config)
        first = model.module(input_ids=ids[:, :3], cache=cache, use_cache=True).logits
        rest = model.module(input_ids=ids[:, 3:], cache=cache, use_cache=True).logits
    torch.testing.assert_close(torch.cat([first, rest], 1), whole, rtol=1e-4, atol=1e-5)
    lengths = [layer.get_seq_length() for layer in cache.layers]
    if how.startswith("loop"):
        assert set(lengths) == {5}
        assert len(lengths) == 3 + (4 if how == "loop" else 1)
    else:
        assert set(lengths) <= {0, 5}
        assert lengths[0] == 5


def test_a_cache_filled_without_the_loop_is_refused(llama) -> None:
    ids = torch.tensor([[5, 9, 11, 7]])
    cache = DynamicCache(config=llama.module.config)
    with torch.no_grad():
        llama.module(input_ids=ids[:, :3], cache=cache, use_cache=True)
        with looped(llama, 0, 2, 2), pytest.raises(ValueError, match="filled without the loop"):
            llama.module(input_ids=ids[:, 3:], cache=cache, use_cache=True)


def test_caches_without_further_slots_are_refused(llama) -> None:
    ids = torch.tensor([[5, 9, 11]])
    cache = StaticCache(config=llama.module.config, max_cache_len=8)
    with torch.no_grad(), looped(llama, 0, 2, 2), pytest.raises(ValueError, match="StaticCache has no further slots"):
        llama.module(input_ids=ids, cache=cache, use_cache=True)


def test_what_cannot_loop_is_refused(llama) -> None:
    with pytest.raises(IndexError, match="blocks 0 to 2"), looped(llama, 1, 4, 2):
        pass
    with pytest.raises(IndexError), looped(llama, 2, 2, 2):
        pass
    with pytest.raises(IndexError), skipped(llama, 3):
        pass
    with pytest.raises(ValueError, match="repeats="):
        loop_weights(0)
    with (
        pytest.raises(ValueError, match="looped or left out already"),
        looped(llama, 0, 2, 2),
        skipped(llama, 1),
    ):
        pass
    module = tiny_family("t5")
    with (
        pytest.raises(ValueError, match="encoder and a decoder"),
        blocks_looped(module, anatomy_of(module), 0, 1, [1.0]),
    ):
        pass


def failing(i: int, state: torch.Tensor) -> None:
    raise RuntimeError(f"state {i}")


def test_blocks_are_as_before_after_an_error(llama) -> None:
    clean = logits(llama)
    with pytest.raises(RuntimeError, match="mine"), looped(llama, 0, 2, 3):
        raise RuntimeError("mine")
    with pytest.raises(RuntimeError, match="state"), looped(llama, 0, 2, 3, on_state=failing):
        logits(llama)
    assert torch.equal(logits(llama), clean)
    assert not any("forward" in vars(block) for block in llama.module.model.layers)


def test_other_threads_run_the_model_as_it_is(llama) -> None:
    clean = logits(llama)
    with looped(llama, 0, 2, 3):
        mine = logits(llama)
        found = []
        other = threading.Thread(target=lambda: found.append(logits(llama)))
        other.start()
        other.join()
    assert torch.equal(found[0], clean)
    assert (mine - clean).abs().max() > 1e-3


def test_the_report_is_of_the_states(llama) -> None:
    states: list[torch.Tensor] = []
    ids = torch.tensor([llama.tokenizer(GOOD[0])["input_ids"]])
    with looped(llama, 0, 2, 3, on_state=lambda i, z: states.append(z.detach())), torch.no_grad():
        llama.module(input_ids=ids)
    report = loop_report(llama, [GOOD[0]], 0, 2, 3)
    assert report["repeat"].tolist() == [1, 2, 3]
    for number, row in report.iterrows():
        one, other = states[number][0, 1:], states[number + 1][0, 1:]
        step = float(((other - one).norm(dim=1) / one.norm(dim=1)).mean())
        assert row["step"] == pytest.approx(step, rel=1e-4)
        assert row["residual"] == pytest.approx(3 * step, rel=1e-4)
        assert row["cosine"] == pytest.approx(float(torch.cosine_similarity(one, other, dim=1).mean()), rel=1e-4)
    assert report["forwards"].tolist() == pytest.approx([1 + 2 * 2 / 3] * 3)
    ranges = loop_ranges(llama, [GOOD[0]], 2, 3)
    assert ranges["first"].tolist() == [0, 1]
    assert ranges["kl"].iloc[0] == pytest.approx(report["kl"].iloc[0], rel=1e-5)
    assert np.isfinite(ranges.to_numpy()).all()
    with pytest.raises(ValueError, match="two tokens"):
        loop_report(llama, ["cat"], 0, 2, 2)
