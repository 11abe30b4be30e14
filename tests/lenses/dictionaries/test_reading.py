"""Each published layout written by hand, read, and compared with the package's own order of operations, spelled out."""

import json

import pytest
import torch
from safetensors.torch import save_file

from microtome.lenses.dictionaries.reading import load_dictionary

D, F, K = 6, 10, 3
HOOK = "blocks.2.hook_resid_post"


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + 10 * len(shape) + sum(shape)))


@pytest.fixture
def x():
    return 2 * random(7, D, seed=5) + 1


def folder(path, tensors, config, weights="sae_weights.safetensors", name="cfg.json"):
    path.mkdir(parents=True, exist_ok=True)
    save_file({key: value.contiguous() for key, value in tensors.items()}, path / weights)
    if config is not None:
        (path / name).write_text(json.dumps(config))
    return path


def lens_tensors(threshold=False):
    held = {"W_enc": random(D, F), "b_enc": random(F), "W_dec": random(F, D, seed=1), "b_dec": random(D)}
    return held | ({"threshold": random(F, seed=3)} if threshold else {})


def lens_config(architecture, **changed):
    metadata = {"sae_lens_version": "6.12.0", "model_name": "gpt2-small", "hook_name": HOOK, "hook_head_index": None}
    base = {"architecture": architecture, "d_in": D, "d_sae": F, "dtype": "float32", "device": "cuda"}
    base |= {"apply_b_dec_to_input": True, "normalize_activations": "none", "metadata": metadata}
    return base | changed


def top(values, k):
    places = values.sort(dim=-1, descending=True).indices[..., :k]
    return torch.zeros_like(values).index_put((torch.arange(len(values))[:, None], places), values.gather(-1, places))


@pytest.mark.parametrize("centred", [True, False])
def test_sae_lens_standard(centred, x, tmp_path):
    t = lens_tensors()
    it = load_dictionary(folder(tmp_path, t, lens_config("standard", apply_b_dec_to_input=centred)))
    z = torch.relu((x - t["b_dec"] * centred) @ t["W_enc"] + t["b_enc"])
    torch.testing.assert_close(it.encode(x), z)
    torch.testing.assert_close(it(x), z @ t["W_dec"] + t["b_dec"])
    assert (it.site, it.model, it.kind) == ("resid_post.2", "gpt2-small", "relu")
    assert it.facts["layout"] == "sae_lens"


@pytest.mark.parametrize("rescaled", [True, False])
def test_sae_lens_topk(rescaled, x, tmp_path):
    t = lens_tensors()
    it = load_dictionary(folder(tmp_path, t, lens_config("topk", k=K, rescale_acts_by_decoder_norm=rescaled)))
    norms = t["W_dec"].norm(dim=-1) if rescaled else torch.ones(F)
    z = torch.relu(top(((x - t["b_dec"]) @ t["W_enc"] + t["b_enc"]) * norms, K))
    torch.testing.assert_close(it.encode(x), z)
    torch.testing.assert_close(it(x), (z / norms) @ t["W_dec"] + t["b_dec"])


def test_sae_lens_jumprelu(x, tmp_path):
    t = lens_tensors(threshold=True)
    config = lens_config("jumprelu", apply_b_dec_to_input=False)
    it = load_dictionary(folder(tmp_path / "one", t, config))
    pre = x @ t["W_enc"] + t["b_enc"]
    z = torch.relu(pre) * (pre > t["threshold"].relu())
    assert (t["threshold"] < 0).any()
    torch.testing.assert_close(it.encode(x), z)
    torch.testing.assert_close(it(x), z @ t["W_dec"] + t["b_dec"])
    t["log_threshold"] = t.pop("threshold")
    logged = load_dictionary(folder(tmp_path / "two", t, config))
    torch.testing.assert_close(logged.threshold, t["log_threshold"].exp())


def test_a_pre_activation_at_its_threshold_is_off(tmp_path):
    t = {"W_enc": torch.eye(D, F), "b_enc": torch.zeros(F), "W_dec": torch.eye(F, D), "b_dec": torch.zeros(D)}
    it = load_dictionary(folder(tmp_path, t | {"threshold": torch.ones(F)}, lens_config("jumprelu")))
    assert it.encode(torch.tensor([[1.0, 1.5, 0.5, -2.0, 0, 0]]))[0, :4].tolist() == [0, 1.5, 0, 0]


def test_sae_lens_batchtopk_in_training(x, tmp_path):
    t = lens_tensors()
    config = lens_config("batchtopk", k=2.5, rescale_acts_by_decoder_norm=True)
    it = load_dictionary(folder(tmp_path, t | {"topk_threshold": torch.tensor(0.6).double()}, config))
    norms = t["W_dec"].norm(dim=-1)
    pre = ((x - t["b_dec"]) @ t["W_enc"] + t["b_enc"]) * norms
    z = torch.relu(pre) * (pre > 0.6)
    torch.testing.assert_close(it.encode(x), z)
    torch.testing.assert_close(it(x), (z / norms) @ t["W_dec"] + t["b_dec"])


@pytest.mark.parametrize("spelling", ["hook_point", "hook_name"])
def test_sae_lens_before_6(spelling, x, tmp_path):
    t = lens_tensors()
    config = {spelling: HOOK, "model_name": "gpt2-small", "d_in": D, "d_sae": F, "activation_fn_str": "topk"}
    config |= {"activation_fn_kwargs": {"k": K}, "normalize_activations": False, "lr": 4e-4, "l1_coefficient": 1}
    it = load_dictionary(folder(tmp_path, t | {"scaling_factor": torch.ones(F)}, config))
    torch.testing.assert_close(it.encode(x), torch.relu(top((x - t["b_dec"]) @ t["W_enc"] + t["b_enc"], K)))
    assert it.site == "resid_post.2"
    with pytest.raises(ValueError, match="finetuning scaling factor is not 1"):
        load_dictionary(folder(tmp_path, t | {"scaling_factor": torch.full((F,), 1.1)}, config))


def test_sae_lens_of_one_head(tmp_path):
    config = {"hook_point": "blocks.5.attn.hook_z", "hook_point_head_index": 3}
    assert load_dictionary(folder(tmp_path, lens_tensors(), config)).site == "z.5.3"


def test_sae_lens_normalisations(x, tmp_path):
    t = lens_tensors()

    def rebuilt(u):
        return torch.relu((u - t["b_dec"]) @ t["W_enc"] + t["b_enc"]) @ t["W_dec"] + t["b_dec"]

    layer = load_dictionary(folder(tmp_path / "l", t, lens_config("standard", normalize_activations="layer_norm")))
    mean = x.mean(-1, keepdim=True)
    std = ((x - mean).square().sum(-1, keepdim=True) / (D - 1)).sqrt()
    torch.testing.assert_close(layer(x), rebuilt((x - mean) / (std + 1e-5)) * std + mean)
    path = folder(tmp_path / "c", t, lens_config("standard", normalize_activations="constant_norm_rescale"))
    factor = D**0.5 / x.norm(dim=-1, keepdim=True)
    torch.testing.assert_close(load_dictionary(path)(x), rebuilt(x * factor) / factor)
    path = folder(tmp_path / "s", t, lens_config("standard", normalize_activations="expected_average_only_in"))
    with pytest.raises(ValueError, match="its factor is in no file"):
        load_dictionary(path)
    folded = {"W_enc": t["W_enc"] * 0.3, "W_dec": t["W_dec"] / 0.3, "b_dec": t["b_dec"] / 0.3}
    other = load_dictionary(folder(tmp_path / "f", t | folded, lens_config("standard")))
    torch.testing.assert_close(load_dictionary(path, scale=0.3)(x), other(x))
    with pytest.raises(ValueError, match="whose input is not scaled"):
        load_dictionary(tmp_path / "f", scale=0.3)


def sparsify_tensors():
    return {
        "encoder.weight": random(F, D),
        "encoder.bias": random(F),
        "W_dec": random(F, D, seed=1),
        "b_dec": random(D),
    }


def test_sparsify(x, tmp_path):
    t, config = sparsify_tensors(), {"d_in": D, "k": K, "num_latents": F, "activation": "topk", "multi_topk": False}
    it = load_dictionary(folder(tmp_path / "layers.7", t, config, "sae.safetensors"))
    z = top(torch.relu(torch.nn.functional.linear(x - t["b_dec"], t["encoder.weight"], t["encoder.bias"])), K)
    torch.testing.assert_close(it.encode(x), z)
    torch.testing.assert_close(it(x), z @ t["W_dec"] + t["b_dec"])
    assert it.site == "resid_post.7"
    folder(tmp_path / "layers.8", t, config, "sae.safetensors")
    assert load_dictionary(tmp_path, "resid_post.8").site == "resid_post.8"
    with pytest.raises(FileNotFoundError, match=r"It has layers\.7, layers\.8"):
        load_dictionary(tmp_path)
    folder(tmp_path / "layers.7.mlp", t, config, "sae.safetensors")
    with pytest.raises(ValueError, match="no file says which site"):
        load_dictionary(tmp_path / "layers.7.mlp")
    assert load_dictionary(tmp_path / "layers.7.mlp", "mlp_out.7").site == "mlp_out.7"


@pytest.mark.parametrize("name", ["transcode", "skip_connection", "signed"])
def test_sparsify_of_another_kind(name, tmp_path):
    path = folder(tmp_path / "layers.7", sparsify_tensors(), {"k": K, name: True}, "sae.safetensors")
    with pytest.raises(ValueError, match=f"{name} is on"):
        load_dictionary(path)


def learned(**more):
    held = {"encoder.weight": random(F, D), "encoder.bias": random(F), "decoder.weight": random(D, F, seed=1)}
    return held | more


def learned_config(name, **more):
    trainer = {"dict_class": name, "layer": 4, "lm_name": "EleutherAI/pythia-70m", **more}
    return {"trainer": {**trainer, "submodule_name": "resid_post_layer_4"}, "buffer": {"d_submodule": D}}


@pytest.mark.parametrize("ending", ["pt", "safetensors"])
@pytest.mark.parametrize("name", ["AutoEncoder", "AutoEncoderNew", "AutoEncoderTopK", "BatchTopKSAE"])
def test_dictionary_learning(name, ending, x, tmp_path):
    b = random(D)
    t = learned(**{{"AutoEncoder": "bias", "AutoEncoderNew": "decoder.bias"}.get(name, "b_dec"): b})
    if name in ("AutoEncoderTopK", "BatchTopKSAE"):
        t |= {"k": torch.tensor(K, dtype=torch.int32), "threshold": torch.tensor(0.8)}
    path = folder(tmp_path, t, learned_config(name), "ae.safetensors", "config.json")
    if ending == "pt":
        (path / "ae.safetensors").unlink()
        torch.save(t, path / "ae.pt")
    it = load_dictionary(path)
    u = x if name == "AutoEncoderNew" else x - b
    z = torch.relu(torch.nn.functional.linear(u, t["encoder.weight"], t["encoder.bias"]))
    z = {"AutoEncoderTopK": top(z, K), "BatchTopKSAE": z * (z > 0.8)}.get(name, z)
    torch.testing.assert_close(it.encode(x), z)
    torch.testing.assert_close(it(x), torch.nn.functional.linear(z, t["decoder.weight"]) + b)
    assert (it.site, it.model) == ("resid_post.4", "EleutherAI/pythia-70m")


def test_dictionary_learning_jumprelu(x, tmp_path):
    t = lens_tensors(threshold=True)
    it = load_dictionary(folder(tmp_path, t, learned_config("JumpReluAutoEncoder"), "ae.safetensors", "config.json"))
    norms = t["W_dec"].norm(dim=1)
    pre = x @ t["W_enc"] + t["b_enc"]
    z = torch.relu(pre * (pre > t["threshold"])) * norms
    torch.testing.assert_close(it.encode(x), z)
    torch.testing.assert_close(it(x), (z / norms) @ t["W_dec"] + t["b_dec"])


def test_dictionary_learning_that_says_too_little(tmp_path):
    t = learned(b_dec=random(D), k=torch.tensor(K), threshold=torch.tensor(-1.0))
    with pytest.raises(ValueError, match="have the same tensors"):
        load_dictionary(folder(tmp_path, t, None, "ae.safetensors"), "resid_post.1")
    path = folder(tmp_path, t, learned_config("BatchTopKSAE"), "ae.safetensors", "config.json")
    with pytest.raises(ValueError, match="never set"):
        load_dictionary(path)
    folder(tmp_path, t, learned_config("MatryoshkaBatchTopKSAE"), "ae.safetensors", "config.json")
    with pytest.raises(ValueError, match="dict_class is 'Matryoshka"):
        load_dictionary(path)


@pytest.mark.parametrize(
    ("tensors", "config", "said"),
    [
        ({"b_gate": torch.zeros(F)}, {}, "a gated sparse autoencoder"),
        ({}, {"architecture": "gated"}, "architecture is 'gated'; read are standard"),
        ({}, {"architecture": "temporal"}, "architecture is 'temporal'"),
        ({"W_skip": torch.zeros(D, D)}, {}, "tensors W_skip are not known"),
        ({"W_dec": None}, {}, "no tensor W_dec"),
        ({"b_enc": torch.zeros(D)}, {}, r"goes with a encoder_bias \(10,\), got \(6,\)"),
        ({"W_dec": torch.full((F, D), torch.nan)}, {}, "tensor W_dec holds NaN"),
        ({}, {"architecture": "jumprelu"}, "has no tensor threshold"),
        ({}, {"architecture": "topk"}, "needs a k"),
        ({}, {"d_in": 7}, "config says d_in 7, the tensors 6"),
        ({}, {"normalize_activations": "batch"}, "normalize_activations is 'batch'"),
        ({}, {"activation_fn": "tanh-relu"}, "activation function of a standard is 'tanh-relu'"),
        ({}, {"hook_name": "blocks.2.ln2.hook_normalized"}, "no counterpart"),
        ({}, {"hook_name_out": "blocks.2.hook_mlp_out"}, "a transcoder is not read"),
        ({}, {"metadata": [1]}, r"metadata of cfg.json is list \(\[1\]\), expected an object"),
        ({}, {"trainer": "top_k"}, "trainer of cfg.json is str"),
        ({}, {"trainer": {"k": [3]}}, "k of cfg.json is list"),
        ({}, {"hook_name": [HOOK]}, "hook_name of cfg.json is list .*, expected a name"),
        ({}, {"architecture": {"name": "topk"}}, "architecture of cfg.json is dict"),
        ({}, {"architecture": "topk", "k": 2.5}, "k is 2.5; expected a whole number"),
        ({}, {"architecture": "topk", "k": float("inf")}, "k is inf; expected a whole number"),
        ({}, {"architecture": "topk", "activation_fn_kwargs": {"k": "3"}}, "k of cfg.json is str"),
        ({}, {"metadata": {"d_in": [D]}}, "d_in of cfg.json is list"),
        ({"W_dec": torch.zeros(D)}, {"architecture": "topk", "k": 3, "rescale_acts_by_decoder_norm": True}, "got .6,."),
        ({name: torch.zeros(0) for name in ("b_enc",)} | {"W_enc": torch.zeros(D, 0)}, {}, "there is no feature"),
    ],
)
def test_what_cannot_be_read_is_refused(tensors, config, said, tmp_path):
    held = {name: tensor for name, tensor in (lens_tensors() | tensors).items() if tensor is not None}
    path = folder(tmp_path, held, {"hook_name": HOOK} | config)
    with pytest.raises(ValueError, match=said):
        load_dictionary(path)


@pytest.mark.parametrize("held", [[torch.zeros(2)], torch.zeros(2), {1: torch.zeros(2)}, {"a": {"b": torch.zeros(2)}}])
def test_a_file_of_other_things_is_refused(held, tmp_path):
    torch.save(held, tmp_path / "ae.pt")
    with pytest.raises(ValueError, match=r"not .*tensor"):
        load_dictionary(tmp_path, "resid_post.2")


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"encoder.weight": torch.zeros(F)}, r"encoder.weight is \(10,\); expected a matrix"),
        ({"decoder.weight": torch.zeros(1, D, F)}, r"decoder.weight is \(1, 6, 10\)"),
    ],
)
def test_a_weight_that_is_no_matrix_is_refused(changed, said, tmp_path):
    held = {
        "encoder.weight": random(F, D),
        "encoder.bias": random(F),
        "decoder.weight": random(D, F),
        "bias": random(D),
    }
    path = folder(tmp_path, held | changed, {"trainer": {"dict_class": "AutoEncoder"}}, "ae.safetensors", "config.json")
    with pytest.raises(ValueError, match=said):
        load_dictionary(path, "resid_post.2")


def test_a_threshold_of_another_number_of_features_is_refused(tmp_path):
    held = lens_tensors() | {"threshold": torch.ones(F + 2)}
    path = folder(tmp_path, held, {"trainer": {"dict_class": "JumpReluAutoEncoder"}}, "ae.safetensors", "config.json")
    with pytest.raises(ValueError, match=r"the threshold is \(12,\)"):
        load_dictionary(path, "resid_post.2")


def test_sites_and_files_that_do_not_fit(tmp_path):
    path = folder(tmp_path, lens_tensors(), lens_config("standard"))
    load_dictionary(path / "sae_weights.safetensors", "blocks.2.hook_resid_post")
    with pytest.raises(ValueError, match=r"is asked for at resid_post\.9"):
        load_dictionary(path, "resid_post.9")
    (path / "cfg.json").write_text("{")
    with pytest.raises(ValueError, match=r"cfg\.json is damaged"):
        load_dictionary(path)
    (path / "cfg.json").unlink()
    (path / "sae_weights.safetensors").write_bytes(b"nothing")
    with pytest.raises(ValueError, match="it is damaged"):
        load_dictionary(path, "resid_post.2")
    save_file({"weight": torch.zeros(2)}, path / "sae_weights.safetensors")
    with pytest.raises(ValueError, match="of no known layout"):
        load_dictionary(path)
    with pytest.raises(FileNotFoundError, match=r"there is no dictionary\.safetensors"):
        load_dictionary(tmp_path / "nowhere")
