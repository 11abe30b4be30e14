"""Efficiency and subspace size on planted cases with known answers: rank-10 map, pure noise, linear network."""

import numpy as np
import pytest
import torch

from microtome.lenses.canonical import canonical_correlations
from microtome.lenses.linear_map import LinearMap
from microtome.lenses.map_scores import map_scores
from microtome.lenses.pair_splits import PairSplits
from microtome.lenses.ridge_map import ridge_map
from microtome.lenses.transport.efficiency import transport_efficiency
from microtome.lenses.transport.subspace import _upper, transport_subspace

D = 24


def rows(seed: int, count: int = 6000, width: int = D) -> torch.Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def uneven(width: int = D) -> torch.Tensor:
    """Channels of unlike variance, mixed."""
    axes = torch.linalg.qr(rows(9, width, width)).Q
    return torch.logspace(1, -1, width, dtype=torch.float64)[:, None] * axes


@pytest.fixture(scope="module")
def linear() -> PairSplits:
    """A linear residual network: y = x + x A + b."""
    x = rows(1) @ uneven() + 3
    return PairSplits.from_rows(x, x + x @ rows(2, D, D) / 5 + 1)


@pytest.fixture(scope="module")
def planted() -> PairSplits:
    """Ten directions of x arrive in y, the rest of y is its own."""
    x, noise = rows(3), rows(4)
    into = torch.linalg.qr(rows(5, D, D)).Q[:10]
    return PairSplits.from_rows(x @ uneven() + 1, (x[:, :10] @ into * 2 + noise) @ uneven())


@pytest.fixture(scope="module")
def unrelated() -> PairSplits:
    return PairSplits.from_rows(rows(6) @ uneven() + 1, rows(7) @ uneven() - 2)


@pytest.mark.parametrize("metric", ["whitened", "raw"])
def test_a_linear_network_is_carried_with_efficiency_one(linear, metric):
    found = transport_efficiency(linear, metric=metric, strengths=[0])
    full = found.table.iloc[-1]
    assert full["rank"] == D
    assert full["score"] == pytest.approx(1, abs=1e-9)
    assert np.allclose(found.table["efficiency"], 1, atol=0.02)
    assert full["efficiency"] == pytest.approx(1, abs=1e-9)
    assert full["published_efficiency"] == pytest.approx(1, abs=1e-6)
    whole = found.whole.set_index("map")
    assert whole.loc["identity", "efficiency"] < 0.99
    assert whole.loc["ridge", "efficiency"] == pytest.approx(1, abs=1e-9)


@pytest.mark.parametrize("metric", ["whitened", "raw"])
@pytest.mark.parametrize("case", ["linear", "planted", "unrelated"])
def test_score_never_passes_ceiling_nor_any_rank_its_bound(request, case, metric):
    table = transport_efficiency(request.getfixturevalue(case), metric=metric, ranks=range(1, D + 1)).table
    assert (table["score"] <= table["ceiling"] + 1e-12).all()
    assert (table[["score", "truncated_score"]].max(axis=1) <= table["bound"] + 1e-9).all()
    assert (table["in_sample_score"] <= table["in_sample_ceiling"] + 1e-12).all()
    assert (table["truncated_score"] <= table["bound"] + 1e-9).all()


def test_in_sample_score_at_strength_0_is_the_canonical_ceiling(planted):
    table = transport_efficiency(planted, strengths=[0], ranks=range(1, D + 1)).table
    ceiling = canonical_correlations(planted.fit).in_sample_ceiling.numpy()
    assert np.allclose(table["in_sample_score"], ceiling, atol=1e-9)
    assert np.allclose(table["in_sample_ceiling"], ceiling, atol=1e-9)
    assert np.allclose(table["published_ceiling"], ceiling, atol=1e-9)


@pytest.mark.parametrize(("metric", "kind"), [("whitened", "r2_wh"), ("raw", "r2_vw")])
def test_score_of_full_rank_is_that_of_map_scores(planted, metric, kind):
    """In the raw metric exactly; whitening is by the fit rows here and by the test rows there."""
    found = transport_efficiency(planted, metric=metric)
    ridge = ridge_map(planted.fit, planted.validation).map
    other = getattr(map_scores(ridge, planted.test, planted.fit), kind)
    assert found.table["score"].iloc[-1] == pytest.approx(other, abs=1e-9 if metric == "raw" else 0.01)
    assert found.whole.set_index("map").loc["ridge", "score"] == pytest.approx(found.table["score"].iloc[-1], abs=1e-9)


def test_truncated_singular_values_waste_ranks_that_reduced_rank_uses(planted):
    table = transport_efficiency(planted, ranks=[4, 10]).table.set_index("rank")
    assert (table["efficiency"] > 0.97).all()
    assert (table["truncated_efficiency"] < table["efficiency"] - 0.2).all()
    assert (table["published_efficiency"] < table["efficiency"] - 0.2).all()


def test_further_maps_are_held_against_the_full_ceiling(planted):
    zero = LinearMap(torch.zeros(D, D).double(), planted.fit.mean_y, "mean")
    whole = transport_efficiency(planted, maps={"mean": zero}).whole.set_index("map")
    assert whole.loc["mean", "score"] == pytest.approx(0, abs=1e-9)
    assert list(whole.index) == ["identity", "mean", "ridge"]


def test_a_planted_rank_is_counted_and_noise_counts_nothing(planted, unrelated):
    found, noise = transport_subspace(planted), transport_subspace(unrelated)
    assert found["above_edge"] == found["above_null"] == 10
    assert found["rank_99"] == 10
    assert noise["above_edge"] == 0
    assert noise["above_null"] <= 1  # 5 % of nulls show one
    null = noise.table.set_index("measure")
    for measure in ("participation", "effective_rank", "rank_95"):
        assert null.loc[measure, "null_low"] * 0.9 <= noise[measure] <= null.loc[measure, "null_high"] * 1.1
    # the published measure does not see that there is nothing: a quarter circle of correlations
    assert noise["participation"] == pytest.approx(0.72 * D, rel=0.06)
    assert found["participation"] > 10.5


def test_simulated_null_is_that_of_independent_rows():
    """Few rows, where the largest correlations are far from those of a matrix of independent normals."""
    count, draws = 180, 40
    real = []
    for seed in range(draws):
        x, y = rows(100 + seed, count, 12), rows(500 + seed, count, 20)
        real.append(canonical_correlations(PairSplits.from_rows(x, y, (1, 0, 0.2)).fit).in_sample.numpy())
    x, y = rows(100, 180, 12), rows(500, 180, 20)
    splits = PairSplits.from_rows(x, y, (1, 0, 0.2))
    one = transport_subspace(splits, draws=200)
    sums = [each.sum() ** 2 / (each**2).sum() for each in real]
    null = one.table.set_index("measure").loc["participation"]
    assert null["null_mean"] == pytest.approx(np.mean(sums), rel=0.02)


def test_null_moments_of_correlated_rows_widen_the_null(planted):
    """Each row eight times over: as much as an eighth of the rows."""
    x, y = rows(20, 1200), rows(21, 1200)
    repeated = PairSplits.from_rows(x.repeat_interleave(8, 0), y.repeat_interleave(8, 0))
    plain = transport_subspace(repeated)
    told = transport_subspace(repeated, nulls=[repeated])
    assert told.null_edge > 2 * plain.null_edge
    assert told["above_edge"] == 0
    assert plain["above_edge"] + plain["above_null"] > 0
    assert told.given_draws == 1


def test_refuses_fewer_rows_than_channels_ranks_that_are_not_there_and_no_null(planted):
    few = PairSplits.from_rows(rows(1, 60), rows(2, 60))
    for call in (transport_efficiency, transport_subspace):
        with pytest.raises(ValueError, match="36 rows for 24 \\+ 24 channels"):
            call(few)
    with pytest.raises(ValueError, match="ranks 1 to 24"):
        transport_efficiency(planted, ranks=[25])
    with pytest.raises(ValueError, match="needs a null"):
        transport_subspace(planted, draws=0)
    with pytest.raises(ValueError, match="metric is 'cosine'"):
        transport_efficiency(planted, metric="cosine")


@pytest.mark.parametrize("draws", [20, 40])
def test_five_percent_of_pairs_that_share_nothing_pass_the_null(draws):
    generator = torch.Generator().manual_seed(3)
    passed, repeats = 0, 150
    for seed in range(repeats):
        x, y = (torch.randn(500, 4, generator=generator, dtype=torch.float64) for _ in range(2))
        splits = PairSplits.from_rows(x, y, (0.7, 0, 0.3))
        passed += transport_subspace(splits, draws=draws, seed=seed)["above_null"] > 0
    assert passed / repeats < 0.08  # an interpolated quantile of 20 draws lets 9 % through


@pytest.mark.parametrize("draws", [1, 7, 19, 20, 39, 100])
def test_the_null_edge_is_the_draw_that_one_more_passes_in_five_percent(draws):
    levels = torch.linspace(0, 1, draws, dtype=torch.float64).tolist()
    above = sum(one > _upper(levels, 0.95) for one in levels)
    assert (above + 1) / (draws + 1) <= max(0.05, 1 / (draws + 1)) + 1e-12


@pytest.mark.parametrize("constant", ["source", "target"])
def test_a_site_that_does_not_vary_carries_nothing(constant):
    x, y = torch.randn(300, 4).double(), torch.full((300, 4), 3.0).double()
    splits = PairSplits.from_rows(*((y, x) if constant == "source" else (x, y)))
    for measure in (transport_efficiency, transport_subspace):
        with pytest.raises(ValueError, match=f"the {constant} is the same in all 180 fit rows"):
            measure(splits)


def test_refuses_no_ranks_and_maps_of_a_name_that_is_there(planted):
    with pytest.raises(ValueError, match="no ranks"):
        transport_efficiency(planted, ranks=[])
    with pytest.raises(ValueError, match="cannot be called 'ridge'"):
        transport_efficiency(planted, maps={"ridge": LinearMap(torch.eye(D), torch.zeros(D), "mine")})
