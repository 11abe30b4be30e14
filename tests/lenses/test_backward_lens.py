import copy
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn
from transformers import OPTConfig, OPTForCausalLM

from microtome.capture.models import LoadedModel
from microtome.lenses.backward_lens import backward_lens, edited_weights, step_effect

KINDS = ["llama", "gpt2", "neox", "neox_sequential", "gemma2", "qwen3"]
TEXT = [5, 9, 30, 7, 11, 60, 2]


@pytest.mark.parametrize("kind", KINDS)
def test_factors_give_the_gradient_of_every_matrix(tiny, kind):
    model = tiny(kind)
    lens = backward_lens(model, TEXT, 17, position=4)
    assert all(p.grad is None for p in model.parameters())
    loss = -model(input_ids=torch.tensor([TEXT])).logits[0, 4].log_softmax(-1)[17]
    loss.backward()
    assert lens.loss == pytest.approx(float(loss.detach()), abs=1e-5)
    assert len(lens.matrices) == 3 * (3 if kind in ("llama", "gemma2", "qwen3") else 2)
    for matrix in lens.matrices:
        gradient = model.get_submodule(matrix.path).weight.grad
        gradient = gradient if kind == "gpt2" else gradient.T
        error = (matrix.formed() - gradient).abs().max() / gradient.abs().max()
        assert float(error) < 1e-5, matrix.path
        assert matrix.stream_side.shape == (7, 32)
        if matrix.layer == 2:  # no later attention: only the loss's own position
            assert (matrix.norm > 1e-9).nonzero().flatten().tolist() == [4]
            assert torch.linalg.matrix_rank(matrix.formed()) == 1


def test_frozen_parameters_stay_frozen_and_others_open(tiny):
    model = tiny("llama")
    model.requires_grad_(False)
    model.lm_head.weight.requires_grad_(True)
    lens = backward_lens(model, TEXT, 17)
    assert [name for name, p in model.named_parameters() if p.requires_grad] == ["lm_head.weight"]
    assert all(float(matrix.norm.max()) > 0 for matrix in lens.matrices)


def test_opts_matrices_are_those_of_its_mlp():
    """fc1 and fc2 lie in the block itself, beside attention's."""
    torch.manual_seed(0)
    small = {"hidden_size": 32, "ffn_dim": 48, "num_attention_heads": 4, "num_hidden_layers": 2}
    config = OPTConfig(**small, vocab_size=120, max_position_embeddings=64, word_embed_proj_dim=32)
    lens = backward_lens(OPTForCausalLM(config).eval(), TEXT, 17, layers=[1])
    assert [matrix.path.rpartition(".")[2] for matrix in lens.matrices] == ["fc1", "fc2"]
    assert [matrix.inputs.shape for matrix in lens.matrices] == [(7, 32), (7, 48)]


def test_inside_inference_mode_and_a_graph_inside_edited_weights(tiny):
    model = tiny("llama")
    lens = backward_lens(model, TEXT, 17)
    with torch.inference_mode():
        inside = backward_lens(model, TEXT, 17)
        assert step_effect(model, inside).equals(step_effect(model, lens))
        made_here = copy.deepcopy(model)
    pd.testing.assert_frame_equal(inside.table, lens.table)
    with edited_weights(model, lens, lr=0.1):
        assert model(input_ids=torch.tensor([TEXT])).logits.requires_grad
    with pytest.raises(ValueError, match=r"made in torch.inference_mode, which allows no gradients"):
        backward_lens(made_here, TEXT, 17)


def test_the_effect_is_read_where_the_lens_was_taken(tiny):
    model = tiny("llama")
    lens = backward_lens(model, TEXT, 17, position=-4)
    assert lens.position == 3
    effect = step_effect(model, lens, lr=0.01).set_index("token")
    assert effect.loc["target", "log_prob_before"] == pytest.approx(-lens.loss, abs=1e-5)
    assert effect.loc["original", "rank_before"] == 0
    last = step_effect(model, lens, lr=0.01, position=-1).set_index("token")
    assert last.loc["target", "log_prob_before"] != pytest.approx(-lens.loss, abs=1e-3)


def test_a_lens_of_another_model_changes_nothing(tiny):
    model = tiny("llama")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    foreign = backward_lens(tiny("gpt2"), TEXT, 17)
    wide = backward_lens(model, TEXT, 17, layers=[0, 1])
    first, last = wide.matrices[0], wide.matrices[-1]
    wide = replace(wide, matrices=(first, replace(last, inputs=torch.ones(7, 50))))
    for lens, name in ((foreign, "transformer.h.0.mlp.c_fc"), (wide, last.path)):
        with (
            pytest.raises(ValueError, match=f"has no matrix {name} of .*: the lens is of another model"),
            edited_weights(model, lens),
        ):
            pass
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name


@pytest.mark.parametrize("kind", ["gpt2", "gemma2"])
def test_words_and_ranks_of_the_written_vector(tiny, kind):
    model = tiny(kind)
    lens = backward_lens(model, TEXT, 17, layers=[1], top=4)
    row = lens.table[lens.table["writes_stream"] & (lens.table["position"] == 6)].iloc[0]
    d = next(m for m in lens.matrices if m.writes_stream).gradients[6].double()
    if kind == "gemma2":
        d = d * (1 + model.model.layers[1].post_feedforward_layernorm.weight.double())
        gain = 1 + model.model.norm.weight.double()
    else:
        d, gain = d - d.mean(), model.transformer.ln_f.weight.double()
    scores = model.get_output_embeddings().weight.double() @ (d * gain)
    assert row["words"] == tuple(str(i) for i in scores.topk(4).indices.tolist())
    assert row["negative_words"] == tuple(str(i) for i in (-scores).topk(4).indices.tolist())
    assert row["target_rank"] == int((scores > scores[17]).sum())
    assert row["target_rank_from_bottom"] == int((scores < scores[17]).sum())
    np.testing.assert_allclose(lens.norms()[0, 6], row["norm"], rtol=1e-6)


@pytest.mark.parametrize("kind", ["llama", "gpt2", "neox"])
def test_the_target_is_at_the_bottom_in_the_last_layer(tiny, kind):
    lens = backward_lens(tiny(kind), TEXT, 17)
    last = lens.table.query("writes_stream and layer == 2 and position == 6").iloc[0]
    assert last["target_rank_from_bottom"] == 0
    assert last["negative_words"][0] == "17"


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_a_step_is_plain_gradient_descent_and_is_taken_back(tiny, kind):
    model = tiny(kind)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    lens = backward_lens(model, TEXT, 17)
    trained = copy.deepcopy(model)
    (-trained(input_ids=torch.tensor([TEXT])).logits[0, -1].log_softmax(-1)[17]).backward()
    with torch.no_grad():
        for matrix in lens.matrices:
            weight = trained.get_submodule(matrix.path).weight
            weight -= 0.05 * weight.grad
        expected = trained(input_ids=torch.tensor([TEXT])).logits
        with edited_weights(model, lens, lr=0.05):
            torch.testing.assert_close(model(input_ids=torch.tensor([TEXT])).logits, expected, rtol=1e-4, atol=1e-4)
    effect = step_effect(model, lens, lr=0.05).set_index("token")
    assert effect.loc["target", "log_prob_after"] == pytest.approx(float(expected[0, -1].log_softmax(-1)[17]), abs=1e-4)
    assert effect.loc["target", "log_prob_after"] > effect.loc["target", "log_prob_before"]
    assert effect.loc["original", "rank_before"] == 0
    assert lens.loss == pytest.approx(-effect.loc["target", "log_prob_before"], abs=1e-5)
    with pytest.raises(RuntimeError, match="stop"), edited_weights(model, lens, lr=1.0):
        raise RuntimeError("stop")
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_shift_is_the_change_of_the_write_at_the_same_input(tiny):
    model = tiny("llama")
    lens = backward_lens(model, TEXT, 17, layers=[2])
    matrix = next(m for m in lens.matrices if m.writes_stream)
    projection = model.get_submodule(matrix.path)
    old = projection(matrix.inputs[-1]).detach()
    with edited_weights(model, lens, lr=0.1):
        new = projection(matrix.inputs[-1]).detach()
    shift = lens.table.query("writes_stream and position == 6").iloc[0]["shift"]
    torch.testing.assert_close(new - old, -0.1 * shift * matrix.gradients[-1], rtol=1e-3, atol=1e-6)


def test_strings_and_bad_input(tiny, word_tokenizer):
    model = tiny("llama")
    loaded = LoadedModel.from_module(model, tokenizer=word_tokenizer, name="tiny")
    lens = backward_lens(loaded, "the cat sat", "dog", layers=[1])
    assert set(lens.table["layer"]) == {1}
    assert lens.table["token"].tolist()[:3] == ["the", "cat", "sat"]
    with pytest.raises(ValueError, match="target='cat dog' is 2 tokens"):
        backward_lens(loaded, "the cat", "cat dog")
    with pytest.raises(IndexError, match="the text has 7 tokens; there is no position 7"):
        backward_lens(model, TEXT, 17, position=7)
    with pytest.raises(IndexError, match="layer 5 is out of range"):
        backward_lens(model, TEXT, 17, layers=[5])
    with pytest.raises(ValueError, match="layers is empty"):
        backward_lens(model, TEXT, 17, layers=[])
    with pytest.raises(ValueError, match="training mode"):
        backward_lens(copy.deepcopy(model).train(), TEXT, 17)
    with pytest.raises(ValueError, match="lr=nan"), edited_weights(model, lens, lr=float("nan")):
        pass
    wrapped = copy.deepcopy(model)
    wrapped.model.layers[0].mlp.down_proj = nn.Sequential(wrapped.model.layers[0].mlp.down_proj)
    with pytest.raises(ValueError, match="is a Sequential, no plain matrix"):
        backward_lens(wrapped, TEXT, 17)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_the_strongest_changes_say_what_a_step_writes(tiny, kind):
    """Independent: the change of the write in a model with the step taken, through the final norm's gain."""
    model = tiny(kind)
    lens = backward_lens(model, TEXT, 17, top=3)
    found = lens.strongest(5)
    every = lens.table[lens.table["writes_stream"]]
    sizes = [
        float((x[:, None] * d[None]).norm())
        for m in lens.matrices
        if m.writes_stream
        for x, d in zip(m.inputs, m.gradients, strict=True)
    ]
    assert found["change"].tolist() == pytest.approx(sorted(sizes, reverse=True)[:5], rel=1e-5)
    assert len(every) == len(sizes) == 21
    assert found["written_words"][0][0] == "17"
    assert found["target_rank"][0] == 0
    gain = model.get_submodule("transformer.ln_f" if kind == "gpt2" else "model.norm").weight.double()
    for row in found.itertuples():
        matrix = next(m for m in lens.matrices if m.writes_stream and m.layer == row.layer)
        projection, x = model.get_submodule(matrix.path), matrix.inputs[row.position]
        alone = replace(
            lens, matrices=(replace(matrix, inputs=x[None], gradients=matrix.gradients[row.position][None]),)
        )
        with torch.no_grad():
            old = projection(x)
            with edited_weights(model, alone, lr=1.0):
                change = (projection(x) - old).double()
        assert float(change.norm()) == pytest.approx(row.norm * row.shift, rel=1e-2)
        change = change - change.mean() if kind == "gpt2" else change
        scores = model.get_output_embeddings().weight.double() @ (change * gain)
        assert row.written_words[0] == str(int(scores.argmax()))
        assert row.erased_words[0] == str(int(scores.argmin()))
    assert len(lens.strongest(999)) == 21
    with pytest.raises(ValueError, match="n=0: give at least one row"):
        lens.strongest(0)


def test_prints_are_short(tiny):
    lens = backward_lens(tiny("llama"), TEXT, 17)
    assert repr(lens).startswith("BackwardLens(9 matrices, 7 positions, loss ")
    assert repr(lens.matrices[2]) == (
        "MatrixGradient(model.layers.0.mlp.down_proj, writes the stream, 48 to 32, 7 positions)"
    )


def test_one_text_is_asked_for(tiny, word_tokenizer):
    loaded = LoadedModel.from_module(tiny("llama"), tokenizer=word_tokenizer, name="tiny")
    for texts in (["the cat"], ("the cat",), [TEXT], [], {"input_ids": TEXT}):
        with pytest.raises(TypeError, match=r"is of one text\. Give one string, or one list of token ids"):
            backward_lens(loaded, texts, "dog")
