"""SmolLM2 beside itself untrained, token by token, and beside MiniLM, word by word: other tokenizers, other widths."""

import pytest
import torch

from microtome.capture import LoadedModel, capture, untrained
from microtome.lenses.pair_moments import PairMoments
from microtome.lenses.transport.aligned_activations import aligned_activations, moments_of_aligned, word_ends
from microtome.lenses.transport.alignment import cka
from microtome.lenses.transport.model_moments import moments_of_models

pytestmark = pytest.mark.slow

TEXTS = [
    "The harbour was quiet, and the boats that had left before dawn were only now coming back with their catch.",
    "A committee of twelve met on Thursday to hear what the engineers had found beneath the old railway bridge.",
    "Nobody in the village could say when the well had been dug, or why its water tasted faintly of iron 🙂.",
    "She sorted the letters by year,  then by hand,\n\nand found that two of them had never been opened at all.",
]


def test_words_of_smollm2_and_minilm_are_the_same_words(smollm2: LoadedModel, minilm: LoadedModel) -> None:
    given = {"positions": "all", "token_labels": {"word_end": word_ends}, "progress": False}
    captures = {
        "smollm2": capture(smollm2, TEXTS, "resid_post.20", **given),
        "minilm": capture(minilm, TEXTS, "resid_post.3", **given),
    }
    aligned = aligned_activations(captures, on="word_end")
    words = [(number, word) for number, text in enumerate(TEXTS) for word in text.split()]
    assert len(aligned.rows) == len(words)
    tokens = [[str(token) for token in aligned.activations(name).rows["token"]] for name in captures]
    for (text, word), row, one, other in zip(words, aligned.rows.to_dict("records"), *tokens, strict=True):
        assert row["text"] == text
        assert TEXTS[text][: int(row["word_end"])].split()[-1] == word
        if "🙂" not in word:
            assert word.endswith(one.strip())
            assert word.lower().endswith(other.strip().removeprefix("##"))
    moments = moments_of_aligned(aligned, shards={"all": 1}, progress=False)
    found = moments.pair("smollm2/resid_post.20", "minilm/resid_post.3", "all", "all")
    assert (found.d_in, found.d_out) == (576, 384)
    x, y = (
        aligned.activations(name)[site] for name, site in (("smollm2", "resid_post.20"), ("minilm", "resid_post.3"))
    )
    assert cka(found) == pytest.approx(cka(PairMoments.from_rows(x, y)), rel=1e-3)


def test_smollm2_and_its_untrained_twin(smollm2: LoadedModel) -> None:
    models = {"a": smollm2, "b": untrained(smollm2, seed=0)}
    moments = moments_of_models(models, TEXTS, ["resid_post.10"], shards={"all": 1}, progress=False)
    kept = {name: capture(model, TEXTS, "resid_post.10", "all", progress=False) for name, model in models.items()}
    keep = torch.tensor((kept["a"].rows["position"] > 0).tolist())
    found = moments.pair("a/resid_post.10", "b/resid_post.10", "all")
    expected = PairMoments.from_rows(*(kept[name]["resid_post.10"][keep] for name in models))
    assert found.count == expected.count
    assert cka(found) == pytest.approx(cka(expected), rel=1e-3)
