"""Which tokens are set apart, and why."""

import pytest
import torch

from microtome.lenses.strata import REASONS, TokenRule, massive_tokens, ordinary_median


@pytest.fixture
def rows():
    return torch.randn(6, 50, generator=torch.Generator().manual_seed(0))


def test_a_token_is_massive_when_both_thresholds_are_passed(rows):
    median = ordinary_median(rows, torch.ones(6, dtype=torch.bool))
    assert 0.6 < median < 0.75  # of |N(0, 1)|: 0.674
    rows[1, 7], rows[2, 7], rows[3, 7] = 2000.0, -2000.0, 500.0
    assert massive_tokens(rows, median).tolist() == [False, True, True, False, False, False]
    assert massive_tokens(rows, median, times=500).tolist() == [False, True, True, True, False, False]
    assert massive_tokens(rows / 100, median / 100).sum() == 0  # 20 is not above 100
    assert massive_tokens(rows / 100, median / 100, above=1).sum() == 2


def test_the_median_leaves_first_and_special_tokens_out(rows):
    rows[0] = 1e6
    ordinary = torch.tensor([False, True, True, True, True, True])
    assert ordinary_median(rows, ordinary) < 1
    assert ordinary_median(rows[:1], ordinary[:1]) == 1e6  # nothing else there


def test_each_token_has_one_reason_the_first_that_holds(rows):
    rows[[0, 2, 4], 3] = 5000.0
    position = torch.tensor([0, 1, 2, 0, 1, 2])
    special = torch.tensor([True, True, False, False, False, False])
    rule = TokenRule()
    found = rule.reasons(position, special, {"resid_post.0": rows}, {"resid_post.0": 0.7})
    assert [REASONS[k] for k in found] == ["first", "special", "massive", "first", "massive", "rest"]
    found = TokenRule(first=False).reasons(position, special, {"resid_post.0": rows}, {"resid_post.0": 0.7})
    assert [REASONS[k] for k in found] == ["special", "special", "massive", "rest", "massive", "rest"]
    none = TokenRule(first=False, special=False, massive=False)
    assert none.reasons(position, special, {"resid_post.0": rows}, {}).sum() == 0


def test_residual_sites_are_looked_at_unless_others_are_named():
    names = ("resid_pre.0", "z.1", "resid_post.2", "big/resid_post.1", "sounds", "attn_out.1")
    assert TokenRule().sites(names) == ("resid_pre.0", "resid_post.2", "big/resid_post.1")
    assert TokenRule(looked_at=("attn_out.1",)).sites(names) == ("attn_out.1",)
    assert TokenRule(massive=False).sites(names) == ()


def test_wrong_thresholds():
    with pytest.raises(ValueError, match="thresholds are 0 or more"):
        TokenRule(above=-1.0)
