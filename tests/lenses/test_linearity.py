"""The published score against its own recipe on rows, and what sinks, the residual part and few rows do to it."""

import numpy as np
import pytest
import torch

from microtome.lenses.linearity import linearity, published_score
from microtome.lenses.pair_moments import PairMoments


def noise(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def recipe(x: torch.Tensor, y: torch.Tensor) -> float:
    """As the paper's code does: centre, unit norm, pseudo-inverse, one less the squared norm of what is left."""
    x, y = x - x.mean(0), y - y.mean(0)
    x, y = x / x.norm(), y / y.norm()
    return float(1 - (y - x @ (torch.linalg.pinv(x) @ y)).square().sum())


def test_the_published_score_is_its_recipe():
    x = noise(0, 200, 7) + 3
    y = x + torch.tanh(x @ noise(1, 7, 7))
    fit = PairMoments.from_rows(x, y)
    assert published_score(fit) == pytest.approx(recipe(x, y), abs=1e-10)
    assert published_score(fit.increment()) == pytest.approx(recipe(x, y - x), abs=1e-10)
    assert published_score(PairMoments.from_rows(x, x @ noise(2, 7, 7))) == pytest.approx(1, abs=1e-10)
    assert np.isnan(published_score(PairMoments.from_rows(x, torch.ones(200, 7, dtype=torch.float64))))


def test_few_rows_lift_it_but_not_the_held_out_score(row_moments):
    values = {"resid_pre.0": noise(3, 80, 24), "resid_post.0": noise(4, 80, 24)}
    row = linearity(row_moments(values), strata=["rest"]).table.iloc[0]
    assert row["published"] > 0.35
    assert row["r2_vw"] < 0.02
    assert row["procrustes"] < 0.02
    assert row["tokens_per_channel"] == 2


def test_scores_by_layer(stream_moments):
    table = linearity(stream_moments, strata=["rest"]).to_frame()
    assert list(table["depth"]) == [0, 1, 2]
    for row in table.to_dict("records"):
        rows = stream_moments.masks["fit", "rest"]
        x, y = (stream_moments.values[row[name]][rows] for name in ("source", "target"))
        assert row["published"] == pytest.approx(recipe(x, y), abs=1e-9)
        assert row["published_increment"] == pytest.approx(recipe(x, y - x), abs=1e-9)
        assert row["r2_vw"] == pytest.approx(1 - (1 - row["r2_increment"]) * row["increment_share"], abs=1e-10)
        assert row["procrustes"] == pytest.approx(1 - (1 - row["procrustes_increment"]) * row["increment_share"])
        assert row["procrustes"] < row["r2_vw"]
        assert row["published"] > row["published_increment"]
        values = np.linalg.eigvalsh(np.cov(x.T))
        assert row["anisotropy"] == pytest.approx(values[-1] / values.sum())


def test_sinks_carry_the_score_alone(row_moments):
    """One token in 25 far away along one axis: R2 of everything rises, without it nothing does."""
    is_sink = torch.arange(1000) % 25 == 0
    x = noise(5, 1000, 6)
    y = 0.5 * x + noise(6, 1000, 6)
    far = torch.zeros(6, dtype=torch.float64).index_fill(0, torch.tensor([2]), 300.0)
    values = {"resid_pre.0": x + is_sink[:, None] * far, "resid_post.0": y + is_sink[:, None] * far}
    found = linearity(row_moments(values, is_sink)).by_stratum("r2_vw")
    plain = linearity(row_moments({"resid_pre.0": x, "resid_post.0": y})).by_stratum("r2_vw")
    assert float(found["all"].iloc[0]) > 0.98
    assert float(found["rest"].iloc[0]) == pytest.approx(0.2, abs=0.06)
    assert float(plain["all"].iloc[0]) == float(plain["rest"].iloc[0])


def test_a_rotation_is_as_linear_as_can_be(row_moments):
    x, rotation = noise(7, 300, 5), torch.linalg.qr(noise(8, 5, 5))[0]
    moments = row_moments({"resid_pre.0": x, "resid_post.0": 1.5 * x @ rotation + 2})
    row = linearity(moments, strata=["all"], strengths=[0]).table.iloc[0]
    names = ["published", "published_increment", "r2_vw", "r2_increment", "procrustes", "procrustes_increment"]
    np.testing.assert_allclose(row[names].astype(float), 1, atol=1e-9)
    assert row["identity"] < 0


def test_bad_input_says_what_to_do(stream_moments, row_moments):
    with pytest.raises(ValueError, match="there are no pairs"):
        linearity(stream_moments, [])
    with pytest.raises(ValueError, match="shard has 0 rows of stratum 'sinks'"):
        linearity(stream_moments, strata=["sinks"])
    unlike = row_moments({"resid_pre.0": noise(0, 50, 3), "mlp_act.0": noise(1, 50, 4)})
    with pytest.raises(ValueError, match="needs one width, got 3 and 4"):
        linearity(unlike, [("resid_pre.0", "mlp_act.0")])
    with pytest.raises(KeyError, match="no column 'r2'"):
        linearity(stream_moments, strata=["rest"]).by_stratum("r2")
