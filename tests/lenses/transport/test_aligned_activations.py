"""Rows of two captures matched by text, token and word; two tokenizers that share nothing but the characters."""

import random

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE, WordLevel
from tokenizers.pre_tokenizers import ByteLevel, Split
from transformers import PreTrainedTokenizerFast

from microtome.capture.activations import Activations
from microtome.capture.collect import capture
from microtome.capture.models import LoadedModel
from microtome.lenses.pair_moments import PairMoments
from microtome.lenses.transport.aligned_activations import aligned_activations, moments_of_aligned, word_ends
from microtome.lenses.transport.model_moments import moments_of_models

DRAW = random.Random(0)
SOME = ["the", "cat", "dog", "a", "film", "book", "day", "man,", "woman.", "child,", "big."]
TEXTS = [" ".join(DRAW.choice(SOME) for _ in range(DRAW.randrange(3, 9))) for _ in range(30)]
LABELS = {"word_end": word_ends}


@pytest.fixture(scope="module")
def letter_tokenizer() -> PreTrainedTokenizerFast:
    """One token per character, the space between words among them; [CLS] before the text."""
    letters = ["<pad>", "<s>", "<unk>", *" abcdefghijklmnopqrstuvwxyz.,"]
    tokenizer = Tokenizer(WordLevel({letter: i for i, letter in enumerate(letters)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Split("", "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", unk_token="<unk>")


@pytest.fixture(scope="module")
def models(tiny, word_tokenizer, letter_tokenizer) -> dict[str, LoadedModel]:
    return {
        "words": LoadedModel.from_module(tiny("llama"), word_tokenizer, name="words"),
        "letters": LoadedModel.from_module(tiny("gpt2"), letter_tokenizer, name="letters"),
    }


def captures(models, positions="all", **given) -> dict[str, Activations]:
    sites = ["resid_pre.0", "resid_post"]
    return {name: capture(model, TEXTS, sites, positions, progress=False, **given) for name, model in models.items()}


def test_words_end_where_their_last_character_is(models):
    aligned = aligned_activations(captures(models, token_labels=LABELS), on="word_end")
    words = [(number, word) for number, text in enumerate(TEXTS) for word in text.split()]
    assert len(aligned.rows) == len(words)
    ends = {(row["text"], int(row["word_end"])) for row in aligned.rows.to_dict("records")}
    assert ends == {(n, len(head)) for n, text in enumerate(TEXTS) for head in _heads(text)}
    by_words, by_letters = (aligned.activations(name).rows["token"].tolist() for name in ("words", "letters"))
    for row, one, other in zip(aligned.rows.to_dict("records"), by_words, by_letters, strict=True):
        word = TEXTS[row["text"]][: int(row["word_end"])].split()[-1]
        assert word.endswith(one)
        assert other == word[-1]
    assert aligned.unmatched["letters"] == sum(map(len, TEXTS)) - len(words)


def _heads(text: str) -> list[str]:
    words = text.split()
    return [" ".join(words[: i + 1]) for i in range(len(words))]


@pytest.mark.parametrize(
    ("text", "offsets", "expected"),
    [
        ("a bc", [(0, 1), (2, 3), (3, 4)], [1, None, 4]),
        ("a bc", [(0, 0), (0, 1), (1, 4), (0, 0)], [None, 1, 4, None]),  # special tokens; the space with the next word
        ("a  b ", [(0, 2), (2, 3), (3, 5)], [1, None, 4]),  # white space behind a word is not another word
        ("a b c", [(0, 3), (3, 5)], [None, 5]),  # a token over two words ends neither
        ("a b c", [(0, 5)], [None]),
        ("ab cd", [(0, 1), (1, 4), (4, 5)], [None, None, 5]),  # goes on into the next word
        ("é x", [(0, 1), (0, 1), (1, 3)], [None, 1, 3]),  # two bytes of one character
        ("", [(0, 0)], [None]),
        ("  ", [(0, 2)], [None]),
        ("abc", [(0, 2)], [None]),  # cut off before its end
    ],
)
def test_word_ends(text, offsets, expected):
    assert word_ends(text, np.array(offsets)) == expected


def test_word_ends_of_a_byte_level_tokenizer():
    alphabet = {letter: i for i, letter in enumerate(ByteLevel.alphabet())}
    tokenizer = Tokenizer(BPE(alphabet, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    text = "né 🙂🙂 end.\n\nNext"
    ends = word_ends(text, np.array(tokenizer.encode(text).offsets))
    found = [end for end in ends if end is not None]
    assert [text[:end].split()[-1] for end in found] == text.split()
    assert ends.index(5) == len("né 🙂🙂".encode()) - 1  # the last byte of the second face


def test_moments_of_words_are_those_of_rows_matched_by_hand(models):
    kept = captures(models, token_labels=LABELS)
    moments = moments_of_aligned(aligned_activations(kept, on="word_end"), shards={"all": 1}, progress=False)
    assert moments.sites[3:5] == ("words/resid_post.2", "letters/resid_pre.0")
    rows: dict[str, list[int]] = {"words": [], "letters": []}
    for number, text in enumerate(TEXTS):
        place = 0
        for word in text.split():
            start = text.index(word, place)
            place = start + len(word)
            read = len(text[:place].replace(",", " ,").replace(".", " .").split())
            rows["words"].append(_row(kept["words"], number, read - 1))
            rows["letters"].append(_row(kept["letters"], number, place - 1))
    x, y = kept["words"]["resid_post.1"][rows["words"]], kept["letters"]["resid_post.2"][rows["letters"]]
    found, expected = (
        moments.pair("words/resid_post.1", "letters/resid_post.2", "all", "all"),
        PairMoments.from_rows(x, y),
    )
    assert found.count == expected.count
    torch.testing.assert_close(found.xy, expected.xy, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found.yy, expected.yy, rtol=1e-4, atol=1e-4)
    # the first token of either capture: a first word that is one token for `words`, "a" for `letters`
    assert moments.counts()["first"][0] == sum(text.split()[0].isalpha() for text in TEXTS)


def _row(kept: Activations, text: int, position: int) -> int:
    chosen = (kept.rows["text"] == text) & (kept.rows["position"] == position)
    return int(np.flatnonzero(chosen)[0])


def test_tokens_of_two_seeds_are_those_of_the_joint_pass(tiny, models, tmp_path):
    pair = {"words": models["words"], "other": LoadedModel.from_module(
        tiny("qwen3"), models["words"].tokenizer, name="other")}  # fmt: skip
    given = {"shards": {"fit": 0.5, "test": 0.5}, "shuffled": True, "progress": False}
    expected = moments_of_models(pair, TEXTS, **given)
    kept = captures(pair)
    stored = {
        name: captures({name: model}, store=tmp_path / name, shard_tokens=60)[name] for name, model in pair.items()
    }
    mixed = kept["other"].select_rows(np.random.default_rng(0).permutation(kept["other"].n_rows))
    for each in (kept, stored, kept | {"other": mixed}):
        aligned = aligned_activations(each)
        assert aligned.unmatched == {"words": 0, "other": 0}
        moments = moments_of_aligned(aligned, **given)
        assert moments.counts().equals(expected.counts())
        for site in ("resid_pre.0", "resid_post.2"):
            one, other = (m.pair("words/resid_post.1", f"other/{site}", "test") for m in (moments, expected))
            torch.testing.assert_close(one.xy, other.xy, rtol=1e-4, atol=1e-4)


def test_texts(models):
    kept = captures(models, "mean")
    aligned = aligned_activations(kept, on="text")
    assert aligned.rows["text"].tolist() == list(range(30))
    documents = [f"book {number // 3}" for number in range(30)]
    moments = moments_of_aligned(aligned, documents=documents, shards={"all": 1}, shuffled=True, progress=False)
    assert moments.count("all", "rest") == 30
    assert len(moments.documents) == 10
    found = moments.pair("words/resid_post.2", "letters/resid_post.0", "all")
    expected = PairMoments.from_rows(kept["words"]["resid_post.2"], kept["letters"]["resid_post.0"])
    torch.testing.assert_close(found.xy, expected.xy, rtol=1e-4, atol=1e-4)
    assert moments.pair("words/resid_post.2", "letters/resid_post.0", "all", shuffled=True).count > 20
    last = captures(models, "last")
    some = aligned_activations({"words": last["words"], "letters": last["letters"].select_rows("text > 20")}, on="text")
    assert len(some.rows) == 9
    assert some.unmatched == {"words": 21, "letters": 0}


def test_errors(models):
    kept = captures(models, token_labels=LABELS)
    with pytest.raises(ValueError, match="Give two or more"):
        aligned_activations({"words": kept["words"]})
    with pytest.raises(ValueError, match="by names without '/'"):
        aligned_activations({"a/b": kept["words"], "c": kept["letters"]})
    with pytest.raises(ValueError, match=r"text 0, position 0 is .* in words and .* in letters: .*on='word_end'"):
        aligned_activations(kept)
    with pytest.raises(ValueError, match=r"words has several rows of text 0. .*one position of each text"):
        aligned_activations(kept, on="text")
    with pytest.raises(KeyError, match=r"words has no column 'word_end'.*token_labels"):
        aligned_activations(captures(models), on="word_end")
    with pytest.raises(ValueError, match=r"rows of words are means over positions"):
        aligned_activations(captures(models, "mean"))
    late = {"words": kept["words"].select_rows("text < 3"), "letters": kept["letters"].select_rows("text > 5")}
    with pytest.raises(ValueError, match=r"no row of \['words', 'letters'\] matches on \['text', 'word_end'\]"):
        aligned_activations(late, on="word_end")
    aligned = aligned_activations(kept, on="word_end")
    with pytest.raises(ValueError, match=r"text 29 has no document; 3 were given"):
        moments_of_aligned(aligned, documents=[0, 1, 2], progress=False)
