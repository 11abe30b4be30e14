"""The two stages of the solver, each on its own."""

import pytest
import torch

from microtome.probes.fold_basis import fold_basis
from microtome.probes.newton_cg import Tasks, approach, refine
from microtome.probes.preconditioner import principal_axes


@pytest.fixture
def case():
    """Basis and tasks: one site, two folds, strengths 0.01, 1 and 100; 80 rows, 30 features, barely not separable."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(1, 120, 30, dtype=torch.float64, generator=generator)
    label = (rows[0, :, 0] + 0.3 * torch.randn(120, dtype=torch.float64, generator=generator) > 0).double()
    train = torch.stack([torch.arange(120) % 3 != fold for fold in range(2)])
    basis = fold_basis(rows, train)
    strength = torch.tensor([0.01, 1.0, 100.0], dtype=torch.float64)[:, None, None]
    weight = train.double()
    return basis, Tasks(weight=weight, target=weight * label, ridge=basis.ridge[:, None], strength=strength)


def measured(basis, tasks, point) -> torch.Tensor:
    """Largest entry of ∇J on standardised features, by automatic differentiation of J."""
    root = torch.where(tasks.ridge > 0, tasks.ridge, 1.0).sqrt()
    own = (point.detach() * root).requires_grad_()
    score = (own / root) @ basis.double[:, None]
    loss = tasks.weight * torch.nn.functional.softplus(score) - tasks.target * score
    objective = 0.5 * (tasks.ridge * (own / root) ** 2).sum() + (tasks.strength[..., 0] * loss.sum(-1)).sum()
    return torch.autograd.grad(objective, own)[0].abs().amax(-1)


def approached(basis, tasks, **options):
    return approach(basis.single, principal_axes(basis), tasks, **options)


def refined(basis, tasks, start=None, **options):
    shape = (1, len(tasks.strength), len(tasks.weight))
    if start is None:
        start = torch.zeros(*shape, basis.double.shape[1])
    settings = {"tolerance": 1e-11, "max_steps": 60, "max_passes": 200} | options
    return refine(basis, principal_axes(basis), tasks, start, torch.zeros(shape, dtype=torch.long), **settings)


def test_approach_reaches_its_tolerance(case) -> None:
    basis, tasks = case
    point, passes = approached(basis, tasks, tolerance=1e-5, max_passes=500)
    assert (measured(basis, tasks, point.double()) <= 1.1e-5 * tasks.unit()).all()
    assert (passes > 0).all()
    assert (passes[0, 0] < passes[0, 2]).all()  # small C needs fewer


def test_approach_survives_steps_that_overshoot(case) -> None:
    basis, tasks = case
    # a loss that is flat but for a few heavy rows far out: Newton's step along a line is far too long at first
    double = basis.double.clone()
    double[:, :30, :5] *= 300
    basis = type(basis)(**(vars(basis) | {"double": double, "single": double.float()}))
    point, _ = approached(basis, tasks, tolerance=1e-4, max_passes=2000)
    assert (measured(basis, tasks, point.double()) <= 2e-4 * tasks.unit()).all()


def test_the_start_does_not_matter(case) -> None:
    basis, tasks = case
    start, _ = approached(basis, tasks, tolerance=1e-6, max_passes=500)
    cold, warm = refined(basis, tasks), refined(basis, tasks, start)
    torch.testing.assert_close(cold.point, warm.point, rtol=0, atol=1e-7)
    assert (warm.passes < cold.passes).all()


def test_exact_directions_take_over_where_conjugate_gradients_run_out(case, monkeypatch) -> None:
    basis, tasks = case
    expected = refined(basis, tasks)
    calls = []

    def counted(*arguments):
        calls.append(arguments)
        return direction(*arguments)

    from microtome.probes import newton_cg

    direction = newton_cg._newton_direction
    monkeypatch.setattr(newton_cg, "_newton_direction", counted)
    solution = refined(basis, tasks, max_passes=1)
    assert len(calls) >= 6
    torch.testing.assert_close(solution.point, expected.point, rtol=0, atol=1e-7)


def test_steps_that_run_out_leave_the_gradient_to_be_seen(case) -> None:
    basis, tasks = case
    solution = refined(basis, tasks, max_steps=2)
    exact = measured(basis, tasks, solution.point) / tasks.unit()
    assert (solution.gradient > 1e-11).any()
    torch.testing.assert_close(solution.gradient, exact, rtol=1e-6, atol=1e-13)


def test_margin_is_that_of_the_training_rows(case) -> None:
    basis, tasks = case
    solution = refined(basis, tasks)
    score = solution.point @ basis.double[:, None]
    for fold in range(2):
        rows = tasks.weight[fold] > 0
        signed = torch.where(tasks.target[fold, rows] > 0, 1.0, -1.0) * score[0, :, fold][:, rows]
        torch.testing.assert_close(solution.margin[0, :, fold], signed.amin(-1))


def test_a_start_that_is_not_finite_is_put_aside(case) -> None:
    basis, tasks = case
    start = torch.zeros(1, 3, 2, basis.double.shape[1])
    start[0, 1, 0, 4] = torch.nan
    torch.testing.assert_close(refined(basis, tasks, start).point, refined(basis, tasks).point, rtol=0, atol=1e-7)
