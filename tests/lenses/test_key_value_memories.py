import copy

import numpy as np
import pandas as pd
import pytest
import torch

from microtome.capture.dissect import dissect
from microtome.capture.models import LoadedModel
from microtome.capture.store_files import writing
from microtome.capture.taps import taps
from microtome.lenses import key_value_memories
from microtome.lenses.key_value_memories import Values, trigger_examples, value_words

GENERATOR = np.random.default_rng(0)
TEXTS = [GENERATOR.integers(3, 120, size=n).tolist() for n in (9, 30, 17, 5, 2, 22)]
KINDS = ["llama", "gpt2", "neox", "neox_sequential", "gemma2", "qwen3"]


def all_coefficients(model, layer: int) -> dict[tuple[int, int], torch.Tensor]:
    """Of every token but a text's first, each text alone."""
    found = {}
    for number, ids in enumerate(TEXTS):
        with torch.no_grad(), taps(model, f"mlp_act.{layer}") as tape:
            model(input_ids=torch.tensor([ids]))
        for position in range(1, len(ids)):
            found[number, position] = tape["mlp_act", layer][0, position]
    return found


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("kind", ["llama", "gpt2", "gemma2"])
def test_triggers_are_the_largest_coefficients(tiny, kind, sign):
    model = tiny(kind)
    found = trigger_examples(model, TEXTS, k=4, sign=sign, max_tokens=64)
    assert found.tokens == sum(len(ids) - 1 for ids in TEXTS)
    for layer in range(3):
        every = all_coefficients(model, layer)
        places, values = list(every), torch.stack(list(every.values()))
        best, at = (sign * values).topk(4, dim=0)
        torch.testing.assert_close(found.coefficient[layer], sign * best.T, rtol=1e-4, atol=1e-4)
        for neuron in range(48):
            here = zip(found.text[layer][neuron].tolist(), found.position[layer][neuron].tolist(), strict=True)
            assert list(here) == [places[i] for i in at[:, neuron]]
            text, position = places[at[0, neuron]]
            follows = [*TEXTS[text], -1][position + 1]
            assert int(found.next_token[layer][neuron, 0]) == follows
        assert (found.next_token[layer] == -1).any()


def test_any_batching_gives_the_same(tiny):
    model = tiny("qwen3")
    whole = trigger_examples(model, TEXTS, k=7, max_tokens=2048)
    for max_tokens in (30, 64):
        part = trigger_examples(model, TEXTS, k=7, max_tokens=max_tokens)
        for layer in range(3):
            torch.testing.assert_close(part.coefficient[layer], whole.coefficient[layer], rtol=1e-4, atol=1e-5)
            assert torch.equal(part.text[layer], whole.text[layer])


def test_more_triggers_than_tokens(tiny):
    found = trigger_examples(tiny("llama"), [[5, 6, 7, 8]], k=9, layers=[1])
    assert found.coefficient[1].shape == (48, 3)
    assert list(found.coefficient) == [1]
    assert len(found.examples(1, 0)) == 3


def test_examples_show_the_text(tiny, word_tokenizer):
    loaded = LoadedModel.from_module(tiny("llama"), tokenizer=word_tokenizer, name="tiny")
    found = trigger_examples(loaded, ["the cat sat on the dog", "a bird ran"], k=9)
    table = found.examples(2, 5, 9, before=2)
    assert len(table) == 7
    assert sorted(table["follows"]) == ["", "", "dog", "on", "ran", "sat", "the"]
    for row in table.itertuples():
        words = [["the", "cat", "sat", "on", "the", "dog"], ["a", "bird", "ran"]][row.text]
        assert row.token == words[row.position]
        assert row.follows == [*words, ""][row.position + 1]
        assert row.prefix == "".join(words[max(0, row.position - 1) : row.position + 1])
    with pytest.raises(KeyError, match="layer 7 was not looked at"):
        found.examples(7, 0)
    with pytest.raises(IndexError, match="layer 0 has 48 neurons; there is no 48"):
        found.examples(0, 48)


def test_a_stopped_pass_goes_on(tiny, tmp_path, monkeypatch):
    model = tiny("gpt2")
    whole = trigger_examples(model, TEXTS, k=3, max_tokens=30)
    monkeypatch.setattr(key_value_memories, "_SAVE_EVERY_TOKENS", 1)
    merge, calls = key_value_memories._merge, []

    def stops(*args):
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return merge(*args)

    monkeypatch.setattr(key_value_memories, "_merge", stops)
    with pytest.raises(KeyboardInterrupt):
        trigger_examples(model, TEXTS, k=3, max_tokens=30, folder=tmp_path)
    done = len(calls)
    resumed = trigger_examples(model, TEXTS, k=3, max_tokens=30, folder=tmp_path)
    again = trigger_examples(model, TEXTS, k=3, max_tokens=30, folder=tmp_path)
    n_batches = len(calls) - done + 2
    assert n_batches > 3
    for found in (resumed, again):
        assert found.tokens == whole.tokens
        for layer in range(3):
            assert torch.equal(found.coefficient[layer], whole.coefficient[layer])
            assert torch.equal(found.next_token[layer], whole.next_token[layer])
    with pytest.raises(ValueError, match="is of a pass with other k"):
        trigger_examples(model, TEXTS, k=4, max_tokens=30, folder=tmp_path)
    with pytest.raises(ValueError, match=r"is of a pass with other .*texts"):
        trigger_examples(model, TEXTS[:3], k=3, max_tokens=30, folder=tmp_path)


@pytest.mark.parametrize("kind", KINDS)
def test_a_values_words_are_what_more_of_it_raises(tiny, kind):
    """Independent: the derivative of logits along the write, at a kept scale, by autograd through the real norm."""
    model = tiny(kind)
    norm = model.get_submodule(dissect(model).final_norm)
    words = value_words(model, 1, [0, 3, 47], top=3)
    block = next(b for b in dissect(model).main if b.layer == 1)
    last = model.get_submodule(next(c.projection.module for c in block.contributions if c.role == "mlp"))
    matrix = last.weight if kind == "gpt2" else last.weight.T
    unembedding = model.get_output_embeddings().weight
    centre = isinstance(norm, torch.nn.LayerNorm)
    gain = norm.weight + (kind == "gemma2")
    for row in words.itertuples():
        value = matrix[row.neuron]
        if kind == "gemma2":
            value = value * (1 + model.model.layers[1].post_feedforward_layernorm.weight)
        value = value - value.mean() if centre else value
        scores = unembedding @ (value * gain)
        assert row.words == tuple(str(i) for i in scores.topk(3).indices.tolist())
        assert row.negative_words == tuple(str(i) for i in (-scores).topk(3).indices.tolist())
        assert (row.top_id, row.bottom_id) == (int(scores.argmax()), int(scores.argmin()))


def test_a_pass_of_edited_weights_does_not_go_on(tiny, tmp_path):
    model = LoadedModel.from_module(copy.deepcopy(tiny("llama")), name="tiny")
    trigger_examples(model, TEXTS, k=3, folder=tmp_path)
    with torch.no_grad():
        model.module.model.layers[0].mlp.up_proj.weight.mul_(1.5)
    with pytest.raises(ValueError, match="is of a pass with other model"):
        trigger_examples(model, TEXTS, k=3, folder=tmp_path)
    with writing(tmp_path), pytest.raises(BlockingIOError):
        trigger_examples(model, TEXTS, k=3, folder=tmp_path)


def test_nan_is_no_largest_coefficient(tiny):
    model = copy.deepcopy(tiny("llama"))
    anatomy = dissect(model)
    model.model.embed_tokens.weight.data[TEXTS[1][4]] = float("nan")
    with pytest.raises(ValueError, match=r"mlp_act.0 is NaN at text \d, position \d+\. Look at that text"):
        trigger_examples(model, TEXTS, anatomy=anatomy)


def test_bad_input(tiny):
    model = tiny("llama")
    with pytest.raises(ValueError, match="k=0: give at least one trigger"):
        trigger_examples(model, TEXTS, k=0)
    with pytest.raises(ValueError, match="sign=2: give 1"):
        trigger_examples(model, TEXTS, sign=2)
    with pytest.raises(ValueError, match="No token to look at: the first token of each text and special tokens are"):
        trigger_examples(model, [[4], [5]])
    assert trigger_examples(model, [[4, 5]]).tokens == 1
    with pytest.raises(IndexError, match="layer 3 is out of range"):
        trigger_examples(model, TEXTS, layers=[3])
    with pytest.raises(IndexError, match="layer 1 has 48 neurons; there is no 99"):
        value_words(model, 1, [99])
    with pytest.raises(ValueError, match="no unembedding"):
        value_words(tiny("bert"), 1, [0])


def test_a_state_without_last_tokens_does_not_go_on(tiny, tmp_path, monkeypatch):
    write = key_value_memories.write_triggers

    def as_before(folder, state, settings, *rest):
        write(folder, state, {name: value for name, value in settings.items() if name != "left out"}, *rest)

    monkeypatch.setattr(key_value_memories, "write_triggers", as_before)
    trigger_examples(tiny("llama"), TEXTS, k=3, folder=tmp_path)
    with pytest.raises(ValueError, match="is of a pass with other left out"):
        trigger_examples(tiny("llama"), TEXTS, k=3, folder=tmp_path)


def test_words_of_one_neuron(tiny):
    model = tiny("llama")
    pd.testing.assert_frame_equal(value_words(model, 1, 7), value_words(model, 1, [7]))
    for number in (np.int64(7), torch.tensor(7)):
        pd.testing.assert_frame_equal(value_words(model, 1, number), value_words(model, 1, [7]))
    assert repr(Values.of(model, [1])) == "Values(LlamaForCausalLM, layers [1])"
