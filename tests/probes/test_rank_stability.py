"""rank_stability of sweeps, of several classes and of numbers."""

import numpy as np
import pytest
import torch

from microtome.probes.rank_stability import rank_stability
from microtome.probes.sweep import sweep

QUICK = {"groups": "rows", "permutations": 0, "bootstraps": 100, "progress": False, "folds": 3, "inner_folds": 2}
N = 240


def planted(label: str, seed: int = 0):
    """Heads of z and a stream; of the labels, head h tells more with h, the stream nothing."""
    rng = np.random.default_rng(seed)
    codes, numbers = rng.permutation(np.arange(N) % 3), rng.normal(size=N)
    signal = numbers[:, None] * np.eye(4)[0] if label == "numbers" else np.eye(4)[codes]
    heads = np.stack([rng.normal(size=(N, 4)) + 0.7 * head * signal for head in range(4)], axis=1)
    labels = {"binary": codes == 1, "classes": np.array(["a", "b", "c"])[codes], "numbers": numbers}[label]
    return sweep({"z.0": heads, "resid_post.0": rng.normal(size=(N, 4))}, labels, **QUICK)


@pytest.mark.parametrize("label", ["binary", "classes", "numbers"])
def test_a_sweep_ranks_as_its_arrays_do(label) -> None:
    result = planted(label)
    found = rank_stability(result, top=2, draws=60)
    arrays = rank_stability(result.scores, result.truth, result.groups, result.test, top=2, draws=60)
    assert found.sites == tuple(result.table["site"])
    assert arrays.sites == ()
    assert (found.tau, found.jaccard) == (arrays.tau, arrays.jaccard)
    assert torch.equal(found.in_top, arrays.in_top)
    assert found.tau > 0.5
    best = {site for site, share in zip(found.sites, found.in_top.tolist(), strict=True) if share > 0.8}
    assert best == {"z.0.2", "z.0.3"}
    assert repr(found).startswith(f"RankStability(5 probes, tau {found.tau:.2f} [")
    assert len(repr(found)) < 120


def test_one_kind_is_ranked_alone() -> None:
    result = planted("classes")
    found = rank_stability(result, top=2, kind="z", draws=60)
    assert found.sites == ("z.0.0", "z.0.1", "z.0.2", "z.0.3")
    is_z = torch.tensor([site.startswith("z") for site in result.table["site"]])
    rest = result.truth, result.groups, result.test
    assert found.tau == rank_stability(result.scores[is_z], *rest, top=2, draws=60).tau
    with pytest.raises(ValueError, match="kind='q' was not probed; give one of"):
        rank_stability(result, kind="q")
    with pytest.raises(ValueError, match="top=1 of 1 probes"):
        rank_stability(result, kind="resid_post", top=1)
    with pytest.raises(ValueError, match="give the sweep alone"):
        rank_stability(result, result.truth)
    with pytest.raises(ValueError, match="scores with their truth, groups and test rows"):
        rank_stability(result.scores, result.truth)
    with pytest.raises(ValueError, match="scores with their truth, groups and test rows"):
        rank_stability(result.scores, *rest, kind="z")
