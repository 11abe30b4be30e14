import pytest
import torch
from torch import nn

from microtome.capture import LoadedModel
from microtome.capture.untrained import shuffled_weights, untrained

KINDS = ["llama", "gpt2", "neox", "gemma2", "qwen3", "bert"]


@pytest.fixture
def loaded(tiny, word_tokenizer):
    return lambda kind: LoadedModel.from_module(tiny(kind), word_tokenizer, name=kind)


def outputs(model):
    ids = torch.arange(5, 17)[None]
    with torch.no_grad():
        return model.module(input_ids=ids)[0]


@pytest.mark.parametrize("kind", KINDS)
def test_same_configuration_other_weights(loaded, kind):
    model = loaded(kind)
    before = outputs(model)
    fresh = untrained(model, seed=3)
    assert type(fresh.module) is type(model.module)
    assert fresh.module.config.to_dict() == model.module.config.to_dict()
    assert fresh.module.config is not model.module.config
    assert fresh.tokenizer is model.tokenizer
    assert not fresh.module.training
    assert fresh.provenance.name == f"{kind} (untrained, seed 3)"
    assert fresh.provenance.untrained == ("all parameters (untrained, seed 3)",)
    assert fresh.provenance.weight_sha256 != model.provenance.weight_sha256
    shapes = {name: tensor.shape for name, tensor in model.module.named_parameters()}
    assert {name: tensor.shape for name, tensor in fresh.module.named_parameters()} == shapes
    assert (outputs(fresh) - before).abs().max() > 1e-3
    assert torch.equal(outputs(model), before)


@pytest.mark.parametrize("kind", ["llama", "bert"])
def test_the_seed_decides_and_the_global_generator_is_left_alone(loaded, kind):
    model = loaded(kind)
    state = torch.random.get_rng_state()
    first, again, other = (untrained(model, seed=seed) for seed in (0, 0, 1))
    assert torch.equal(torch.random.get_rng_state(), state)
    assert first.provenance.weight_sha256 == again.provenance.weight_sha256 != other.provenance.weight_sha256
    mixed = [shuffled_weights(model, seed=seed).provenance.weight_sha256 for seed in (0, 0, 1)]
    assert torch.equal(torch.random.get_rng_state(), state)
    assert mixed[0] == mixed[1] != mixed[2]


def test_weights_are_those_of_transformers_initialisation(loaded):
    fresh = untrained(loaded("llama"))
    config = fresh.module.config
    for name, tensor in fresh.module.named_parameters():
        if "norm" in name:
            assert (tensor == 1).all()
        elif "layers" in name:
            assert tensor.std().item() == pytest.approx(config.initializer_range, rel=0.15)


@pytest.mark.parametrize("kind", KINDS)
def test_shuffled_tensors_hold_the_same_values_elsewhere(loaded, kind):
    model = loaded(kind)
    mixed = shuffled_weights(model, seed=1)
    moved = 0
    for (name, old), new in zip(model.module.named_parameters(), mixed.module.parameters(), strict=True):
        assert torch.equal(old.flatten().sort().values, new.flatten().sort().values), name
        moved += int(not torch.equal(old, new))
    assert moved > 10
    for old, new in zip(model.module.buffers(), mixed.module.buffers(), strict=True):
        assert torch.equal(old, new)
    assert mixed.provenance.name == f"{kind} (weights shuffled within each tensor, seed 1)"
    assert mixed.provenance.quantisation == "weights shuffled within each tensor, seed 1"
    assert (outputs(mixed) - outputs(model)).abs().max() > 1e-3


def test_norms_are_kept_if_asked_for(loaded):
    model = loaded("gpt2")
    fresh = untrained(model, keep_norms=True)
    assert fresh.provenance.name == "gpt2 (untrained, seed 0, norms kept)"
    kept = 0
    for old, new in zip(model.module.parameters(), fresh.module.parameters(), strict=True):
        if new.any():
            torch.testing.assert_close(new.norm(), old.norm(), rtol=1e-5, atol=0)
            assert not torch.equal(new, old)
            kept += 1
    assert kept > 10


def test_tied_weights_stay_tied(loaded):
    model = loaded("gpt2")
    for made in (untrained(model), shuffled_weights(model)):
        module = made.module
        assert module.lm_head.weight is module.transformer.wte.weight


def test_dtype_is_kept(tiny):
    model = LoadedModel.from_module(tiny("llama").to(torch.bfloat16), name="half")
    for made in (untrained(model), shuffled_weights(model), untrained(model, keep_norms=True)):
        assert made.provenance.dtype == "bfloat16"
        assert made.tokenizer is None
        assert made.no_tokenizer == model.no_tokenizer


def test_what_cannot_be_drawn_afresh_is_refused(loaded):
    plain = LoadedModel.from_module(nn.Linear(3, 3).eval(), name="plain")
    for make in (untrained, shuffled_weights):
        with pytest.raises(ValueError, match="Linear is no transformers model"):
            make(plain)
    model = loaded("llama")
    model.module.config.quantization_config = {"quant_method": "none"}
    with pytest.raises(ValueError, match="'llama' has quantised weights"):
        untrained(model)


@pytest.mark.slow
def test_smollm2_without_its_training_predicts_no_text(smollm2):
    text = "The capital of France is Paris. The capital of Italy is Rome."
    ids = smollm2.tokenizer(text, return_tensors="pt").input_ids
    losses = []
    for model in (smollm2, untrained(smollm2), shuffled_weights(smollm2)):
        with torch.no_grad():
            losses.append(model.module(input_ids=ids, labels=ids).loss.item())
    assert losses[0] < 3 < 9 < min(losses[1:])
