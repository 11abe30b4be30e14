"""The published scores against the rows themselves and scikit-learn, in one pass with the others."""

import numpy as np
import pytest
import torch
from sklearn.metrics import r2_score

from microtome.capture.collect import capture
from microtome.capture.models import LoadedModel
from microtome.lenses.linear_map import LinearMap
from microtome.lenses.transport.active_sums import ActiveSums
from microtome.lenses.transport.feature_transport import feature_transport

SITES = "resid_post.0", "resid_post.1"


@pytest.fixture(scope="module")
def model(tiny) -> LoadedModel:
    return LoadedModel.from_module(tiny("llama"), name="llama")


@pytest.fixture
def texts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(5, 100, (9,), generator=generator).tolist() for _ in range(20)]


def test_they_are_those_of_the_rows_that_fire(model, texts):
    generator = torch.Generator().manual_seed(0)
    weight = torch.eye(32) + 0.1 * torch.randn(32, 32, generator=generator)
    found = LinearMap(weight, 0.3 * torch.randn(32, generator=generator), "drawn", *SITES)
    decoder = torch.randn(6, 32, generator=generator)
    bias = torch.tensor([0.0, 0.0, 1.0, -1.0, 0.0, -1e6])

    def encode(y: torch.Tensor) -> torch.Tensor:
        return torch.relu(y @ decoder.T.to(y) + bias.to(y))

    scored = feature_transport(model, texts, found, decoder, encode=encode, draws=5, max_tokens=30).table
    plain = feature_transport(model, texts, found, decoder, draws=5).table
    np.testing.assert_allclose(scored["r2"], plain["r2"], atol=1e-6)
    assert "published_r2" not in plain
    kept = capture(model, texts, list(SITES), "all", progress=False)
    keep = torch.from_numpy(kept.rows["position"].to_numpy() > 0)
    x, y = (kept[site][keep].double() for site in SITES)
    unit = decoder.double() / decoder.double().norm(dim=1, keepdim=True)
    a, a_hat = (y @ unit.T).numpy(), (found(x) @ unit.T).numpy()
    z, z_hat = encode(y).numpy(), encode(found(x)).numpy()
    for i in range(5):
        fires = z[:, i] > 1e-6
        there, guess, row = a[fires, i], a_hat[fires, i], scored.loc[i]
        assert row["active_rows"] == fires.sum() > 0
        assert row["published_r2"] == pytest.approx(r2_score(there, guess), abs=1e-5)
        assert row["published_pearson"] == pytest.approx(np.corrcoef(there, guess)[0, 1], abs=1e-5)
        cosine = there @ guess / np.sqrt((there @ there) * (guess @ guess))
        assert row["published_cosine"] == pytest.approx(cosine, abs=1e-5)
        assert row["published_rms_ratio"] == pytest.approx(np.sqrt((guess @ guess) / (there @ there)), abs=1e-5)
        assert row["activation_r2"] == pytest.approx(r2_score(z[:, i], z_hat[:, i]), abs=1e-5)
    assert scored.loc[5, "active_rows"] == 0
    assert scored.loc[5, "published_rubric"] == "never fires"
    assert scored.loc[5, ["published_r2", "published_rms_ratio", "activation_r2"]].isna().all()


def test_the_rubric_and_the_worst_r2():
    """a_hat is a times the ratio, in rows that all fire; p is 3."""
    ratios = torch.tensor([1.05, 0.85, 0.7, 1.7, 1e9], dtype=torch.float64)
    values = torch.randn(50, 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64).expand(50, 5)
    sums = ActiveSums()
    fires = torch.ones(50, 5)
    sums.add(values - 3, values * (1 - ratios), torch.full((5,), 3.0).double(), fires, fires)
    table = sums.table()
    assert table["published_rubric"].tolist() == ["excellent", "good", "fair", "poor", "poor"]
    np.testing.assert_allclose(table["published_rms_ratio"], ratios, rtol=1e-6)
    np.testing.assert_allclose(table["published_cosine"][:4], 1, atol=1e-9)
    assert table["published_r2"][4] == -1e6


def test_conditioning_on_an_outcome_makes_a_direction_that_is_carried_look_lost():
    """y = x + noise has R2 0.9 over all rows; among those in a narrow band of y the published one is far below 0."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4000, 1, generator=generator, dtype=torch.float64)
    y = x + torch.randn(4000, 1, generator=generator, dtype=torch.float64) / 3
    fires = ((y > 1.0) & (y < 1.1)).double()
    sums = ActiveSums()
    sums.add(y, y - 0.9 * x, torch.zeros(1).double(), fires, fires)
    assert 1 - float((y - 0.9 * x).var() / y.var()) > 0.85
    assert sums.table()["published_r2"][0] < -10
