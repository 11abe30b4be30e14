"""Inference-time intervention: ranking of heads against scikit-learn, planted answers, and nothing held out used."""

import numpy as np
import pytest
import torch
from scipy.stats import binom
from sklearn.linear_model import LogisticRegression
from sklearn.preprocessing import StandardScaler
from steering_steps import noise

from microtome.interventions.head_rows import HeadRows, head_rows
from microtome.interventions.iti import (
    INNER_FOLDS,
    PENALTY,
    best_by_luck,
    choose_shift,
    head_accuracy,
    head_directions,
    head_shifts,
)
from microtome.interventions.steering import steered
from microtome.probes.folds import grouped_folds

HEADS, ROWS, WIDTH = 12, 80, 8
LABELS = np.random.default_rng(0).permutation(ROWS) < ROWS // 2
GROUPS = np.arange(ROWS) // 2
SITES = tuple(f"z.{layer}.{head}" for layer in range(3) for head in range(4))


def planted(gap: float = 3.0, head: int = 5, seed: int = 0) -> HeadRows:
    """Noise in every head; one of them tells the classes apart along its first axis."""
    z = noise(HEADS, ROWS, WIDTH, seed=seed)
    z[head, :, 0] += gap * torch.tensor(LABELS)
    return HeadRows(SITES, z, 1)


# ---- rows of heads


@pytest.mark.parametrize("kind", ["llama", "gpt2", "qwen3"])
@pytest.mark.parametrize("tokens", [1, 3])
def test_rows_are_what_the_output_projection_reads(loaded, kind, tokens):
    """Against one forward per text with a hook of torch's own; a text of two tokens gives the two it has."""
    model = loaded(kind)
    texts = ["she liked the good old film .", "the cat", "we saw a big red river in the city ."]
    found = head_rows(model, texts, tokens=tokens, max_tokens=16)
    assert found.sites == SITES
    blocks = model.module.transformer.h if kind == "gpt2" else model.module.model.layers
    for layer, block in enumerate(blocks):
        projection = block.attn.c_proj if kind == "gpt2" else block.self_attn.o_proj
        for text, row in zip(texts, range(3), strict=True):
            seen = []
            hook = projection.register_forward_pre_hook(lambda _, args, seen=seen: seen.append(args[0].detach()))
            with torch.no_grad():
                model.module(**model.tokenizer(text, return_tensors="pt", return_token_type_ids=False))
            hook.remove()
            wanted = seen[0][0].view(-1, 4, WIDTH)[-tokens:].mean(0)
            assert torch.allclose(found.z[4 * layer : 4 * layer + 4, row], wanted, atol=1e-5)


def test_at_least_one_token(llama):
    with pytest.raises(ValueError, match="tokens=0"):
        head_rows(llama, ["the cat"], tokens=0)


# ---- ranking


def test_accuracies_are_those_of_scikit_learn():
    z = planted(0.8).z
    found = head_accuracy(z, LABELS, GROUPS, seed=1)
    test = grouped_folds(LABELS.astype(int), GROUPS, folds=INNER_FOLDS, seed=1)
    for head in range(HEADS):
        right = 0
        for rows in test:
            scale = StandardScaler().fit(z[head][~rows])
            probe = LogisticRegression(C=PENALTY, tol=1e-8, max_iter=1000)
            probe.fit(scale.transform(z[head][~rows]), LABELS[~rows])
            right += (probe.predict(scale.transform(z[head][rows])) == LABELS[rows]).sum()
        assert found[head] == pytest.approx(right / ROWS)


def test_the_probes_direction_is_that_of_scikit_learn():
    z = planted(1.0).z
    found = head_directions(z, LABELS, "probe")
    for head in range(HEADS):
        scale = StandardScaler().fit(z[head])
        probe = LogisticRegression(C=PENALTY, tol=1e-10, max_iter=5000).fit(scale.transform(z[head]), LABELS)
        weights = probe.coef_[0] / scale.scale_
        assert np.allclose(found[head], weights / np.linalg.norm(weights), atol=1e-4)


@pytest.mark.parametrize("probe", ["logistic", "mlp"])
def test_a_planted_head_comes_first(probe):
    shifts = head_shifts(planted(), LABELS, GROUPS.tolist(), probe=probe)
    assert shifts.table["site"][0] == "z.1.1"
    assert shifts.table["accuracy"].is_monotonic_decreasing
    assert shifts.table["accuracy"][0] > 0.85
    assert float(shifts.theta[0, 0]) > 0.9
    assert torch.allclose(shifts.theta.norm(dim=1), torch.ones(HEADS), atol=1e-6)


def test_the_shift_is_the_mean_difference_times_the_deviation():
    rows = planted()
    shifts = head_shifts(rows, LABELS, GROUPS.tolist())
    z = rows.z[5].double().numpy()
    difference = z[LABELS].mean(0) - z[~LABELS].mean(0)
    theta = difference / np.linalg.norm(difference)
    assert np.allclose(shifts.theta[0], theta, atol=1e-6)
    assert float(shifts.sigma[0]) == pytest.approx((z @ theta).std(ddof=1), rel=1e-5)


def test_random_labels_rank_as_well_as_luck():
    """The best of many independent heads on shuffled labels: the maximum of as many binomials."""
    z = noise(60, ROWS, 4, seed=3)
    best = best_by_luck(HeadRows(tuple(map(str, range(60))), z, 1), LABELS, list(range(ROWS)), draws=40)
    hits = np.arange(ROWS + 1)
    below = binom.cdf(hits, ROWS, 0.5) ** 60
    expected = (np.diff(below, prepend=0) * hits).sum() / ROWS
    assert best.mean() == pytest.approx(expected, abs=0.03)
    assert head_accuracy(z, LABELS, np.arange(ROWS)).mean() == pytest.approx(0.5, abs=0.04)


def test_xor_is_seen_by_the_network_alone_and_has_no_shift():
    """Labels that are the exclusive or of two signs: a network tells them apart, a line and the means do not."""
    signs = np.array([[a, b] for a in (-1, 1) for b in (-1, 1)] * 100)
    labels = signs[:, 0] != signs[:, 1]
    z = torch.tensor(signs + 0.15 * np.random.default_rng(0).normal(size=signs.shape)).float()[None]
    groups = np.arange(len(signs))
    assert head_accuracy(z, labels, groups, probe="mlp")[0] > 0.95
    assert head_accuracy(z, labels, groups)[0] == pytest.approx(0.5, abs=0.1)
    apart = z[0, labels].mean(0) - z[0, ~labels].mean(0)
    assert float(apart.norm()) < 4 * 0.015  # the standard error of the noise, where an edge is 2


# ---- nothing held out


@pytest.mark.parametrize("direction", ["mean", "probe"])
def test_rows_outside_the_training_part_change_nothing(direction):
    """A leak is planted: on held-out rows another head holds the label itself, a hundred times as large."""
    train = GROUPS < 28
    clean, leaking = planted(), planted()
    leaking.z[2, ~train] = 100.0 * torch.tensor(LABELS)[~train, None]
    one, other = (
        head_shifts(rows, LABELS, GROUPS.tolist(), train=train, direction=direction) for rows in (clean, leaking)
    )
    assert one.table.equals(other.table)
    assert torch.equal(one.theta, other.theta)
    assert torch.equal(one.sigma, other.sigma)
    assert one.counts == (int(LABELS[train].sum()), int((~LABELS[train]).sum()))
    seen = head_shifts(leaking, LABELS, GROUPS.tolist(), direction=direction)
    assert not torch.allclose(seen.sigma.sort().values, one.sigma.sort().values)


def test_groups_stay_whole_in_the_ranking():
    """Every group has its own offset in all heads and one label: a probe that saw the group would know the label."""
    groups = np.arange(ROWS) // 8
    labels = groups % 2 == 0
    z = 10 * noise(10, 32, seed=4)[groups][None] + 0.01 * noise(1, ROWS, 32)
    assert head_accuracy(z, labels, np.arange(ROWS))[0] > 0.95
    assert head_accuracy(z, labels, groups)[0] < 0.85


def test_heads_and_strength_are_chosen_by_what_the_caller_measures(llama):
    shifts = head_shifts(planted(), LABELS, GROUPS.tolist())
    asked = []

    def measure(artefact, strength):
        asked.append((len(artefact.sites), strength, artefact.positions))
        return float("nan") if strength > 10 else len(artefact.sites) - strength

    table = choose_shift(shifts, llama, measure, heads=(1, 4), strengths=(2.0, 20.0, 5.0), positions="all")
    assert asked == [(k, alpha, "all") for k in (1, 4) for alpha in (2.0, 20.0, 5.0)]
    assert table.iloc[0].tolist() == [4, 2.0, 2.0]
    assert table["score"].isna().tolist() == [False] * 4 + [True] * 2


def test_a_choice_on_validation_rows_does_not_see_the_test(llama):
    """Nested: fit on training rows, choose on validation rows; whatever stands in the test rows, the choice is the
    same."""
    part = np.select([GROUPS < 20, GROUPS < 30], ["train", "validation"], "test")

    def chosen(rows: HeadRows):
        shifts = head_shifts(rows, LABELS, GROUPS.tolist(), train=part == "train")
        held = torch.tensor(part == "validation")

        def measure(artefact, strength):
            score = 0.0
            for site in artefact.sites:
                z = rows.z[rows.sites.index(site)][held]
                moved = (z + strength * artefact.vector(site)) @ artefact.vector(site)
                score += float(moved.mean()) - 0.1 * strength**2 * float(artefact.vector(site).norm())
            return score

        return choose_shift(shifts, llama, measure, heads=(1, 2, 3), strengths=(1.0, 2.0, 4.0))

    leaking = planted()
    leaking.z[:, torch.tensor(part == "test")] = 1e3 * torch.tensor(LABELS)[part == "test", None].float()
    assert chosen(planted()).equals(chosen(leaking))
    leaking.z[:, torch.tensor(part == "validation")] = 5.0
    assert not chosen(planted()).equals(chosen(leaking))


# ---- artefacts


def test_the_artefact_has_the_best_heads_and_moves_them(llama):
    shifts = head_shifts(planted(), LABELS, GROUPS.tolist())
    artefact = shifts.artefact(llama, 3, names=("yes", "no"))
    assert artefact.sites == tuple(shifts.table["site"][:3])
    assert torch.allclose(artefact.tensors["vector"], shifts.sigma[:3, None] * shifts.theta[:3])
    assert (artefact.method, artefact.positive, artefact.counts) == ("ITI", "yes", (40, 40))
    skipped = shifts.artefact(llama, 2, skip=1)
    assert skipped.sites == tuple(shifts.table["site"][1:3])
    assert shifts.artefact(llama, 12).steering(llama)
    nonlinear = head_shifts(planted(), LABELS, GROUPS.tolist(), probe="mlp")
    assert nonlinear.artefact(llama, 1).method == "NL-ITI"


def test_a_head_moves_by_alpha_deviations_before_the_output_projection(llama):
    shifts = head_shifts(planted(), LABELS, GROUPS.tolist())
    artefact = shifts.artefact(llama, 1, positions="all")
    seen = []
    projection = llama.module.model.layers[1].self_attn.o_proj
    ids = torch.tensor([[5, 6, 7, 8]])
    for strength in (0.0, 2.5):
        with steered(llama, artefact.steering(llama, strength=strength)), torch.no_grad():
            hook = projection.register_forward_pre_hook(lambda _, args: seen.append(args[0].clone()))
            llama.module(input_ids=ids)
            hook.remove()
    moved = (seen[1] - seen[0]).view(4, 4, WIDTH)
    assert torch.allclose(moved[:, 1], (2.5 * shifts.sigma[0] * shifts.theta[0]).expand(4, WIDTH), atol=1e-5)
    assert not moved[:, [0, 2, 3]].any()


def test_random_heads_are_others(llama):
    shifts = head_shifts(planted(), LABELS, GROUPS.tolist())
    best = set(shifts.artefact(llama, 4).sites)
    drawn = [shifts.random_heads(llama, 4, seed=seed) for seed in range(12)]
    for one in drawn:
        assert len(set(one.sites)) == 4
        assert not best & set(one.sites)
        place = shifts.table["site"].tolist().index(one.sites[0])
        assert torch.allclose(one.vector(one.sites[0]), shifts.sigma[place] * shifts.theta[place])
    assert len({one.sites for one in drawn}) > 3
    assert set().union(*(one.sites for one in drawn)) == set(SITES) - best
    for count in (0, 7):
        with pytest.raises(ValueError, match=f"heads={count}"):
            shifts.random_heads(llama, count)


def test_too_many_heads_are_refused(llama):
    shifts = head_shifts(planted(), LABELS, GROUPS.tolist())
    for settings in ({"heads": 0}, {"heads": 13}, {"heads": 12, "skip": 1}):
        with pytest.raises(ValueError, match="there are"):
            shifts.artefact(llama, **settings)


@pytest.mark.parametrize("direction", ["mean", "probe"])
@pytest.mark.parametrize("value", [0.0, 0.1, 1e4])
def test_a_head_that_holds_the_same_for_both_has_no_shift(llama, direction, value):
    """Also where rounding leaves a difference of the means."""
    rows = planted()
    labels = LABELS.copy()
    labels[:3] = True
    rows.z[7] = value
    shifts = head_shifts(rows, labels, list(range(ROWS)), direction=direction)
    place = shifts.table["site"].tolist().index("z.1.3")
    assert not shifts.theta[place].any()
    assert shifts.artefact(llama, place or 1).sites
    with pytest.raises(ValueError, match=r"z\.1\.3: what the head holds is the same for both classes"):
        shifts.artefact(llama, place + 1)


def test_unusable_rows_are_refused():
    rows = planted()
    with pytest.raises(ValueError, match="of one class"):
        head_shifts(rows, LABELS, GROUPS.tolist(), train=LABELS)
    with pytest.raises(ValueError, match="give one each"):
        head_shifts(rows, LABELS[:-1], GROUPS.tolist())
    with pytest.raises(ValueError, match="groups"):
        head_shifts(rows, LABELS, [i % 3 for i in range(ROWS)])
    with pytest.raises(ValueError, match="direction='median'"):
        head_directions.__wrapped__(rows.z, LABELS, "median")
