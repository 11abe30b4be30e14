import copy

import numpy as np
import pytest
import torch
from torch import nn

from microtome.capture.taps import taps
from microtome.lenses.key_value_memories import Triggers, Values, trigger_examples, value_words
from microtome.lenses.memory_scores import chance_agreement, memory_composition, value_agreement
from microtome.lenses.wilson_interval import wilson_interval

GENERATOR = np.random.default_rng(0)
TEXTS = [GENERATOR.integers(3, 120, size=n).tolist() for n in (9, 30, 17, 22)]


def planted(following: torch.Tensor, layer: int, sign: int = 1) -> Triggers:
    column = following.reshape(len(following), -1)
    zeros = torch.zeros_like(column)
    return Triggers({layer: zeros.float()}, {layer: zeros}, {layer: zeros}, {layer: column}, sign, 9, ())


@pytest.mark.parametrize("kind", ["llama", "gpt2", "gemma2"])
@pytest.mark.parametrize("sign", [1, -1])
def test_planted_agreement(tiny, kind, sign):
    """Half of the triggers are followed by the value's first word."""
    model = tiny(kind)
    first = torch.tensor(value_words(model, 1)["top_id" if sign == 1 else "bottom_id"].to_numpy())
    following = first.clone()
    following[::2] = (following[::2] + 1) % 120
    row = value_agreement(model, planted(following, 1, sign)).iloc[0]
    assert row["agreement"] == 0.5
    assert row["agreement_low"] < 0.5 < row["agreement_high"]
    assert row["neurons"] == 48
    assert row["control_agreement"] < 0.2
    whole = value_agreement(model, planted(first, 1, sign), neurons=20).iloc[0]
    assert (whole["agreement"], whole["rank"], whole["neurons"], whole["rank_1_percent"]) == (1.0, 0.0, 20, 1.0)
    assert whole["control_rank"] > 5


def test_ranks_are_those_of_the_values_logits(tiny):
    model = tiny("qwen3")
    triggers = trigger_examples(model, TEXTS, k=2)
    found = value_agreement(model, triggers, layers=[2]).iloc[0]
    values = Values.of(model, [2]).folded(2)
    scores = values.float() @ model.lm_head.weight.detach().T
    following = [next((i for i in row if i >= 0), None) for row in triggers.next_token[2].tolist()]
    assert (triggers.next_token[2][:, 0] == -1).any()
    ranks = np.array([int((scores[n] > scores[n, i]).sum()) for n, i in enumerate(following) if i is not None])
    assert found["neurons"] == len(ranks)
    assert found["rank"] == float(np.median(ranks))
    assert found["agreement"] == pytest.approx((ranks == 0).mean())


def test_the_controls_expectation_is_the_mean_over_permutations():
    generator = torch.Generator().manual_seed(0)
    words, following = (torch.randint(0, 5, (40,), generator=generator) for _ in range(2))
    shuffled = [
        float((words == following[torch.randperm(40, generator=generator)]).double().mean()) for _ in range(4000)
    ]
    assert chance_agreement(words, following) == pytest.approx(np.mean(shuffled), abs=0.005)


def test_wilson_interval():
    from scipy.stats import binomtest

    for hits, count in ((0, 10), (3, 17), (50, 50), (120, 500)):
        low, high = binomtest(hits, count).proportion_ci(method="wilson")
        assert wilson_interval(hits, count) == pytest.approx((max(0, low), min(1, high)), abs=1e-6)


@pytest.mark.parametrize("kind", ["llama", "neox", "gemma2"])
def test_composition_by_hand(tiny, kind):
    model = tiny(kind)
    found = memory_composition(model, TEXTS, [1], active=3).iloc[0]
    values = Values.of(model, [1])
    unembedding = model.get_output_embeddings().weight.detach().double()
    say = values.folded(1).double() @ unembedding.T
    length = values.maps[1].weight.detach().double().norm(dim=1)
    norm = model.get_submodule(values.anatomy.final_norm)
    middle = "resid_pre" if kind == "neox" else "resid_mid"
    composed, kinds = [], []
    for ids in TEXTS:
        sites = ["mlp_act.1", "mlp_out.1", "resid_post.1", f"{middle}.1"]
        with torch.no_grad(), taps(model, sites) as tape:
            model(input_ids=torch.tensor([ids]))
        for position in range(1, len(ids)):
            c = tape["mlp_act", 1][0, position].double()
            active = (c.abs() * length).topk(3).indices
            heads = {int((say[i] * c[i].sign()).argmax()) for i in active}
            write = tape["mlp_out", 1][0, position].double()
            write = write - write.mean() if kind == "neox" else write
            said = int(((norm.weight.double() + (kind == "gemma2")) * write @ unembedding.T).argmax())
            composed.append(said not in heads)
            with torch.no_grad():
                before, after = (
                    int((norm(tape[site, 1][0, position]).double() @ unembedding.T).argmax())
                    for site in (middle, "resid_post")
                )
            kinds.append((after == before, after == said))
    assert found["positions"] == len(composed)
    assert found["composed"] == pytest.approx(np.mean(composed))
    for name, pattern in {
        "residual": (True, False),
        "ffn": (False, True),
        "agreement": (True, True),
        "composition": (False, False),
    }.items():
        assert found[name] == pytest.approx(np.mean([k == pattern for k in kinds])), name


def test_one_memory_alone_is_never_composed(tiny):
    """With one neuron left, the layer says what that memory says."""
    model = copy.deepcopy(tiny("llama"))
    projection = model.model.layers[1].mlp.down_proj
    with torch.no_grad():
        keep = torch.zeros(48)
        keep[7] = 1.0
        projection.weight.mul_(keep)
    assert memory_composition(model, TEXTS, [1], active=1).iloc[0]["composed"] == 0.0
    assert isinstance(projection, nn.Linear)


def test_bad_input(tiny):
    model = tiny("llama")
    triggers = trigger_examples(model, TEXTS, k=1, layers=[0])
    with pytest.raises(KeyError, match="layer 2 was not looked at"):
        value_agreement(model, triggers, layers=[2])
    with pytest.raises(ValueError, match="neurons=0: give at least one"):
        value_agreement(model, triggers, neurons=0)
    with pytest.raises(ValueError, match="triggers of 40 neurons and token ids to 4, a model of 48 neurons and 120"):
        value_agreement(model, planted(torch.full((40,), 4), 1))
    with pytest.raises(ValueError, match="token ids to 400, a model of 48 neurons and 120 tokens"):
        value_agreement(model, planted(torch.full((48,), 400), 1))
    with pytest.raises(ValueError, match="layers is empty"):
        memory_composition(model, TEXTS, [])
    with pytest.raises(ValueError, match="active=0: give at least one memory"):
        memory_composition(model, TEXTS, [0], active=0)
    with pytest.raises(ValueError, match="No token to look at"):
        memory_composition(model, [[5]], [0])


def test_neurons_whose_triggers_end_their_texts_are_left_out(tiny):
    model = tiny("llama")
    first = torch.tensor(value_words(model, 1)["top_id"].to_numpy())
    ends = torch.full_like(first, -1)
    whole = planted(first, 1)
    behind = planted(torch.stack([ends, first], 1), 1)
    assert value_agreement(model, behind).equals(value_agreement(model, whole))
    assert value_agreement(model, behind)["agreement"][0] == 1.0
    some = value_agreement(model, planted(torch.where(torch.arange(48) < 5, ends, first), 1)).iloc[0]
    assert (some["neurons"], some["agreement"]) == (43, 1.0)
    with pytest.raises(ValueError, match="layer 1: every trigger ends its text, so no token follows"):
        value_agreement(model, planted(ends, 1))
