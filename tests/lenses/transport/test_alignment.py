"""Alignment of two sets of rows with known answers: rotated, mixed, independent, of other widths, told by the token."""

from itertools import permutations

import numpy as np
import pytest
import torch

from microtome.lenses.canonical import canonical_correlations
from microtome.lenses.map_scores import map_scores
from microtome.lenses.pair_moments import PairMoments
from microtome.lenses.ridge_map import ridge_map
from microtome.lenses.simple_maps import procrustes_map
from microtome.lenses.transport.alignment import Alignment, alignment, cka, cka_null, cka_of_two

GENERATOR = torch.Generator().manual_seed(0)


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=GENERATOR, dtype=torch.float64)


@pytest.fixture
def of_rows(row_moments):
    """`of_rows(x, y, **changes)`: the alignment of rows "a/x" and "b/y", as a dictionary of its one row."""

    def build(x: torch.Tensor, y: torch.Tensor, **changes) -> dict:
        moments = row_moments({"a/x": x, "b/y": y})
        moments.is_shuffled = changes.pop("shuffled", False)
        return alignment(moments, "a", "b", **changes).table.iloc[0].to_dict()

    return build


@pytest.fixture
def several(row_moments):
    """Moments of three depths of a and two of b; b/resid_post.0 is nearest to a/resid_post.1."""
    start = normal(1500, 8) * torch.logspace(0.5, -0.5, 8).double()
    mixes = [normal(8, 8) / 8**0.5 for _ in range(2)]
    first = start + torch.tanh(start @ mixes[0])
    second = first + torch.tanh(first @ mixes[1])
    wide = torch.cat([second, normal(1500, 3)], 1) @ normal(11, 11) + 0.3 * normal(1500, 11)
    other = start @ normal(8, 11) + 0.5 * normal(1500, 11)
    values = {"a/resid_pre.0": start, "a/resid_post.0": first, "a/resid_post.1": second}
    moments = row_moments(values | {"b/resid_pre.0": other, "b/resid_post.0": wide})
    moments.is_shuffled = True
    return moments


ANISOTROPIC = torch.logspace(1, -1, 8).double()


def test_a_rotated_copy_is_the_same_by_every_measure(of_rows):
    x = normal(1000, 8) * ANISOTROPIC + 3
    rotation = torch.linalg.qr(normal(8, 8))[0]
    row = of_rows(x, 2.5 * x @ rotation - 7)
    for name in ("cka", "cka_two", "procrustes", "back_procrustes", "canonical", "r2_vw", "back_r2_vw", "r2_wh"):
        assert row[name] == pytest.approx(1, abs=1e-6), name
    assert row["identity_r2_vw"] < 0.5
    assert row["canonical_above_edge"] == 8


def test_an_invertible_mix_is_the_same_for_ridge_and_canonical_only(of_rows):
    x = normal(1000, 8) * ANISOTROPIC
    row = of_rows(x, x @ (normal(8, 8) * ANISOTROPIC.flip(0)[:, None]))
    for name in ("canonical", "r2_vw", "back_r2_vw", "r2_wh", "back_r2_wh"):
        assert row[name] == pytest.approx(1, abs=1e-5), name
    assert row["cka"] < 0.9
    assert row["cka_two"] < 0.9
    assert row["procrustes"] < 0.9


def test_independent_rows_are_unlike_and_cka_is_what_so_few_rows_give(of_rows):
    row = of_rows(normal(3000, 20), normal(3000, 12), shuffled=True)
    assert row["canonical"] < 3 / 600
    assert row["shuffled_canonical"] < 3 / 600
    for name in ("r2_vw", "back_r2_vw", "r2_wh", "shuffled_r2_vw", "shuffled_back_r2_vw"):
        assert -0.02 < row[name] < 0.005, name
    assert row["canonical_above_edge"] == 0
    assert row["cka_null"] == pytest.approx((20 * 12) ** 0.5 / 599, rel=0.05)
    assert row["cka"] == pytest.approx(row["cka_null"], rel=0.25)
    assert row["shuffled_cka"] == pytest.approx(row["cka_null"], rel=0.25)
    assert abs(row["cka_two"]) < 0.2 * row["cka"]


def test_cka_is_that_of_gram_matrices():
    x, y = normal(60, 9) * 3 + 100, normal(60, 5)
    y[:, :2] += x[:, :2]
    centre = torch.eye(60, dtype=torch.float64) - 1 / 60
    k, m = centre @ x @ x.T @ centre, centre @ y @ y.T @ centre
    direct = (k * m).sum() / (k.square().sum() * m.square().sum()).sqrt()
    assert cka(PairMoments.from_rows(x, y)) == pytest.approx(float(direct), rel=1e-9)


def test_the_null_of_cka_is_its_mean_over_all_pairings():
    x, y = normal(6, 3), normal(6, 2) + 1
    every = [cka(PairMoments.from_rows(x[list(order)], y)) for order in permutations(range(6))]
    assert cka_null(PairMoments.from_rows(x, y)) == pytest.approx(np.mean(every), rel=1e-9)


def test_cka_of_two_sets_does_not_grow_as_rows_get_fewer():
    mix = normal(12, 10) / 4
    covariance = mix.T @ mix + torch.eye(10, dtype=torch.float64)  # of y = x mix + noise, x of unit variance
    expected = float(mix.square().sum() / (12**0.5 * covariance.norm()))
    plain, two = [], []
    for _ in range(400):
        parts = []
        for _ in range(2):
            x = normal(40, 12)
            parts.append(PairMoments.from_rows(x, x @ mix + normal(40, 10)))
        plain.append(cka(parts[0]))
        two.append(cka_of_two(*parts))
    assert np.mean(plain) > expected + 0.1
    assert np.mean(two) == pytest.approx(expected, abs=0.03)


def test_widths_differ_and_the_wider_one_says_more(of_rows):
    x = normal(2000, 6)
    row = of_rows(x, torch.cat([x, normal(2000, 4)], 1) @ torch.linalg.qr(normal(10, 10))[0])
    assert row["back_r2_vw"] == pytest.approx(1, abs=1e-5)
    assert row["r2_vw"] == pytest.approx(0.6, abs=0.05)
    assert row["r2_wh"] == pytest.approx(0.6, abs=0.05)
    assert row["canonical"] == pytest.approx(1, abs=1e-5)  # of the narrower site's directions
    assert row["procrustes"] == pytest.approx(0.6, abs=0.05)
    assert np.isnan(row["back_procrustes"])
    assert np.isnan(row["identity_r2_vw"])
    assert np.isnan(row["lexical_r2_vw"])


def test_what_the_token_says_is_told_apart(row_moments):
    token, hidden = normal(3000, 6), normal(3000, 6)
    values = {
        "a/resid_pre.0": token,
        "a/resid_post.0": torch.cat([token, hidden], 1) @ normal(12, 12),
        "b/resid_pre.0": token @ normal(6, 5),
        "b/resid_post.0": torch.cat([token @ normal(6, 3), hidden[:, :3]], 1),
    }
    table = alignment(row_moments(values), "a", "b").table.set_index(["source", "target"])
    assert table.loc[("a/resid_post.0", "b/resid_pre.0"), "lexical_r2_vw"] == pytest.approx(1, abs=1e-5)
    assert table.loc[("a/resid_pre.0", "b/resid_post.0"), "beyond_r2_vw"] == pytest.approx(0, abs=1e-12)
    row = table.loc["a/resid_post.0", "b/resid_post.0"]
    assert 0.2 < row["lexical_r2_vw"] < 0.95
    assert row["beyond_r2_vw"] == pytest.approx(1, abs=1e-4)
    assert row["beyond_r2_wh"] == pytest.approx((row["r2_wh"] - row["lexical_r2_wh"]) / (1 - row["lexical_r2_wh"]))
    # b's embedding has five of the token's six channels
    assert 0 < row["lexical_back_r2_vw"] < row["back_r2_vw"]
    none = alignment(row_moments(values), "a", "b", lexical=False).table
    assert none["lexical_r2_vw"].isna().all()
    other = alignment(row_moments(values), ["a/resid_post.0"], ["b/resid_post.0"],
                      lexical=("a/resid_pre.0", "b/resid_pre.0")).table.iloc[0]  # fmt: skip
    assert other["lexical_r2_vw"] == row["lexical_r2_vw"]


def test_numbers_are_those_of_each_pair_alone(several):
    found = alignment(several, "a", "b", keep_maps=True)
    assert found.sources == ("a/resid_pre.0", "a/resid_post.0", "a/resid_post.1")
    assert found.matrix().shape == (3, 2)
    for x, y in (("a/resid_post.0", "b/resid_post.0"), ("a/resid_post.1", "b/resid_pre.0")):
        row = found.table.set_index(["source", "target"]).loc[(x, y)]
        fit, validation, test = (several.pair(x, y, shard) for shard in ("fit", "validation", "test"))
        there, back = ridge_map(fit, validation).map, ridge_map(fit.reversed(), validation.reversed()).map
        assert row["r2_vw"] == pytest.approx(map_scores(there, test, fit).r2_vw, abs=1e-9)
        assert row["back_r2_wh"] == pytest.approx(map_scores(back, test.reversed(), fit.reversed()).r2_wh, abs=1e-9)
        assert row["procrustes"] == pytest.approx(map_scores(procrustes_map(fit), test, fit).r2_vw, abs=1e-12)
        held = canonical_correlations(fit, test).held_out.clamp_min(0)
        assert row["canonical"] == pytest.approx(float(held.square().mean()), abs=1e-12)
        assert row["cka"] == cka(test)
        assert row["cka_two"] == cka_of_two(fit, test)
        torch.testing.assert_close(found.maps[x, y].weight, there.weight)
        torch.testing.assert_close(found.back_maps[y, x].weight, back.weight)
    assert found.matrix("back_r2_vw").idxmax()["b/resid_post.0"] == "a/resid_post.1"
    assert "Alignment(table=[6 x" in repr(found)


def test_reversed_is_the_alignment_the_other_way_round(several):
    turned, expected = alignment(several, "a", "b").reversed(), alignment(several, "b", "a")
    assert (turned.sources, turned.targets) == (expected.sources, expected.targets)
    assert list(turned.table[["source", "target"]].itertuples(index=False)) == list(
        expected.table[["source", "target"]].itertuples(index=False)
    )
    for name in expected.table.columns[2:]:
        if not name.startswith("shuffled"):  # these pair the rows in another order
            np.testing.assert_allclose(turned.table[name], expected.table[name], atol=1e-9, err_msg=name)
    assert set(turned.table.columns) == set(expected.table.columns)


def test_what_is_left_out_and_refit(several):
    short = alignment(several, "a", "b", canonical=False, procrustes=False)
    assert not {"canonical", "procrustes", "shuffled_canonical"} & set(short.table.columns)
    assert "shuffled_cka" in short.table
    again = alignment(several, "a", "b", refit=True)
    joined = several.pair("a/resid_pre.0", "b/resid_pre.0", ("fit", "validation"))
    test = several.pair("a/resid_pre.0", "b/resid_pre.0", "test")
    assert again.table["procrustes"][0] == pytest.approx(
        map_scores(procrustes_map(joined), test, joined).r2_vw, abs=1e-12
    )


def test_errors(several):
    with pytest.raises(ValueError, match=r"no site is called 'c'. Models: \['a', 'b'\]"):
        alignment(several, "c", "b")
    with pytest.raises(ValueError, match=r"no site is called b/resid_post.7"):
        alignment(several, "a", ["b/resid_post.7"])
    with pytest.raises(ValueError, match="is a source and a target"):
        alignment(several, "a", ["a/resid_post.0", "b/resid_post.0"])
    with pytest.raises(ValueError, match="no site is called a/embed"):
        alignment(several, "a", "b", lexical=("a/embed", "b/embed"))
    twice = alignment(several, ["a/resid_post.0"] * 2, "b", canonical=False, procrustes=False)
    assert twice.matrix().index.tolist() == ["a/resid_post.0"]
    found: Alignment = alignment(several, "a", "b", canonical=False, procrustes=False)
    with pytest.raises(KeyError, match="no column 'r2'"):
        found.matrix("r2")
