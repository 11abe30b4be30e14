"""A sweep that is killed between two blocks and goes on is, in every bit, the sweep that was not interrupted."""

import sys

import numpy as np
import pandas as pd
import pytest
import torch

from microtome.probes import methods
from microtome.probes.sweep import sweep

sweep_module = sys.modules["microtome.probes.sweep"]  # the folder's name `sweep` is the function

QUICK = {"folds": 3, "inner_folds": 2, "permutations": 40, "bootstraps": 100, "progress": False, "groups": "rows"}


@pytest.fixture
def case(monkeypatch):
    """Three blocks, one site per call of the solver; labels."""
    monkeypatch.setattr(sweep_module, "SIDE_BY_SIDE_BYTES", 1)
    generator = torch.Generator().manual_seed(0)
    arrays = {"z.0": torch.randn(60, 2, 5, generator=generator), "z.1": torch.randn(60, 2, 5, generator=generator)}
    arrays["resid_post.0"] = torch.randn(60, 9, generator=generator)
    return arrays, np.arange(60) % 2 == 0


def dies_at(monkeypatch, name: str, number: int) -> list:
    """The `number`-th call of a solver raises, as a kill would end it; returns the list of calls."""
    module = methods if name == "nested_fits" else sweep_module
    real, calls = getattr(module, name), []

    def fragile(*arguments, **options):
        calls.append(1)
        if len(calls) == number:
            raise KeyboardInterrupt
        return real(*arguments, **options)

    monkeypatch.setattr(module, name, fragile)
    return calls


@pytest.mark.parametrize(("name", "number"), [("nested_fits", 1), ("nested_fits", 4), ("ridge_statistic", 2)])
def test_a_killed_sweep_goes_on_to_the_same_bits(case, tmp_path, monkeypatch, name, number) -> None:
    arrays, labels = case
    whole = sweep(arrays, labels, **QUICK)
    with monkeypatch.context() as patch:
        dies_at(patch, name, number)
        with pytest.raises(KeyboardInterrupt):
            sweep(arrays, labels, **QUICK, checkpoint=tmp_path / "kept")
    fitted, nulls = (dies_at(monkeypatch, solver, -1) for solver in ("nested_fits", "ridge_statistic"))
    resumed = sweep(arrays, labels, **QUICK, checkpoint=tmp_path / "kept")
    done = number - 1 if name == "nested_fits" else 5
    assert len(fitted) == 5 - done
    assert len(nulls) == 3 - (number - 1 if name == "ridge_statistic" else 0)
    pd.testing.assert_frame_equal(resumed.table, whole.table, check_exact=True)
    for field in ("scores", "control_scores", "intercepts", "null", "fold_strengths"):
        assert torch.equal(getattr(resumed, field), getattr(whole, field)), field
    assert all(torch.equal(resumed.coefficients[site], whole.coefficients[site]) for site in whole.coefficients)
    assert resumed.selected == whole.selected
    assert not list((tmp_path / "kept").glob(".*"))


@pytest.mark.parametrize("change", ["labels", "seed", "strengths", "permutations", "features"])
def test_what_was_kept_for_something_else_is_not_read(case, tmp_path, monkeypatch, change) -> None:
    arrays, labels = case
    settings = QUICK | {"seed": 0, "strengths": (0.01, 0.1)}
    sweep(arrays, labels, **settings, checkpoint=tmp_path)
    if change == "labels":
        labels = np.roll(labels, 1)
    elif change == "features":
        arrays = {name: values + 1e-3 for name, values in arrays.items()}
    else:
        settings |= {
            "seed": {"seed": 1},
            "strengths": {"strengths": (0.01, 0.2)},
            "permutations": {"permutations": 41},
        }[change]
    calls = dies_at(monkeypatch, "nested_fits", -1)
    again = sweep(arrays, labels, **settings, checkpoint=tmp_path)
    assert len(calls) == 5
    plain = sweep(arrays, labels, **settings)
    assert torch.equal(again.scores, plain.scores)
    assert torch.equal(again.null, plain.null)


def test_a_damaged_file_is_named(case, tmp_path) -> None:
    arrays, labels = case
    sweep(arrays, labels, **QUICK, checkpoint=tmp_path)
    for file in tmp_path.glob("fits-*"):
        file.write_bytes(b"cut off")
    with pytest.raises(ValueError, match=r"fits-\w+\.safetensors is damaged .*Delete it"):
        sweep(arrays, labels, **QUICK, checkpoint=tmp_path)


def test_half_precision_features_are_kept_too(case, tmp_path) -> None:
    arrays, labels = case
    halves = {name: values.to(torch.bfloat16) for name, values in arrays.items()}
    first, second = (sweep(halves, labels, **QUICK, checkpoint=tmp_path) for _ in range(2))
    assert torch.equal(first.scores, second.scores)
