"""Texts to encoded rows: identities first, then agreement with the tokenizer's own calls, then messages."""

import hashlib

import pandas as pd
import pytest
import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers, processors, trainers
from tokenizers.models import BPE
from transformers import BatchEncoding, PreTrainedTokenizerFast

from microtome.capture.encoded_text import EncodedTexts
from microtome.capture.ready_inputs import ReadyInputs
from microtome.capture.texts import encode_texts

TEXTS = ["the cat sat", "a dog", "the old man read a good book"]
CHAT = [
    [{"role": "user", "content": "the cat sat"}],
    [{"role": "system", "content": "a dog"}, {"role": "user", "content": "the film was great"}],
]
TEMPLATE = (
    "{{ '<s>' }}{% for message in messages %}{% if message['role'] == 'tool' %}{{ raise_exception('no tools here') }}"
    "{% endif %}{{ message['content'] + '</s>' }}{% endfor %}{% if add_generation_prompt %}{{ 'she' }}{% endif %}"
)


def bpe(**around) -> PreTrainedTokenizerFast:
    """Byte-level BPE with merges of a small text: tokens that carry spaces, characters of several tokens."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<pad>", "<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([*TEXTS, "the cat sat on the mat with the old man"] * 5, trainer)
    if around:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=" ".join(part for part in (around.get("before"), "$A", around.get("after")) if part),
            special_tokens=[("<s>", 1), ("</s>", 2)],
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>", chat_template=TEMPLATE
    )


@pytest.fixture(scope="module")
def plain():
    return bpe()


@pytest.fixture(scope="module")
def with_bos():
    return bpe(before="<s>")


@pytest.fixture(scope="module")
def bert_like():
    return bpe(before="<s>", after="</s>")


def ids_of(encoded) -> list[list[int]]:
    return [row.token_ids.tolist() for row in encoded.rows]


# Identities


@pytest.mark.parametrize(
    "listed",
    [list, tuple, pd.Series, lambda texts: (text for text in texts)],
    ids=["list", "tuple", "Series", "generator"],
)
def test_any_listing_of_the_same_texts_is_the_same(plain, listed):
    assert ids_of(encode_texts(listed(TEXTS), plain)) == plain(TEXTS)["input_ids"]


def test_ids_lists_tensors_and_a_padded_mapping_are_the_same(plain):
    ids = plain(TEXTS)["input_ids"]
    left, right = (plain(TEXTS, return_tensors="pt", padding=True, padding_side=side) for side in ("left", "right"))
    for given in (ids, [torch.tensor(row) for row in ids], left, dict(right)):
        encoded = encode_texts(given, plain)
        assert isinstance(encoded, EncodedTexts)
        assert encoded.kind == "token_ids"
        assert ids_of(encoded) == ids
        assert encoded.provenance["token_ids_sha256"] == encode_texts(TEXTS, plain).provenance["token_ids_sha256"]


def test_lengths_match_every_field(bert_like):
    encoded = encode_texts(TEXTS, bert_like)
    for row, length in zip(encoded.rows, encoded.lengths, strict=True):
        fields = (row.token_ids, row.is_special, row.tokens, row.offsets, range(row.length))
        assert {len(field) for field in fields} == {length}


def test_added_tokens_are_special_and_words_are_not(bert_like):
    for row in encode_texts(TEXTS, bert_like).rows:
        assert row.is_special.tolist() == [True, *[False] * (row.length - 2), True]
        assert row.n_added == (1, 1)


def test_a_special_token_inside_a_text_is_special(plain):
    (row,) = encode_texts(["a dog</s>the cat"], plain).rows
    assert [token for token, special in zip(row.tokens, row.is_special, strict=True) if special] == ["</s>"]


def test_offsets_spell_the_text(plain):
    for text, row in zip(TEXTS, encode_texts(TEXTS, plain).rows, strict=True):
        pieces = [text[start:end] for start, end in row.offsets.tolist()]
        assert "".join(pieces) == text
        assert tuple(pieces) == row.tokens


def test_token_strings_need_no_tokenizer():
    assert encode_texts([[5, 7]], None).rows[0].tokens == ("5", "7")


# Message lists


@pytest.mark.parametrize("prompt", [False, True])
def test_messages_are_the_models_own_encoding(with_bos, prompt):
    encoded = encode_texts(CHAT, with_bos, add_generation_prompt=prompt)
    own = [with_bos.apply_chat_template(chat, add_generation_prompt=prompt)["input_ids"] for chat in CHAT]
    assert ids_of(encoded) == own
    assert all(row.token_ids.tolist().count(1) == 1 for row in encoded.rows), "one BOS, from the template"
    assert encoded.rows[0].text.endswith("she") == prompt


def test_chat_marks_are_special_and_contents_are_not(with_bos):
    (row, _) = encode_texts(CHAT, with_bos).rows
    assert (
        "".join(token for token, special in zip(row.tokens, row.is_special, strict=True) if not special)
        == "the cat sat"
    )


def test_template_is_recorded(plain):
    provenance = encode_texts(CHAT, plain).provenance
    assert provenance["chat_template_sha256"] == hashlib.sha256(TEMPLATE.encode()).hexdigest()
    assert provenance["kind"] == "messages"


# Truncation


@pytest.mark.parametrize("end", ["left", "right"])
def test_truncation_keeps_one_end_and_the_added_tokens(bert_like, end):
    whole, cut = (
        encode_texts(TEXTS, bert_like, **options).rows[2] for options in ({}, {"truncate": end, "max_length": 6})
    )
    body = whole.token_ids[1:-1]
    kept = body[-4:] if end == "left" else body[:4]
    assert cut.token_ids.tolist() == [1, *kept.tolist(), 2]
    assert cut.is_special.tolist() == [True, *[False] * 4, True]
    assert cut.n_dropped == whole.length - 6
    # what is left still points at its characters of the whole text
    assert [whole.text[start:end] for start, end in cut.offsets[1:-1].tolist()] == list(cut.tokens[1:-1])


def test_short_texts_are_left_alone(bert_like):
    assert ids_of(encode_texts(TEXTS, bert_like, truncate="left", max_length=60)) == bert_like(TEXTS)["input_ids"]


def test_leading_bos_of_messages_and_ids_stays(with_bos):
    (row,) = encode_texts([[1, 5, 6, 7, 8]], with_bos, truncate="left", max_length=3).rows
    assert row.token_ids.tolist() == [1, 7, 8]
    row = encode_texts(CHAT, with_bos, truncate="left", max_length=3).rows[1]
    assert row.token_ids[0] == 1
    assert row.token_ids[-1] == 2


def test_limit_of_the_model_is_the_default(plain, tiny):
    with pytest.raises(ValueError, match=r"1 of 2 texts are longer than 64 tokens \(row 1 has 70\)"):
        encode_texts([[5], [5] * 70], plain, module=tiny("gpt2"))
    encoded = encode_texts([[5], [5] * 70], plain, module=tiny("gpt2"), truncate="right")
    assert encoded.lengths == [1, 64]
    assert encoded.provenance["n_truncated"] == 1
    assert encoded.provenance["max_length"] == 64


def test_no_room_beside_special_tokens(bert_like):
    with pytest.raises(ValueError, match="2 tokens leave no room for text beside 2 special"):
        encode_texts(TEXTS, bert_like, truncate="right", max_length=2)


# Other inputs


def test_images_pass_through(plain):
    pixels = torch.randn(3, 1, 4, 4)
    ready = encode_texts(BatchEncoding({"pixel_values": pixels}), None)
    assert isinstance(ready, ReadyInputs)
    torch.testing.assert_close(ready.model_inputs([2, 0], device="cpu")["pixel_values"], pixels[[2, 0]])


def test_token_types_follow_the_tokenizer(word_tokenizer):
    typed = PreTrainedTokenizerFast(
        tokenizer_object=word_tokenizer.backend_tokenizer,
        unk_token="<unk>",
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
    )
    assert encode_texts(TEXTS, typed).rows[0].token_type_ids.tolist() == [0, 0, 0]
    assert encode_texts([[5, 6]], typed).rows[0].token_type_ids.tolist() == [0, 0]
    pairs = {"input_ids": torch.tensor([[4, 5, 6]]), "token_type_ids": torch.tensor([[0, 1, 1]])}
    assert encode_texts(pairs, typed).rows[0].token_type_ids.tolist() == [0, 1, 1]
    assert encode_texts(TEXTS, word_tokenizer).rows[0].token_type_ids is None


# Errors


@pytest.mark.parametrize(
    ("texts", "error", "message"),
    [
        ("the cat", TypeError, r"wrap a single text: \[text\]"),
        (None, TypeError, "must be a list of texts. Got None"),
        ([], ValueError, "texts is empty"),
        (["the cat", ""], ValueError, "row 1 has empty text"),
        (["", "the cat", ""], ValueError, "rows 0, 2 have empty text"),
        (["the cat", "</s>"], ValueError, "row 1 has no token besides special ones"),
        (["the cat", None], TypeError, r"row 1 is None \(NoneType\): expected a string"),
        (["the cat", float("nan")], TypeError, r"row 1 is nan \(float\)"),
        (["the cat", [3, 4]], TypeError, r"mix kinds: strings \(row 0\), token_ids \(row 1\)"),
        ([[3], []], ValueError, "row 1 is an empty list"),
        ([torch.tensor([], dtype=torch.long)], ValueError, "row 0 is empty"),
        ([[3], [3, -1]], ValueError, "row 1 holds token id -1 at position 1; ids count from 0"),
        ([torch.zeros(2)], TypeError, r"row 0 is a torch.float32 array of shape \(2,\)"),
        ([[True, False]], TypeError, "row 0 is"),
        ([3, 4], TypeError, "single row of token ids; wrap it"),
        (CHAT[0], TypeError, r"single message list: \[messages\]"),
        ([[{"role": "user"}]], ValueError, 'row 0: message 0 lacks "role" or "content"'),
        ([CHAT[0], [{"role": "tool", "content": "x"}]], ValueError, "row 1: the chat template refuses.*no tools here"),
        ({"labels": torch.zeros(2, 2)}, ValueError, "expected one of input_ids"),
    ],
)
def test_bad_texts_are_named(plain, texts, error, message):
    with pytest.raises(error, match=message):
        encode_texts(texts, plain)


def test_bos_alone_is_no_text(with_bos):
    assert with_bos("")["input_ids"] == [1]
    with pytest.raises(ValueError, match="row 0 has no token besides special ones"):
        encode_texts(["<s>"], with_bos, add_special_tokens=False)


def test_double_bos_is_refused(with_bos):
    with pytest.raises(ValueError, match="row 1 has the BOS token twice"):
        encode_texts(["the cat", "<s>the cat"], with_bos)
    assert encode_texts(["<s>the cat"], with_bos, add_special_tokens=False).rows[0].token_ids.tolist().count(1) == 1


def test_ids_outside_the_vocabulary(plain, tiny):
    with pytest.raises(ValueError, match="row 1 holds token id 120 at position 1; this model's vocabulary is 0 to 119"):
        encode_texts([[3], [119, 120]], plain, module=tiny("llama"))
    with pytest.raises(ValueError, match="row 0 holds token id"):
        encode_texts(["the cat"], plain, module=tiny("llama"))


def test_strings_need_a_tokenizer_and_messages_a_template(word_tokenizer):
    with pytest.raises(ValueError, match="strings need a tokenizer"):
        encode_texts(["the cat"], None)
    with pytest.raises(ValueError, match="no chat template"):
        encode_texts(CHAT, word_tokenizer)


def test_truncate_is_an_end(plain):
    with pytest.raises(ValueError, match="truncate='middle': expected None"):
        encode_texts(TEXTS, plain, truncate="middle")


# Real tokenizers


@pytest.mark.slow
def test_smollm2_and_minilm(smollm2, minilm):
    chats = [[{"role": "user", "content": "Hello there"}]]
    encoded = encode_texts(chats, smollm2.tokenizer, module=smollm2.module)
    assert ids_of(encoded) == [smollm2.tokenizer.apply_chat_template(chats[0])["input_ids"]]
    assert encoded.provenance["max_length"] == 8192
    with pytest.raises(ValueError, match="row 0 has 602"):
        encode_texts(["a " * 600], minilm.tokenizer, module=minilm.module)
    row = encode_texts(["a " * 600], minilm.tokenizer, module=minilm.module, truncate="left").rows[0]
    assert row.length == 512
    assert (row.tokens[0], row.tokens[-1]) == ("[CLS]", "[SEP]")
