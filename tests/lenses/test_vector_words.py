import pytest
import torch

from microtome.capture import taps
from microtome.capture.models import LoadedModel
from microtome.lenses.unembedding import unembedding_of
from microtome.lenses.vector_words import neuron_vectors, vector_words

DECODERS = ["llama", "gpt2", "neox", "neox_sequential", "gemma2", "qwen3"]


@pytest.mark.parametrize("kind", DECODERS)
def test_words_are_those_of_dense_logits(kind, tiny):
    model = tiny(kind)
    vectors = torch.randn(2, 32, generator=torch.Generator().manual_seed(1)) * 3
    words = vector_words(model, vectors, top=4, names=["one", "two"])
    with torch.no_grad():
        expected = unembedding_of(model).logits(vectors)
    scores, ids = expected.topk(4)
    assert words["token"].tolist() == ids.flatten().tolist()
    assert words["vector"].tolist() == ["one"] * 4 + ["two"] * 4
    torch.testing.assert_close(torch.tensor(words["score"]), scores.flatten(), rtol=1e-4, atol=1e-4)
    probs = expected.softmax(-1).gather(1, ids).flatten()
    torch.testing.assert_close(torch.tensor(words["prob"]), probs, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", DECODERS)
def test_the_gain_reading_is_linear(kind, tiny):
    model = tiny(kind)
    one, two = torch.randn(2, 32, generator=torch.Generator().manual_seed(2))

    def scores(vector):
        return vector_words(model, vector, top=120, norm="gain").sort_values("token")["score"].to_numpy()

    torch.testing.assert_close(
        torch.tensor(scores(one + two)), torch.tensor(scores(one) + scores(two)), rtol=1e-3, atol=1e-3
    )


@pytest.mark.parametrize("kind", DECODERS)
def test_rows_of_neurons_add_up_to_what_the_mlp_adds(kind, tiny):
    model = tiny(kind)
    rows = neuron_vectors(model, 1)
    assert rows.shape == (48, 32)
    with taps(model, ["mlp_act.1", "mlp_out.1"]) as tape, torch.no_grad():
        model(torch.tensor([[5, 6, 7, 8]]))
    with taps(model, ["mlp_out.1"], {"mlp_act.1": lambda x: -x}) as bare, torch.no_grad():
        model(torch.tensor([[5, 6, 7, 8]]))
    write, made = tape["mlp_out.1"] - (0 if kind == "gemma2" else bare["mlp_out.1"]), tape["mlp_act.1"] @ rows
    if kind == "gemma2":  # the norm after the MLP divides each token's write by its size
        made = made * (write * made).sum(-1, keepdim=True) / made.square().sum(-1, keepdim=True)
    torch.testing.assert_close(made, write, rtol=1e-3, atol=1e-4)


def test_a_column_of_the_unembedding_says_its_own_word(tiny, word_tokenizer):
    loaded = LoadedModel.from_module(tiny("gpt2"), word_tokenizer, name="tiny")
    weight = unembedding_of(loaded).weight
    number = word_tokenizer.convert_tokens_to_ids("river")
    gain = loaded.module.transformer.ln_f.weight.detach()
    words = vector_words(loaded, (weight[number] - weight.mean(0)) / gain, top=1)
    assert words["word"].tolist() == ["river"]


def test_what_has_no_words_is_refused(tiny):
    model = tiny("llama")
    with pytest.raises(ValueError, match="32 coordinates"):
        vector_words(model, torch.ones(31))
    with pytest.raises(ValueError, match="NaN"):
        vector_words(model, torch.full((32,), torch.nan))
    with pytest.raises(ValueError, match="names for 1"):
        vector_words(model, torch.ones(32), names=["a", "b"])
    with pytest.raises(ValueError, match="'own' or 'gain'"):
        vector_words(model, torch.ones(32), norm="x")
    with pytest.raises(IndexError, match="neuron 48"):
        neuron_vectors(model, 0, [48])
    with pytest.raises(IndexError, match="layer 3"):
        neuron_vectors(model, 3)


def test_lists_and_arrays_have_words_and_zeros_none(tiny, word_tokenizer):
    model = LoadedModel.from_module(tiny("llama"), word_tokenizer, name="tiny")
    row = torch.randn(32, generator=torch.Generator().manual_seed(0))
    words = vector_words(model, row, top=3)["word"].tolist()
    assert vector_words(model, row.tolist(), top=3)["word"].tolist() == words
    assert vector_words(model, row[None].numpy(), top=3)["word"].tolist() == words
    with pytest.raises(ValueError, match="vector 1 is zero, which has no words"):
        vector_words(model, [row.tolist(), [0.0] * 32])
