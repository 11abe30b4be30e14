from dataclasses import replace

import numpy as np
import pytest

from microtome.lenses.early_exit import early_exits, exits, never, thresholds
from microtome.lenses.lens_statistics import LensStatistics
from microtome.lenses.logit_lens import logit_lens

DEPTHS, TOKENS, DOCUMENTS = 5, 400, 20


@pytest.fixture(scope="module")
def planted() -> LensStatistics:
    """Tokens whose lens is right from a depth of their own on, and whose gap says so but for noise."""
    chance = np.random.default_rng(0)
    settle = chance.integers(0, DEPTHS, TOKENS)
    right = np.arange(DEPTHS)[:, None] >= settle
    right[-1] = True
    gap = np.where(right, 0.8, 0.2) + chance.uniform(-0.25, 0.25, (DEPTHS, TOKENS))
    top = np.where(right, 7, 8 + np.arange(DEPTHS)[:, None])
    text = np.repeat(np.arange(DOCUMENTS), TOKENS // DOCUMENTS)
    position = np.tile(np.arange(1, 1 + TOKENS // DOCUMENTS), DOCUMENTS)
    scalar = np.ones((DEPTHS, TOKENS))
    return LensStatistics(
        lens="planted",
        sites=("resid_pre.0", *(f"resid_post.{n}" for n in range(DEPTHS - 1))),
        depth=np.arange(DEPTHS),
        text=text,
        position=position,
        document=text,
        token=np.full(TOKENS, 3),
        target=np.full(TOKENS, 7),
        is_sink=np.zeros(TOKENS, dtype=bool),
        final_entropy=np.ones(TOKENS),
        final_cross_entropy=np.ones(TOKENS),
        final_top=np.full(TOKENS, 7),
        kl=scalar,
        kl_reverse=scalar,
        entropy=1.2 - gap,
        cross_entropy=np.where(right, 1.0, 3.0),
        target_rank=np.where(right, 0, 5),
        top_ids=np.stack([top, np.full_like(top, 99)], -1),
        top_probs=np.stack([0.5 + gap / 2, 0.5 - gap / 2], -1),
        gap=gap,
        kl_previous=np.where(right, 0.1, 1.0),
        blocks=DEPTHS - 1,
    )


def leaves(found, rule, tau, depth, token) -> bool:
    if rule == "patience":
        tops = found.top_ids[max(0, depth - int(min(tau, 99)) + 1) : depth + 1, token, 0]
        return depth + 1 >= tau and len(set(tops)) == 1
    name = {"kl": "kl_previous"}.get(rule, rule)
    value = np.round(getattr(found, name)[depth, token], 6)
    return value <= tau if rule in ("entropy", "kl") else value >= tau


def by_loop(found, rule, tau):
    last = len(found.sites) - 1
    return [
        next(depth for depth in range(last + 1) if depth == last or leaves(found, rule, tau, depth, token))
        for token in range(len(found.text))
    ]


@pytest.mark.parametrize("rule", ["gap", "max_prob", "entropy", "kl", "patience"])
def test_tokens_leave_where_a_loop_says(rule, planted):
    for tau in thresholds(rule, planted)[::60]:
        assert exits(rule, planted, tau).tolist() == by_loop(planted, rule, tau)


@pytest.mark.parametrize("rule", ["gap", "max_prob", "entropy", "kl", "patience"])
def test_a_rule_that_never_holds_is_the_model(rule, planted):
    left = exits(rule, planted, never(rule))
    assert (left == DEPTHS - 1).all()
    assert planted.agrees[left, np.arange(TOKENS)].all()


def test_a_planted_gap_saves_what_it_should(planted):
    found = early_exits(planted, rules=("gap", "kl"), targets=(0.95, 1.0))
    table = found.table.set_index(["rule", "target"])
    gap, random, oracle = table.loc[("gap", 0.95)], table.loc[("random as gap", 0.95)], table.loc[("oracle", 1.0)]
    assert gap["validation_agreement"] >= 0.95
    assert gap["agreement"] > 0.9
    assert gap["agreement_low"] <= gap["agreement"] <= gap["agreement_high"]
    assert oracle["agreement"] == 1.0
    assert gap["blocks_saved"] > 0.8 * oracle["blocks_saved"]
    assert random["blocks_saved"] == pytest.approx(gap["blocks_saved"])
    assert random["agreement"] < gap["agreement"] - 0.2
    assert table.loc[("fixed depth", 0.95), "blocks_saved"] == 0
    assert gap["head_products"] == pytest.approx(gap["blocks_run"] + 1)
    # the gap of the planted lens tells right from wrong at 0.45 to 0.55 exactly; kl tells it without error
    assert table.loc[("kl", 1.0), "blocks_saved"] == pytest.approx(oracle["blocks_saved"])
    curve = found.curves[found.curves["rule"] == "gap"].sort_values("tau")
    assert curve["blocks_saved"].is_monotonic_decreasing
    assert curve["agreement"].iloc[-1] == 1.0
    assert curve["agreement"].iloc[0] < 0.5


def test_agreement_and_cross_entropy_are_those_of_the_exits(planted):
    row = early_exits(planted, rules=("gap",), targets=(0.9,), validation_share=0.5).table.iloc[0]
    documents = np.unique(planted.document)
    tested = None
    for seed_order in (np.random.default_rng([0, 5]).permutation(len(documents)),):
        tested = ~np.isin(planted.document, documents[seed_order[:10]])
    test = planted.at(tested)
    left = by_loop(test, "gap", row["tau"])
    rows = np.arange(len(test.text))
    assert row["agreement"] == pytest.approx(test.agrees[left, rows].mean())
    assert row["cross_entropy"] == pytest.approx(test.cross_entropy[left, rows].mean())
    assert row["blocks_run"] == pytest.approx(np.mean(left))


def test_a_real_lens_goes_through(tiny):
    generator = np.random.default_rng(0)
    found = logit_lens(tiny("llama"), generator.integers(3, 120, (8, 9)).tolist(), previous=True)
    table = early_exits(found, rules=("gap", "kl", "patience")).table
    assert len(table) == 3 * 3 * 2 + 3 + 1
    assert (table["blocks_saved"] >= 0).all()
    assert table["tokens"].iloc[0] < 8 * 9


def test_what_makes_no_sense_is_refused(planted, tiny):
    with pytest.raises(ValueError, match="no rule 'luck'"):
        early_exits(planted, rules=("luck",))
    with pytest.raises(ValueError, match="no share"):
        early_exits(planted, targets=(95,))
    with pytest.raises(ValueError, match="one document"):
        early_exits(replace(planted, document=np.zeros(TOKENS, dtype=int)))
    with pytest.raises(ValueError, match="previous=True"):
        early_exits(replace(planted, kl_previous=None), rules=("kl",))
    with pytest.raises(ValueError, match="ascending"):
        early_exits(replace(planted, depth=planted.depth[::-1]))
    with pytest.raises(ValueError, match="not the model"):
        early_exits(replace(planted, final_top=planted.final_top + 1))
    with pytest.raises(ValueError, match="other tokens"):
        early_exits({"one": planted, "two": planted.at(np.arange(40))})
    with pytest.raises(ValueError, match="at least one lens"):
        early_exits({})


def test_one_depth_and_tokens_without_a_next_one_are_no_crash(tiny):
    model = tiny("llama")
    texts = np.random.default_rng(0).integers(3, 120, (6, 2)).tolist()
    found = early_exits(logit_lens(model, texts, previous=True), rules=("gap", "kl", "patience"))
    assert found.table["cross_entropy"].isna().all()
    assert found.table["agreement"].notna().all()
    alone = early_exits(logit_lens(model, texts, "resid_post.2", previous=True), rules=("gap", "kl", "patience"))
    assert (alone.table["blocks_saved"] == 0).all()
    assert (alone.table["agreement"] == 1).all()


@pytest.mark.parametrize("share", [0, 1, -3, float("nan")])
def test_a_share_of_documents_is_between_0_and_1(share, planted):
    with pytest.raises(ValueError, match="between 0 and 1"):
        early_exits(planted, validation_share=share)


def test_no_threshold_lies_within_rounding(planted):
    noise = np.random.default_rng(1).uniform(-1e-8, 1e-8, planted.entropy.shape)
    sure = replace(planted, entropy=np.where(planted.agrees, 0.0, 1.0) + noise)
    assert thresholds("entropy", sure).tolist() == [0.0, 1.0, -np.inf]
    agrees = np.take_along_axis(planted.agrees, exits("entropy", sure, 0.0)[None], 0)
    assert agrees.all()
