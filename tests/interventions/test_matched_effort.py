"""Effort read off the ledger against the changes themselves, and the strength that reaches a wanted one."""

import pytest
from steering_steps import noise

from microtome.interventions.contrast import contrast, contrast_rows
from microtome.interventions.controllers import controlled
from microtome.interventions.matched_effort import effort_of, strength_for_effort
from microtome.interventions.operations import Add, Project
from microtome.interventions.steering import Intervention, Steering

TEXTS = ["the happy cat ran to the river .", "she hated the bad film .", "a great big city"]
SITES = ["resid_post.0", "resid_post.1", "resid_post.2"]


def pushes(*sizes, positions="all", strength=1.0, names=None) -> Steering:
    return Steering(
        Intervention(site, Add(size * noise(32) / noise(32).norm()), positions, strength, name=name)
        for site, size, name in zip(SITES, sizes, names or ["a"] * len(sizes), strict=False)
    )


def test_effort_of_adding_is_the_squared_length_over_layers(llama):
    assert effort_of(llama, pushes(3.0), TEXTS) == pytest.approx(9.0, rel=1e-5)
    assert effort_of(llama, pushes(3.0, 4.0), TEXTS) == pytest.approx(25.0, rel=1e-5)
    assert effort_of(llama, pushes(3.0, strength=0.5), TEXTS) == pytest.approx(2.25, rel=1e-5)
    assert effort_of(llama, pushes(3.0, strength=0.0), TEXTS) == 0.0


def test_it_is_per_token_on_which_the_edit_acts(llama):
    assert effort_of(llama, pushes(3.0, positions=(1,)), TEXTS) == pytest.approx(9.0, rel=1e-5)
    assert effort_of(llama, pushes(3.0, 4.0, positions="last"), TEXTS) == pytest.approx(25.0, rel=1e-5)


def test_names_and_batches_do_not_change_it(llama):
    assert effort_of(llama, pushes(3.0, 4.0, names=["a", "b"]), TEXTS) == pytest.approx(25.0, rel=1e-5)
    assert effort_of(llama, pushes(3.0, 4.0), TEXTS * 7) == pytest.approx(25.0, rel=1e-5)


def test_several_edits_of_one_site_each_count(llama):
    both = Steering([*pushes(3.0, names=["a"]), *pushes(4.0, names=["b"])])
    assert effort_of(llama, both, TEXTS) == pytest.approx(25.0, rel=1e-5)


def test_layers_at_different_tokens_are_per_token_of_the_busiest(llama):
    """9 at every token of one layer and 16 at one token of each text of another."""
    tokens = sum(len(ids) for ids in llama.tokenizer(TEXTS)["input_ids"])
    mixed = Steering([*pushes(3.0), Intervention(SITES[1], Add(4 * noise(32) / noise(32).norm()), (1,))])
    assert effort_of(llama, mixed, TEXTS) == pytest.approx(9 + 16 * len(TEXTS) / tokens, rel=1e-5)


@pytest.mark.parametrize(("start", "wanted"), [(1.0, 30.0), (1.0, 1e-3), (100.0, 5.0), (1e-3, 400.0)])
def test_the_strength_of_adding_is_the_root(llama, start, wanted):
    found = strength_for_effort(lambda s: pushes(3.0, strength=s), wanted, llama, TEXTS, start=start, tolerance=1e-3)
    assert found == pytest.approx((wanted / 9) ** 0.5, rel=1e-3)


def test_one_method_is_matched_to_another(llama):
    good = ["the happy cat ran to the river .", "she liked the good film .", "a great big city ."]
    bad = ["the sad cat sat in the house .", "she hated the bad film .", "an awful old town"]
    means = contrast(llama, contrast_rows(llama, good, bad, SITES), positions="all")
    wanted = effort_of(llama, controlled(llama, means, kp=0.5, ki=0.1, positions="all"), TEXTS)

    def p_only(strength: float) -> Steering:
        return controlled(llama, means, kp=0.2, positions="all", strength=strength)

    found = strength_for_effort(p_only, wanted, llama, TEXTS, tolerance=0.01)
    assert effort_of(llama, p_only(found), TEXTS) == pytest.approx(wanted, rel=0.01)
    assert effort_of(llama, p_only(1.0), TEXTS) != pytest.approx(wanted, rel=0.05)


def test_what_cannot_be_reached_is_said(llama):
    with pytest.raises(ValueError, match="above 0"):
        strength_for_effort(lambda s: pushes(3.0, strength=s), 0.0, llama, TEXTS)
    with pytest.raises(ValueError, match="above 0"):
        strength_for_effort(lambda s: pushes(3.0, strength=s), float("nan"), llama, TEXTS)

    def capped(strength: float) -> Steering:
        return Steering(Intervention(SITES[0], Project(noise(32)), strength=min(strength, 1.0)))

    with pytest.raises(ValueError, match=r"No strength up to 32 has an effort of 1e\+09"):
        strength_for_effort(capped, 1e9, llama, TEXTS, most=6)

    def jumps(strength: float) -> Steering:
        return pushes(3.0 if strength > 1.5 else 1.0)

    with pytest.raises(ValueError, match="jumps"):
        strength_for_effort(jumps, 5.0, llama, TEXTS, most=12)


def test_tokens_in_front_of_the_continuation_are_left_out(llama):
    """A projection's effort differs from token to token; strength goes with its root."""

    def steer(strength: float) -> Steering:
        return Steering(Intervention(SITES[0], Project(noise(32)), "generated", strength))

    first, third = (effort_of(llama, steer(1.0), TEXTS, prompt_tokens=n) for n in (1, 3))
    assert first != pytest.approx(third, rel=1e-3)
    found = strength_for_effort(steer, third / 4, llama, TEXTS, prompt_tokens=3, tolerance=1e-3)
    assert found == pytest.approx(0.5, rel=1e-3)
