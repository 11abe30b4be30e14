"""Differences of pairs: what they are, that a fit without intercept does not care which comes first, columns named."""

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression

from microtome.capture.activations import Activations
from microtome.capture.attention_features import attention_features
from microtome.capture.models import LoadedModel
from microtome.probes.paired_differences import column_names, heads_together, key_features, paired_differences

TEXTS = ["the dog liked the cat and it slept", "the cat liked the dog and it ran", "a bird saw the man and she sat"]
SECOND, FIRST = [(18, 21), (18, 21), (15, 18)], [(4, 7), (4, 7), (2, 6)]


def test_one_forward_gives_both_members_of_a_pair(tiny, word_tokenizer) -> None:
    model = LoadedModel.from_module(tiny("llama"), word_tokenizer, name="llama")
    features = attention_features(
        model,
        TEXTS,
        keys={"right": SECOND, "decoy": FIRST},
        queries=-2,
        labels={"group": [0, 0, 1]},
        progress=False,
    )
    right, decoy = key_features(features, "right"), key_features(features, "decoy")
    difference = paired_differences(right, decoy)
    for layer in range(3):
        both = features["attention", layer]
        assert torch.equal(difference[f"attention.{layer}"][..., 0], both[..., 0] - both[..., 1])
    together = heads_together(difference)
    assert together["attention"].shape == (3, 12)
    names = column_names(difference)
    assert names.iloc[5].tolist() == ["attention.1", 1, 0]
    assert torch.equal(together["attention"][:, 5], difference["attention.1"][:, 1, 0])
    with pytest.raises(KeyError, match=r"no key group 'wrong'; these features have \['right', 'decoy'\]"):
        key_features(features, "wrong")
    reverse = paired_differences(decoy, right)
    assert torch.equal(reverse["attention.0"], -difference["attention.0"])


def test_without_intercept_the_order_within_pairs_changes_nothing() -> None:
    rng = np.random.default_rng(0)
    signal = rng.normal(size=(200, 6))
    right = Activations.from_arrays({"heads.0": signal + 0.5 * rng.normal(size=6)})
    decoy = Activations.from_arrays({"heads.0": rng.normal(size=(200, 6))})
    x = paired_differences(right, decoy)["heads.0"].numpy()
    sign = np.where(rng.integers(0, 2, 200), 1, -1)
    fits = []
    for s in (sign, np.where(np.arange(200) % 2, 1, -1)):
        fits.append(LogisticRegression(fit_intercept=False, tol=1e-10).fit(x * s[:, None], s > 0).coef_)
    np.testing.assert_allclose(fits[0], fits[1], atol=1e-6)


def test_sites_of_our_own_kinds_go_together_under_another_name() -> None:
    acts = Activations.from_arrays({"z.0": np.ones((4, 2, 3)), "z.1": np.zeros((4, 2, 3))})
    together = heads_together(acts)
    assert [str(site) for site in together.sites] == ["z_together"]
    assert together["z_together"][0].tolist() == [1] * 6 + [0] * 6
    both = Activations.from_arrays({"z.0": np.ones((4, 2, 3)), "resid_post.1": np.zeros((4, 5), dtype=np.float32)})
    assert heads_together(both, site="heads")["heads"].dtype == torch.float64
    assert column_names(both)["head"].tolist() == [0] * 3 + [1] * 3 + [-1] * 5
    with pytest.raises(ValueError, match=r"kinds \['z', 'resid_post'\]"):
        heads_together(both)


def test_pairs_that_are_none_are_refused() -> None:
    x = np.random.default_rng(0).normal(size=(4, 3))
    right = Activations.from_arrays({"heads.0": x}, groups=[0, 0, 1, 1])
    with pytest.raises(ValueError, match="right has 4 rows, decoy 2"):
        paired_differences(right, right.select_rows([0, 1]))
    with pytest.raises(ValueError, match="Sites and widths must agree"):
        paired_differences(right, Activations.from_arrays({"heads.1": x}))
    with pytest.raises(ValueError, match="row 0: the group of right and decoy differ"):
        paired_differences(right, Activations.from_arrays({"heads.0": -x}, groups=[1, 0, 1, 0]))
    with pytest.raises(ValueError, match="equal at every site"):
        paired_differences(right, right)
