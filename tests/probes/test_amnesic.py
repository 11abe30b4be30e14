"""The amnesic check: the loss against transformers' own, edits that change nothing or everything, bad input."""

import numpy as np
import pytest
import torch

from microtome.capture.taps import taps
from microtome.probes.amnesic import amnesic
from microtome.probes.erasure import LeaceEraser
from microtome.probes.erasure_maps import Erasure

TEXTS = [[5, 9, 30, 4, 77, 8, 21], [11, 6, 90], [3, 44, 17, 60, 12], [7, 8]]


def directions(rank: int, width: int = 32, seed: int = 0) -> Erasure:
    basis = torch.tensor(np.linalg.qr(np.random.default_rng(seed).normal(size=(width, rank)))[0])
    return Erasure(torch.zeros(width, dtype=torch.float64), basis, basis.T.contiguous())


def test_losses_are_the_models_own(tiny) -> None:
    model = tiny("llama")
    edit = directions(3)
    table = amnesic(model, TEXTS, {"resid_post.1": edit}, controls=1).set_index("condition")
    plain, edited, tokens = 0.0, 0.0, 0
    for ids in TEXTS:  # without padding, by the model's own loss
        inputs = torch.tensor([ids])
        with torch.no_grad():
            plain += float(model(inputs, labels=inputs).loss) * (len(ids) - 1)
        with torch.no_grad(), taps(model, edits={"resid_post.1": edit}):
            edited += float(model(inputs, labels=inputs).loss) * (len(ids) - 1)
        tokens += len(ids) - 1
    assert table.loc["as it is", "tokens"] == tokens
    assert table.loc["as it is", "loss"] == pytest.approx(plain / tokens, rel=1e-5)
    assert table.loc["erased", "loss"] == pytest.approx(edited / tokens, rel=1e-5)
    assert table.loc["erased", "change"] == pytest.approx((edited - plain) / tokens, abs=1e-5)
    assert table.loc["as it is", ["change", "moved"]].tolist() == [0, 0]
    assert table.loc["random 0", "change"] != table.loc["erased", "change"]


def test_a_direction_that_is_nowhere_costs_nothing_and_all_of_them_much(tiny) -> None:
    model = tiny("gpt2")
    with torch.no_grad(), taps(model, "resid_post.1") as tape:
        model(torch.tensor([TEXTS[0]]))
    value = tape["resid_post.1"][0].double()
    nowhere = Erasure(value.mean(0), torch.zeros(32, 1, dtype=torch.float64), torch.zeros(1, 32, dtype=torch.float64))
    none = amnesic(model, TEXTS[:1], {"resid_post.1": nowhere}, controls=0)
    assert none.loc[1, ["change", "moved"]].tolist() == [0, 0]
    everything = amnesic(model, TEXTS[:1], {"resid_post.1": directions(32)}, controls=2)
    assert everything.loc[1, "moved"] == pytest.approx(float(value.norm(dim=1).mean()), rel=1e-4)
    # all directions are all directions, drawn at random or not
    np.testing.assert_allclose(everything["loss"][1:], everything["loss"][1], rtol=1e-4)


def test_the_first_token_can_be_spared(tiny) -> None:
    model, edits = tiny("llama"), {"resid_post.1": directions(5)}
    texts = [[7, 8], [11, 6, 90]]  # of the first, only the first token predicts
    both = amnesic(model, texts[:1], edits, controls=0), amnesic(model, texts[:1], edits, controls=0, spare_first=True)
    assert both[0].loc[1, "change"] != 0 == both[1].loc[1, "change"]
    padded = amnesic(model, texts, edits, controls=0, spare_first=True)
    assert padded.loc[1, "change"] != 0


def test_erasers_of_heads_and_seeds(tiny) -> None:
    model = tiny("llama")
    ids = torch.randint(3, 120, (40, 6), generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), taps(model, "z.1.2") as tape:
        model(ids)
    eraser = LeaceEraser().fit(tape["z.1.2"][:, -1].numpy(), np.arange(40) % 2)
    one, again, other = (
        amnesic(model, ids.tolist(), {"z.1.2": eraser.edit()}, seed=seed, controls=2) for seed in (0, 0, 5)
    )
    assert one.equals(again)
    assert one["condition"].tolist() == ["as it is", "erased", "random 0", "random 1"]
    assert one.loc[2, "loss"] != other.loc[2, "loss"]
    assert bool((one["change_error"][1:] > 0).all())


def test_bad_input_says_what_is_wrong(tiny) -> None:
    model = tiny("llama")
    with pytest.raises(ValueError, match="edits is empty"):
        amnesic(model, TEXTS, {})
    with pytest.raises(TypeError, match=r"pass eraser\.edit\(\)"):
        amnesic(model, TEXTS, {"resid_post.1": lambda x: -x})
    with pytest.raises(ValueError, match="text 1 has one token"):
        amnesic(model, [[5, 6], [7]], {"resid_post.1": directions(1)})
