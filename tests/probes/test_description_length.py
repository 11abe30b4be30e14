import math
from itertools import pairwise

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.linear_model import LogisticRegression

from microtome.probes.control_task import control_task
from microtome.probes.description_length import BOUNDARIES, _blocks, code_lengths, description_length
from microtome.probes.metrics import log_loss_bits

N = 400


@pytest.fixture
def case():
    rng = np.random.default_rng(0)
    positive = rng.permutation(np.arange(N) < 120)
    noise = rng.normal(size=(3, N, 6))
    noise[1, :, 2] += 1.5 * positive
    noise[2, :, 2] += 3.0 * positive
    return torch.from_numpy(noise), positive, np.arange(N)


def entropy(positive):
    share = positive.mean()
    return -(share * math.log2(share) + (1 - share) * math.log2(1 - share))


def test_a_constant_predictor_costs_n_times_the_entropy(case):
    _, positive, groups = case
    share = positive.mean()
    constant = torch.full((1, N), math.log(share / (1 - share)), dtype=torch.float64)
    assert N * log_loss_bits(constant, torch.from_numpy(positive)).item() == pytest.approx(N * entropy(positive))
    # with a feature that says nothing at all the shares must be learned: a few bits more
    bits = code_lengths(torch.zeros(1, N, 1), torch.from_numpy(positive[None]), groups).mean().item()
    assert N * entropy(positive) < bits < N * entropy(positive) + 30


def test_noise_does_not_compress_and_information_shortens_the_code(case):
    features, positive, groups = case
    lengths = description_length({f"resid_post.{n}": f for n, f in enumerate(features)}, positive, groups=groups)
    table = lengths.table.set_index(["site", "labelling"])
    nothing, something, more = (table.loc[(f"resid_post.{n}", "labels"), "bits"] for n in range(3))
    assert more < 0.8 * something < 0.8 * 0.85 * nothing
    assert table.loc[("resid_post.0", "labels"), "compression"] < 1
    assert (table.xs("shuffled", level=1)["compression"] < 1).all()
    assert table.loc[("resid_post.2", "labels"), "compression"] == pytest.approx(N * entropy(positive) / more)
    assert table.loc[("resid_post.2", "labels"), "uniform_compression"] == pytest.approx(N / more)
    assert lengths.bits.shape == (3, 2, 5)
    most = table.loc[("resid_post.2", "labels")]
    shown = f"most compressed resid_post.2 {most['compression']:.2f} times, {most['bits_per_row']:.3f} bits per row"
    assert repr(lengths) == f"DescriptionLength(3 sites, {shown}; controls: shuffled)"
    assert "<th>compression</th>" in lengths._repr_html_()


def test_agreement_with_a_loop_over_scikit_learn(case):
    features, positive, groups = case
    strengths = (0.01, 0.3)
    [[[found]]] = code_lengths(features[2:], torch.from_numpy(positive[None]), groups, strengths, shuffles=1, seed=4)
    prefixes = _blocks(positive[None], groups, BOUNDARIES, 2, np.random.default_rng(4))
    x = features[2].numpy()
    of_strength = []
    for strength in strengths:
        bits = 0.0
        for before, until in pairwise(prefixes):
            block = until & ~before
            mean, scale = x[before].mean(axis=0), x[before].std(axis=0)
            model = LogisticRegression(C=strength, solver="newton-cholesky", tol=1e-12)
            model.fit((x[before] - mean) / scale, positive[before])
            p = model.predict_proba((x[block] - mean) / scale)
            bits -= np.log2(p[np.arange(block.sum()), positive[block].astype(int)]).sum()
        of_strength.append(bits)
    mixture = -math.log2(sum(2 ** -(bits - min(of_strength)) for bits in of_strength) / 2) + min(of_strength)
    assert found.item() == pytest.approx(prefixes[0].sum() + mixture, abs=0.02)


def test_classes_cost_what_they_should():
    rng = np.random.default_rng(1)
    kinds = rng.integers(3, size=300)
    features = torch.from_numpy(np.stack([rng.normal(size=(300, 4)), rng.normal(size=(300, 4)) + 3 * np.eye(4)[kinds]]))
    labels = torch.from_numpy(kinds[None])
    noise, signal = code_lengths(features, labels, np.arange(300)).mean(dim=-1)[:, 0].tolist()
    assert signal < 0.5 * noise
    assert 300 * math.log2(3) * 0.98 < noise < 300 * math.log2(3) + 40
    two = torch.from_numpy(kinds[None] % 2)
    binary, classes = (code_lengths(features[1:], x, np.arange(300), [0.1]).mean().item() for x in (two == 1, two))
    assert classes == pytest.approx(binary, rel=1e-3)


def test_classes_agree_with_a_loop_over_one_against_the_rest():
    rng = np.random.default_rng(5)
    kinds = rng.integers(3, size=150)
    x = rng.normal(size=(150, 4)) + np.eye(4)[kinds]
    bits = code_lengths(
        torch.from_numpy(x[None]), torch.from_numpy(kinds[None]), np.arange(150), [0.2], shuffles=1, seed=3
    )
    prefixes = _blocks(kinds[None], np.arange(150), BOUNDARIES, 3, np.random.default_rng(3))
    expected = prefixes[0].sum() * math.log2(3)
    for before, until in pairwise(prefixes):
        block = until & ~before
        mean, scale = x[before].mean(axis=0), x[before].std(axis=0)
        p = np.empty((block.sum(), 3))
        for kind in range(3):
            model = LogisticRegression(C=0.2, solver="newton-cholesky", tol=1e-12)
            model.fit((x[before] - mean) / scale, kinds[before] == kind)
            p[:, kind] = model.predict_proba((x[block] - mean) / scale)[:, 1]
        p /= p.sum(axis=1, keepdims=True)
        expected -= np.log2(p[np.arange(len(p)), kinds[block]]).sum()
    assert bits.item() == pytest.approx(expected, abs=0.02)


def test_groups_are_sent_whole_and_the_first_block_holds_every_class():
    groups = np.repeat(np.arange(60), 3)
    labels = np.stack([np.arange(180) % 20 == 0, np.arange(180) % 2 == 0])
    rng = np.random.default_rng(0)
    for _ in range(20):
        prefixes = _blocks(labels, groups, BOUNDARIES, 2, rng)
        assert prefixes[-1].all()
        assert (prefixes[1:] >= prefixes[:-1]).all()
        for rows in prefixes:
            assert np.isin(rows.reshape(60, 3).sum(axis=1), [0, 3]).all()
            assert all(0 < label[rows].sum() < rows.sum() for label in labels)


def test_a_block_is_not_coded_with_its_own_labels(case):
    # labels of the last block turned over: earlier code stays, and the last block's grows
    features, positive, groups = case
    prefixes = _blocks(positive[None], groups, BOUNDARIES, 2, np.random.default_rng(2))
    turned = np.where(prefixes[-2], positive, ~positive)
    both = torch.from_numpy(np.stack([positive, turned]))
    # the blocks of both labellings are the same only if they start alike
    bits = code_lengths(features[2:], both, groups, [0.3], shuffles=1, seed=2)[0, :, 0]
    assert bits[1] > bits[0] + (~prefixes[-2]).sum()


def test_control_labels_are_coded_beside(case):
    features, positive, groups = case
    types = np.random.default_rng(3).integers(30, size=N)
    control = control_task(types, positive)
    sites = {"resid_post.0": features[2], "resid_post.1": torch.from_numpy(np.eye(30)[types])}
    table = description_length(sites, positive, groups=groups, controls={"control task": control}).table
    assert table["labelling"].tolist() == ["labels", "shuffled", "control task"] * 2
    bits = table.set_index(["site", "labelling"])["bits"].unstack()
    assert bits.loc["resid_post.1", "control task"] < 0.75 * bits.loc["resid_post.0", "control task"]
    assert isinstance(table, pd.DataFrame)


def test_bad_input_is_explained(case):
    features, positive, groups = case
    with pytest.raises(ValueError, match="labels are numbers"):
        description_length({"a": features[0]}, np.linspace(0, 1, N), groups=groups)
    with pytest.raises(ValueError, match="called 'shuffled'"):
        description_length({"a": features[0]}, positive, groups=groups, controls={"shuffled": positive})
    with pytest.raises(ValueError, match="shuffles=0"):
        description_length({"a": features[0]}, positive, groups=groups, shuffles=0)
    with pytest.raises(ValueError, match="never held all 2 classes"):
        code_lengths(features, torch.from_numpy(positive[None]), (~positive).astype(np.int64))
    with pytest.raises(KeyError, match="labels='mood' is no column"):
        description_length({"a": features[0]}, "mood", groups=groups)
