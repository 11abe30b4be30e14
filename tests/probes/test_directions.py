"""The table of directions: planted agreement, held-out numbers, bands, groups, pairs, bad input."""

import numpy as np
import pytest
import torch

from microtome.probes.directions import direction_table


def planted(n: int = 240, width: int = 30, gap: float = 4.0, seed: int = 0) -> tuple[dict, np.ndarray, np.ndarray]:
    """One site with the concept on its largest axis, one without any; two rows of each group."""
    rng = np.random.default_rng(seed)
    y = rng.integers(2, size=n)
    X = rng.normal(size=(n, width))
    X[:, 3] += gap * (2 * y - 1)
    noise = rng.normal(size=(n, width))
    return {"resid_post.0": X, "resid_post.1": noise}, y, np.arange(n) // 2


FINDERS = ("mass_mean", "lda", "pca", "kmeans", "random")


def test_finders_agree_where_one_direction_carries_everything_and_not_in_noise() -> None:
    X, y, groups = planted()
    table = direction_table(X, y, groups=groups, finders=FINDERS, draws=8)
    strong, noise = (table.pairs[table.pairs["site"] == site] for site in X)
    assert len(strong) == 10
    trained = strong[(strong["first"] != "random") & (strong["second"] != "random")]
    assert bool((trained["cosine"] > 0.9).all())
    assert bool((trained["cosine_low"] > 0.8).all())
    assert bool((trained["score_correlation"] > 0.9).all())
    np.testing.assert_allclose(strong["chance"], np.sqrt(2 / (np.pi * 30)))
    assert float(noise.set_index(["first", "second"]).loc[("mass_mean", "pca"), "cosine"]) < 0.7
    alone = table.finders.set_index(["site", "finder"])
    assert float(alone.loc[("resid_post.0", "mass_mean"), "auroc"]) > 0.99
    assert 0.35 < float(alone.loc[("resid_post.1", "mass_mean"), "auroc"]) < 0.65
    assert float(alone.loc[("resid_post.0", "mass_mean"), "stability"]) > 0.95
    assert float(alone.loc[("resid_post.1", "pca"), "stability"]) < 0.95
    assert float(table.directions["resid_post.0"]["mass_mean"][3]) > 0.95


def test_cosines_are_what_the_directions_say() -> None:
    X, y, groups = planted(n=60)
    table = direction_table(X, y, groups=groups, finders=("mass_mean", "lda"), draws=0)
    for site, values in X.items():
        u, v = (table.directions[site][name].numpy() for name in ("mass_mean", "lda"))
        row = table.pairs[table.pairs["site"] == site].iloc[0]
        assert row["cosine"] == pytest.approx(abs(u @ v))
        covariance = np.cov(values.T)
        assert row["whitened_cosine"] == pytest.approx(abs(np.corrcoef(values @ u, values @ v)[0, 1]))
        assert row["whitened_cosine"] == pytest.approx(
            abs(u @ covariance @ v) / np.sqrt(u @ covariance @ u * (v @ covariance @ v))
        )
        assert np.isnan(row["cosine_low"])
    best = table.finders.sort_values("auroc", ascending=False, kind="stable").iloc[0]
    assert repr(table).startswith(f"DirectionTable({len(X)} sites, 2 finders, median |cosine| ")
    assert f"best {best['finder']} at {best['site']} AUROC {best['auroc']:.3f}, stability nan" in repr(table)
    assert "<th>whitened_cosine</th>" in table._repr_html_()
    matrix = table.matrix("resid_post.0", "whitened_cosine")
    assert matrix.loc["lda", "mass_mean"] == matrix.loc["mass_mean", "lda"] < 1 == matrix.loc["lda", "lda"]


def test_whitening_tells_apart_what_the_raw_angle_does_not() -> None:
    rng = np.random.default_rng(0)
    y = rng.integers(2, size=400)
    X = rng.normal(size=(400, 5)) * [1, 100, 1, 1, 1]
    own = {
        "narrow": lambda rows, *_: torch.eye(5, dtype=torch.float64)[:1],
        "tilted": lambda rows, *_: torch.tensor([[1.0, 0.1, 0, 0, 0]], dtype=torch.float64),
    }
    row = direction_table({"x": X}, y, groups="rows", finders=(), own=own, draws=2).pairs.iloc[0]
    assert row["cosine"] == pytest.approx(1 / np.sqrt(1.01))
    assert row["whitened_cosine"] == pytest.approx(1 / np.sqrt(1 + 100), abs=0.1)


def test_heads_are_sites_of_their_own_and_seeds_repeat() -> None:
    X, y, groups = planted(n=80)
    heads = {"z.4": np.stack(list(X.values()), 1)}
    first, again = (direction_table(heads, y, groups=groups, finders=("mass_mean", "random"), draws=3) for _ in "ab")
    assert list(first.pairs["site"]) == ["z.4.0", "z.4.1"]
    assert first.pairs.equals(again.pairs)
    whole = direction_table(X, y, groups=groups, finders=("mass_mean", "pca"), draws=0)
    torch.testing.assert_close(first.directions["z.4.0"]["mass_mean"], whole.directions["resid_post.0"]["mass_mean"])


def test_held_out_rows_are_not_fitted_on() -> None:
    X, y, _ = planted(n=60, width=200, gap=0.0)
    alone = direction_table(X, y, groups="rows", finders=("mass_mean", "lda"), draws=0).finders
    assert bool(alone["auroc"].between(0.25, 0.75).all())  # on the fitted rows it is 1


def test_pairs_and_own_finders() -> None:
    rng = np.random.default_rng(0)
    shared = 10 * rng.normal(size=(40, 6))
    X = np.concatenate([shared, shared + 2 * np.eye(6)[1]]) + 0.1 * rng.normal(size=(80, 6))
    y, groups = np.arange(80) // 40, np.arange(80) % 40
    pairs = np.stack([np.arange(40), np.arange(40, 80)], 1)
    asked = {"groups": groups, "finders": ("pca_difference",), "draws": 3}
    table = direction_table({"x": X}, y, pairs=pairs, own={"last": lambda rows, *_: rows[:, -1]}, **asked)
    assert float(table.directions["x"]["pca_difference"][1]) > 0.99
    assert table.pairs.loc[0, ["first", "second"]].tolist() == ["pca_difference", "last"]
    with pytest.raises(ValueError, match="rows in two groups"):
        direction_table({"x": X}, y, pairs=pairs, **{**asked, "groups": "rows"})
    with pytest.raises(ValueError, match="there are 80, from 0"):
        direction_table({"x": X}, y, pairs=pairs + 1, **asked)
    with pytest.raises(ValueError, match=r"expected \[pair, 2\]"):
        direction_table({"x": X}, y, pairs=pairs[:, 0], **asked)


def test_bad_input_says_what_is_wrong() -> None:
    X, y, groups = planted(n=40)
    with pytest.raises(ValueError, match="binary target needs two"):
        direction_table(X, np.arange(40) % 3, groups=groups)
    with pytest.raises(ValueError, match="cannot fill 5 folds"):
        direction_table(X, y, groups=np.arange(40) // 14)
    with pytest.raises(ValueError, match="compares at least two"):
        direction_table(X, y, groups=groups, finders=("lda",))
    with pytest.raises(ValueError, match="same features"):
        direction_table({"x": np.ones((40, 3))}, y, groups=groups)
    table = direction_table(X, y, groups=groups, finders=("mass_mean", "lda"), draws=0)
    with pytest.raises(KeyError, match="no 'angle'"):
        table.matrix("resid_post.0", "angle")
