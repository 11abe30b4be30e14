import copy

import numpy as np
import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from microtome.capture.dissect import dissect
from microtome.capture.models import LoadedModel
from microtome.capture.tap_plan import Read
from microtome.capture.taps import taps
from microtome.lenses.attribution import logit_attribution
from microtome.lenses.stream_terms import back_steps

KINDS = ["llama", "gpt2", "neox", "neox_sequential", "gemma2", "qwen3"]
TEXTS = [[5, 9, 30, 7, 11, 60, 2], [8, 3, 90], [40, 41, 42, 43, 44]]


@pytest.fixture(scope="module")
def models(tiny) -> dict[str, nn.Module]:
    return {kind: tiny(kind) for kind in KINDS}


def logits_of(model, ids) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=torch.tensor([ids])).logits[0].double()


@pytest.mark.parametrize("by", ["neuron", "token"])
@pytest.mark.parametrize("kind", KINDS)
def test_parts_sum_to_the_logit_and_to_a_difference(models, kind, by):
    model = models[kind]
    positions = [[2, -1], [1], [0, 4, 3]]
    one = logit_attribution(model, TEXTS, positions, target=17, by=by)
    two = logit_attribution(model, TEXTS, positions, target=17, against=[4, 5, 6], by=by, largest_neurons=7)
    places = [(t, p % len(TEXTS[t])) for t, row in enumerate(positions) for p in row]
    assert list(zip(one.logits["text"], one.logits["position"], strict=True)) == places
    cap = 30.0 if kind == "gemma2" else None
    for found in (one, two):
        sums = found.table.groupby("row")["value"].sum()
        for row, (text, position) in enumerate(places):
            logits = logits_of(model, TEXTS[text])[position]
            before = logits if cap is None else cap * torch.atanh(logits / cap)
            true = before[17] - (0 if found is one else before[[4, 5, 6][text]])
            assert sums[row] == pytest.approx(float(true), abs=1e-4 * max(1.0, float(before.abs().max())))
            assert found.logits["logit"][row] == pytest.approx(float(true), abs=1e-3)
            assert found.logits["model_logit"][row] == pytest.approx(
                float(logits[17] - (0 if found is one else logits[[4, 5, 6][text]])), abs=1e-4
            )
    np.testing.assert_allclose(one.table["residual"], one.logits["residual"].to_numpy()[one.table["row"]])
    assert one.logits["residual"].abs().max() < 1e-4
    assert one.logits["cap"].isna().all() == (cap is None)


@pytest.mark.parametrize("kind", KINDS)
def test_a_heads_part_is_its_write_through_the_frozen_norms(models, kind):
    """Against an independent computation: gradients of the logit with all norms' scales held."""
    model, ids = models[kind], TEXTS[0]
    found = logit_attribution(model, [ids], 4, target=17)
    with torch.no_grad(), taps(model, ["head_out.1", "attn_out.1", "resid_post.2"]) as tape:
        model(input_ids=torch.tensor([ids]))
    writes, stream = tape["head_out", 1][0, 4].double(), tape["resid_post", 2][0, 4].double()
    if kind == "gemma2":
        post = model.model.layers[1].post_attention_layernorm
        whole = writes.sum(0)
        writes = writes * (1 + post.weight.double()) / (whole.square().mean() + post.eps).sqrt()
        torch.testing.assert_close(writes.sum(0), tape["attn_out", 1][0, 4].double(), rtol=1e-4, atol=1e-5)
    norm = model.get_submodule(dissect(model).final_norm)
    centre = isinstance(norm, nn.LayerNorm)
    centred, parts = (x - x.mean(-1, keepdim=True) if centre else x for x in (stream, writes))
    eps = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
    gain = norm.weight.double() + (kind == "gemma2")
    direction = model.get_output_embeddings().weight[17].double()
    expected = (parts * gain / (centred.square().mean() + eps).sqrt()) @ direction
    heads = found.heads().query("layer == 1")["value"].to_numpy()
    np.testing.assert_allclose(heads, expected.detach().numpy(), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("kind", ["llama", "gemma2", "neox"])
def test_finer_parts_sum_to_coarser_ones(models, kind):
    model = models[kind]
    made = {by: logit_attribution(model, TEXTS, target=17, by=by) for by in ("layer", "head", "neuron", "token")}

    def of_layers(by: str) -> dict:
        table = made[by].table
        role = table["component"].str.replace(" bias", "").replace({"neuron": "mlp", "other neurons": "mlp"})
        keep = role.isin(["attention", "mlp"]) & table["layer"].notna()
        return table[keep].groupby([table["row"], role, "layer"])["value"].sum().to_dict()

    coarse = of_layers("layer")
    for by in ("head", "neuron", "token"):
        fine = of_layers(by)
        assert fine.keys() == coarse.keys()
        assert fine == pytest.approx(coarse, abs=1e-5)
    np.testing.assert_allclose(made["token"].heads()["value"], made["head"].heads()["value"], atol=1e-5)
    assert made["token"].by_source()["value"].sum() == pytest.approx(made["head"].heads()["value"].sum(), abs=1e-4)
    assert made["neuron"].by_layer()["value"].sum() == pytest.approx(made["layer"].table["value"].sum(), abs=1e-4)


def test_a_neurons_part_is_its_coefficient_times_its_value(models):
    model = models["llama"]
    found = logit_attribution(model, TEXTS[:1], target=17, by="neuron", largest_neurons=144)
    table = found.table[found.table["component"] == "neuron"].set_index(["layer", "neuron"])["value"]
    assert len(table) == 144
    with torch.no_grad(), taps(model, ["mlp_act.1", "resid_post.2"]) as tape:
        model(input_ids=torch.tensor(TEXTS[:1]))
    norm = model.model.norm
    scale = (tape["resid_post", 2][0, -1].square().mean() + norm.variance_epsilon).sqrt()
    values = model.model.layers[1].mlp.down_proj.weight.T * norm.weight / scale @ model.lm_head.weight[17]
    expected = (tape["mlp_act", 1][0, -1] * values).detach()
    np.testing.assert_allclose([table[1, n] for n in range(48)], expected, rtol=1e-3, atol=1e-5)
    assert found.table.query("component == 'other neurons'")["value"].abs().max() < 1e-12
    few = logit_attribution(model, TEXTS[:1], target=17, by="neuron", largest_neurons=5).table
    few = few[few["component"] == "neuron"]
    assert len(few) == 5
    assert few["value"].abs().min() == pytest.approx(table.abs().nlargest(5).min())


@pytest.mark.parametrize("by", ["head", "token"])
@pytest.mark.parametrize("kind", ["gpt2", "gemma2", "neox"])
def test_padded_and_alone_agree(models, kind, by):
    model = models[kind]
    together = logit_attribution(model, TEXTS, by=by, target=3).table
    one_row = {"max_tokens": 8} if by == "head" else {}
    for text in range(3):
        alone = logit_attribution(model, TEXTS[text : text + 1], by=by, target=3, **one_row).table
        part = together[together["text"] == text]
        np.testing.assert_allclose(part["value"], alone["value"], atol=1e-4)
        assert part["source"].tolist() == alone["source"].tolist()


def test_the_target_defaults_to_the_models_first_token(models):
    found = logit_attribution(models["qwen3"], TEXTS, [[0, 1], [2], [3]])
    for row in found.logits.itertuples():
        logits = logits_of(models["qwen3"], TEXTS[row.text])[row.position]
        assert row.target_id == row.top_id == int(logits.argmax())
        assert row.logit == pytest.approx(float(logits.max()), abs=1e-4)


def test_biases_and_shifts_have_rows_of_their_own(models):
    components = set(logit_attribution(models["gpt2"], TEXTS, target=1, by="neuron").table["component"])
    assert components == {
        *("embed", "embed rest", "attention", "attention bias", "neuron", "other neurons", "mlp bias", "norm shift")
    }
    assert "unembedding bias" not in components  # GPT-2 has none
    model = copy.deepcopy(models["llama"])
    model.lm_head = nn.Linear(32, 120, bias=True)
    found = logit_attribution(model.eval(), TEXTS, target=9, against=4)
    bias = found.table.query("component == 'unembedding bias'")["value"]
    assert bias.tolist() == pytest.approx([float((model.lm_head.bias[9] - model.lm_head.bias[4]).detach())] * 3)


def test_by_token_follows_what_a_token_brought(models):
    """A[t, j] v_j W_O^h through the frozen norm, by hand."""
    model, ids = models["llama"], TEXTS[0]
    before = logit_attribution(model, [ids], target=17, by="token").table

    def parts(layer: int, source: int) -> np.ndarray:
        rows = before.query("layer == @layer and source == @source and component == 'attention'")
        return rows.sort_values("head")["value"].to_numpy()

    with torch.no_grad(), taps(model, ["v.0", "resid_post.2", Read("pattern.0", queries=[-1])]) as tape:
        model(input_ids=torch.tensor([ids]))
    value = tape["v", 0][0, 2].double().repeat_interleave(2, 0)  # 4 heads over 2 key-value heads
    stream, norm = tape["resid_post", 2][0, -1].double(), model.model.norm
    direction = model.lm_head.weight[17].double() * norm.weight.double()
    direction = direction / (stream.square().mean() + norm.variance_epsilon).sqrt()
    output = model.model.layers[0].self_attn.o_proj.weight.double().T.unflatten(0, (4, 8))
    weight = tape["pattern", 0][0, :, 0, 2].double()
    expected = weight * torch.einsum("hd,hdm,m->h", value, output, direction)
    np.testing.assert_allclose(parts(0, 2), expected.detach(), rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_transformer_lens_agrees(models, kind, tmp_path, word_tokenizer):
    """Its model is rewritten (norm folded, writes and unembedding centred), and drops b_U: a difference has none."""
    pytest.importorskip("transformer_lens")
    from transformer_lens.model_bridge import TransformerBridge
    from transformer_lens.tools.analysis import direct_logit_attribution
    from transformers import AutoTokenizer

    ids = TEXTS[0]
    ours = logit_attribution(models[kind], [ids], target=17, against=5, by="layer").by_layer()
    models[kind].save_pretrained(tmp_path)  # it reads configuration and tokenizer from a folder
    word_tokenizer.save_pretrained(tmp_path)
    bridge = TransformerBridge.boot_transformers(
        str(tmp_path), hf_model=copy.deepcopy(models[kind]), tokenizer=AutoTokenizer.from_pretrained(tmp_path)
    )
    bridge.enable_compatibility_mode()
    theirs = direct_logit_attribution(bridge, torch.tensor([ids]), answer_tokens=17, incorrect_tokens=5)
    values = dict(zip(theirs.labels, theirs.attribution.flatten().tolist(), strict=True))
    ours = {(c, layer): v for c, layer, v in ours[["component", "layer", "value"]].itertuples(index=False)}
    for layer in range(3):
        assert ours["attention", layer] == pytest.approx(values[f"{layer}_attn_out"], abs=2e-4)
        assert ours["mlp", layer] == pytest.approx(values[f"{layer}_mlp_out"], abs=2e-4)


SMALL = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 120,
}
FAMILIES = {
    "granite": {"residual_multiplier": 0.3, "embedding_multiplier": 5.0, "logits_scaling": 2.0},
    "olmo2": {},
    "cohere": {"logit_scale": 0.25},
    "phi": {},
    "bloom": {"n_head": 4, "n_layer": 2},
    "gemma3_text": {"head_dim": 8},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_other_families(family):
    """Factors on branches, embeddings and logits; norms behind branches; biases of the unembedding; embedding norms."""
    settings = SMALL | {
        "vocab_size": 120,
        "intermediate_size": 48,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **settings, **FAMILIES[family]))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.2 * torch.randn(parameter.shape))
    found = logit_attribution(model.eval(), TEXTS, target=17, by="neuron")
    for text, ids in enumerate(TEXTS):
        total = found.table.loc[found.table["text"] == text, "value"].sum()
        assert total == pytest.approx(float(logits_of(model, ids)[-1, 17]), abs=1e-4)
    assert {"attention", "embed"} <= set(found.table["component"])


def test_strings_through_a_tokenizer(models, word_tokenizer):
    loaded = LoadedModel.from_module(models["llama"], tokenizer=word_tokenizer, name="tiny")
    found = logit_attribution(loaded, ["the cat sat", "a dog"], target="bird", against="film")
    assert found.logits["target"].tolist() == ["bird", "bird"]
    assert found.logits["token"].tolist() == ["sat", "dog"]
    with pytest.raises(ValueError, match=r"target='cat dog' is 2 tokens"):
        logit_attribution(loaded, ["the cat"], target="cat dog")


def test_numbers_of_other_kinds(models):
    model = models["llama"]
    plain = logit_attribution(model, TEXTS, 1, target=17, by="layer").logits
    for position, target in ((np.int64(1), np.int64(17)), (torch.tensor(1), torch.tensor([17] * 3))):
        assert logit_attribution(model, TEXTS, position, target=target, by="layer").logits.equals(plain)
    assert logit_attribution(model, TEXTS, torch.tensor([1, 1, 1]), target=17, by="layer").logits.equals(plain)


def test_nan_names_its_text(models):
    model = copy.deepcopy(models["llama"])
    anatomy = dissect(model)
    with torch.no_grad():
        model.model.embed_tokens.weight[90] = float("nan")
    with pytest.raises(ValueError, match="The stream of text 1 or its logits are NaN or infinite"):
        logit_attribution(model, TEXTS, target=17, anatomy=anatomy)


def test_bad_input(models, tiny):
    model = models["llama"]
    with pytest.raises(ValueError, match="by='heads'; give 'layer'"):
        logit_attribution(model, TEXTS, by="heads")
    with pytest.raises(TypeError, match="no tokenizer"):
        logit_attribution(model, TEXTS, target=" Paris")
    with pytest.raises(ValueError, match="target=120: token ids of this model are 0 to 119"):
        logit_attribution(model, TEXTS, target=120)
    for wrong in (5.7, [5, None, 3], [1.0, 2, 3], True):
        with pytest.raises(TypeError, match=r"target holds .*: give whole numbers or strings"):
            logit_attribution(model, TEXTS, target=wrong)
    for wrong in (0.9, [[0.9], [1], [1]]):
        with pytest.raises(TypeError, match=r"positions holds 0.9: give whole numbers\."):
            logit_attribution(model, TEXTS, wrong)
    with pytest.raises(TypeError, match="positions='all': give whole numbers, one for all texts"):
        logit_attribution(model, TEXTS, "all")
    with pytest.raises(ValueError, match="largest_neurons=-1: give 0 or more"):
        logit_attribution(model, TEXTS, by="neuron", largest_neurons=-1)
    with pytest.raises(ValueError, match="against has 2 tokens for 3 texts"):
        logit_attribution(model, TEXTS, target=1, against=[1, 2])
    with pytest.raises(ValueError, match="positions has 2 entries for 3 texts"):
        logit_attribution(model, TEXTS, [0, 1])
    with pytest.raises(ValueError, match="positions names none for text 1"):
        logit_attribution(model, TEXTS, [[0], [], [1]])
    with pytest.raises(IndexError, match="text 1 has 3 tokens; there is no position 5"):
        logit_attribution(model, TEXTS, 5)
    with pytest.raises(ValueError, match=r"norm .* is on the trunk: .* no sum of contributions"):
        back_steps(tiny("bert"), dissect(tiny("bert")))
    with pytest.raises(ValueError, match="by layer"):
        logit_attribution(model, TEXTS, by="layer").heads()
    with pytest.raises(ValueError, match="by head"):
        logit_attribution(model, TEXTS).by_source()
    with pytest.raises(ValueError, match="training mode"):
        logit_attribution(copy.deepcopy(model).train(), TEXTS)


def test_a_token_against_itself_is_refused(tiny):
    texts = [[5, 9, 30], [8, 3, 90]]
    with pytest.raises(ValueError, match=r"target and against are both '7' \(token 7\) for text 1\. Name two tokens"):
        logit_attribution(tiny("llama"), texts, target=[4, 7], against=7)
    with pytest.raises(ValueError, match="target and against are both '7'"):
        logit_attribution(tiny("llama"), texts, target=7, against=[7, 4])


def test_words_are_quoted_in_print(tiny, word_tokenizer):
    loaded = LoadedModel.from_module(tiny("llama"), tokenizer=word_tokenizer, name="tiny")
    found = logit_attribution(loaded, ["the cat sat", "a bird", "the dog"], target="dog", against="cat")
    lines = repr(found).splitlines()
    assert len(lines) == 3
    assert lines[1].startswith(f"  row 0: 'dog' less 'cat' after 'sat': {found.logits['logit'][0]:.3f}, the model's")
    assert lines[2].startswith("  row 1: 'dog' less 'cat' after 'bird': ")
    assert lines[2].endswith(f"first is {found.logits['top'][1]!r}")
