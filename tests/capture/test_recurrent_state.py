"""The recurrent state as a site: what the cache holds, read and written, in a call and in `generate`."""

import pytest
import torch
from tiny_families import built
from torch import nn

from microtome.capture.anatomy import Anatomy
from microtome.capture.collect import capture
from microtome.capture.dissect import dissect
from microtome.capture.tap_plan import Read
from microtome.capture.taps import TapNeverFired, taps

IDS = torch.randint(3, 100, (2, 7), generator=torch.Generator().manual_seed(2))
GENERATE = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "eos_token_id": None, "output_logits": True}


@pytest.fixture(scope="module", params=["mamba", "mamba2", "qwen3_next", "falcon_h1"])
def recurrent(request) -> tuple[nn.Module, Anatomy, str]:
    """A model, its anatomy and the name of its first state."""
    model = built(request.param)
    anatomy = dissect(model)
    return model, anatomy, next(str(site) for site in anatomy.sites if site.kind == "state")


def cached(model: nn.Module, ids: torch.Tensor):
    """The cache after a call on some ids."""
    output = model(input_ids=ids, use_cache=True)
    return output.get("past_key_values", output.get("cache_params"))


def logits_of(model: nn.Module, edits: dict, anatomy: Anatomy) -> list[torch.Tensor]:
    """Logits of every step of `generate`."""
    with torch.no_grad(), taps(model, (), edits, anatomy=anatomy):
        made = model.generate(input_ids=IDS, return_dict_in_generate=True, **GENERATE)
    return list(made.logits)


def test_the_state_is_what_the_cache_holds(recurrent) -> None:
    model, anatomy, site = recurrent
    with torch.no_grad(), taps(model, site, anatomy=anatomy) as tape:
        cache = cached(model, IDS)
    held = cache.layers[anatomy.tap(site).point.slot].recurrent_states[0]
    assert torch.equal(tape[site], held)
    assert tape[site].data_ptr() != held.data_ptr()  # the next step rewrites the cache in place


def test_a_step_of_generate_is_a_firing(recurrent) -> None:
    model, anatomy, site = recurrent
    with torch.no_grad(), taps(model, site, anatomy=anatomy) as tape:
        model.generate(input_ids=IDS, **{k: v for k, v in GENERATE.items() if k != "output_logits"})
    states = tape.all(site)
    assert len(states) == 4
    assert not torch.equal(states[0], states[1])


def test_an_edit_acts_from_the_next_step_on_and_zeros_change_nothing(recurrent) -> None:
    model, anatomy, site = recurrent
    plain = logits_of(model, {}, anatomy)
    zeros = logits_of(model, {site: torch.zeros_like}, anatomy)
    assert all(torch.equal(a, b) for a, b in zip(plain, zeros, strict=True))
    edited = logits_of(model, {site: lambda value: value}, anatomy)
    assert torch.equal(plain[0], edited[0])
    assert not torch.allclose(plain[1], edited[1])


def test_an_edit_of_one_row_leaves_the_other(recurrent) -> None:
    model, anatomy, site = recurrent
    plain = logits_of(model, {}, anatomy)

    def first_row(value: torch.Tensor) -> torch.Tensor:
        delta = torch.zeros_like(value)
        delta[0] = value[0]
        return delta

    edited = logits_of(model, {site: first_row}, anatomy)
    assert not torch.allclose(plain[1][0], edited[1][0])
    for a, b in zip(plain, edited, strict=True):
        torch.testing.assert_close(a[1], b[1])  # not bit for bit: experts run on the tokens of both rows


def test_a_forward_without_a_cache_has_no_state(recurrent) -> None:
    model, anatomy, site = recurrent
    with (
        pytest.raises(TapNeverFired, match="without a cache; call the model with use_cache=True"),
        torch.no_grad(),
        taps(model, site, anatomy=anatomy),
    ):
        model(input_ids=IDS, use_cache=False)


def test_a_state_has_no_positions_and_no_graph(recurrent) -> None:
    model, anatomy, site = recurrent
    with pytest.raises(ValueError, match=r"state\.\d has no positions: it is what a cache holds after a call"):
        capture(model, [IDS[0].tolist()], site, "last", progress=False)
    with pytest.raises(ValueError, match="a cache holds no graph"):
        taps(model, Read(site, keep_graph=True), anatomy=anatomy).__enter__()


def test_a_state_kept_elsewhere_is_not_offered() -> None:
    with pytest.raises(KeyError, match="keeps no recurrent state of this mixer in transformers' cache"):
        dissect(built("rwkv")).tap("state.0")
