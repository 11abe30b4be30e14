"""Each kept token gets the label of its span, function or list; what cannot be labelled is named."""

import numpy as np
import pandas as pd
import pytest
import torch

from microtome.capture.collect import capture
from microtome.capture.models import LoadedModel

TEXTS = ["the cat sat on the house .", "a dog ran"]
SPANS = [[(0, 3, "DET"), (4, 7, "NOUN"), (8, 11, "VERB")], [(2, 5, "NOUN")]]


@pytest.fixture(scope="module")
def model(tiny, word_tokenizer) -> LoadedModel:
    return LoadedModel.from_module(tiny("llama"), word_tokenizer, name="llama")


def rows(model, token_labels, texts=TEXTS, positions="all", **given) -> pd.DataFrame:
    return capture(model, texts, "z.0", positions, token_labels=token_labels, progress=False, **given).rows


def lengths(text: str, offsets: np.ndarray) -> list[int]:
    return [int(stop - start) for start, stop in offsets]


def test_spans_functions_and_lists(model) -> None:
    given = {"pos": SPANS, "length": lengths, "n": [list(range(7)), [9, 8, 7]], "flag": [[True] * 7, [None] * 3]}
    table = rows(model, given)
    assert [value if isinstance(value, str) else None for value in table["pos"]] == [
        "DET",
        "NOUN",
        "VERB",
        *[None] * 5,
        "NOUN",
        None,
    ]
    assert table["length"].tolist() == [3, 3, 3, 2, 3, 5, 1, 1, 3, 3]
    assert table["n"].tolist() == [0, 1, 2, 3, 4, 5, 6, 9, 8, 7]
    assert (str(table["length"].dtype), str(table["pos"].dtype)) == ("int64", "str")
    assert table["flag"].tolist() == [True] * 7 + [None] * 3


def test_only_kept_tokens_are_labelled_and_means_are_not(model) -> None:
    assert rows(model, {"n": lengths}, positions="last")["n"].tolist() == [1, 3]
    assert rows(model, {"n": lengths}, positions=[[1, 0], []])["n"].tolist() == [3, 3]
    means = rows(model, {"pos": SPANS}, positions="mean")
    assert means["pos"].isna().all()


def test_a_token_that_begins_with_a_space_is_of_its_word(smollm_like, tiny) -> None:
    """Byte-level tokens carry the space before their word; the word's span counts, not the space."""
    model = LoadedModel.from_module(tiny("llama"), smollm_like, name="llama")
    table = rows(model, {"pos": [[(0, 2, "A"), (3, 5, "B")]]}, texts=["tt tt"])
    assert list(zip(table["token"], table["pos"], strict=True)) == [("tt", "A"), (" tt", "B")]


@pytest.fixture(scope="module")
def smollm_like():
    """A byte-level tokenizer whose tokens are `tt` with and without the space before it."""
    from tokenizers import Tokenizer
    from tokenizers.decoders import ByteLevel as Decoder
    from tokenizers.models import BPE
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"<pad>": 0, "t": 1, "Ġ": 2, "tt": 3, "Ġtt": 4}
    tokenizer = Tokenizer(BPE(vocabulary, [("t", "t"), ("Ġ", "tt")]))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False, trim_offsets=False)
    tokenizer.decoder = Decoder()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>")


def test_lists_go_by_place_not_by_an_index(model) -> None:
    """A shuffled or filtered table: texts are taken by place, and so are their labels."""
    table = pd.DataFrame({"text": [*TEXTS, "the dog ran"], "pos": [*SPANS, [(4, 7, "NOUN")]]}).iloc[[2, 0, 1]]
    found = rows(model, {"pos": table["pos"]}, texts=table["text"].tolist())
    assert found["pos"].dropna().tolist() == ["NOUN", "DET", "NOUN", "VERB", "NOUN"]


def test_special_tokens_have_no_label(tiny, word_tokenizer) -> None:
    model = LoadedModel.from_module(tiny("llama"), word_tokenizer, name="llama")
    table = rows(model, {"pos": [[(0, 3, "SPECIAL"), (4, 7, "DET")]]}, texts=["<s> the cat"])
    assert [value if isinstance(value, str) else None for value in table["pos"]] == [None, "DET", None]


def test_truncated_texts_keep_the_labels_of_what_is_left(model) -> None:
    table = rows(model, {"pos": SPANS, "n": lengths}, truncate="left", max_length=4)
    assert table["token"].tolist() == ["on", "the", "house", ".", "a", "dog", "ran"]
    assert table["n"].tolist() == [2, 3, 5, 1, 1, 3, 3]
    assert table["pos"].notna().tolist() == [False, False, False, False, False, True, False]


@pytest.mark.parametrize(
    ("given", "kind", "said"),
    [
        ({"pos": SPANS[:1]}, ValueError, r"token_labels\['pos'\] has 1 entries for 2 texts"),
        ({"pos": "NOUN"}, TypeError, r"token_labels\['pos'\] is a str; give a function or one list per text"),
        ({"token": SPANS}, ValueError, "has a column 'token', which the row table has already"),
        ({"label": SPANS}, ValueError, "has a column 'label', which the row table has already"),
        ({"n": [[1, 2], [1, 2, 3]]}, ValueError, r"row 0: token_labels\['n'\] gives 2 values for 7 tokens"),
        ({"n": lambda text, offsets: [1]}, ValueError, r"row 0: token_labels\['n'\] gives 1 values for 7 tokens"),
        ({"pos": [[(0, 5, "A"), (4, 7, "B")], []]}, ValueError, "row 0: spans of .* overlap at character 4"),
        ({"pos": [[], [(4, 4, "A")]]}, ValueError, r"row 1: a span \(4, 4\) of .* is empty or not inside the text's 9"),
        ({"pos": [[], [(5, 3, "A")]]}, ValueError, r"row 1: a span \(5, 3\) of .* is empty"),
        ({"pos": [[], [(-3, -1, "A")]]}, ValueError, r"row 1: a span \(-3, -1\) of .* is empty or not inside"),
        ({"pos": [[], [(0, 40, "A")]]}, ValueError, r"row 1: a span \(0, 40\) of .* is empty or not inside"),
        ({"n": [[1] * 7, ["a"] * 3]}, TypeError, r"token_labels\['n'\] holds a number and text"),
        ({"n": [[True] * 7, [2] * 3]}, TypeError, r"token_labels\['n'\] holds a Boolean and a number"),
    ],
)
def test_what_cannot_label_tokens(model, given, kind, said) -> None:
    with pytest.raises(kind, match=said):
        rows(model, given, labels={"label": [0, 1]})


def test_token_ids_have_no_characters(model) -> None:
    with pytest.raises(ValueError, match=r"row 0 has no character offsets, which token_labels\['pos'\] needs"):
        rows(model, {"pos": [[(0, 1, "A")]]}, texts=[[5, 6]])
    assert rows(model, {"n": [[4, 2]]}, texts=[[5, 6]])["n"].tolist() == [4, 2]
    inputs = {"inputs_embeds": torch.zeros(2, 3, 32)}
    with pytest.raises(ValueError, match="token_labels are for texts"):
        rows(model, {"n": [[1, 2, 3]] * 2}, texts=inputs)


def test_types_that_differ_between_chunks_are_refused_before_any_forward(model, tmp_path) -> None:
    values = [[1, 2]] * 1100 + [["a", "b"]]
    with pytest.raises(
        TypeError, match=r"token_labels\['n'\] holds a number and text; give every token's label one type"
    ):
        capture(model, [[5, 6]] * 1101, "z.0", "last", token_labels={"n": values}, store=tmp_path / "s", progress=False)
    assert not (tmp_path / "s").exists()


def test_shards_with_and_without_labels_join(model, tmp_path) -> None:
    """A column that is empty, whole numbers or floats by shard comes back as one."""
    texts = [f"the cat {'sat ' * (i % 3)}".strip() for i in range(30)]
    spans = [[] if i < 15 else [(0, 3, "DET")] for i in range(30)]
    given = {
        "pos": spans,
        "n": lengths,
        "some": [[None if i > 20 else i for _ in text.split()] for i, text in enumerate(texts)],
    }
    store = capture(
        model, texts, "z.0", "all", token_labels=given, store=tmp_path / "s", shard_tokens=9, progress=False
    )
    memory = rows(model, given, texts=texts)
    pd.testing.assert_frame_equal(store.rows.astype({"string": "str"}), memory.astype({"string": "str"}))
