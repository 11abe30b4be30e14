"""A condition decides by text: similarity, thresholds, batches, and that nothing is kept for the next call."""

import numpy as np
import pytest
import torch
from steering_steps import BAD, GOOD, noise

from microtome.capture import capture
from microtome.interventions.contrast import contrast, contrast_rows
from microtome.interventions.gate import CosineGate, fit_gate, pooled, similarity
from microtome.interventions.generation import generate
from microtome.interventions.operations import Add
from microtome.interventions.steering import Intervention, Steering

D = 32
TEXTS = [*GOOD, *BAD]


def gated(gate: CosineGate | None, *, strength: float = 3.0) -> Steering:
    return Steering(Intervention("resid_post.1", Add(noise(D, seed=8)), "all", strength, gate))


def values(model, pooling: str) -> torch.Tensor:
    position = "mean" if pooling == "mean" else "last"
    return capture(model, TEXTS, ["resid_post.0"], position, progress=False)["resid_post.0"]


def test_similarity_by_hand() -> None:
    h, c = noise(5, D), noise(D, seed=1)
    parallel = c[None] * torch.tensor([[0.5], [2.0]])
    assert similarity(parallel, 1e-3 * c).min() > 0.9
    torch.testing.assert_close(similarity(h, c), similarity(h, 7 * c), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(similarity(h, c, "cosine"), torch.nn.functional.cosine_similarity(h, c[None]))
    part = (h @ c / (c @ c))[:, None] * c
    expected = torch.nn.functional.cosine_similarity(h, part.tanh())
    torch.testing.assert_close(similarity(h, c), expected)


def test_padding_has_no_part_in_the_mean() -> None:
    x = noise(2, 4, D)
    mask = torch.tensor([[False, False, True, True], [True, True, True, True]])
    positions = torch.tensor([[-1, -1, 0, 1], [0, 1, 2, 3]])
    torch.testing.assert_close(pooled(x, mask, positions, "mean")[0], x[0, 2:].mean(0))
    torch.testing.assert_close(pooled(x, mask, positions, "last"), x[:, -1])


@pytest.mark.parametrize("pooling", ["mean", "last"])
@pytest.mark.parametrize("use_cache", [True, False])
def test_texts_that_meet_it_are_steered_and_no_others(llama, pooling, use_cache) -> None:
    sims = similarity(values(llama, pooling), noise(D), "cosine")
    threshold = float(sims.median())
    gate = CosineGate("resid_post.0", noise(D), threshold, pooling=pooling, measure="cosine")
    found = generate(llama, TEXTS, gated(gate), 4, use_cache=use_cache)
    clean = generate(llama, TEXTS, None, 4, use_cache=use_cache)
    steered = generate(llama, TEXTS, gated(None), 4, use_cache=use_cache)
    fires = (sims > threshold).tolist()
    assert 0 < sum(fires) < len(TEXTS)
    for text, is_on in enumerate(fires):
        assert found.token_ids[text] == (steered if is_on else clean).token_ids[text]
    decided = gate.decisions().set_index("text").sort_index()
    assert decided["gate"].tolist() == [float(is_on) for is_on in fires]
    np.testing.assert_allclose(decided["similarity"], sims, rtol=1e-3, atol=1e-4)
    acted = found.ledger.by_text().groupby("text")["fired"].any()
    assert acted.tolist() == fires


def test_a_gate_that_never_opens_is_the_unsteered_model(llama) -> None:
    gate = CosineGate("resid_post.0", noise(D), 2.0)
    steering = Steering([*gated(gate), *gated(None, strength=0.0)])
    found = capture(llama, TEXTS, ["logits"], "last", edits=steering.edits(llama), progress=False)["logits"]
    assert torch.equal(found, capture(llama, TEXTS, ["logits"], "last", progress=False)["logits"])


def test_the_other_side_and_soft_decisions(llama) -> None:
    sims = similarity(values(llama, "mean"), noise(D))
    threshold = float(sims.median())
    texts = generate(llama, TEXTS, gated(CosineGate("resid_post.0", noise(D), threshold, above=False)), 2)
    assert texts.ledger.by_text().groupby("text")["fired"].any().tolist() == (sims < threshold).tolist()
    soft = CosineGate("resid_post.0", noise(D), threshold, softness=0.1)
    generate(llama, TEXTS, gated(soft), 2)
    expected = torch.sigmoid((sims - threshold) / 0.1)
    np.testing.assert_allclose(soft.decisions().set_index("text").sort_index()["gate"], expected, rtol=1e-3, atol=1e-4)


def test_nothing_is_kept_for_the_next_call(llama) -> None:
    sims = similarity(values(llama, "mean"), noise(D))
    gate = CosineGate("resid_post.0", noise(D), float(sims.median()))
    first, last = int(sims.argmax()), int(sims.argmin())
    for text, is_on in ((first, True), (last, False), (first, True)):
        found = (
            generate(llama, [TEXTS[text]], gated(gate), 2)
            if is_on
            else generate(llama, [TEXTS[text], TEXTS[first]], gated(gate), 2)
        )
        assert found.ledger.by_text().groupby("text")["fired"].any().iloc[0] == is_on
    assert len(gate.decisions()) == 4


def test_a_gate_has_to_look_before_it_acts(llama) -> None:
    gate = CosineGate("resid_post.2", noise(D), 0.0)
    with pytest.raises(ValueError, match="comes after"):
        generate(llama, TEXTS, gated(gate), 2)
    several = CosineGate("resid_post", noise(D), 0.0)
    with pytest.raises(ValueError, match="one site"):
        generate(llama, TEXTS, gated(several), 2)
    with pytest.raises(ValueError, match="zero or not finite"):
        CosineGate("resid_post.0", torch.zeros(D), 0.0)
    with pytest.raises(ValueError, match="threshold="):
        CosineGate("resid_post.0", noise(D), float("nan"))


def test_the_fitted_gate_fires_as_its_table_says(llama) -> None:
    found = fit_gate(llama, GOOD, BAD, {"resid_post.0": noise(D), "resid_post.1": noise(D, seed=1)})
    best = found.table["f1"].max()
    row = found.table[found.table["f1"] == best].iloc[0]
    assert found.gate.site == row["site"]
    steering = Steering(Intervention("resid_post.2", Add(noise(D)), "all", 1.0, found.gate))
    generate(llama, [*GOOD, *BAD], steering, 1)
    fired = found.gate.decisions().set_index("text").sort_index()["gate"].to_numpy() > 0
    recall, alarms = fired[:4].mean(), fired[4:].mean()
    assert recall == pytest.approx(row["recall"])
    assert alarms == pytest.approx(row["false_alarms"])
    apart = contrast_rows(llama, GOOD, BAD, ["resid_post.0"], "mean")
    direction = contrast(llama, apart).vector()
    strict = fit_gate(llama, GOOD, BAD, {"resid_post.0": direction}, measure="cosine", false_alarms=0.0)
    chosen = strict.table[strict.table["threshold"] == strict.gate.threshold]
    chosen = chosen[chosen["above"] == strict.gate.above].iloc[0]
    assert chosen["false_alarms"] == 0
    assert chosen["recall"] == strict.table[strict.table["false_alarms"] == 0]["recall"].max()
    assert chosen["recall"] > 0
    with pytest.raises(ValueError, match="No threshold steers any"):
        fit_gate(llama, GOOD, [*GOOD, *BAD], {"resid_post.0": direction}, false_alarms=0.0)
    with pytest.raises(ValueError, match="give some of each"):
        fit_gate(llama, GOOD, [], {"resid_post.0": noise(D)})
