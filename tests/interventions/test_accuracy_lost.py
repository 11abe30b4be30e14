"""Share of accuracy that hangs on a direction: arithmetic, a planted classifier, replacements, matched directions."""

import numpy as np
import pytest
import torch
from steering_steps import BAD, GOOD, noise

from microtome.capture import LoadedModel, capture
from microtome.interventions.accuracy_lost import (
    Resample,
    WordClassifier,
    ablation_accuracies,
    accuracy_lost,
    lost_interval,
    matched_directions,
    mean_ablation,
    projection_means,
    resample_ablation,
)
from microtome.interventions.positions import Tokens
from microtome.interventions.steering import Intervention, Steering, anatomy_of

D = 32
TEXTS = [*GOOD, *BAD]


def test_the_papers_arithmetic() -> None:
    assert accuracy_lost(1.00, 0.62) == pytest.approx(0.76)
    assert accuracy_lost(1.00, 0.82) == pytest.approx(0.36)
    with pytest.raises(ValueError, match="nothing to lose"):
        accuracy_lost(0.5, 0.4)


def test_intervals_draw_groups_and_are_honest_near_chance() -> None:
    chance = np.random.default_rng(0)
    base = np.ones(200)
    ablated = (chance.random(200) < 0.62).astype(float)
    share, low, high = lost_interval(base, ablated, range(200))
    assert share == pytest.approx((1 - ablated.mean()) / 0.5)
    expected = 2 * 1.96 * np.sqrt(0.62 * 0.38 / 200) / 0.5
    assert high - low == pytest.approx(expected, rel=0.15)
    twins = lost_interval(np.repeat(base, 4), np.repeat(ablated, 4), np.repeat(np.arange(200), 4).tolist())
    assert twins[2] - twins[1] == pytest.approx(high - low, rel=0.1)
    weak = np.array([1.0, 0.0] * 10 + [1.0])
    assert np.isnan(lost_interval(weak, np.zeros(21), range(21))[1])


@pytest.fixture(scope="module")
def planted(tiny, word_tokenizer):
    """A model that reads one coordinate of the last token's embedding: sign(x . d) is its answer."""
    module = tiny("llama")
    anatomy_of(module)  # found while blocks still write
    with torch.no_grad():
        for layer in module.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        module.model.norm.weight.fill_(1.0)
        module.lm_head.weight.zero_()
        ids = word_tokenizer.convert_tokens_to_ids(["good", "bad"])
        module.lm_head.weight[ids[0], 3], module.lm_head.weight[ids[1], 3] = 1.0, -1.0
        table = module.model.embed_tokens.weight
        table[:, 3] = torch.where(torch.arange(len(table)) % 2 == 0, 0.5, -0.5)
    return LoadedModel.from_module(module, word_tokenizer, name="planted")


def test_a_planted_direction_is_all_there_is_and_others_are_nothing(planted) -> None:
    words = ["cat", "dog", "house", "river", "film", "city", "tree", "man"]
    labels = [planted.tokenizer.convert_tokens_to_ids(word) % 2 == 0 for word in words]
    assert 0 < sum(labels) < len(labels)
    classifier = WordClassifier("the {text}", "good", "bad")
    direction, other = torch.zeros(D), torch.zeros(D)
    direction[3], other[5] = 1.0, 1.0
    sites = ["resid_pre.0"]
    table = ablation_accuracies(
        planted,
        classifier,
        words,
        labels,
        {"own": mean_ablation(direction, sites, [0.0]), "other": mean_ablation(other, sites, [0.0])},
    )
    right = table.groupby("condition")["right"].mean()
    assert right["base"] == 1.0
    assert right["other"] == 1.0
    scores = table[table["condition"] == "own"]["score"]
    assert scores.abs().max() < 1e-5  # chance: nothing is left to answer by
    fitted = classifier.fitted(planted, words, [not label for label in labels])
    assert ablation_accuracies(planted, fitted, words, labels, {})["right"].mean() <= 0.75


def test_means_are_those_of_the_tokens(llama) -> None:
    directions = torch.linalg.qr(noise(D, 2)).Q.T
    stops = Tokens.saying(llama, ".")
    acts = capture(llama, TEXTS, ["resid_post.1"], "all", progress=False)
    rows = acts.rows
    for tokens, keep in ((None, rows["position"] > 0), (stops, rows["token"] == ".")):
        means, deviations = projection_means(llama, TEXTS, ["resid_post.1"], directions, tokens)
        chosen = acts["resid_post.1"][torch.tensor(keep.to_numpy())] @ directions.T
        torch.testing.assert_close(means[0], chosen.mean(0))
        torch.testing.assert_close(deviations[0], chosen.std(0))
    with pytest.raises(ValueError, match="two at least"):
        projection_means(llama, ["the cat"], ["resid_post.1"], directions, stops)


def test_the_mean_replaces_and_the_first_token_is_left_alone(llama) -> None:
    direction = noise(D) / noise(D).norm()
    edits = mean_ablation(direction, ["resid_post.1"], [0.7]).edits(llama)
    acts, clean = (capture(llama, TEXTS, ["resid_post.1"], "all", edits=e, progress=False) for e in (edits, None))
    is_first = torch.tensor((clean.rows["position"] == 0).to_numpy())
    found = acts["resid_post.1"]
    assert torch.equal(found[is_first], clean["resid_post.1"][is_first])
    torch.testing.assert_close(found[~is_first] @ direction, torch.full((int((~is_first).sum()),), 0.7))


def test_resampling_draws_from_the_pool_whatever_the_batch(llama) -> None:
    direction, pool = noise(D) / noise(D).norm(), noise(500, seed=2)
    steering = resample_ablation(direction, ["resid_post.1"], [pool])
    acts = capture(llama, TEXTS, ["resid_post.1"], "all", edits=steering.edits(llama), progress=False)
    rest = torch.tensor((acts.rows["position"] > 0).to_numpy())
    drawn = (acts["resid_post.1"] @ direction)[rest]
    nearest = (drawn[:, None] - pool).abs().min(1).values
    assert nearest.max() < 1e-4
    assert len(set(drawn.round(decimals=3).tolist())) > 0.8 * len(drawn)
    narrow = capture(llama, TEXTS, ["resid_post.1"], "all", edits=steering.edits(llama), max_tokens=8, progress=False)
    torch.testing.assert_close(narrow["resid_post.1"], acts["resid_post.1"], rtol=1e-4, atol=1e-5)
    other = resample_ablation(direction, ["resid_post.1"], [pool], seed=1)
    again = capture(llama, TEXTS, ["resid_post.1"], "all", edits=other.edits(llama), progress=False)
    assert not torch.allclose((again["resid_post.1"] @ direction)[rest], drawn)
    with pytest.raises(ValueError, match="finite coordinates"):
        Resample(direction, torch.tensor([float("nan")]))
    off = Steering(Intervention("resid_post.1", Resample(direction, pool), "all", 0.0))
    zero = capture(llama, TEXTS, ["logits"], "all", edits=off.edits(llama), progress=False)["logits"]
    assert torch.equal(zero, capture(llama, TEXTS, ["logits"], "all", progress=False)["logits"])


def test_matched_directions_have_the_directions_own_variance() -> None:
    x = noise(3000, D) * torch.linspace(0.1, 3, D)
    direction = noise(D, seed=7)
    found = matched_directions(x, direction, 10)
    covariance = torch.cov(x.T)
    unit = direction / direction.norm()
    wanted = float(unit @ covariance @ unit)
    for one in found:
        assert float(one.norm()) == pytest.approx(1.0, abs=1e-5)
        assert float(one @ covariance @ one) == pytest.approx(wanted, rel=1e-3)
        assert abs(float(one @ unit)) < 1e-4
    assert abs(float((found @ found.T).triu(1).mean())) < 0.3
    with pytest.raises(ValueError, match="No random direction"):
        matched_directions(x, torch.eye(D)[-1] * 1.0, 3)
