"""CCS: finds what is consistent, invariant to exchanging the sides, at chance on labels that mean nothing."""

import pytest
import torch
from torch import Tensor, nn

from microtome.probes.ccs_fits import fit_ccs

QUICK = {"steps": 300, "learning_rate": 0.02}


def pairs(n_sites: int = 2, n_pairs: int = 300, width: int = 8, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Truth along a direction of its own at each site, and a mark of the side that is easier to see."""
    generator = torch.Generator().manual_seed(seed)
    truth = torch.rand(n_pairs, generator=generator) > 0.5
    direction = torch.randn(n_sites, 1, width, generator=generator)
    topic = torch.randn(n_sites, n_pairs, width, generator=generator)
    sides = []
    for sign in (1, -1):
        noise = 0.5 * torch.randn(n_sites, n_pairs, width, generator=generator)
        sides.append(topic + noise + sign * (2.0 * truth[:, None] - 1) * direction + 5 * sign)
    return (*sides, truth)


def right(fits, ours: Tensor, theirs: Tensor, truth: Tensor) -> Tensor:
    return ((fits.scores(ours, theirs) > 0) == truth).float()


def test_the_truth_is_found_from_ten_labels() -> None:
    ours, theirs, truth = pairs()
    train = torch.arange(300)[None] < 200
    fits = fit_ccs(ours, theirs, train, truth, labelled=torch.arange(300) < 10, **QUICK)
    assert (right(fits, ours, theirs, truth)[:, 0, 200:].mean(-1) > 0.9).all()
    assert torch.equal(fits.loss, fits.losses.amin(-1))


def test_exchanging_the_sides_changes_nothing() -> None:
    ours, theirs, truth = pairs()
    train = torch.ones(1, 300, dtype=torch.bool)
    fits = fit_ccs(ours, theirs, train, truth, **QUICK)
    exchanged = fit_ccs(theirs, ours, train, ~truth, **QUICK)
    torch.testing.assert_close(exchanged.loss, fits.loss, atol=1e-5, rtol=0)
    torch.testing.assert_close(exchanged.sign, fits.sign)
    torch.testing.assert_close(exchanged.coefficients, fits.coefficients, atol=1e-3, rtol=0)
    torch.testing.assert_close(exchanged.scores(theirs, ours), -fits.scores(ours, theirs), atol=1e-3, rtol=0)


def test_labels_outside_the_fold_do_not_fix_the_sign() -> None:
    ours, theirs, truth = pairs()
    train = torch.arange(300)[None] < 60
    fits = fit_ccs(ours, theirs, train, truth, **QUICK)
    labels = truth.clone()
    labels[60:] = ~labels[60:]
    torch.testing.assert_close(fit_ccs(ours, theirs, train, labels, **QUICK).sign, fits.sign)


def test_random_labels_score_at_chance() -> None:
    ours, theirs, _ = pairs(n_sites=6, n_pairs=400)
    labels = torch.rand(400, generator=torch.Generator().manual_seed(9)) > 0.5
    train = torch.arange(400)[None] < 200
    fits = fit_ccs(ours, theirs, train, labels, **QUICK)
    assert abs(right(fits, ours, theirs, labels)[:, 0, 200:].mean().item() - 0.5) < 0.07


def test_equals_autograd() -> None:
    ours, theirs, truth = pairs(n_sites=1, n_pairs=50)
    train = torch.ones(1, 50, dtype=torch.bool)
    fits = fit_ccs(ours, theirs, train, truth, restarts=1, steps=40, learning_rate=0.01, seed=3)
    start = (2 * torch.rand(9, 1, generator=torch.Generator().manual_seed(3)) - 1) / 8**0.5
    probe = nn.Linear(8, 1)
    probe.weight.data, probe.bias.data = start[:8].T.clone(), start[8].clone()
    adam = torch.optim.AdamW(probe.parameters(), lr=0.01, weight_decay=0.01)
    centred = [side[0] - side[0].mean(0) for side in (ours, theirs)]
    for _ in range(40):
        p, q = (torch.sigmoid(probe(side)) for side in centred)
        loss = ((p - (1 - q)) ** 2).mean() + (torch.minimum(p, q) ** 2).mean()
        adam.zero_grad()
        loss.backward()
        adam.step()
    torch.testing.assert_close(fits.coefficients[0], probe.weight.double(), atol=1e-5, rtol=0)
    bias = fits.intercept[0] + fits.coefficients[0] @ ours[0].double().mean(0)
    torch.testing.assert_close(bias, probe.bias.double(), atol=1e-5, rtol=0)


def test_pairs_outside_the_fold_change_no_bit() -> None:
    ours, theirs, truth = pairs()
    train = torch.stack([torch.arange(300) < 200, torch.arange(300) >= 100])
    spoiled = ours.clone()
    spoiled[:, 250] = 1e9
    labels = truth.clone()
    labels[200:] = ~labels[200:]
    settings = {"steps": 20, "divide": True}
    fits = fit_ccs(ours, theirs, train, truth, **settings)
    again = fit_ccs(spoiled, theirs, train[:1], labels, **settings)
    for name in ("coefficients", "negative_coefficients", "intercept", "losses", "sign"):
        torch.testing.assert_close(getattr(fits, name)[:, :1], getattr(again, name), atol=0, rtol=0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c.update(negative_side=c["negative_side"][:, 1:]), "each pair needs both"),
        (lambda c: c.update(labels=c["labels"][1:]), "labels covers 299 pairs"),
        (lambda c: c["negative_side"][1, 2].fill_(torch.nan), "negative_side holds NaN.* site 1, pair 2, feature 0"),
        (lambda c: c.update(restarts=0), "restarts=0"),
        (lambda c: c.update(labelled=torch.zeros(300, dtype=torch.bool)), "0 of them labelled"),
    ],
)
def test_bad_input_says_what_to_do(change, message: str) -> None:
    ours, theirs, truth = pairs()
    case = {"positive_side": ours, "negative_side": theirs, "labels": truth}
    case["train"] = torch.ones(1, 300, dtype=torch.bool)
    change(case)
    with pytest.raises(ValueError, match=message):
        fit_ccs(**case)
