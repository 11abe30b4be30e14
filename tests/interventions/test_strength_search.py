"""The largest strength a side effect allows, on side effects that are known."""

import math

import pytest

from microtome.interventions.strength_search import search_strength


@pytest.mark.parametrize("power", [0.5, 1, 2, 4])
@pytest.mark.parametrize("answer", [0.03, 0.9, 1.0, 7.3, 60.0])
def test_a_power_is_found_to_the_tolerance(power, answer):
    def side(strength):
        return (abs(strength) / answer) ** power

    found = search_strength(side, 1.0, tolerance=0.05)
    assert found.is_reached
    assert 0.95 <= side(found.strength) <= 1
    assert side(found.strength) == found.table.loc[found.table["strength"] == found.strength, "side_effect"].item()
    assert found.table["strength"].is_monotonic_increasing
    negative = search_strength(side, 1.0, start=-1.0)
    assert negative.strength == pytest.approx(-found.strength)


def test_nothing_is_asked_twice_and_not_beyond_the_largest():
    asked = []

    def side(strength):
        asked.append(strength)
        return 1e-3 * strength

    found = search_strength(side, 1.0, largest=50.0)
    assert asked == [1, 2, 4, 8, 16, 32, 50]
    assert (found.strength, found.is_reached) == (50, False)


def test_the_number_of_tries_is_kept():
    asked = []
    found = search_strength(lambda s: asked.append(s) or s / 7.3, 1.0, tolerance=1e-9, most=6)
    assert len(asked) == len(found.table) == 6
    assert found.strength <= 7.3


def test_a_side_effect_that_is_always_too_large_allows_nothing():
    found = search_strength(lambda s: 2.0, 1.0)
    assert (found.strength, found.is_reached) == (0, True)
    assert len(found.table) <= 24


def test_a_model_that_breaks_has_gone_too_far():
    found = search_strength(lambda s: 0.1 if s < 3 else math.nan, 1.0)
    assert 2.9 < found.strength < 3
    jump = search_strength(lambda s: 0.1 if s <= 3 else 5.0, 1.0)
    assert 2.9 < jump.strength <= 3


def test_other_numbers_are_kept_beside():
    found = search_strength(lambda s: {"side_effect": s, "target": 10 * s}, 3.0)
    assert found.table["target"].tolist() == [10 * s for s in found.table["strength"]]


@pytest.mark.parametrize(
    "settings",
    [
        {"limit": 0.0},
        {"limit": math.nan},
        {"start": 0.0},
        {"start": math.nan},
        {"start": 100.0},
        {"tolerance": 0.0},
        {"tolerance": 1.0},
        {"most": 1},
    ],
)
def test_settings_without_a_search_are_refused(settings):
    limit = settings.pop("limit", 1.0)
    with pytest.raises(ValueError, match="give a limit above"):
        search_strength(lambda s: s, limit, **settings)
