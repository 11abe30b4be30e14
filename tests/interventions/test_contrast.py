"""Directions between two sets: planted means, rotations, signs, closed forms, nulls, and what is refused."""

import numpy as np
import pytest
import torch
from steering_steps import BAD, GOOD, noise

from microtome.capture import capture
from microtome.interventions.artefact import Artefact
from microtome.interventions.contrast import (
    METHODS,
    ContrastRows,
    contrast,
    contrast_rows,
    direction_cosines,
    rows_of,
    separation,
)
from microtome.interventions.controls import shuffled_labels

D = 32


def planted(n: int = 400, *, size: float = 2.0, seed: int = 0, spread: torch.Tensor | None = None) -> ContrastRows:
    """Two Gaussians with means +mu and -mu at one site."""
    mu = size * noise(D, seed=9) / noise(D, seed=9).norm()
    wanted = torch.arange(n) % 2 == 0
    x = noise(n, D, seed=seed)
    x = x if spread is None else x * spread
    x = x + torch.where(wanted[:, None], mu, -mu)
    return ContrastRows({"resid_post.1": x}, wanted, "last")


def vector(model, rows, method="mean") -> torch.Tensor:
    return contrast(model, rows, method).vector()


@pytest.mark.parametrize("method", METHODS)
def test_planted_means_are_found(llama, method) -> None:
    rows = planted(4000)
    mu = noise(D, seed=9) / noise(D, seed=9).norm()
    found = contrast(llama, rows, method)
    assert torch.cosine_similarity(found.vector(), mu, dim=0) > 0.98
    assert float(found.vector() @ mu) == pytest.approx(4.0, rel=0.05)
    unit = (found.vector() / found.vector().norm()).double()
    x = rows.activations["resid_post.1"].double()
    assert float(found.offset[0]) == pytest.approx(float(x[~rows.wanted].mean(0) @ unit), rel=1e-5)
    # strength 1 is the gap of the classes along the direction, whatever the method
    gap = (x[rows.wanted].mean(0) - x[~rows.wanted].mean(0)) @ unit
    assert float(found.vector().norm()) == pytest.approx(float(gap), rel=1e-5)
    assert float(found.raw_norm[0]) >= float(gap) * (1 - 1e-6)


@pytest.mark.parametrize("method", METHODS)
def test_exchanging_the_sets_turns_the_vector(llama, method) -> None:
    rows = planted()
    turned = ContrastRows(rows.activations, ~rows.wanted, "last")
    one, other = vector(llama, rows, method), vector(llama, turned, method)
    torch.testing.assert_close(one, -other, rtol=1e-3, atol=1e-4)
    if method == "mean":
        assert torch.equal(one, -other)


def test_the_mean_turns_with_the_space(llama) -> None:
    rows = planted()
    turn = torch.linalg.qr(noise(D, D, seed=4)).Q
    turned = ContrastRows({"resid_post.1": rows.activations["resid_post.1"] @ turn.T + 7.0}, rows.wanted, "last")
    torch.testing.assert_close(vector(llama, turned), turn @ vector(llama, rows), rtol=1e-4, atol=1e-4)


def test_whitening_is_fishers_direction(llama) -> None:
    spread = torch.linspace(0.2, 3.0, D)
    rows = planted(20000, spread=spread)
    mu = noise(D, seed=9) / noise(D, seed=9).norm()
    found = vector(llama, rows, "whitened")
    assert torch.cosine_similarity(found, mu / spread.square(), dim=0) > 0.99
    assert torch.cosine_similarity(vector(llama, rows), mu / spread.square(), dim=0) < 0.9


def test_principal_components_are_not_centred(llama) -> None:
    mu = noise(D, seed=1) / noise(D, seed=1).norm()
    other = noise(D, seed=2)
    other = other - (other @ mu) * mu
    other = other / other.norm()
    n = 200
    noise_of_pairs = noise(n, 1, seed=3) * other
    x = torch.cat([3 * mu + noise_of_pairs, torch.zeros(n, D)])
    wanted = torch.arange(2 * n) < n
    rows = ContrastRows({"resid_post.1": x}, wanted, "last", [*range(n), *range(n)])
    assert abs(float(torch.cosine_similarity(vector(llama, rows, "pca"), mu, dim=0))) > 0.99
    centred = torch.linalg.svd(rows.differences("resid_post.1") - rows.differences("resid_post.1").mean(0)).Vh[0]
    assert abs(float(centred.float() @ mu)) < 0.01


def test_a_component_that_does_not_tell_the_classes_apart_is_refused(llama) -> None:
    x = torch.zeros(8, D)
    wanted = torch.arange(8) < 4
    x[:4, 0] = torch.tensor([5.0, -5.0, 5.0, -5.0])
    x[:4, 1] = 0.5
    rows = ContrastRows({"resid_post.1": x}, wanted, "last")
    with pytest.raises(ValueError, match="pca direction"):
        contrast(llama, rows, "pca")


def test_pairs_are_set_beside_one_another() -> None:
    x = torch.arange(6.0)[:, None].expand(6, 2).clone()
    wanted = torch.tensor([True, False, True, False, True, False])
    rows = ContrastRows({"resid_post.0": x}, wanted, "last", [2, 0, 1, 1, 0, 2])
    assert rows.differences("resid_post.0")[:, 0].tolist() == [3.0, -1.0, -5.0]
    broken = ContrastRows({"resid_post.0": x}, wanted, "last", [2, 0, 1, 1, 0, 0])
    with pytest.raises(ValueError, match="one wanted and one unwanted"):
        broken.differences("resid_post.0")


def test_rows_are_the_activations_under_padding(llama) -> None:
    rows = contrast_rows(llama, GOOD, BAD, ["resid_post.1", "z.0"])
    assert rows.sites == ("resid_post.1", "z.0.0", "z.0.1", "z.0.2", "z.0.3")
    assert rows.counts == (4, 4)
    for number, text in enumerate([*GOOD, *BAD]):
        alone = capture(llama, [text], ["resid_post.1"], "last", progress=False)["resid_post.1"][0]
        torch.testing.assert_close(rows.activations["resid_post.1"][number], alone, rtol=1e-4, atol=1e-5)
    from_acts = capture(
        llama, [*GOOD, *BAD], ["resid_post.1"], "last", labels={"label": [1] * 4 + [0] * 4}, progress=False
    )
    same = rows_of(from_acts)
    assert torch.equal(same.wanted, rows.wanted)
    torch.testing.assert_close(vector(llama, same), contrast(llama, rows, sites=["resid_post.1"]).vector())


def test_separation_is_measured_on_rows_that_had_no_part() -> None:
    strong, none = separation(planted()), separation(planted(size=0.0))
    assert strong["d_prime"].iloc[0] == pytest.approx(4.0, rel=0.15)
    assert strong["stability"].iloc[0] > 0.98
    assert abs(none["d_prime"].iloc[0]) < 0.4
    # without folds the same noise would look like a difference
    x, wanted = planted(size=0.0).activations["resid_post.1"], planted(size=0.0).wanted
    unit = x[wanted].mean(0) - x[~wanted].mean(0)
    projected = x @ (unit / unit.norm())
    own = float(projected[wanted].mean() - projected[~wanted].mean()) / float(projected.std())
    assert own > 0.4


def test_shuffled_labels_are_at_null() -> None:
    rows = planted(200)
    groups = list(range(200))
    found = []
    for seed in range(20):
        labels = shuffled_labels(rows.wanted.numpy(), groups, seed=seed)
        one = ContrastRows(rows.activations, torch.from_numpy(labels), "last")
        found.append(separation(one, seed=seed)["d_prime"].iloc[0])
    assert abs(np.mean(found)) < 2 * np.std(found) / np.sqrt(20) + 0.05
    assert max(found) < 1.0 < separation(rows)["d_prime"].iloc[0]


def test_groups_stay_in_one_fold() -> None:
    # twins: every row four times; rows apart would lend a fold its own rows
    x = noise(40, D, seed=5).repeat_interleave(4, 0)
    wanted = (torch.arange(40) % 2 == 0).repeat_interleave(4)
    rows = ContrastRows({"resid_post.0": x}, wanted, "last")
    apart = separation(rows)["d_prime"].iloc[0]
    whole = separation(rows, groups=np.arange(40).repeat(4).tolist())["d_prime"].iloc[0]
    assert apart > 1 > whole
    with pytest.raises(ValueError, match="fold"):
        separation(ContrastRows({"resid_post.0": x[:4]}, torch.tensor([True, True, False, False]), "last"))


def test_methods_are_set_side_by_side(llama) -> None:
    rows = planted()
    table = direction_cosines([contrast(llama, rows, method) for method in METHODS], "resid_post.1")
    assert list(table.index) == list(METHODS)
    assert np.diag(table) == pytest.approx(np.ones(4), abs=1e-6)
    assert table.to_numpy().min() > 0.8


def test_an_artefact_says_where_it_is_from(llama) -> None:
    found = contrast(llama, contrast_rows(llama, GOOD, BAD), names=("good", "bad"), seed=3)
    assert isinstance(found, Artefact)
    assert (found.positive, found.negative, found.counts, found.extraction) == ("good", "bad", (4, 4), "last")
    assert found.layers == (0, 1, 2)
    assert found.facts["seed"] == 3
    assert found.facts["weight_sha256"]


def test_sets_that_are_no_contrast_are_refused(llama) -> None:
    with pytest.raises(ValueError, match="needs both"):
        contrast_rows(llama, GOOD, [])
    with pytest.raises(ValueError, match="are the same"):
        contrast_rows(llama, GOOD, GOOD[::-1])
    with pytest.raises(ValueError, match="cannot be paired"):
        contrast_rows(llama, GOOD, BAD[:2], paired=True)
    with pytest.raises(ValueError, match="one position per text"):
        contrast_rows(llama, GOOD, BAD, positions="all")
    with pytest.raises(ValueError, match="the two sets read the same"):
        contrast(llama, contrast_rows(llama, GOOD, BAD, "resid_pre.0"))  # all end in a full stop
    with pytest.warns(UserWarning, match="1 texts are in both sets"):
        contrast_rows(llama, GOOD, [*BAD, GOOD[0]])
    acts = capture(llama, GOOD, ["resid_post.0"], "last", labels={"label": [1] * 4}, progress=False)
    with pytest.raises(ValueError, match="1 classes"):
        rows_of(acts)
    acts = capture(llama, GOOD, ["resid_post.0"], "all", labels={"label": [1, 1, 0, 0]}, progress=False)
    with pytest.raises(ValueError, match="Several rows of one text"):
        rows_of(acts)
