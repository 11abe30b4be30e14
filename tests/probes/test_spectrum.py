"""Spectra: planted ranks, brute force, invariance, first tokens, bad input."""

import numpy as np
import pandas as pd
import pytest
import torch

from microtome.capture.activations import Activations
from microtome.probes.spectrum import MEASURES, spectrum, spectrum_measures


def rows(sites: int = 3, n: int = 60, width: int = 20, seed: int = 0) -> torch.Tensor:
    rng = np.random.default_rng(seed)
    return torch.tensor(rng.normal(size=(sites, n, width)) * np.logspace(-1, 1, width) + rng.normal(size=width))


@pytest.mark.parametrize("n", [15, 60])  # both Gram matrices
def test_agrees_with_brute_force(n: int) -> None:
    X = rows(n=n)
    measured = spectrum_measures(X)
    for site, values in enumerate(X.numpy()):
        q = np.linalg.svd(values - values.mean(0), compute_uv=False) ** 2
        q = q[q > 1e-20] / q.sum()
        p = np.linalg.svd(values, compute_uv=False)
        p = p / p.sum() + 1e-7
        expected = {
            "effective_rank": np.exp(-(q * np.log(q)).sum()),
            "participation": 1 / (q**2).sum(),
            "stable_rank": q.sum() / q.max(),
            "rankme": np.exp(-(p * np.log(p)).sum()),
        }
        for name, some in (("anisotropy", values), ("anisotropy_centred", values - values.mean(0))):
            unit = some / np.linalg.norm(some, axis=1, keepdims=True)
            expected[name] = (unit @ unit.T)[~np.eye(n, dtype=bool)].mean()
        for name in MEASURES:
            assert float(measured[name][site]) == pytest.approx(expected[name], rel=1e-6, abs=1e-9), name


def test_orthonormal_rows_have_their_number_as_rank() -> None:
    X = torch.linalg.qr(torch.randn(30, 30, generator=torch.Generator().manual_seed(0)).double())[0][None, :12]
    measured = spectrum_measures(X)
    assert float(measured["rankme"][0]) == pytest.approx(12, rel=1e-4)
    assert float(measured["anisotropy"][0]) == pytest.approx(0, abs=1e-12)
    assert float(measured["effective_rank"][0]) == pytest.approx(11, rel=1e-9)  # the mean takes one


def test_rank_of_planted_rows_is_never_exceeded() -> None:
    generator = torch.Generator().manual_seed(0)
    X = torch.randn(1, 50, 4, generator=generator).double() @ torch.randn(1, 4, 20, generator=generator).double()
    for name, value in spectrum_measures(X).items():
        if "anisotropy" not in name:
            assert float(value[0]) <= 4 * 1.001, name


def test_rotation_and_row_order_change_nothing() -> None:
    X = rows()
    turn = torch.linalg.qr(torch.randn(20, 20, generator=torch.Generator().manual_seed(1)).double())[0]
    order = torch.randperm(60, generator=torch.Generator().manual_seed(2))
    before = spectrum_measures(X)
    for other in (X @ turn, X[:, order], 1e4 * X):
        after = spectrum_measures(other)
        for name in MEASURES:
            torch.testing.assert_close(after[name], before[name], rtol=1e-6, atol=1e-9)


def test_finite_samples_bias_every_rank_down() -> None:
    X = torch.randn(1, 2048, 256, generator=torch.Generator().manual_seed(0))
    found = [float(spectrum_measures(X[:, :n])["effective_rank"][0]) for n in (32, 128, 512, 2048)]
    np.testing.assert_allclose(found, [30, 100, 200, 240], rtol=0.06)  # the sheet's table


def test_first_tokens_stand_beside_and_equal_numbers_can_be_drawn() -> None:
    X = rows(sites=1, n=60)[0]
    X[::6] = 1000 + X[::6]  # every sixth row is a sink
    table = pd.DataFrame({"text": np.arange(60) // 6, "position": np.arange(60) % 6})
    acts = Activations.from_arrays({"resid_post.0": X, "resid_post.1": 2 * X}, rows=table)
    found = spectrum(acts)
    assert list(found["layer"]) == [0, 1]
    assert list(found["n"]) == [60, 60]
    assert list(found["n_without_first"]) == [50, 50]
    assert bool((found["effective_rank"] < 1.1).all())
    inner = spectrum_measures(X[None, table["position"] > 0])
    np.testing.assert_allclose(found["effective_rank_without_first"], float(inner["effective_rank"][0]))
    drawn = spectrum(acts, rows=40, sites=["resid_post.0"])
    assert drawn.loc[0, ["n", "n_without_first"]].tolist() == [40, 40]
    assert drawn.equals(spectrum(acts, rows=40, sites=["resid_post.0"]))
    assert not drawn.equals(spectrum(acts, rows=40, sites=["resid_post.0"], seed=1))


def test_heads_have_lines_of_their_own() -> None:
    X = rows(sites=4)
    found = spectrum({"z.2": X.transpose(0, 1).float().numpy()})
    assert list(found["site"]) == ["z.2.0", "z.2.1", "z.2.2", "z.2.3"]
    np.testing.assert_allclose(found["rankme"], spectrum_measures(X)["rankme"], rtol=1e-4)
    assert not any(name.endswith("_without_first") for name in found)


def test_equal_rows_have_rank_zero() -> None:
    row = torch.rand(1, 1, 50, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    measured = spectrum_measures(row.expand(1, 37, 50))
    assert [float(measured[name][0]) for name in ("effective_rank", "participation", "stable_rank")] == [0, 0, 0]
    assert float(measured["anisotropy"][0]) == pytest.approx(1)


def test_bad_input_says_what_is_wrong() -> None:
    with pytest.raises(ValueError, match="at least 2"):
        spectrum_measures(torch.ones(1, 1, 3))
    with pytest.raises(ValueError, match="NaN or infinity"):
        spectrum_measures(torch.full((1, 4, 3), torch.nan))
    with pytest.raises(ValueError, match="give a number from 2 to 60"):
        spectrum({"resid_post.0": rows()[0].numpy()}, rows=61)
