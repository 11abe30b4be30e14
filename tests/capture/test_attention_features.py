"""Attention weights as features: those of transformers' eager attention, pooled over the pairs that were asked for."""

import copy
import sys
from dataclasses import replace
from inspect import unwrap

import numpy as np
import pytest
import torch

from microtome.capture.attention_features import attention_features
from microtome.capture.batches import PaddingRecipe
from microtome.capture.dissect import dissect
from microtome.capture.models import LoadedModel
from microtome.capture.positions import Span

TEXTS = [
    "the cat sat on the big red house .",
    "a dog ran and slept",
    "she liked the film , but he hated the book and the very old city by the river !",
    "good day to the woman",
]
SUBJECT = [Span(4, 7), Span(2, 5), (10, 18), (5, 8)]  # "cat"; "dog"; "the film"; "day"
SUBJECT_TOKENS = [[1], [1], [2, 3], [1]]


@pytest.fixture(scope="module")
def loaded(tiny, word_tokenizer):
    made: dict[str, LoadedModel] = {}

    def load(kind: str) -> LoadedModel:
        if kind not in made:
            made[kind] = LoadedModel.from_module(tiny(kind), word_tokenizer, name=kind)
        return made[kind]

    return load


def eager(model: LoadedModel, text: str) -> torch.Tensor:
    """`[layer, head, query, key]` of one text alone, from a copy of the model with transformers' own attention."""
    module = copy.deepcopy(model.module)
    module.set_attn_implementation("eager")
    with torch.no_grad():
        patterns = module(**model.tokenizer(text, return_tensors="pt"), output_attentions=True).attentions
    return torch.stack(patterns)[:, 0]


def expected(pattern: torch.Tensor, keys: list[int], queries: list[int], pool: str, direction: str) -> torch.Tensor:
    """`[layer, head]`, pair by pair."""
    pairs = [
        pattern[:, :, query, key] if direction == "from_query" else pattern[:, :, key, query]
        for key in keys
        for query in queries
    ]
    stacked = torch.stack(pairs)
    return stacked.mean(0) if pool == "mean" else stacked.amax(0)


@pytest.mark.parametrize(
    ("kind", "direction"),
    [*((kind, "from_query") for kind in ("llama", "bert")), ("bert", "to_query")],
)
@pytest.mark.parametrize("pool", ["mean", "max"])
def test_weights_are_those_of_eager_attention_in_any_batch(loaded, kind: str, direction: str, pool: str) -> None:
    model = loaded(kind)
    keys = {"subject": SUBJECT, "first": "first", "previous": "previous", "self": "self"}
    queries = [[-1, -2], [3], [5, 6, 7], [-1]]  # several rows in some texts, so that batches have unequal ones
    acts = attention_features(
        model, TEXTS, keys=keys, queries=queries, pool=pool, direction=direction, max_tokens=40, progress=False
    )
    assert [str(site) for site in acts.sites] == ["attention.0", "attention.1", "attention.2"]
    for row, text in enumerate(TEXTS):
        pattern = eager(model, text)
        length = pattern.shape[-1]
        asked = [q % length for q in queries[row]]
        of_keys = [SUBJECT_TOKENS[row], [0]]
        wanted = [expected(pattern, tokens, asked, pool, direction) for tokens in of_keys]
        for step in (-1, 0):
            each = torch.stack([expected(pattern, [q + step], [q], pool, direction) for q in asked])
            wanted.append(each.mean(0) if pool == "mean" else each.amax(0))
        for layer in range(3):
            for number, values in enumerate(wanted):
                assert torch.allclose(acts["attention", layer][row, :, number], values[layer], atol=2e-6), (layer, row)


def test_one_by_one_and_together_are_the_same(loaded) -> None:
    model = loaded("llama")  # 4 heads over 2 key-value heads
    options = {"queries": "last", "progress": False, "layers": [1]}
    together = attention_features(model, TEXTS, keys={"all": "all", "subject": SUBJECT}, **options)
    assert together["attention.1"].shape == (4, 4, 2)
    for row, text in enumerate(TEXTS):
        alone = attention_features(model, [text], keys={"all": "all", "subject": [SUBJECT[row]]}, **options)
        assert torch.allclose(together["attention.1"][row], alone["attention.1"][0], atol=1e-6)


def test_padding_on_the_left_changes_nothing(loaded, monkeypatch) -> None:
    model = loaded("llama")
    options = {"keys": {"subject": SUBJECT, "previous": "previous"}, "queries": [[-1, 2], [-1], [3, 4], [2]]}
    right = attention_features(model, TEXTS, progress=False, **options)
    recipe = PaddingRecipe("left", "cumsum")
    found = replace(dissect(model.module), padding=recipe)
    monkeypatch.setattr(sys.modules["microtome.capture.attention_features"], "dissect", lambda module: found)
    left = attention_features(model, TEXTS, progress=False, **options)
    for site in right.sites:
        assert torch.allclose(left[site], right[site], atol=2e-6)


def test_rows_say_length_and_distance(loaded) -> None:
    labels = {"label": [0, 1, 0, 1]}
    acts = attention_features(
        loaded("llama"), TEXTS, keys={"subject": SUBJECT, "self": "self"}, layers=0, labels=labels, progress=False
    )
    assert acts.rows["n_tokens"].tolist() == [9, 5, 19, 5]
    assert acts.rows["distance_subject"].tolist() == [7, 3, 15.5, 3]
    assert acts.rows["distance_self"].tolist() == [0, 0, 0, 0]
    assert acts.rows["label"].tolist() == [0, 1, 0, 1]
    assert acts.rows["string"].tolist() == TEXTS
    assert acts.rows["token"].tolist() == [".", "slept", "!", "woman"]
    assert acts.provenance["keys"] == ["subject", "self"]
    assert "span" not in acts.rows
    with pytest.raises(ValueError, match="column 'n_tokens', which is added here"):
        attention_features(loaded("llama"), TEXTS, keys={"a": "first"}, labels={"n_tokens": [0] * 4}, progress=False)
    bert = attention_features(
        loaded("bert"), TEXTS, keys={"subject": SUBJECT}, layers=0, direction="to_query", progress=False
    )
    assert bert.rows["distance_subject"].tolist() == [7, 3, 15.5, 3]


def test_transforms_are_what_they_say(loaded) -> None:
    options = {"keys": {"first": "first"}, "layers": 0, "progress": False}
    p = attention_features(loaded("llama"), TEXTS, **options)["attention.0"].double().numpy()
    logit = attention_features(loaded("llama"), TEXTS, transform="logit", **options)["attention.0"].numpy()
    arcsine = attention_features(loaded("llama"), TEXTS, transform="arcsine", **options)["attention.0"].numpy()
    np.testing.assert_allclose(logit, np.log(p / (1 - p)), rtol=1e-5)
    np.testing.assert_allclose(np.sin(arcsine / 2) ** 2, p, rtol=1e-5)


def test_no_square_pattern_is_held(loaded, monkeypatch) -> None:
    """What leaves the forward is [text, head, key]; only the asked rows are computed."""
    from microtome.capture import attention_pairs

    seen = []
    pooled = attention_pairs.BatchPairs.pooled
    monkeypatch.setattr(
        attention_pairs.BatchPairs,
        "pooled",
        lambda self, rows, pool: seen.append(rows.shape) or pooled(self, rows, pool),
    )
    attention_features(loaded("llama"), TEXTS, keys={"first": "first"}, layers=0, progress=False)
    assert seen
    assert all(shape[2] == 1 for shape in seen)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"keys": {}}, "keys is empty"),
        ({"keys": {"a": "first"}, "pool": "sum"}, "pool='sum': expected one of mean, max"),
        ({"keys": {"a": "first"}, "direction": "up"}, "direction='up'"),
        ({"keys": {"a": "first"}, "transform": "log"}, "transform='log'"),
        ({"keys": {"a": [0, 1]}}, r"keys\['a'\]: positions is a list of 2 entries for 4 texts"),
        ({"keys": {"a": [[0], [], [1], [2]]}}, r"keys\['a'\]: text 1 has no token"),
        ({"keys": {"a": 40}}, r"keys\['a'\]: row 0 has 9 tokens.*40 is out of range"),
        ({"keys": {"a": "previous"}, "queries": "first"}, "text 0 has no token before its query token"),
        ({"keys": {"end": "last"}, "queries": "first"}, "every weight is zero.*direction='to_query'"),
    ],
)
def test_bad_input_says_what_to_do(loaded, options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        attention_features(loaded("llama"), TEXTS, progress=False, **options)


def test_keys_are_named(loaded) -> None:
    with pytest.raises(TypeError, match="name each group of tokens"):
        unwrap(attention_features)(loaded("llama"), TEXTS, keys=["first"], progress=False)


def test_ready_inputs_and_training_mode_are_refused(loaded, tiny) -> None:
    with pytest.raises(ValueError, match="needs texts"):
        attention_features(loaded("llama"), {"pixel_values": torch.zeros(2, 3, 4, 4)}, keys={"a": "first"})
    model = LoadedModel.from_module(tiny("llama"), name="llama")
    model.module.train()
    with pytest.raises(ValueError, match="training mode"):
        attention_features(model, [[3, 4, 5]], keys={"a": "first"})


@pytest.mark.slow
@pytest.mark.parametrize("name", ["smollm2", "minilm"])
def test_pretrained_models_of_unequal_texts_in_one_batch(request, name: str) -> None:
    model = request.getfixturevalue(name)
    texts = ["The trophy does not fit because it is too big.", "It rained.", "Anna asked Mary, since she knew."]
    keys, queries = {"start": [(0, 3), (0, 2), (0, 4)], "previous": "previous"}, [[-2, -1], [-1], [-1]]
    acts = attention_features(model, texts, keys=keys, queries=queries, progress=False)
    for row, text in enumerate(texts):
        pattern = eager(model, text)
        offsets = model.tokenizer(text, return_offsets_mapping=True)["offset_mapping"]
        stop = keys["start"][row][1]
        start = [n for n, (first, last) in enumerate(offsets) if first < last and first < stop]
        asked = [q % pattern.shape[-1] for q in queries[row]]
        wanted = expected(pattern, start, asked, "mean", "from_query")
        before = torch.stack([pattern[:, :, q, q - 1] for q in asked]).mean(0)
        for layer in range(len(pattern)):
            assert torch.allclose(acts["attention", layer][row], torch.stack([wanted, before], -1)[layer], atol=1e-5)
