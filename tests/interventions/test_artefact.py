"""Steering vectors as they are kept: what was saved is what acts, and at other models, sites and widths it does not."""

import json
import math

import pytest
import torch
from steering_steps import noise

from microtome.capture import LoadedModel
from microtome.interventions.artefact import DESCRIPTION, FILE, Artefact, made_on
from microtome.interventions.positions import Tokens
from microtome.interventions.steering import steered

SITES = ("resid_post.0", "resid_post.2")
KINDS = {
    "add": ({"vector": noise(2, 32)}, {}),
    "relative": ({"vector": noise(2, 32)}, {"relative": True}),
    "project": ({"basis": noise(2, 32)}, {"keep_norm": True}),
    "set": ({"basis": noise(2, 32), "values": torch.tensor([1.0, -2.0])}, {}),
    "subspace": ({"basis": noise(2, 3, 32)}, {}),
    "affine": ({"gain": 1 + 0.1 * noise(2, 32), "bias": noise(2, 32, seed=1)}, {}),
    "bounded": (
        {"gain": torch.ones(2, 32), "bias": noise(2, 32), "low": -torch.ones(2, 32), "high": torch.ones(2, 32)},
        {},
    ),
    "rotate": ({"plane": noise(2, 2, 32)}, {"angle": 0.7, "mode": "by", "adaptive": True}),
    "feedback": (
        {"read": noise(2, 32), "write": noise(2, 32, seed=1), "setpoint": torch.tensor([1.0, 2.0])},
        {"one_sided": True, "cap": 0.5},
    ),
}
OPERATION = {"relative": "add", "set": "project", "subspace": "project", "bounded": "affine"}


def artefact(model=None, kind: str = "add", **more) -> Artefact:
    tensors, options = KINDS[kind]
    facts = {} if model is None else made_on(model, seed=3)
    return Artefact(OPERATION.get(kind, kind), SITES, tensors, options, method=kind, facts=facts, **more)


@torch.no_grad()
def logits(model: LoadedModel, steering=None) -> torch.Tensor:
    ids = torch.tensor([[5, 6, 7, 8, 9]])
    if steering is None:
        return model.module(input_ids=ids).logits
    with steered(model, steering):
        return model.module(input_ids=ids).logits


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_read_acts_as_what_was_saved(llama, tmp_path, kind):
    held = artefact(
        llama,
        kind,
        positive="glad",
        negative="sad",
        extraction="mean",
        positions=(0, -1),
        raw_norm=torch.tensor([3.0, 4.0]),
        offset=torch.tensor([-1.0, 0.5]),
        counts=(7, 9),
    )
    held.save(tmp_path / "a")
    again = Artefact.load(tmp_path / "a")
    assert torch.allclose(logits(llama, again.steering(llama)), logits(llama, held.steering(llama)), atol=1e-5)
    assert not torch.equal(logits(llama, again.steering(llama)), logits(llama))
    for name in ("operation", "sites", "options", "method", "positive", "negative", "extraction", "positions"):
        assert getattr(again, name) == getattr(held, name)
    assert again.counts == (7, 9)
    assert again.facts == json.loads(json.dumps(held.facts))
    for name, value in held.tensors.items():
        assert torch.equal(again.tensors[name], value)
    assert torch.equal(again.raw_norm, held.raw_norm)
    assert torch.equal(again.offset, held.offset)
    assert again.to_frame().equals(held.to_frame())
    assert repr(again) == repr(held)


def test_strength_one_of_an_added_vector_adds_it(llama):
    held = artefact(llama)
    with steered(llama, held.steering(llama, strength=2.0), ["resid_post.0"]) as (tape, _), torch.no_grad():
        llama.module(input_ids=torch.tensor([[5, 6, 7]]))
    with torch.no_grad():
        clean = llama.module(input_ids=torch.tensor([[5, 6, 7]]), output_hidden_states=True).hidden_states[1]
    assert torch.allclose(tape["resid_post.0"] - clean, 2 * held.vector("resid_post.0"), atol=1e-5)


def test_tokens_are_kept_as_positions(llama, tmp_path):
    for positions in (Tokens.saying(llama, [",", "."]), "generated", 3, (1, 2)):
        held = artefact(llama, positions=positions)
        held.save(tmp_path / "a")
        assert Artefact.load(tmp_path / "a").positions == held.positions
    assert artefact(llama).steering(llama, positions="last").interventions[0].positions == "last"


def test_vectors_are_float32_and_are_not_shared_with_the_graph():
    weights = torch.nn.Parameter(noise(1, 32).double())
    held = Artefact("add", ("resid_post.0",), {"vector": weights})
    assert held.tensors["vector"].dtype == torch.float32
    assert not held.tensors["vector"].requires_grad


# ---- refusals


def test_another_model_is_refused(llama, loaded, tmp_path):
    artefact(llama).save(tmp_path)
    for held in (artefact(llama), Artefact.load(tmp_path)):
        with pytest.raises(ValueError, match=r"was made for weights .* Fit it on this model"):
            held.steering(loaded("llama", 1))
    assert artefact().steering(loaded("llama", 1))  # nothing is known of where it came from


def test_another_site_or_width_is_refused(llama):
    held = artefact(llama)
    for call in (
        lambda: held.vector("resid_post.1"),
        lambda: held.only("mlp_out.0"),
        lambda: held.operation_at("z.0.1"),
    ):
        with pytest.raises(KeyError, match=r"made at resid_post\.0, resid_post\.2; it has nothing for"):
            call()
    with pytest.raises(ValueError, match=r"32 channels, z\.0\.1 has 8"):
        held.moved(["z.0.1", "z.0.2"]).steering(llama)
    with pytest.raises(IndexError, match="7"):
        held.moved(["resid_post.0", "resid_post.7"]).steering(llama)
    with pytest.raises(ValueError, match="name a site"):
        held.vector()


def test_shapes_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="give one of add"):
        Artefact("subtract", SITES, {"vector": noise(2, 32)})
    with pytest.raises(ValueError, match="one entry per site"):
        Artefact("add", SITES, {"vector": noise(3, 32)})
    with pytest.raises(ValueError, match="one entry per site"):
        Artefact("add", (), {"vector": noise(0, 32)})
    with pytest.raises(ValueError, match="raw_norm has 1 entries for 2 sites"):
        artefact(raw_norm=torch.ones(1))
    with pytest.raises(ValueError, match=r"needs vector .* has basis"):
        Artefact("add", SITES, {"basis": noise(2, 32)})
    with pytest.raises(ValueError, match="needs gain, bias"):
        Artefact("affine", SITES, {"gain": noise(2, 32)})
    with pytest.raises(ValueError, match="listed twice"):
        Artefact("add", ("resid_post.0", "resid_post.0"), {"vector": noise(2, 32)})


def test_a_zero_or_broken_vector_is_refused_when_it_is_to_act(llama):
    for value, says in ((0.0, "is zero"), (math.nan, "NaN"), (math.inf, "NaN or infinity")):
        vectors = noise(2, 32)
        vectors[1] = value
        with pytest.raises(ValueError, match=says):
            Artefact("add", SITES, {"vector": vectors}).steering(llama)


def test_damaged_files_are_refused(llama, tmp_path):
    with pytest.raises(FileNotFoundError):
        Artefact.load(tmp_path / "none")

    def saved(name: str):
        artefact(llama).save(tmp_path / name)
        return tmp_path / name

    cut = saved("cut")
    (cut / FILE).write_bytes((cut / FILE).read_bytes()[:-8])
    other = saved("other")
    artefact(llama, "relative").with_tensors("x", vector=noise(2, 32, seed=5)).save(tmp_path / "elsewhere")
    (other / FILE).write_bytes((tmp_path / "elsewhere" / FILE).read_bytes())
    broken = saved("broken")
    (broken / DESCRIPTION).write_text("{", encoding="utf-8")
    lacking = saved("lacking")
    said = json.loads((lacking / DESCRIPTION).read_text(encoding="utf-8"))
    (lacking / DESCRIPTION).write_text(json.dumps({k: v for k, v in said.items() if k != "sites"}), encoding="utf-8")
    future = saved("future")
    (future / DESCRIPTION).write_text(json.dumps({**said, "format": 99}), encoding="utf-8")
    alone = saved("alone")
    for folder in (cut, other, broken, lacking, future):
        with pytest.raises(ValueError, match=r"."):
            Artefact.load(folder)
    (alone / DESCRIPTION).unlink()
    with pytest.raises(FileNotFoundError):
        Artefact.load(alone)


# ---- parts and controls


def test_a_part_is_the_same_there(llama):
    held = artefact(llama, raw_norm=torch.tensor([3.0, 4.0]), offset=torch.tensor([1.0, 2.0]))
    part = held.only("resid_post.2")
    assert part.sites == ("resid_post.2",)
    assert torch.equal(part.vector(), held.vector("resid_post.2"))
    assert (float(part.raw_norm), float(part.offset)) == (4.0, 2.0)
    turned = held.only(["resid_post.2", "resid_post.0"])
    assert torch.equal(turned.vector("resid_post.0"), held.vector("resid_post.0"))
    assert turned.layers == (2, 0)


def test_what_is_moved_says_from_where(llama):
    held = artefact(llama)
    moved = held.moved(["resid_post.1", "resid_pre.0"])
    assert moved.facts["moved_from"] == list(SITES)
    assert torch.equal(moved.vector("resid_post.1"), held.vector("resid_post.0"))
    with pytest.raises(ValueError, match="one entry per site"):
        held.moved("resid_post.1")


def test_other_tensors_have_another_name(llama):
    other = artefact(llama).with_tensors("mine", vector=noise(2, 32, seed=8))
    assert other.method == "mine"
    assert torch.equal(other.tensors["vector"], noise(2, 32, seed=8))
    assert artefact(llama).method == "add"


@pytest.mark.parametrize("strength", [1.5, -0.1, [0.5, 2.0]])
def test_a_map_beyond_one_warns(llama, strength):
    with pytest.warns(UserWarning, match="outside 0 to 1"):
        artefact(llama, "affine").steering(llama, strength=strength)
    artefact(llama, "affine").steering(llama, strength=[0.0, 1.0])
    artefact(llama, "add").steering(llama, strength=strength)


def test_facts_name_weights_and_template(llama):
    facts = made_on(llama, unit="gaps")
    assert facts["weight_sha256"] == llama.provenance.weight_sha256
    assert (facts["model"], facts["dtype"], facts["unit"]) == ("tiny llama", "float32", "gaps")
    assert facts["template_sha256"] is None
