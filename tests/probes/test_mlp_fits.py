"""fit_mlps: the same answers as torch's own training one by one, nothing from rows or probes that are not its own."""

from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

from microtome.probes.mlp_fits import fit_mlps
from microtome.probes.mlp_networks import MlpSettings, start_values


def xor(n_sites: int, n_rows: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Two features whose signs agree where the label is True, and noise: no linear probe can tell."""
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(n_sites, n_rows, 6, generator=generator)
    positive = torch.rand(n_rows, generator=generator) > 0.5
    agree = torch.where(positive, 1.0, -1.0)
    features[:, :, 1] = features[:, :, 0].sign() * agree * features[:, :, 1].abs()
    return features, positive


def random_case(n_sites: int = 3, n_rows: int = 90, width: int = 5, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    features = 3 + 2 * torch.randn(n_sites, n_rows, width, generator=generator)
    labels = torch.rand(2, n_rows, generator=generator) > 0.4
    train = torch.rand(2, n_rows, generator=generator) > 0.3
    return features, labels, train


def one_by_one(rows: Tensor, labels: Tensor, settings: MlpSettings, seed: int, n_classes: int = 2) -> nn.Sequential:
    """torch.nn, torch.optim and autograd on standardised rows."""
    n_outputs = 1 if n_classes == 2 else n_classes
    sizes = (rows.shape[1], *settings.hidden, n_outputs)
    layers = []
    for n_in, n_out in pairwise(sizes):
        layers += [nn.Linear(n_in, n_out), nn.ReLU()]
    network = nn.Sequential(*layers[:-1])
    weights, biases = start_values(sizes, seed)
    for layer, weight, bias in zip(network[::2], weights, biases, strict=True):
        layer.weight.data.copy_(weight.T)
        layer.bias.data.copy_(bias)
    adam = torch.optim.Adam(network.parameters(), lr=settings.learning_rate, weight_decay=settings.weight_decay)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(settings.epochs):
        order = torch.randperm(len(rows), generator=generator)
        for batch in order.split(settings.batch):
            if len(batch) < settings.batch:
                continue
            logits = network(rows[batch])
            loss = (
                nn.functional.binary_cross_entropy_with_logits(logits[:, 0], labels[batch].float())
                if n_classes == 2
                else nn.functional.cross_entropy(logits, labels[batch])
            )
            adam.zero_grad()
            loss.backward()
            adam.step()
    return network


@pytest.mark.parametrize("hidden", [(16,), (7, 3)])
@pytest.mark.parametrize("n_classes", [2, 3])
def test_equals_torch_one_by_one(hidden: tuple[int, ...], n_classes: int) -> None:
    features, labels, train = random_case()
    if n_classes == 3:
        labels = labels.long() + (features[0, :, 0] > 4)
    settings = MlpSettings(hidden=hidden, epochs=4, batch=16, learning_rate=0.01, weight_decay=0.1)
    fits = fit_mlps(features, labels, train, settings=settings, seed=5)
    logits = fits.logits(features)
    for site in range(3):
        for number in range(2):
            for fold, rows in enumerate(train):
                own = features[site, rows].double()
                mean, deviation = own.mean(0), own.std(0, correction=0)
                standard = ((features[site].double() - mean) / deviation).float()
                network = one_by_one(standard[rows], labels[number, rows], settings, 5, n_classes)
                for layer, weight, bias in zip(network[::2], fits.weights, fits.biases, strict=True):
                    torch.testing.assert_close(weight[site, number, fold], layer.weight.T, atol=1e-4, rtol=0)
                    torch.testing.assert_close(bias[site, number, fold], layer.bias, atol=1e-4, rtol=0)
                expected = network(standard).double()
                expected = expected[:, 0] if n_classes == 2 else expected
                torch.testing.assert_close(logits[site, number, fold], expected, atol=1e-4, rtol=0)


def test_finds_what_no_linear_probe_can() -> None:
    features, positive = xor(2, 600)
    train = torch.arange(600) < 400
    settings = MlpSettings(epochs=20, learning_rate=0.02)
    logits = fit_mlps(features, positive[None], train[None], settings=settings).logits(features)
    is_right = (logits[:, 0, 0] > 0) == positive
    assert (is_right[:, ~train].float().mean(1) > 0.9).all()


def test_a_probe_does_not_depend_on_the_others() -> None:
    features, labels, train = random_case(n_sites=40)
    fits = fit_mlps(features, labels, train)
    alone = fit_mlps(features[17:18], labels[1:], train[1:])
    for together, single in zip((*fits.weights, *fits.biases), (*alone.weights, *alone.biases), strict=True):
        torch.testing.assert_close(together[17:18, 1:, 1:], single, atol=1e-6, rtol=0)  # rounding of float32


def test_rows_outside_the_fold_change_no_bit() -> None:
    features, labels, train = random_case()
    fits = fit_mlps(features, labels, train[:1])
    spoiled = features.clone()
    spoiled[:, ~train[0]] = 1e9
    again = fit_mlps(spoiled, labels, train[:1])
    for before, after in zip((*fits.weights, fits.mean), (*again.weights, again.mean), strict=True):
        torch.testing.assert_close(before, after, atol=0, rtol=0)


def test_validation_keeps_the_epoch_of_lowest_loss() -> None:
    features, labels, train = random_case()
    settings = MlpSettings(epochs=12, learning_rate=0.1, batch=8)
    fits = fit_mlps(features, labels, train, validation=~train, settings=settings)
    assert (fits.epochs == fits.validation_bits.argmin(-1) + 1).all()
    assert len(fits.epochs.unique()) > 2
    # an earlier epoch of the long training is the last of a short one
    site, number, fold = (int(axis) for axis in (fits.epochs < 12).nonzero()[0])
    epochs = int(fits.epochs[site, number, fold])
    short = fit_mlps(features, labels, train, settings=MlpSettings(epochs=epochs, learning_rate=0.1, batch=8))
    torch.testing.assert_close(fits.weights[0][site, number, fold], short.weights[0][site, number, fold])
    kept = fit_mlps(features, labels, train, keep=fits.epochs, settings=settings)
    torch.testing.assert_close(kept.weights, fits.weights)
    assert torch.equal(kept.epochs, fits.epochs)
    assert kept.validation_bits.isnan().all()


@pytest.mark.parametrize("n_classes", [2, 3])
def test_validation_bits_are_those_of_the_logits(n_classes: int) -> None:
    features, labels, train = random_case()
    labels = labels if n_classes == 2 else labels.long() + (features[0, :, 0] > 4)
    fits = fit_mlps(features, labels, train, validation=~train, settings=MlpSettings(epochs=1))
    logits, held = fits.logits(features)[1, 0, 1, ~train[1]], labels[0, ~train[1]]
    loss = (
        nn.functional.binary_cross_entropy_with_logits(logits, held.double())
        if n_classes == 2
        else nn.functional.cross_entropy(logits, held)
    )
    assert fits.validation_bits[1, 0, 1, 0].item() == pytest.approx(loss.item() / 0.6931471805599453, rel=1e-5)


def test_a_constant_feature_counts_nothing_and_few_rows_make_one_batch() -> None:
    features, labels, train = random_case(n_rows=20)
    features[:, :, 2] = 0.1
    fits = fit_mlps(features, labels, train, settings=MlpSettings(epochs=3))
    assert fits.logits(features).isfinite().all()
    start = start_values((5, 16, 1), 0)[0][0]
    assert not torch.allclose(fits.weights[0][0, 0, 0], start)  # 14 rows, and yet it moved
    features[:, :, 2] = 7.0
    torch.testing.assert_close(fits.logits(features).shape, (3, 2, 2, 20))
    other = fit_mlps(features, labels, train, settings=MlpSettings(epochs=3))
    torch.testing.assert_close(other.weights[1], fits.weights[1])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c["features"][1, 2].fill_(torch.nan), "site 1, row 2, feature 0"),
        (lambda c: c.update(labels=c["labels"][:, :-1]), "labels covers 89 rows, features have 90"),
        (lambda c: c["labels"][1].fill_(True), "fold 0 trains label set 1 on .* fewer than two classes"),
        (lambda c: c.update(labels=c["labels"].long() - 1), "class number -1"),
        (lambda c: c.update(validation=c["train"]), "of which it trains on"),
        (lambda c: c.update(validation=~c["train"][:1]), "validation has 1 folds, train 2"),
        (lambda c: c.update(keep=torch.full((3, 2, 2), 11)), "epochs 11 to 11; they count from 1 to 10"),
    ],
)
def test_bad_input_says_what_to_do(change, message: str) -> None:
    features, labels, train = random_case()
    case = {"features": features, "labels": labels, "train": train}
    change(case)
    with pytest.raises(ValueError, match=message):
        fit_mlps(**case)
