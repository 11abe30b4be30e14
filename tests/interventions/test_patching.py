"""Patching: nothing recovers 0, everything 1, directions add up, the linear proxy is a derivative."""

import numpy as np
import pytest
import torch
from steering_steps import noise

from microtome.capture import LoadedModel, capture
from microtome.interventions.patching import (
    PatchingPairs,
    attribution_patching,
    logit_differences,
    patch_of,
    patching_table,
    recovery,
)

D = 32
CLEAN = ["the happy cat ran to the river", "she liked the good film"]
CORRUPTED = ["the sad cat sat in the house", "she hated the bad film"]


@pytest.fixture(scope="module")
def pairs(llama) -> PatchingPairs:
    return PatchingPairs.of(llama, CLEAN, CORRUPTED, ["good", "great"], ["bad", "awful"])


def differences(model, pairs):
    return (logit_differences(model, texts, pairs) for texts in (pairs.clean, pairs.corrupted))


def test_everything_recovers_all_and_nothing_none(llama, pairs) -> None:
    table = patching_table(llama, pairs, ["resid_post.2", "resid_pre.0", "resid_post.0"])
    assert table["recovery"].tolist() == pytest.approx([1.0, 1.0, 1.0], abs=1e-4)
    clean, corrupted = differences(llama, pairs)
    assert table["logit_difference"].iloc[0] == pytest.approx(clean.mean(), abs=1e-4)
    none = patch_of(llama, pairs, ["resid_post.1"]).times(0.0)
    assert logit_differences(llama, pairs.corrupted, pairs, none) == pytest.approx(corrupted, abs=0)
    flips = ((clean > 0) != (corrupted > 0)).mean()
    assert table["flips"].iloc[0] == pytest.approx(flips)


def test_directions_of_a_basis_add_up_to_the_whole(llama, pairs) -> None:
    basis = torch.linalg.qr(noise(D, D)).Q.T
    site = "resid_post.1"

    def moved(directions):
        steering = patch_of(llama, pairs, [site], directions=directions)
        acts = capture(
            llama, pairs.corrupted, [site], "all", edits=steering.edits(llama), add_special_tokens=False, progress=False
        )
        return acts[site]

    start = capture(llama, pairs.corrupted, [site], "all", add_special_tokens=False, progress=False)[site]
    whole = moved(None) - start
    total = sum(moved({site: row[None]}) - start for row in basis)
    torch.testing.assert_close(total, whole, rtol=1e-4, atol=1e-4)
    half = moved({site: basis[:16]}) - start
    torch.testing.assert_close(half, whole @ basis[:16].T @ basis[:16], rtol=1e-4, atol=1e-4)


def test_heads_and_positions(llama, pairs) -> None:
    table = patching_table(llama, pairs, ["z.2.0", "z.2.1", "z.2.2", "z.2.3"])
    assert table["recovery"].abs().max() > 1e-4
    last = patch_of(llama, pairs, ["resid_post.2"], positions="last")
    clean, _ = differences(llama, pairs)
    assert logit_differences(llama, pairs.corrupted, pairs, last) == pytest.approx(clean, abs=1e-4)


def test_double_precision_is_kept(tiny, word_tokenizer, pairs) -> None:
    model = LoadedModel.from_module(tiny("llama").double(), word_tokenizer, name="double")
    patched = logit_differences(model, pairs.corrupted, pairs, patch_of(model, pairs, ["resid_post.0"]))
    clean, _ = differences(model, pairs)
    assert patched == pytest.approx(clean, abs=1e-12)


def test_the_proxy_is_the_derivative(llama, pairs) -> None:
    sites = ["resid_post.2", "mlp_out.1", "attn_out.0", "z.1"]
    table = attribution_patching(llama, pairs, sites).set_index("site")["recovery"]
    clean, corrupted = differences(llama, pairs)
    for site in sites:
        small = 1e-2
        patched = logit_differences(llama, pairs.corrupted, pairs, patch_of(llama, pairs, [site]).times(small))
        slope = recovery(patched, corrupted, clean) / small
        assert table[site] == pytest.approx(slope, rel=0.1, abs=0.02)


def test_pairs_that_cannot_be_set_side_by_side_are_refused(llama, pairs) -> None:
    with pytest.raises(ValueError, match="texts of one length"):
        PatchingPairs.of(llama, ["the cat"], ["the cat sat"], ["good"], ["bad"])
    with pytest.raises(ValueError, match="not one token"):
        PatchingPairs.of(llama, ["the cat"], ["the film"], ["good film"], ["bad"])
    with pytest.raises(ValueError, match="give as many of each"):
        PatchingPairs(pairs.clean, pairs.corrupted, [1], [2])
    same = PatchingPairs(pairs.clean, pairs.clean, pairs.correct, pairs.wrong)
    with pytest.raises(ValueError, match="nothing to recover"):
        patching_table(llama, same, ["resid_post.0"])
    with pytest.raises(ValueError, match="nothing to recover"):
        attribution_patching(llama, same, ["resid_post.0"])
    assert recovery(np.array([2.0]), np.array([1.0]), np.array([3.0])) == 0.5
