"""Axes of the rows, and how near the preconditioner is to the inverse Hessian."""

import pytest
import torch

from microtome.probes.fold_basis import fold_basis
from microtome.probes.preconditioner import AXES, principal_axes, refreshed, uniform


def basis_of(width: int, rows: int = 1500):
    """Two sites whose features have a spectrum that falls as 1/k, in three folds."""
    generator = torch.Generator().manual_seed(0)
    latent = torch.randn(2, rows, width, dtype=torch.float64, generator=generator)
    turn = torch.linalg.qr(torch.randn(width, width, dtype=torch.float64, generator=generator))[0]
    features = (latent / torch.arange(1, width + 1).double().sqrt()) @ turn
    train = torch.stack([torch.arange(rows) % 3 != fold for fold in range(3)])
    return fold_basis(features, train), train


def scaled(basis, width):
    return basis.single[:, :width] * basis.ridge[..., :width].log().mean(1).mul(-0.5).exp().float()[..., None]


def test_axes_diagonalise_the_second_moments() -> None:
    basis, _ = basis_of(70)
    axes = principal_axes(basis)
    eye = torch.eye(71).expand(2, -1, -1)
    torch.testing.assert_close(axes.axes.mT @ axes.axes, eye, rtol=0, atol=1e-5)
    rows = scaled(basis, 70)
    inner = axes.axes[:, :70, :70].mT @ (rows @ rows.mT / 1500) @ axes.axes[:, :70, :70]
    torch.testing.assert_close(inner, torch.diag_embed(axes.spectrum[:, :70]), rtol=1e-4, atol=1e-4)


def test_wide_rows_get_their_leading_axes() -> None:
    basis, _ = basis_of(300)
    axes = principal_axes(basis)
    assert axes.axes.shape == (2, 304, AXES + 1)
    rows = scaled(basis, 300)
    exact = torch.linalg.eigvalsh(rows @ rows.mT / 1500)
    torch.testing.assert_close(axes.spectrum[:, -21:-1], exact[:, -20:], rtol=0.02, atol=0)
    rest = (exact.sum(1) - axes.spectrum[:, :-1].sum(1)) / (300 - AXES)
    torch.testing.assert_close(axes.rest, rest, rtol=1e-3, atol=0)


def test_an_outlier_does_not_take_the_axes_over() -> None:
    basis, _ = basis_of(70)
    clean = principal_axes(basis)
    basis.single[:, :70, 5] *= 1e8
    spoiled = principal_axes(basis)
    torch.testing.assert_close(spoiled.spectrum[:, -11:-1], clean.spectrum[:, -11:-1], rtol=0.1, atol=0)


@pytest.mark.parametrize(("width", "n_fits"), [(70, 1), (300, 1), (300, 100)])
@pytest.mark.parametrize("is_refreshed", [False, True])
def test_it_is_near_the_inverse_hessian(width, n_fits, is_refreshed) -> None:
    basis, train = basis_of(width)
    weight, strength = train.float(), torch.tensor([1e-3, 0.1])[:, None, None]
    share = torch.full((2, 2, 3, 1500), 0.25)
    if is_refreshed:  # half of the rows are far from the boundary
        share[..., ::2] = 1e-3
    curvature = weight * share
    ridge = basis.ridge[:, None].float()
    axes = principal_axes(basis, n_fits=n_fits)
    assert axes.axes.shape[2] == (129 if (width, n_fits) == (300, 1) else width + 1)
    lower = uniform(axes, weight=weight, ridge=ridge, strength=strength)
    if is_refreshed:
        lower = refreshed(lower, basis.single, strength=strength, curvature=curvature)
    rows = basis.single[:, None, None].double()
    hessian = (
        torch.diag_embed(ridge.double()) + strength[..., None].double() * (rows * curvature[..., None, :]) @ rows.mT
    )
    hessian = hessian[..., : width + 1, : width + 1]
    eye = torch.eye(basis.single.shape[1])[:, None, None, None].expand(-1, 2, 2, 3, -1)
    inverse = torch.stack([lower(column.contiguous()) for column in eye], -1)[..., : width + 1, : width + 1].double()
    torch.testing.assert_close(inverse, inverse.mT, rtol=0, atol=1e-5)
    # eigenvalues of the preconditioned Hessian: all 1 if it were exact
    root = torch.linalg.cholesky(hessian)
    values = torch.linalg.eigvalsh(root.mT @ inverse @ root)
    plain = torch.linalg.eigvalsh(hessian)
    assert (values.amin(-1) > 0).all()
    condition, before = values.amax(-1) / values.amin(-1), plain.amax(-1) / plain.amin(-1)
    assert (condition < {(70, 1): 2.5, (300, 1): 15, (300, 100): 6}[width, n_fits]).all(), condition
    assert (condition[:, 1] < before[:, 1] / 25).all()


def test_a_strength_without_curvature_keeps_what_it_had() -> None:
    basis, train = basis_of(70)
    weight, strength = train.float(), torch.tensor([1e-3, 0.1])[:, None, None]
    lower = uniform(principal_axes(basis), weight=weight, ridge=basis.ridge[:, None].float(), strength=strength)
    curvature = (0.25 * weight).expand(2, 2, 3, 1500).clone()
    curvature[:, 1] = 0.0
    after = refreshed(lower, basis.single, strength=strength, curvature=curvature)
    before = torch.diag_embed(lower.along[:, :, 0].sqrt())
    assert torch.equal(after.root[:, 1], before[:, 1])
    assert not torch.equal(after.root[:, 0], before[:, 0])
