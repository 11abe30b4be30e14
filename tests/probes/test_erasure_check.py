"""The check of erasure on held-out rows: planted sites, folds, bad input."""

import numpy as np
import pandas as pd
import pytest

from microtome.probes.erasure_check import erased_sweep_check


def planted(n: int = 400, seed: int = 0) -> tuple[dict, np.ndarray, np.ndarray]:
    """A site with the concept, one without, and one with it in two dimensions of a curve (no linear probe sees it)."""
    rng = np.random.default_rng(seed)
    y = rng.integers(2, size=n)
    X, noise = rng.normal(size=(n, 8)) @ rng.normal(size=(8, 8)), rng.normal(size=(n, 8))
    return {"resid_post.0": X + 2 * y[:, None] * rng.normal(size=8), "resid_post.1": noise}, y, np.arange(n) // 2


@pytest.mark.parametrize("method", ["leace", "inlp"])
def test_before_a_probe_finds_it_after_it_does_not(method: str) -> None:
    X, y, groups = planted()
    table = erased_sweep_check(X, y, groups=groups, method=method, iterations=6, folds=3).set_index("site")
    assert list(table["layer"]) == [0, 1]
    erased = table.loc["resid_post.0"]
    assert erased["auroc_before"] > 0.9 < erased["auroc_relearned_before"]
    assert erased["auroc_after"] == 0.5 if method == "leace" else erased["auroc_after"] < 0.62
    assert 0.3 < erased["auroc_relearned"] < 0.66
    assert 0.35 < table.loc["resid_post.1", "auroc_before"] < 0.65
    assert erased["rank"] == 1 if method == "leace" else erased["rank"] >= 1
    assert 0 < erased["changed"] < 1


def test_leace_changes_less_than_inlp() -> None:
    X, y, groups = planted()
    leace, inlp = (
        erased_sweep_check(X, y, groups=groups, method=method, folds=3, iterations=5) for method in ("leace", "inlp")
    )
    assert leace.loc[0, "changed"] < inlp.loc[0, "changed"]


def test_a_test_row_moves_nothing_but_its_own_fold() -> None:
    X, y, groups = planted()
    base = erased_sweep_check({"x": X["resid_post.0"]}, y, groups=groups)
    far = X["resid_post.0"].copy()
    far[7] = 1e6
    moved = erased_sweep_check({"x": far}, y, groups=groups)
    assert moved.loc[0, "auroc_after"] == base.loc[0, "auroc_after"] == 0.5  # erased exactly in every fold


def test_heads_are_lines_of_their_own_and_runs_repeat() -> None:
    X, y, groups = planted(n=200)
    heads = {"z.3": np.stack(list(X.values()), 1)}
    first = erased_sweep_check(heads, y, groups=groups, folds=3)
    assert list(first["site"]) == ["z.3.0", "z.3.1"]
    pd.testing.assert_frame_equal(first, erased_sweep_check(heads, y, groups=groups, folds=3))
    alone = erased_sweep_check({"x": X["resid_post.0"]}, y, groups=groups, folds=3)
    np.testing.assert_allclose(first.loc[0, "auroc_before"], alone.loc[0, "auroc_before"])


def test_bad_input_says_what_is_wrong() -> None:
    X, y, groups = planted(n=40)
    with pytest.raises(ValueError, match="give 'leace' or 'inlp'"):
        erased_sweep_check(X, y, groups=groups, method="rlace")
    with pytest.raises(ValueError, match="binary target needs two"):
        erased_sweep_check(X, np.arange(40) % 3, groups=groups)
    with pytest.raises(ValueError, match="cannot fill 5 folds"):
        erased_sweep_check(X, y, groups=np.arange(40) // 14)
    with pytest.raises(ValueError, match="cannot be halved; ask for fewer folds"):
        erased_sweep_check(X, np.arange(40) < 6, groups="rows")
