import copy
import math
import sys

import numpy as np
import pytest
import torch
from transformers import BloomConfig, BloomForCausalLM

from microtome.capture import dissect, output_weights
from microtome.capture.attention_seam import seam_observed
from microtome.capture.batches import PaddingRecipe
from microtome.kernels.attention_statistics import KeyRule
from microtome.lenses import head_pass
from microtome.lenses.head_roles import ROLE_SCORES, THRESHOLDS, WINDOWS
from microtome.lenses.head_roles import head_roles as roles_of
from microtome.lenses.head_scores import marked_scores

KINDS = ["llama", "gpt2", "neox", "neox_sequential", "gemma2", "qwen3", "bert"]
LENGTHS = (20, 33, 12, 28)
QUICK = {"made_texts": 2, "needle_length": 40, "variance_length": 12, "bootstraps": 50, "progress": False}


def drawn_texts(low=3, high=14, lengths=LENGTHS):
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(low, high, (n,), generator=generator).tolist() for n in lengths]


def eager_patterns(model, ids):
    """Each layer's weights `[head, query, key]` of one text alone, as transformers' eager attention returns them."""
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    with torch.no_grad():
        found = model(input_ids=torch.tensor([ids]), output_attentions=True).attentions
    model.set_attn_implementation(before)
    return [layer[0].double().numpy() for layer in found]


def by_hand(model, texts, first_query=8):
    """Scores of natural texts by their definitions, one number at a time from eager weights."""
    above, below = {}, {}

    def add(name, layer, head, value, weight):
        above.setdefault(name, np.zeros((3, 4)))[layer, head] += value
        below.setdefault(name, np.zeros((3, 4)))[layer, head] += weight

    for ids in texts:
        length = len(ids)
        for layer, pattern in enumerate(eager_patterns(model, ids)):
            is_two_sided = pattern[0, 0, 1:].any()
            for head, rows in enumerate(pattern):
                for t in range(first_query, length):
                    row = rows[t]
                    rest, keys = 1 - row[0], length if is_two_sided else t + 1
                    without = np.append(0, row[1:]) / rest
                    equal = [s for s in range(1, t) if ids[s] == ids[t]]
                    behind = [s for s in range(1, t + 1) if ids[s - 1] == ids[t] and s - 1 < t]
                    behind = [s for s in behind if s != t]
                    distance = np.abs(t - np.arange(length))
                    add("previous", layer, head, row[t - 1], 1)
                    add("previous_no_sink", layer, head, rest * without[t - 1], rest)
                    add("self", layer, head, row[t], 1)
                    add("sink", layer, head, row[0], 1)
                    add("largest", layer, head, row.max(), 1)
                    if equal:
                        add("duplicate", layer, head, row[equal].sum(), 1)
                        add("duplicate_no_sink", layer, head, row[equal].sum(), rest)
                    if behind:
                        add("induction_text", layer, head, row[behind].sum(), 1)
                    entropy = -sum(p * math.log(p) for p in row if p > 0)
                    add("entropy", layer, head, entropy / math.log(keys), 1)
                    left = -sum(p * math.log(p) for p in without if p > 0)
                    add("entropy_no_sink", layer, head, rest * left / math.log(keys), rest)
                    add("distance", layer, head, (row * distance).sum(), 1)
                    add("distance_no_sink", layer, head, rest * (without * distance).sum(), rest)
                    near = distance < 16
                    add("local_16", layer, head, row[near].sum(), 1)
                    add("local_16_no_sink", layer, head, rest * without[near].sum(), rest)
                    add("local_16_over_uniform", layer, head, row[near].sum(), near[:keys].sum() / keys)
    return {name: above[name] / below[name] for name in above}


@pytest.mark.parametrize("kind", KINDS)
def test_scores_are_those_of_eager_weights(tiny, kind):
    """Sliding windows, soft caps, grouped heads, two-sided attention and padded batches included."""
    model, texts = tiny(kind), drawn_texts()
    expected = by_hand(model, texts)
    found = roles_of(model, texts, with_fresh=False, **QUICK).table
    for name, values in expected.items():
        tolerance = 1e-4 if name.startswith("distance") else 2e-5
        np.testing.assert_allclose(found[name].to_numpy().reshape(3, 4), values, atol=tolerance, err_msg=name)
    assert (found["layer"].tolist(), found["head"].tolist()) == ([0] * 4 + [1] * 4 + [2] * 4, [0, 1, 2, 3] * 3)
    grouped = kind in ("llama", "gemma2", "qwen3")
    assert found["kv_head"].tolist() == ([0, 0, 1, 1] if grouped else [0, 1, 2, 3]) * 3


@pytest.mark.parametrize("kind", ["llama", "gpt2", "bert"])
def test_padding_on_either_side_and_none_give_the_same(tiny, kind):
    model, texts = tiny(kind), drawn_texts()
    anatomy = dissect(model)
    tables = {}
    for side in ("right", "left"):
        # bert numbers positions itself and has no left padding
        if (kind, side) == ("bert", "left"):
            continue
        recipe = PaddingRecipe(side=side, position_ids="none" if kind == "bert" else "cumsum")
        own = object.__new__(type(anatomy))
        own.__dict__.update(anatomy.__dict__ | {"padding": recipe})
        tables[side] = roles_of(model, texts, anatomy=own, with_fresh=False, **QUICK).table
    alone = roles_of(model, texts, max_tokens=1, with_fresh=False, **QUICK).table
    numbers = alone.select_dtypes("number").columns
    for table in tables.values():
        np.testing.assert_allclose(table[numbers], alone[numbers], atol=2e-4, rtol=1e-4)


def test_output_norm_is_that_of_the_written_vectors(tiny):
    model, texts = tiny("llama"), drawn_texts()
    weights = output_weights(model)
    kept = {}
    hooks = [
        layer.self_attn.o_proj.register_forward_pre_hook(lambda _, given, i=i: kept.update({i: given[0][0].detach()}))
        for i, layer in enumerate(model.model.layers)
    ]
    totals = np.zeros((3, 4))
    for ids in texts:
        with torch.no_grad():
            model(torch.tensor([ids]))
        for layer, weight in enumerate(weights.values()):
            z = kept[layer].view(len(ids), 4, 8)[8:]
            totals[layer] += torch.einsum("the,hed->thd", z, weight).norm(dim=-1).sum(0).numpy()
    for hook in hooks:
        hook.remove()
    found = roles_of(model, texts, with_fresh=False, **QUICK).table["output_norm"].to_numpy().reshape(3, 4)
    np.testing.assert_allclose(found, totals / totals.mean(1, keepdims=True), rtol=1e-4)


def test_induction_and_retrieval_are_the_marked_weights(tiny):
    model, texts = tiny("llama"), drawn_texts()
    seen = {}

    def spy(made, name):
        seen[name] = made
        return marked_scores(made, name)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys.modules["microtome.lenses.head_roles"], "marked_scores", spy)
        found = roles_of(model, texts, with_fresh=False, copy_length=9, **QUICK).table
    for name, made in seen.items():
        weight, top, one = (np.zeros((3, 4)) for _ in range(3))
        for ids in made.texts:
            for layer, rows in enumerate(eager_patterns(model, list(ids))):
                for query, targets in zip(made.queries, made.targets, strict=True):
                    weight[layer] += rows[:, query, targets].sum(-1)
                    one[layer] += rows[:, query, targets[0]]
                    top[layer] += rows[:, query].argmax(-1) == targets[0]
        count = len(made.texts) * len(made.queries)
        np.testing.assert_allclose(found[name].to_numpy().reshape(3, 4), weight / count, atol=1e-5)
        np.testing.assert_allclose(found[f"{name}_top"].to_numpy().reshape(3, 4), top / count)
        if "retrieval" in name:
            np.testing.assert_allclose(found[f"{name}_copied"].to_numpy().reshape(3, 4), one / count, atol=1e-5)
    made = seen["induction"]
    for ids in made.texts:
        assert ids[:9] == ids[9:]
        # at each query: its own token, once before, in front of the target
        assert all(ids[target - 1] == ids[query] for query, [target] in zip(made.queries, made.targets, strict=True))
    for ids in seen["retrieval"].texts:
        following = [ids[query + 1] for query in seen["retrieval"].queries[:-1]]
        assert following == [ids[target] for target in seen["retrieval"].targets[:-1, 0]]


def planted_model(tiny):
    """A llama whose head 0 of layer 0 looks at itself alone, and whose other heads see nothing but positions' mean."""
    model = tiny("gpt2")
    with torch.no_grad():
        model.transformer.wpe.weight.zero_()
        model.transformer.wpe.weight[:64, :32] = 0
        for block in model.transformer.h:
            block.attn.c_attn.weight[:, :64] = 0
            block.attn.c_attn.bias[:64] = 0
    return model


def test_a_head_that_sees_no_content_is_uniform_and_has_no_pattern_variance(tiny):
    found = roles_of(planted_model(tiny), drawn_texts(), with_fresh=False, **QUICK)
    table = found.table
    np.testing.assert_allclose(table["entropy"], 1, atol=1e-5)
    np.testing.assert_allclose(table["local_16_over_uniform"], 1, atol=1e-5)
    assert (table["pattern_variance"] < 1e-15).all()
    assert (table["content_share"] < 1e-12).all()
    assert (roles_of(tiny("gpt2"), drawn_texts(), with_fresh=False, **QUICK).table["pattern_variance"] > 1e-4).all()


def planted_previous_token(tiny, pull=40.0):
    """gpt2 whose layer 0, head 0 looks at the previous token: q of position t and k of position t - 1 agree."""
    model = tiny("gpt2")
    with torch.no_grad():
        angle = torch.arange(64)[:, None] * torch.tensor([0.4, 1.1])
        turn = torch.stack([angle.cos(), angle.sin()], -1).flatten(1)
        model.transformer.wpe.weight.zero_()
        model.transformer.wpe.weight[:, :4] = 30 * turn
        model.transformer.wte.weight[:, :4] = 0
        block = model.transformer.h[0]
        block.ln_1.weight.fill_(1)
        block.ln_1.bias.zero_()
        weight, bias = block.attn.c_attn.weight, block.attn.c_attn.bias
        weight[:, 0:8] = weight[:, 32:40] = 0
        bias[0:8] = bias[32:40] = 0
        for i, step in enumerate((0.4, 1.1)):
            cos, sin = math.cos(step), math.sin(step)
            # queries turned back by one step
            back = torch.tensor([[cos, -sin], [sin, cos]])
            weight[2 * i : 2 * i + 2, 2 * i : 2 * i + 2] = pull * back
            weight[2 * i : 2 * i + 2, 32 + 2 * i : 34 + 2 * i] = torch.eye(2)
    return model


def test_a_planted_previous_token_head_is_found(tiny):
    found = roles_of(planted_previous_token(tiny), drawn_texts(), with_fresh=True, **QUICK)
    row = found.table.iloc[0]
    assert row["role"] == "previous"
    assert row["previous"] > 0.95
    assert row["previous_low"] <= row["previous"] <= row["previous_high"]
    assert row["fresh_previous"] < 0.2
    assert row["distance"] == pytest.approx(1, abs=0.1)
    assert found.strongest("previous", 1)["head"].tolist() == [0]
    assert "previous" not in " ".join(found.table["roles"][1:])


def test_thresholds_name_roles_and_change_nothing_else(tiny):
    model, texts = tiny("llama"), drawn_texts()
    strict = roles_of(model, texts, thresholds={role: 2 for role in THRESHOLDS if role != "inactive"}, **QUICK)
    assert set(strict.table["role"]) <= {"", "inactive"}
    mild = roles_of(model, texts, thresholds={"sink": 0, "induction": 0, "inactive": 0}, **QUICK)
    assert set(mild.table["role"]) == {"induction"}
    assert all(roles.split()[-1] == "sink" for roles in mild.table["roles"])
    numbers = mild.table.select_dtypes("number").columns
    np.testing.assert_array_equal(mild.table[numbers], strict.table[numbers])
    assert mild.thresholds["sink"] == 0
    assert mild.to_frame() is mild.table
    with pytest.raises(KeyError, match="no role 'copying'; there are induction, previous"):
        mild.strongest("copying")


def test_a_stopped_call_goes_on_from_its_checkpoint(tiny, tmp_path, monkeypatch):
    model, texts = tiny("llama"), drawn_texts()
    whole = roles_of(model, texts, max_tokens=40, **QUICK).table
    monkeypatch.setattr(head_pass, "SAVE_SECONDS", -1.0)
    real, count = head_pass.see_calls, [0]

    def stops(plan, number, see):
        count[0] += 1
        if count[0] == 6:
            raise KeyboardInterrupt
        return real(plan, number, see)

    monkeypatch.setattr(head_pass, "see_calls", stops)
    with pytest.raises(KeyboardInterrupt):
        roles_of(model, texts, max_tokens=40, checkpoint=tmp_path, **QUICK)
    assert (tmp_path / "natural.safetensors").is_file()
    count[0] = 100
    resumed = roles_of(model, texts, max_tokens=40, checkpoint=tmp_path, **QUICK).table
    from_start = count[0] - 100
    assert resumed.equals(whole)
    count[0] = 100
    roles_of(model, texts, max_tokens=40, **QUICK)
    assert count[0] - 100 == from_start + 5
    # sums of other texts are not taken
    other = roles_of(model, texts[::-1][:3], max_tokens=40, checkpoint=tmp_path, **QUICK).table
    assert not other["sink"].equals(whole["sink"])


def test_a_model_outside_the_interface_is_refused_with_the_reason():
    torch.manual_seed(0)
    bloom = BloomForCausalLM(BloomConfig(vocab_size=120, hidden_size=32, n_layer=2, n_head=4)).eval()
    with pytest.raises(KeyError, match="attention does not go through transformers' attention interface"):
        roles_of(bloom, drawn_texts(), **QUICK)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"thresholds": {"copying": 1}}, "thresholds has no role 'copying'"),
        ({"documents": [1, 2]}, "2 documents for 4 texts"),
        ({"first_query": 40}, "no text reaches position 40: the longest has 33 tokens"),
        ({"made_texts": 0}, "must be at least 1"),
        ({"copy_length": 1}, "copies of 1 tokens"),
        ({"needle_length": 17}, "17 tokens have no room for a needle"),
        ({"variance_length": 600, "texts": [[5] * 64] * 2}, None),
    ],
)
def test_what_does_not_fit_is_refused(tiny, options, says):
    texts = options.pop("texts", drawn_texts())
    if says is None:
        found = roles_of(tiny("llama"), texts, with_fresh=False, **QUICK | options).table
        assert found["pattern_variance"].isna().all()
        return
    with pytest.raises(ValueError, match=says):
        roles_of(tiny("llama"), texts, **QUICK | options)


def test_the_model_is_as_it_was(tiny):
    model = tiny("llama")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    setting = type(model.config._attn_implementation_internal)
    torch.manual_seed(3)
    state = torch.get_rng_state()
    roles_of(model, drawn_texts(), **QUICK)
    assert torch.equal(torch.get_rng_state(), state)
    assert type(model.config._attn_implementation_internal) is setting
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_every_role_has_a_score_a_threshold_and_a_control(tiny):
    found = roles_of(tiny("llama"), drawn_texts(), **QUICK)
    assert set(ROLE_SCORES) == set(THRESHOLDS)
    for score in ROLE_SCORES.values():
        assert {score, f"{score}_low", f"{score}_high", f"fresh_{score}"} <= set(found.table)
    assert {"induction_control", "retrieval_control", *(f"local_{w}" for w in WINDOWS)} <= set(found.table)
    assert found.provenance["heads"]["tokens"] == sum(LENGTHS)


def statistics_of(model, ids, rules):
    """Sums over all queries of each layer and head: on the previous token, on the rules, on everything."""
    found = []

    def observe(call, z):
        held = call.statistics(rules=rules)
        sums = (held.on_previous, *held.on_rules, held.total)
        found.append(torch.stack([value[0].double().sum(-1) for value in sums]))

    with torch.no_grad(), seam_observed(model, observe):
        model(torch.tensor([ids]))
    return torch.stack(found)


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_the_detector_of_transformer_lens_agrees(tiny, kind, tmp_path, word_tokenizer):
    """Its score `mul` is sum(A M) / sum(A) over all queries of a text, from the first on: sums of our statistics.

    Ours differ by definition: queries count from position 8, duplicates and targets count where there are some, the
    first token is left to the sink, and induction is asked of repeated random tokens at the one place that continues.
    Its induction mask is the duplicates' mask moved one column to the right, which is our rule "token before the key
    equals the query's token" without the token itself; at s = t + 1, which its mask may mark, A is zero.
    """
    pytest.importorskip("transformer_lens")
    from transformer_lens.head_detector import detect_head
    from transformer_lens.model_bridge import TransformerBridge
    from transformers import AutoTokenizer

    model = tiny(kind)
    model.save_pretrained(tmp_path)  # it reads configuration and tokenizer from a folder
    word_tokenizer.save_pretrained(tmp_path)
    bridge = TransformerBridge.boot_transformers(
        str(tmp_path), hf_model=copy.deepcopy(model), tokenizer=AutoTokenizer.from_pretrained(tmp_path)
    )
    text = "the cat saw the dog and the cat saw the bird and a dog saw the cat"
    ids = bridge.to_tokens(text)[0].tolist()
    tokens = torch.tensor([ids])
    before = torch.nn.functional.pad(tokens[:, :-1], (1, 0), value=-1)
    ours = statistics_of(model, ids, [KeyRule(tokens, tokens), KeyRule(tokens, before, exclude_self=False)])
    total = ours[:, -1]
    names = ("previous_token_head", "duplicate_token_head", "induction_head")
    for number, name in enumerate(names):
        theirs = detect_head(bridge, text, name).double()
        torch.testing.assert_close(ours[:, number] / total, theirs, atol=1e-5, rtol=0, msg=name)


def test_one_changed_weight_is_another_model_to_a_checkpoint(tiny, tmp_path):
    model, texts = tiny("llama"), [[5] * 20, [6] * 20]
    options = QUICK | {"with_fresh": False, "checkpoint": tmp_path}
    before = roles_of(model, texts, **options).table
    with torch.no_grad():
        model.model.embed_tokens.weight[5] *= -3  # one row of many
        model.model.embed_tokens.weight[6] *= -3
    fresh = roles_of(model, texts, **QUICK | {"with_fresh": False}).table
    assert not fresh["largest"].equals(before["largest"])
    assert roles_of(model, texts, **options).table.equals(fresh)
    (tmp_path / "natural.safetensors").write_bytes(b"half a file")
    with pytest.raises(ValueError, match=r"natural\.safetensors is damaged"):
        roles_of(model, texts, **options)


def test_rows_behind_the_tokenizers_vocabulary_are_not_drawn(tiny, word_tokenizer):
    from microtome.capture.models import LoadedModel

    seen = []

    def spy(made, name):
        seen.append(made)
        return marked_scores(made, name)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys.modules["microtome.lenses.head_roles"], "marked_scores", spy)
        loaded = LoadedModel.from_module(tiny("llama"), word_tokenizer, name="tiny")
        roles_of(loaded, drawn_texts(), with_fresh=False, **QUICK)
    assert len(word_tokenizer) < 120
    assert max(max(text) for made in seen for text in made.texts) < len(word_tokenizer)


def test_a_block_that_runs_several_times_is_a_layer_each_time():
    from tiny_families import built

    model, texts = built("albert"), drawn_texts()
    found = roles_of(model, texts, with_fresh=False, **QUICK).table
    assert found["layer"].tolist() == [0] * 4 + [1] * 4 + [2] * 4
    expected = by_hand(model, texts)
    np.testing.assert_allclose(found["previous"].to_numpy().reshape(3, 4), expected["previous"], atol=2e-5)
    assert found["output_norm"].notna().all()
