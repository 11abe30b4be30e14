import pytest
import torch

from microtome.lenses.dictionaries.topk_gradients import (
    TopKWeights,
    summed_by_feature,
    topk_step,
    without_radial_part,
)

D, F, K = 7, 20, 4


def weights(dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    shapes = ((F, D), (F,), (F, D), (D,))
    found = TopKWeights(*(torch.randn(*shape, generator=generator, dtype=dtype) for shape in shapes))
    return found._replace(encoder_bias=found.encoder_bias - 4)


@pytest.fixture
def x():
    return torch.randn(30, D, generator=torch.Generator().manual_seed(1), dtype=torch.float64) + 1


def dense_loss(x, w, variance, dead=None, k_aux=0, aux_weight=0.0):
    """The formula of the module, by autograd."""
    pre = (x - w.decoder_bias) @ w.encoder.T + w.encoder_bias
    kept = pre.topk(K, dim=-1)
    z = torch.zeros_like(pre).scatter(-1, kept.indices, kept.values.relu())
    residual = x - z @ w.decoder - w.decoder_bias
    loss = residual.square().sum(1).mean() / variance
    if dead is None:
        return loss, z
    r = residual.detach()
    kept = pre.masked_fill(~dead, -torch.inf).topk(k_aux, dim=-1)
    z_aux = torch.zeros_like(pre).scatter(-1, kept.indices, kept.values.relu())
    aux = (z_aux @ w.decoder - r).square().sum(1).mean() / (r - r.mean(0)).square().sum(1).mean()
    return loss + aux_weight * aux, z


@pytest.mark.parametrize("with_dead", [False, True])
def test_loss_and_gradients_are_those_of_autograd(with_dead, x):
    leaves = TopKWeights(*(w.clone().requires_grad_() for w in weights()))
    dead = torch.zeros(F, dtype=torch.bool)
    dead[[2, 3, 5, 11, 17]] = True
    aux = {"dead": dead, "k_aux": 3, "aux_weight": 0.4} if with_dead else {}
    loss, z = dense_loss(x, leaves, 5.0, **aux)
    expected = torch.autograd.grad(loss, leaves)
    found = topk_step(x, weights(), K, 5.0, **aux)
    for name, one, other in zip(TopKWeights._fields, found.gradients, expected, strict=True):
        torch.testing.assert_close(one, other, msg=lambda text, name=name: f"{name}: {text}")
    assert found.unexplained + 0.4 * found.auxiliary == pytest.approx(float(loss.detach()))
    assert (found.auxiliary > 0) == with_dead
    assert torch.equal(found.is_on, (z > 0).any(0))
    assert not found.is_on.all()
    assert (z.count_nonzero(1) < K).any()  # some of the k largest are negative


def test_sums_by_feature_are_a_dense_product():
    generator = torch.Generator().manual_seed(2)
    places = torch.stack([torch.randperm(F, generator=generator)[:K] for _ in range(9)])
    places[places == 6] = 7  # one feature of no token, one twice in a token
    values, rows = torch.randn(9, K, generator=generator), torch.randn(9, D, generator=generator)
    dense = torch.zeros(9, F)
    for token in range(9):
        for place, value in zip(places[token], values[token], strict=True):
            dense[token, place] += value
    sums, totals = summed_by_feature(places, values, rows, F)
    torch.testing.assert_close(sums, dense.T @ rows)
    torch.testing.assert_close(totals, dense.sum(0))
    assert sums[6].count_nonzero() == 0


def test_the_radial_part_is_what_changes_a_length():
    rows = torch.nn.functional.normalize(torch.randn(F, D, dtype=torch.float64), dim=1)
    gradient = torch.randn(F, D, dtype=torch.float64)
    rest = without_radial_part(gradient, rows)
    assert float((rest * rows).sum(1).abs().max()) < 1e-12
    along = gradient - rest
    torch.testing.assert_close(torch.cosine_similarity(along, rows).abs(), torch.ones(F).double())
