"""A direction that is written at a known block and turned later is found where it was written; R2 are those of rows."""

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.linear_model import Ridge

from microtome.capture.models import LoadedModel
from microtome.lenses.moments_pass import moments_of
from microtome.lenses.pair_splits import pair_splits
from microtome.lenses.transport.direction_origin import DirectionOrigin, direction_origin
from microtome.lenses.transport.direction_readouts import ReadoutSource, projected

DEPTHS = ["resid_pre.0", *(f"resid_post.{layer}" for layer in range(5))]
KINDS = ["carried_to_target", "made_at", "carried_from_previous"]


def planted_stream() -> dict[str, torch.Tensor]:
    """Six depths of 10 channels: block 1 writes something new along channel 3, block 3 moves channel 3 to channel 7,
    block 4 writes half of channel 8 anew; all add a little noise."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    stream = normal(6000, 10)
    stream[:, [3, 7]] *= 0.1
    values = {DEPTHS[0]: stream}
    for layer in range(5):
        stream = stream + 0.05 * normal(6000, 10)
        if layer == 1:
            stream[:, 3] += 2 * normal(6000)
        if layer == 3:
            stream[:, [3, 7]] = stream[:, [7, 3]] * torch.tensor([1.0, 1.5], dtype=torch.float64)
        if layer == 4:
            stream[:, 8] = stream[:, 8] + normal(6000)
        values[DEPTHS[layer + 1]] = stream
    return values


@pytest.fixture(scope="module")
def stream() -> dict[str, torch.Tensor]:
    return planted_stream()


@pytest.fixture
def found(row_moments, stream) -> DirectionOrigin:
    axes = torch.eye(10)[[7, 8, 0]]
    return direction_origin(
        row_moments(stream), 3 * axes, DEPTHS[5], names=["turned", "half", "old"], controls=20, shuffled=True
    )


def test_a_direction_appears_where_it_was_written_not_where_it_was_turned(found):
    turned = found.appears.loc[0]
    assert (turned["name"], turned["target"], turned["appears"], turned["made_most"]) == (
        "turned",
        "resid_post.4",
        "resid_post.1",
        "resid_post.1",
    )
    assert turned["carried_to_target"] > 0.99
    assert turned["least_carried"] > 0.97
    table = found.table[found.table["name"] == "turned"].set_index("site")
    assert table.loc["resid_pre.0":"resid_post.0", "carried_to_target"].abs().max() < 0.02
    assert table.loc["resid_post.1", "made_at"] == pytest.approx(1, abs=0.03)
    assert table.loc["resid_post.2", "identity_to_target"] < 0.1
    assert table.loc["resid_post.3", "identity_to_target"] > 0.99
    assert table.loc["resid_post.3", "variance"] > 100 * table.loc["resid_post.2", "variance"]
    assert table.loc["resid_post.3", "carried_from_previous"] > 0.99


def test_what_was_there_from_the_start_and_what_is_half_new(found):
    assert found.appears["appears"][2] == "resid_pre.0"
    wide = found.matrix("made_at")
    assert wide.columns.tolist() == DEPTHS
    np.testing.assert_allclose(wide.sum(axis=1), 1, atol=1e-12)
    assert wide.loc[1, "resid_pre.0"] == pytest.approx(0.5, abs=0.05)
    assert wide.loc[1, "resid_post.4"] == pytest.approx(0.5, abs=0.05)
    assert wide.loc[2, "resid_pre.0"] > 0.95


def test_controls_and_shuffled_pairs(found):
    table = found.table
    for kind in KINDS:
        known = table[kind].notna()
        assert (table[f"{kind}_control_low"] <= table[f"{kind}_control"])[known].all()
        assert (table[f"{kind}_control"] <= table[f"{kind}_control_high"])[known].all()
    assert table.loc[table["site"] != DEPTHS[5], "shuffled_to_target"].abs().max() < 0.02
    assert 0.02 < table["made_at_control_high"][table["site"] == "resid_post.1"].max() < 1


def test_readouts_are_scikit_learns_at_the_strength_that_is_best_on_validation(row_moments, stream):
    moments = row_moments(stream)
    rows = torch.nn.functional.normalize(torch.randn(3, 10, generator=torch.Generator().manual_seed(3)).double())
    splits = pair_splits(moments, DEPTHS[1], DEPTHS[5])
    strengths = [1e-3, 1e-1, 1, 10, 100]
    found = ReadoutSource.of(splits).readouts(projected(splits, rows), strengths)
    parts = {name: moments.masks[name, "rest"] for name in ("fit", "validation", "test")}
    x = {name: stream[DEPTHS[1]][mask].numpy() for name, mask in parts.items()}
    a = {name: (stream[DEPTHS[5]][mask] @ rows.T).numpy() for name, mask in parts.items()}
    unit = ((x["fit"] - x["fit"].mean(0)) ** 2).sum() / 10
    for k in range(3):
        fits = [Ridge(alpha=s * unit).fit(x["fit"], a["fit"][:, k]) for s in strengths]
        errors = [((a["validation"][:, k] - fit.predict(x["validation"])) ** 2).sum() for fit in fits]
        best = int(np.argmin(errors))
        assert float(found.strengths[k]) == strengths[best]
        np.testing.assert_allclose(found.map.weight[:, k], fits[best].coef_, atol=1e-10)
        missed = ((a["test"][:, k] - fits[best].predict(x["test"])) ** 2).sum()
        there = ((a["test"][:, k] - a["fit"][:, k].mean()) ** 2).sum()
        assert float(found.r2[k]) == pytest.approx(1 - missed / there, abs=1e-10)


def test_without_validation_gcv_decides(row_moments, stream):
    """On noise the strongest is best, on what is linear the weakest."""
    moments = row_moments({"x": stream[DEPTHS[0]], "y": stream[DEPTHS[0]].roll(1, 1) + 1})
    splits = pair_splits(moments, "x", "y", shards=("fit", None, "test"))
    found = ReadoutSource.of(splits).readouts(projected(splits, torch.eye(10, dtype=torch.float64)), [1e-9, 10])
    assert set(found.strengths.tolist()) == {1e-9}
    noise = torch.randn(6000, 10, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    moments = row_moments({"x": stream[DEPTHS[0]], "y": noise})
    splits = pair_splits(moments, "x", "y", shards=("fit", None, "test"))
    found = ReadoutSource.of(splits).readouts(projected(splits, torch.eye(10, dtype=torch.float64)), [1e-9, 1e4])
    assert found.strengths.mean() > 1e4 / 2


@pytest.fixture(scope="module")
def model(tiny, word_tokenizer) -> LoadedModel:
    return LoadedModel.from_module(tiny("llama"), word_tokenizer, name="llama")


@pytest.fixture(scope="module")
def texts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(6, 14, (150,), generator=generator).tolist()
    return [torch.randint(5, 100, (length,), generator=generator).tolist() for length in lengths]


def test_texts_give_the_same_with_intervals(model, texts):
    shards = ["fit"] * 100 + ["validation"] * 25 + ["test"] * 25
    moments = moments_of(model, texts, "resid", shards=shards, progress=False)
    rows = torch.randn(3, 32, generator=torch.Generator().manual_seed(3))
    plain = direction_origin(moments, rows, "resid_post.2", controls=4)
    given = {"model": model, "texts": texts[125:], "documents": [f"book {i // 2}" for i in range(25)], "draws": 200}
    found = direction_origin(moments, rows, "resid_post.2", controls=4, **given)
    names = [*KINDS, "identity_to_target", "variance"]
    pd.testing.assert_frame_equal(found.table[names], plain.table[names], rtol=1e-5, atol=2e-6)
    assert plain.facts["scored"] == "test shard"
    assert found.facts | {"scored": ""} == plain.facts | {"scored": ""}
    for kind in KINDS:
        known = found.table[kind].notna()
        low, value, high = (found.table[kind + end][known] for end in ("_low", "", "_high"))
        assert ((low <= value) & (value <= high)).all()
    at_target = found.table[found.table["site"] == "resid_post.2"]
    assert at_target[["carried_to_target_low", "carried_to_target_high"]].eq(1).all(axis=None)
    assert (found.appears["depth"] >= plain.appears["depth"]).all()


def test_made_at_is_what_sequences_of_texts_say(model, texts):
    """R2 of the readout from the next depth less that of this, over the same rows, by scikit-learn's r2_score."""
    shards = ["fit"] * 100 + ["validation"] * 25 + ["test"] * 25
    moments = moments_of(model, texts, "resid", shards=shards, progress=False)
    rows = torch.randn(2, 32, generator=torch.Generator().manual_seed(3))
    found = direction_origin(moments, rows, "resid_post.2", controls=0)
    assert not [name for name in found.table if "control" in name]
    splits = [pair_splits(moments, site, "resid_post.2") for site in ("resid_pre.0", "resid_post.0")]
    unit = torch.nn.functional.normalize(rows.double())
    one, other = (ReadoutSource.of(each).readouts(projected(each, unit)).r2 for each in splits)
    np.testing.assert_allclose(found.matrix("made_at")["resid_post.0"], other - one, atol=1e-12)


def test_bad_input_says_what_to_do(row_moments, stream, model, texts):
    moments = row_moments(stream)
    rows = torch.eye(10)[:2]
    with pytest.raises(ValueError, match=r"expected \[direction, 10\]"):
        direction_origin(moments, torch.eye(9), DEPTHS[5])
    with pytest.raises(ValueError, match=r"direction 0 .* has length 0"):
        direction_origin(moments, 0 * rows, DEPTHS[5])
    with pytest.raises(ValueError, match=r"resid_post.9 is not among the sites"):
        direction_origin(moments, rows, "resid_post.9")
    with pytest.raises(ValueError, match="first depth"):
        direction_origin(moments, rows, DEPTHS[0])
    for wrong in ({"controls": -1}, {"draws": 0}, {"threshold": float("nan")}):
        with pytest.raises(ValueError, match="is to lie between 0 and 1, controls="):
            direction_origin(moments, rows, DEPTHS[5], **wrong)
    with pytest.raises(ValueError, match="both the model and the texts"):
        direction_origin(moments, rows, DEPTHS[5], texts=texts)
    with pytest.raises(KeyError, match="no column 'r2'"):
        direction_origin(moments, rows, DEPTHS[2], controls=2).matrix("r2")
    some = moments_of(model, texts, "resid", shards={"fit": 0.6, "test": 0.4}, progress=False)
    shards = ("fit", None, "test")
    with pytest.raises(ValueError, match="no token of these texts"):
        direction_origin(some, torch.ones(32), "resid_post.2", shards=shards, model=model, texts=[[5], [6]])
