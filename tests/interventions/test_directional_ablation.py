"""A direction taken out: nothing of it is left anywhere, hook and weight form agree or are refused, the choice."""

import pytest
import torch
from steering_steps import BAD, GOOD, noise

from microtome.capture import LoadedModel, capture
from microtome.interventions.ablated_weights import ablated_copy, writer_paths
from microtome.interventions.directional_ablation import _why, ablation, ablation_sites, choose_ablation, token_odds
from microtome.interventions.operations import Project
from microtome.interventions.steering import Intervention, Steering, anatomy_of

D = 32
TEXTS = [*GOOD, *BAD]
STREAM = ["resid_pre", "resid_mid", "resid_post"]


def stream(model, steering):
    edits = None if steering is None else steering.edits(model)
    return capture(model, TEXTS, STREAM, "all", edits=edits, progress=False)


def logits(model, steering=None):
    edits = None if steering is None else steering.edits(model)
    return capture(model, TEXTS, ["logits"], "all", edits=edits, progress=False)["logits"]


@pytest.mark.parametrize("kind", ["llama", "gpt2", "gemma2"])
@pytest.mark.parametrize("rows", [1, 3])
def test_nothing_of_it_is_left_anywhere(loaded, kind, rows) -> None:
    model, basis = loaded(kind), noise(rows, D)
    acts = stream(model, ablation(model, basis if rows > 1 else basis[0]).steering(model))
    unit = torch.linalg.qr(basis.T).Q
    before = stream(model, None)
    for site in acts.sites:
        x = acts[site]
        assert float((x @ unit).norm(dim=1).max()) < 1e-5 * float(x.norm(dim=1).mean()), site
        assert float((before[site] @ unit).abs().max()) > 0.01


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_mean_ablation_sets_what_every_part_reads(loaded, kind) -> None:
    model, direction = loaded(kind), noise(D)
    unit = direction / direction.norm()
    found = ablation(model, direction, value=3.0)
    acts = capture(model, TEXTS, STREAM, "all", edits=found.steering(model).edits(model), progress=False)
    for site in map(str, acts.sites):
        if site not in found.sites:  # the stream between two blocks is set where the next one reads it
            assert site in ("resid_post.0", "resid_post.1")
            continue
        assert torch.allclose(acts[site] @ unit, torch.tensor(3.0), atol=1e-4), site
    assert "resid_post.2" in found.sites
    assert found.method == "mean ablation"


def test_twice_is_once_and_a_subspace_is_its_directions_in_turn(llama) -> None:
    basis = torch.linalg.qr(noise(D, 3)).Q.T
    once = Steering(Intervention("resid_post.1", Project(basis)))
    twice = Steering([*once, *once])
    torch.testing.assert_close(logits(llama, twice), logits(llama, once), rtol=1e-4, atol=1e-5)
    for order in ([0, 1, 2], [2, 0, 1]):
        turned = Steering(Intervention("resid_post.1", Project(basis[number])) for number in order)
        torch.testing.assert_close(logits(llama, turned), logits(llama, once), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["llama", "gpt2", "neox"])
@pytest.mark.parametrize("rows", [1, 2])
def test_the_weight_form_is_the_hook_form(loaded, kind, rows) -> None:
    model, basis = loaded(kind), noise(rows, D)
    direction = basis if rows > 1 else basis[0]
    made = ablated_copy(model, direction)
    hook = logits(model, ablation(model, direction).steering(model))
    error = (logits(made) - hook).abs().max() / hook.abs().max()
    assert error < 1e-4
    assert (logits(model) - hook).abs().max() > 1e-3
    unit = torch.linalg.qr(basis.T).Q
    for path in writer_paths(anatomy_of(model)):
        layer = made.module.get_submodule(path)
        weight = layer.weight if isinstance(layer, torch.nn.Linear) else layer.weight.T
        assert float((unit.T @ weight.detach()).abs().max()) < 1e-5


def test_the_copy_leaves_the_model_as_it_was(llama) -> None:
    before = {name: value.clone() for name, value in llama.module.state_dict().items()}
    ablated_copy(llama, noise(D))
    assert all(torch.equal(value, before[name]) for name, value in llama.module.state_dict().items())


def test_norms_behind_writers_are_refused(loaded) -> None:
    model = loaded("gemma2")
    with pytest.raises(ValueError, match="differs from the hook form"):
        ablated_copy(model, noise(D))
    unchecked = ablated_copy(model, noise(D), check=False)
    hook = logits(model, ablation(model, noise(D)).steering(model))
    assert float((logits(unchecked) - hook).abs().max() / hook.abs().max()) > 1e-3


def test_a_direction_that_nothing_writes_changes_nothing(llama, tiny, word_tokenizer) -> None:
    module = tiny("llama")
    direction = torch.zeros(D)
    direction[5] = 1.0
    with torch.no_grad():
        module.get_input_embeddings().weight[:, 5] = 0
        for path in writer_paths(anatomy_of(module)):
            module.get_submodule(path).weight[5] = 0
    model = LoadedModel.from_module(module, word_tokenizer, name="tiny")
    assert torch.equal(logits(model, ablation(model, direction).steering(model)), logits(model))


def test_odds_are_those_of_the_softmax(llama) -> None:
    odds, logp = token_odds(llama, TEXTS, [5, 9])
    plain = capture(llama, TEXTS, ["logits"], "last", progress=False)["logits"].double().softmax(-1)
    p = plain[:, [5, 9]].sum(1)
    torch.testing.assert_close(torch.from_numpy(odds), torch.log(p / (1 - p)))
    torch.testing.assert_close(logp.exp(), plain)


def test_what_is_discarded_and_why() -> None:
    row = {"ablated": -1.0, "induced": 0.5, "kl": 0.05, "layer": 1}
    assert _why(row, 10) == ""
    assert _why(row | {"layer": 8}, 10) == "layer"
    assert _why(row | {"kl": 0.1}, 10) == "kl"
    assert _why(row | {"induced": 0.0}, 10) == "induced"
    assert _why(row | {"ablated": float("nan")}, 10) == "not finite"


def test_candidates_are_scored_by_the_three_numbers(llama, monkeypatch) -> None:
    from microtome.interventions import directional_ablation

    monkeypatch.setattr(directional_ablation, "MOST_KL", 1e9)
    monkeypatch.setattr(directional_ablation, "DEEPEST", 9.0)
    monkeypatch.setattr(directional_ablation, "_why", lambda row, layers: "")
    found = choose_ablation(llama, (GOOD, BAD), (GOOD, BAD), [5], layers=[1, 2], progress=False)
    row = found.table.iloc[0]
    difference = [
        capture(llama, texts, ["resid_pre.1"], -1, progress=False)["resid_pre.1"].mean(0) for texts in (GOOD, BAD)
    ]
    direction = difference[0] - difference[1]
    assert row["norm"] == pytest.approx(float(direction.norm()), rel=1e-5)
    taken = ablation(llama, direction).steering(llama)
    assert row["ablated"] == pytest.approx(token_odds(llama, GOOD, [5], taken)[0].mean(), rel=1e-4)
    clean, edited = token_odds(llama, BAD, [5])[1], token_odds(llama, BAD, [5], taken)[1]
    kl = torch.nn.functional.kl_div(edited, clean, log_target=True, reduction="batchmean")
    assert row["kl"] == pytest.approx(float(kl), rel=1e-3, abs=1e-7)
    assert found.table["ablated"].min() == found.table.set_index("layer").loc[int(found.site[-1]), "ablated"]


def test_candidates_without_a_difference_are_said(llama) -> None:
    # the embedding of the last token is the same in both classes
    with pytest.raises(ValueError, match="no difference"):
        choose_ablation(llama, (GOOD, BAD), (GOOD, BAD), [5], layers=[0], progress=False)
    with pytest.raises(ValueError, match="negative numbers"):
        choose_ablation(llama, (GOOD, BAD), (GOOD, BAD), [5], positions=[0], progress=False)


def test_sites_are_all_that_writes(gpt2) -> None:
    sites = ablation_sites(anatomy_of(gpt2))
    assert {"resid_pre.0", "attn_out.0", "mlp_out.2", "resid_post.2"} <= set(sites)
