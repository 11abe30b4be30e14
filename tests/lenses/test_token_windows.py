from itertools import chain

import pytest
from tokenizers.processors import TemplateProcessing

from microtome.lenses.token_windows import special_tokens_around, token_windows

TEXTS = ["the cat sat . " * 10, "a dog ran", "the bird slept on the tree . " * 3]


@pytest.fixture
def bert_like(word_tokenizer):
    """Adds <s> before and </s> after each text."""
    import copy

    tokenizer = copy.deepcopy(word_tokenizer)
    tokenizer._tokenizer.post_processor = TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    return tokenizer


def test_windows_hold_every_token_of_the_texts_in_order(word_tokenizer):
    windows = token_windows(word_tokenizer, TEXTS, documents=["x", "y", "x"], length=8, least=1)
    ids = [word_tokenizer(text, add_special_tokens=False)["input_ids"] for text in TEXTS]
    assert list(chain(*windows.texts)) == list(chain(*ids))
    assert windows.tokens == 40 + 3 + 21
    assert windows.left_out == 0
    assert windows.documents == ["x"] * 5 + ["y"] + ["x"] * 3
    assert windows.starts == [0, 8, 16, 24, 32, 0, 0, 8, 16]
    assert [len(text) for text in windows.texts] == [8, 8, 8, 8, 8, 3, 8, 8, 5]
    assert windows.to_frame()["tokens"].sum() == windows.tokens


def test_short_tails_are_left_out_and_counted(word_tokenizer):
    windows = token_windows(word_tokenizer, TEXTS, length=8, least=6)
    assert windows.left_out == 3 + 5
    assert len(windows) == 7
    assert set(windows.documents) == {0, 2}
    assert "8 of 64 tokens left out" in repr(windows)


def test_special_tokens_stand_around_every_window(bert_like, word_tokenizer):
    assert special_tokens_around(bert_like) == ([1], [2])
    assert special_tokens_around(word_tokenizer) == ([], [])
    windows = token_windows(bert_like, TEXTS, length=8, least=1)
    assert all(text[0] == 1 and text[-1] == 2 and len(text) <= 8 for text in windows.texts)
    own = [word_tokenizer(text, add_special_tokens=False)["input_ids"] for text in TEXTS]
    assert list(chain(*(text[1:-1] for text in windows.texts))) == list(chain(*own))
    assert windows.starts[:7] == [0, 6, 12, 18, 24, 30, 36]


def test_windows_run_as_texts_of_a_pass(tiny, bert_like):
    from microtome.capture.models import LoadedModel
    from microtome.lenses.corpus_pass import corpus_pass

    loaded = LoadedModel.from_module(tiny("llama"), bert_like, name="tiny")
    windows = token_windows(loaded, TEXTS, length=8, least=1)
    assert corpus_pass(loaded, windows.texts, "resid_post.0").tokens == sum(map(len, windows.texts))


@pytest.mark.parametrize(
    ("texts", "settings", "error", "message"),
    [
        ([], {}, ValueError, "there are no texts"),
        (["a", 3], {}, TypeError, r"text 1 \(counted from 0\) is int, not a string"),
        (["a"], {"documents": [1, 2]}, ValueError, "there are 2 documents for 1 texts"),
        (["a cat"], {"least": 3}, ValueError, "no text has 3 tokens"),
        (
            ["a cat"],
            {"length": 4, "least": 3},
            ValueError,
            "length=4 leaves 2 tokens besides 2 special ones, but least=3",
        ),
        (["a cat"], {"least": 0}, ValueError, "least=0"),
    ],
)
def test_bad_input(bert_like, texts, settings, error, message):
    with pytest.raises(error, match=message):
        token_windows(bert_like, texts, **settings)


def test_a_model_without_tokenizer(tiny):
    from microtome.capture.models import LoadedModel

    with pytest.raises(ValueError, match="needs a tokenizer, and this model has none"):
        token_windows(LoadedModel.from_module(tiny("llama"), name="tiny"), TEXTS)
