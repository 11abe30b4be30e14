"""mlp_nested_fits: the epoch comes from inner folds, the score from the outer one, and no row is on both sides."""

import torch
from torch import Tensor

from microtome.probes.mlp_fits import fit_mlps
from microtome.probes.mlp_nested import mlp_nested_fits
from microtome.probes.mlp_networks import MlpSettings

SETTINGS = MlpSettings(epochs=8, learning_rate=0.05, batch=8)


def case(n_sites: int = 3, n_rows: int = 72) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    labels = torch.rand(2, n_rows, generator=generator) > 0.4
    features = torch.randn(n_sites, n_rows, 4, generator=generator) + labels[0][:, None]
    fold = torch.arange(n_rows) % 3
    test = fold == torch.arange(3)[:, None]
    inner = (torch.arange(n_rows) // 3 % 2) == torch.arange(2)[:, None]
    return features, labels, test, ~test[:, None] & inner


def test_scores_are_those_of_the_chosen_epoch_on_held_out_rows() -> None:
    features, labels, test, nested = case()
    found = mlp_nested_fits(features, labels, test, nested, settings=SETTINGS, seed=1)
    assert found.epochs.unique().numel() > 2
    for fold, rows in enumerate(test):
        inner = nested[fold]
        bits = fit_mlps(
            features, labels, ~rows & ~inner, validation=inner, settings=SETTINGS, seed=1
        ).validation_bits.mean(2)
        assert torch.equal(found.epochs[..., fold], bits.argmin(-1) + 1)
        torch.testing.assert_close(found.inner_bits[..., fold], bits.amin(-1))
        keep = found.epochs[..., fold, None]
        outer = fit_mlps(features, labels, ~rows[None], keep=keep, settings=SETTINGS, seed=1)
        torch.testing.assert_close(found.scores[..., rows], outer.logits(features)[:, :, 0][..., rows])


def test_test_rows_change_nothing_but_their_own_score() -> None:
    features, labels, test, nested = case()
    found = mlp_nested_fits(features, labels, test, nested, settings=SETTINGS)
    spoiled, row = features.clone(), int(test[1].nonzero()[2])
    spoiled[:, row] = 1e9
    flipped = labels.clone()
    flipped[:, row] = ~flipped[:, row]
    again = mlp_nested_fits(spoiled, flipped, test, nested, settings=SETTINGS)
    others = test[1].clone()
    others[row] = False
    torch.testing.assert_close(found.scores[..., others], again.scores[..., others], atol=0, rtol=0)
    assert torch.equal(found.epochs[..., 1], again.epochs[..., 1])


def test_several_classes_have_a_logit_each() -> None:
    features, labels, test, nested = case()
    classes = labels.long() + (features[0, :, 1] > 0.5)
    found = mlp_nested_fits(features, classes, test, nested, settings=SETTINGS)
    assert found.scores.shape == (3, 2, 72, 3)
    assert (found.scores[0, 0].argmax(-1) == classes[0]).double().mean() > 0.6
