import json

import pandas as pd
import pytest
import torch
from microtome.lenses.lens import logit_lens_of
from microtome.lenses.lens_statistics import lens_statistics
from microtome.lenses.tuned_lens import TunedLens, weights_of, zero_tuned_lens

DECODERS = ["llama", "gpt2", "neox", "neox_sequential", "gemma2", "qwen3"]
TEXTS = [[5, 6, 7, 8, 9, 10, 11], [20, 21, 22, 23]]


def some_lens(model) -> TunedLens:
    generator = torch.Generator().manual_seed(0)
    zero = zero_tuned_lens(model)
    weight = torch.randn(zero.weight.shape, generator=generator) * 0.1
    bias = torch.randn(zero.bias.shape, generator=generator)
    history = pd.DataFrame({"step": [0], "site": ["resid_pre.0"], "kl": [1.5], "logit_kl": [2.0], "start_kl": [1.5]})
    return TunedLens(zero.sites, weight, bias, history, zero.facts)


@pytest.mark.parametrize("kind", DECODERS)
def test_zero_translators_are_the_logit_lens_bit_for_bit(kind, tiny):
    model = tiny(kind)
    found = lens_statistics(model, TEXTS, [logit_lens_of(model), zero_tuned_lens(model).lens(model)])
    for name in ("kl", "entropy", "top_probs", "cross_entropy"):
        one, two = (getattr(found[lens], name) for lens in ("logit", "tuned"))
        assert one.tobytes() == two.tobytes()


def test_a_translator_is_r_plus_r_a_plus_b(tiny):
    lens = some_lens(tiny("llama"))
    x = torch.randn(4, 32)
    expected = x + x @ lens.weight[1] + lens.bias[1]
    torch.testing.assert_close(lens.translate("resid_post.0", x), expected)
    torch.testing.assert_close(lens.maps()["resid_post.0"](x), expected, rtol=1e-4, atol=1e-5)
    with pytest.raises(KeyError, match=r"resid_post\.2 has no translator"):
        lens.translate("resid_post.2", x)


def test_a_lens_is_read_by_its_translators_only_where_it_has_them(tiny):
    model = tiny("gpt2")
    whole = some_lens(model)
    part = TunedLens(whole.sites[1:2], whole.weight[1:2], whole.bias[1:2], facts=whole.facts)
    found = lens_statistics(model, TEXTS, [whole.lens(model, name="whole"), part.lens(model, name="part")])
    assert found["part"].sites == ("resid_post.0", "resid_post.2")
    assert abs(found["part"].kl[0] - found["whole"].kl[1]).max() < 1e-6
    assert found["part"].kl[1].max() < 1e-6


def test_a_saved_lens_comes_back_and_damage_is_seen(tiny, tmp_path):
    lens = some_lens(tiny("llama"))
    lens.save(tmp_path)
    same = TunedLens.load(tmp_path)
    assert torch.equal(same.weight, lens.weight)
    assert torch.equal(same.bias, lens.bias)
    assert (same.sites, same.facts) == (lens.sites, lens.facts)
    pd.testing.assert_frame_equal(same.history, lens.history)
    content = bytearray((tmp_path / "translators.safetensors").read_bytes())
    content[-1] ^= 1
    (tmp_path / "translators.safetensors").write_bytes(content)
    with pytest.raises(ValueError, match="damaged"):
        TunedLens.load(tmp_path)
    with pytest.raises(FileNotFoundError, match="TunedLens.save"):
        TunedLens.load(tmp_path / "nowhere")


def test_another_model_is_refused(tiny):
    model = tiny("llama")
    lens = some_lens(model)
    with pytest.raises(ValueError, match="made for weights"):
        lens.lens(tiny("llama", seed=1))
    lens.lens(tiny("llama", seed=1), any_weights=True)
    small = TunedLens(lens.sites, lens.weight[:, :16, :16], lens.bias[:, :16], facts=lens.facts)
    with pytest.raises(ValueError, match="d_model 16"):
        small.lens(model)
    strange = TunedLens(("resid_post.7",), lens.weight[:1], lens.bias[:1], facts=lens.facts)
    with pytest.raises(ValueError, match=r"resid_post\.7"):
        strange.lens(model)
    with pytest.raises(ValueError, match="differ"):
        TunedLens(("resid_post.0",), lens.weight, lens.bias)


def test_a_published_artefact_is_the_module_list_it_was_saved_from(tiny, tmp_path):
    translators = torch.nn.ModuleList([torch.nn.Linear(32, 32) for _ in range(3)])
    config = {"base_model_name_or_path": "owner/name", "d_model": 32, "num_hidden_layers": 3, "bias": True}
    config |= {"base_model_revision": None, "unembed_hash": "x", "lens_type": "linear_tuned_lens"}
    torch.save(translators.state_dict(), tmp_path / "params.pt")
    (tmp_path / "config.json").write_text(json.dumps(config))
    lens = TunedLens.read_published(tmp_path)
    x = torch.randn(5, 32)
    for number, site in enumerate(("resid_pre.0", "resid_post.0", "resid_post.1")):
        torch.testing.assert_close(lens.translate(site, x), x + translators[number](x), rtol=1e-4, atol=1e-5)
    model = tiny("llama")
    with pytest.raises(ValueError, match="any_weights"):
        lens.lens(model)
    assert len(lens.lens(model, any_weights=True).sites) == 4
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 2}))
    with pytest.raises(ValueError, match="does not fit"):
        TunedLens.read_published(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config | {"lens_type": "other"}))
    with pytest.raises(ValueError, match="'other'"):
        TunedLens.read_published(tmp_path)
    with pytest.raises(FileNotFoundError, match="params.pt|config.json"):
        TunedLens.read_published(tmp_path / "no")


def test_the_hash_is_that_of_the_weights(tiny):
    assert weights_of(tiny("llama")) == weights_of(tiny("llama")) != weights_of(tiny("llama", seed=1))
