"""Attribution, memories and the backward lens on SmolLM2-Instruct."""

import pytest

from microtome.lenses.attribution import logit_attribution
from microtome.lenses.attribution_scores import share_of_heads
from microtome.lenses.backward_lens import backward_lens, step_effect
from microtome.lenses.key_value_memories import trigger_examples, value_words

pytestmark = pytest.mark.slow
FACT = "The capital of France is"


def test_one_head_brings_paris_from_france(smollm2):
    found = logit_attribution(smollm2, [FACT], target=" Paris", against=" London", by="token")
    assert found.logits["top"].tolist() == [" Paris"]
    assert found.logits["residual"].abs().max() < 1e-4
    first = found.of(0).iloc[0]
    assert (first["layer"], first["head"], first["source_token"]) == (23, 4, " France")
    assert first["value"] > 0.4 * found.logits["logit"][0]
    assert share_of_heads(found)["share"][0] > 0.3


def test_the_gradient_says_rome_in_upper_layers(smollm2):
    lens = backward_lens(smollm2, FACT, " Rome")
    upper = lens.table.query("writes_stream and position == 4 and layer >= 24")
    assert len(upper) == 6
    assert (upper["target_rank_from_bottom"] == 0).all()
    assert upper.iloc[-1]["words"][0] == " Paris"
    effect = step_effect(smollm2, lens, lr=0.01).set_index("token")
    assert (effect.loc["target", "rank_before"], effect.loc["target", "rank_after"]) == (44, 0)


def test_triggers_and_words(smollm2):
    texts = [f"{FACT} Paris, and the capital of Italy is Rome.", "She walked to the old house by the river."]
    found = trigger_examples(smollm2, texts, k=3, layers=[28])
    table = found.examples(28, 0)
    assert len(table) == 3
    assert table["coefficient"].is_monotonic_decreasing
    words = value_words(smollm2, 28, [0, 1], top=4)
    assert [len(row) for row in words["words"]] == [4, 4]
