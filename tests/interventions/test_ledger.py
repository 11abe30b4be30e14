"""The ledger: sums by hand, whether changes are noted or reduced at once, and interventions that never act."""

import pandas as pd
import pytest
import torch

from microtome.capture.collect import capture
from microtome.capture.hooks import active_taps
from microtome.capture.taps import taps
from microtome.interventions import ledger as ledgers
from microtome.interventions.generation import generate
from microtome.interventions.ledger import Ledger, NeverActed
from microtome.interventions.operations import Add, Affine, Project
from microtome.interventions.steering import Intervention, Steering, steered

PROMPTS = ["the cat sat .", "a good film of the old city"]


def several(model) -> Steering:
    """Edits at every layer and at heads, of several kinds."""
    generator = torch.Generator().manual_seed(0)
    d = model.module.config.hidden_size
    vectors = torch.randn(3, d, generator=generator)
    head = torch.randn(d // model.module.config.num_attention_heads, generator=generator)
    return Steering(
        [
            Intervention("resid_post.0", Add(vectors[0]), "generated", name="one"),
            Intervention("resid_post.0", Project(vectors[1]), "all", name="two"),
            Intervention("z.1.2", Add(head), "prompt", name="three"),
            Intervention(
                "resid_post.2", Affine(1 + 0.1 * vectors[2], vectors[0]), "generated", (1.0, 0.5), name="four"
            ),
        ]
    )


@pytest.mark.parametrize("held", [1, 5000, 2**22])
def test_what_is_noted_is_what_is_reduced_at_once(llama, monkeypatch, held) -> None:
    steering = several(llama)
    noted = generate(llama, PROMPTS, steering, 5).ledger.by_text()
    monkeypatch.setattr(ledgers, "SMALL", 0 if held == 1 else 2**17)
    monkeypatch.setattr(ledgers, "HELD", held)
    at_once = generate(llama, PROMPTS, steering, 5).ledger.by_text()
    pd.testing.assert_frame_equal(noted, at_once, rtol=1e-5)
    assert set(noted["name"]) == {"one", "two", "three", "four"}
    assert noted[noted["name"] == "four"][["before", "after"]].isna().all(axis=None)


def test_sums_are_those_of_the_activations(llama) -> None:
    direction = torch.randn(llama.module.config.hidden_size, generator=torch.Generator().manual_seed(1))
    steering = Steering(Intervention("resid_post.1", Add(direction), "prompt", 2.0))
    found = generate(llama, PROMPTS, steering, 3).ledger.by_text()
    prompt = found[found["step"] == 0].set_index("text")
    clean = capture(llama, PROMPTS, ["resid_post.1"], "all", progress=False)
    unit = direction / direction.norm()
    for text in range(2):
        x = clean["resid_post.1"][torch.tensor((clean.rows["text"] == text).to_numpy())]
        row = prompt.loc[text]
        assert row["tokens"] == len(x)
        assert row["before"] == pytest.approx(float((x @ unit).mean()), rel=1e-4)
        assert row["after"] == pytest.approx(float((x @ unit).mean() + 2 * direction.norm()), rel=1e-4)
        assert row["relative"] == pytest.approx(float((2 * direction.norm() / x.norm(dim=1)).mean()), rel=1e-4)
        assert row["effort"] == pytest.approx(float(4 * direction.norm() ** 2 * len(x)), rel=1e-4)
        assert row["largest"] == pytest.approx(float(2 * direction.abs().max()), rel=1e-5)
    later = found[found["step"] > 0]
    assert not later["fired"].any()
    assert (later["tokens"] == 0).all()


def test_what_never_acts_is_named(llama) -> None:
    direction = torch.ones(llama.module.config.hidden_size)
    ids = torch.tensor([[4, 5, 6]])
    steering = Steering(Intervention("resid_post.0", Add(direction), (40,), name="far"))
    with pytest.raises(NeverActed, match="far"), steered(llama, steering):
        llama.module(input_ids=ids)
    with torch.no_grad(), taps(llama, ["resid_post.0"]) as tape:
        llama.module(input_ids=ids)
    clean = capture(llama, [ids[0].tolist()], ["resid_post.0"], "all", progress=False, add_special_tokens=False)
    assert torch.equal(tape["resid_post.0"][0], clean["resid_post.0"])
    assert not active_taps()


def test_an_empty_ledger_has_its_columns() -> None:
    assert {"site", "fired", "relative"} <= set(Ledger().by_text().columns)
    assert "text" not in Ledger().to_frame().columns
