"""Taps in a dozen kinds of models: in `generate` with a cache, in threads, after exceptions, and out again."""

import threading

import pytest
import torch
from tiny_families import built

from microtome.capture.dissect import dissect
from microtome.capture.hooks import detach
from microtome.capture.padding import call_options
from microtome.capture.taps import taps

KINDS = [
    *("llama", "gpt2", "gpt_neox", "gemma2", "opt", "falcon old", "bloom", "mpt", "phi3", "mixtral", "cohere"),
    *("granite multipliers", "qwen3_next", "mamba", "jamba"),
]
IDS = torch.randint(3, 100, (2, 6), generator=torch.Generator().manual_seed(1))


@pytest.fixture(params=KINDS)
def family(request):
    model = built(request.param)
    assert not isinstance(model, str), model
    return model, dissect(model)


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=IDS, **call_options(model)).logits


def added(anatomy) -> str:
    """A site that every one of them offers and that changes the output."""
    return next(
        f"{kind}.1"
        for kind in ("mlp_out", "attn_out", "mixer_out")
        if any(str(s) == f"{kind}.1" for s in anatomy.sites)
    )


def test_an_edit_in_generate_reaches_every_row_and_every_step(family) -> None:
    model, anatomy = family
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "eos_token_id": None, "output_logits": True}
    options |= {"return_dict_in_generate": True, "attention_mask": torch.ones_like(IDS)}
    delta = torch.randn(32, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        bare = model.generate(IDS, **options)
        with taps(model, ["resid_post.1"], {added(anatomy): lambda value: delta}, anatomy=anatomy) as tape:
            edited = model.generate(IDS, **options)
        again = model.generate(IDS, **options)
    steps = tape.all("resid_post.1")
    assert [len(step) for step in steps] == [2] * 4
    assert steps[0].shape[1] == 6
    for before, after in zip(bare.logits[:1], edited.logits[:1], strict=True):
        assert (before != after).any(-1).all()  # every row
    assert torch.equal(bare.sequences, again.sequences)
    assert all(torch.equal(a, b) for a, b in zip(bare.logits, again.logits, strict=True))


def test_clean_and_edited_forwards_side_by_side(family) -> None:
    model, anatomy = family
    bare = logits(model)
    with taps(model, [], {added(anatomy): torch.ones_like}, anatomy=anatomy):
        expected = logits(model)
    assert not torch.equal(bare, expected)
    wrong = []

    def run(is_edited: bool) -> None:
        for _ in range(8):
            if is_edited:
                with taps(model, [], {added(anatomy): torch.ones_like}, anatomy=anatomy):
                    found = logits(model)
            else:
                found = logits(model)
            wrong.append(not torch.equal(found, expected if is_edited else bare))

    threads = [threading.Thread(target=run, args=(number % 2 == 0,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == [False] * 48


def test_after_an_exception_and_after_detach_the_model_is_as_it_was(family) -> None:
    model, anatomy = family
    bare = logits(model)

    def fail(value):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), taps(model, [], {added(anatomy): fail}, anatomy=anatomy):
        logits(model)
    assert torch.equal(logits(model), bare)
    detach(model)
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in model.modules())
    assert torch.equal(logits(model), bare)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2", "mixtral"])
def test_half_precision_is_proved_and_padded(name, dtype) -> None:
    anatomy = dissect(built(name).to(dtype))
    assert all(identity.holds for identity in anatomy.proof)
    assert anatomy.is_whole
    assert anatomy.padding is not None
    if name == "gpt2":
        assert anatomy.padding_errors["left side, position ids none"] > 0.05
