"""Sites that need more than the common wiring, against the same values computed another way."""

from collections.abc import Callable

import pytest
import torch
from tiny_families import built
from torch import Tensor, nn

from microtome.capture.anatomy import coefficient
from microtome.capture.dissect import dissect
from microtome.capture.padding import call_options
from microtome.capture.tap_plan import Read
from microtome.capture.taps import taps

TOKENS = {"input_ids": torch.randint(3, 100, (2, 9), generator=torch.Generator().manual_seed(5))}
DELTA = torch.randn(32, generator=torch.Generator().manual_seed(3))


def run(model: nn.Module, reads: list, edits: dict | None = None):
    """The tape of one forward."""
    with torch.no_grad(), taps(model, reads, edits, anatomy=dissect(model)) as tape:
        model(**TOKENS, **call_options(model))
    return tape


def seen(model: nn.Module, path: str, slot: int | None = None, *, is_input: bool = False) -> Tensor:
    """What a module returns or is given in a forward without taps."""
    values: list[Tensor] = []

    def keep(module: nn.Module, args: tuple, output: object) -> None:
        value = args[0] if is_input else output
        values.append((value if slot is None else value[slot]).detach().clone())

    handle = model.get_submodule(path).register_forward_hook(keep)
    with torch.no_grad():
        model(**TOKENS, **call_options(model))
    handle.remove()
    return values[0]


# ---- queries, keys and values where the attention interface is not used


def bloom(fused: Tensor) -> dict[str, Tensor]:
    q, k, v = fused.view(2, 9, 4, 3, 8).unbind(3)
    return {"q": q, "k": k, "v": v}


def falcon_of_groups(fused: Tensor) -> dict[str, Tensor]:
    groups = fused.view(2, 9, 2, 4, 8)  # two queries, a key and a value for each of two groups
    return {"q": groups[:, :, :, :2].reshape(2, 9, 4, 8), "k": groups[:, :, :, 2], "v": groups[:, :, :, 3]}


def one_key_for_all(fused: Tensor) -> dict[str, Tensor]:
    heads = fused.view(2, 9, 6, 8)
    return {"q": heads[:, :, :4], "k": heads[:, :, 4:5], "v": heads[:, :, 5:6]}


def side_by_side(fused: Tensor) -> dict[str, Tensor]:
    q, k, v = fused.view(2, 9, 3, 4, 8).unbind(2)
    return {"q": q, "k": k, "v": v}


@pytest.mark.parametrize(
    ("name", "module", "split"),
    [
        ("bloom", "transformer.h.1.self_attention.query_key_value", bloom),
        ("falcon new", "transformer.h.1.self_attention.query_key_value", falcon_of_groups),
        ("falcon old", "transformer.h.1.self_attention.query_key_value", one_key_for_all),
        ("mpt", "transformer.blocks.1.attn.Wqkv", side_by_side),
        ("openai-gpt", "transformer.h.1.attn.c_attn", side_by_side),
    ],
)
def test_fused_projections_are_split_into_heads(
    name: str, module: str, split: Callable[[Tensor], dict[str, Tensor]]
) -> None:
    model = built(name)
    tape = run(model, ["q.1", "k.1", "v.1"])
    for kind, value in split(seen(model, module)).items():
        assert torch.equal(tape[f"{kind}.1"], value), kind


@pytest.mark.parametrize("name", ["xglm", "gpt_neo", "roformer", "rembert", "deberta-v2", "opt", "mpnet", "led"])
def test_projections_of_their_own_are_read_before_they_are_scaled(name: str) -> None:
    model = built(name)
    anatomy = dissect(model)
    tape = run(model, ["q.1", "k.1", "v.1"])
    for kind in "qkv":
        point = anatomy.tap(f"{kind}.1").point
        assert torch.equal(tape[f"{kind}.1"].flatten(2), seen(model, point.module)), kind
    names = [anatomy.tap(f"{kind}.1").point.module.rpartition(".")[2] for kind in "qkv"]
    assert [n[0] for n in names] == ["q", "k", "v"]


@pytest.mark.parametrize("name", ["bloom", "falcon new", "mpt", "openai-gpt", "xglm", "gpt_neo", "qwen3_next"])
def test_a_constant_on_the_values_of_one_head_reaches_z_of_its_group_whole(name: str) -> None:
    model = built(name)
    anatomy = dissect(model)
    head = anatomy.tap("v.1").head_count - 1
    group = anatomy.tap("z.1").head_count // anatomy.tap("v.1").head_count
    z = "z_attn.1" if name == "qwen3_next" else "z.1"  # there a gate follows
    delta = torch.randn(anatomy.tap("v.1").width)
    before = run(model, [z])[z]
    after = run(model, [z], {f"v.1.{head}": lambda value: delta})[z]
    expected = before.clone()
    expected[:, :, head * group : (head + 1) * group] += delta  # each row of a pattern sums to one
    torch.testing.assert_close(after, expected)


@pytest.mark.parametrize("name", ["bloom", "falcon new", "xglm", "opt"])
def test_a_query_edited_at_one_position_moves_its_head_there(name: str) -> None:
    model = built(name)

    def at_last(value: Tensor) -> Tensor:
        delta = torch.zeros_like(value)
        delta[:, -1] = 1.0
        return delta

    moved = (run(model, ["z.1"], {"q.1.2": at_last})["z.1"] - run(model, ["z.1"])["z.1"]).abs().amax((0, 3)) > 1e-6
    assert moved.nonzero().tolist() == [[8, 2]]


# ---- gates, norms and linear attention between the heads and the projection


def test_a_gate_stands_between_what_attention_returns_and_z() -> None:
    model = built("qwen3_next")  # linear, full, linear attention
    tape = run(model, ["z.1", "z_attn.1"])
    gate = seen(model, "model.layers.1.self_attn.q_proj").view(2, 9, 4, 2, 8)[:, :, :, 1]
    torch.testing.assert_close(tape["z.1"], tape["z_attn.1"] * torch.sigmoid(gate))


def test_a_norm_over_all_heads_leaves_heads_before_it_alone() -> None:
    model = built("bitnet")
    tape = run(model, ["z_attn.1"])
    norm = model.get_submodule("model.layers.1.self_attn.attn_sub_norm")
    normed = norm(tape["z_attn.1"].flatten(2))
    torch.testing.assert_close(normed, seen(model, "model.layers.1.self_attn.o_proj", is_input=True))
    with pytest.raises(KeyError, match=r"z\.1 is not available"):
        dissect(model).tap("z.1")


@pytest.mark.parametrize("name", ["qwen3_next", "kimi_linear", "olmo_hybrid", "bailing_hybrid", "xlstm"])
def test_the_heads_of_linear_attention_sum_to_what_the_mixer_adds(name: str) -> None:
    model = built(name)
    anatomy = dissect(model)
    site = next(s for s in anatomy.sites if s.kind == "mixer_out")
    layer = site.layer
    tape = run(model, [f"mixer_out.{layer}", f"head_out.{layer}"])
    torch.testing.assert_close(tape[f"head_out.{layer}"].sum(2), tape[f"mixer_out.{layer}"])
    without = run(model, [f"mixer_out.{layer}"], {f"z.{layer}.1": lambda value: -value})
    expected = tape[f"mixer_out.{layer}"] - tape[f"head_out.{layer}.1"]
    torch.testing.assert_close(without[f"mixer_out.{layer}"], expected)


# ---- factors that are vectors, constants, and several modules that make one term


def test_a_vector_on_the_trunk_scales_what_was_added_before_it() -> None:
    model = built("doge")
    saved = run(model, ["mlp_out.1", "resid_mid.1", "resid_post.1"])
    edits = {"resid_mid.1": lambda value: DELTA, "mlp_out.1": lambda value: saved["mlp_out.1"] - value}
    edited = run(model, ["resid_mid.1", "resid_post.1"], edits)
    scale = model.model.layers[1].post_attention_residual.detach()
    torch.testing.assert_close(edited["resid_post.1"], saved["resid_post.1"] + scale * DELTA)


def test_a_vector_and_a_constant_on_both_operands() -> None:
    model = built("zaya")
    anatomy = dissect(model)
    scale = "model.layers.0.post_attention_residual_scale.hidden_states_scale"
    assert anatomy.tap("attn_out.0").vectors == (scale,)
    before = run(model, ["resid_mid.0", "resid_pre.0", "attn_out.0"])
    edited = run(model, ["resid_post.0"], {"mlp_out.0": lambda value: DELTA})
    scale = coefficient(model, anatomy.tap("mlp_out.0").factor, anatomy.tap("mlp_out.0").vectors)
    plain = run(model, ["resid_post.0"])
    torch.testing.assert_close(edited["resid_post.0"], plain["resid_post.0"] + scale * DELTA)
    scaling = model.get_submodule("model.layers.0.post_attention_residual_scale")
    torch.testing.assert_close(before["resid_mid.0"], scaling(before["attn_out.0"], before["resid_pre.0"]))


def test_a_constant_of_the_last_block_belongs_to_the_formula() -> None:
    model = built("gpt_neox_japanese")
    sites = ["resid_pre.2", "attn_out.2", "mlp_out.2", "resid_post.2"]
    tape = run(model, sites)
    before, attention, mlp, after = (tape[site] for site in sites)
    bias = model.get_submodule("gpt_neox_japanese.layers.2.attention").dense_bias
    torch.testing.assert_close(before + attention + bias + mlp, after)
    assert [hop.step for hop in dissect(model).blocks[2].hops].count("shift") == 1


def test_experts_and_a_shared_mlp_side_by_side_are_one_mlp() -> None:
    model = built("granitemoehybrid")
    tap = dissect(model).tap("mlp_out.1")
    routed, shared = (seen(model, f"model.layers.1.{m}") for m in ("block_sparse_moe", "shared_mlp"))
    tape = run(model, ["mlp_out.1", "resid_post.1"])
    torch.testing.assert_close(tape["mlp_out.1"], routed + shared)
    edited = run(model, ["mlp_out.1", "resid_post.1"], {"mlp_out.1": lambda value: DELTA})
    torch.testing.assert_close(edited["mlp_out.1"], tape["mlp_out.1"] + DELTA)
    torch.testing.assert_close(edited["resid_post.1"], tape["resid_post.1"] + tap.factor * DELTA)


def test_attention_and_a_recurrence_side_by_side_are_two_terms() -> None:
    model = built("falcon_h1")
    anatomy = dissect(model)
    sites = ["resid_pre.1", "attn_out.1", "mixer_out.1", "mlp_out.1", "resid_post.1"]
    tape = run(model, sites)
    total = tape["resid_pre.1"] + sum(anatomy.tap(s).factor * tape[s] for s in sites[1:4])
    torch.testing.assert_close(total, tape["resid_post.1"])


def test_neurons_of_a_model_that_runs_its_mlp_on_flat_tokens() -> None:
    model = built("opt")
    before = run(model, ["mlp_act.1", "mlp_out.1", "resid_mid.1", "resid_pre.1", "attn_out.1"])
    assert before["mlp_act.1"].shape == (2, 9, 48)
    torch.testing.assert_close(before["resid_mid.1"], before["resid_pre.1"] + before["attn_out.1"])
    fc2 = model.get_submodule("model.decoder.layers.1.fc2")
    torch.testing.assert_close(fc2(before["mlp_act.1"]), before["mlp_out.1"])
    after = run(model, ["mlp_out.1"], {"mlp_act.1": lambda value: torch.ones_like(value)})
    torch.testing.assert_close(after["mlp_out.1"], before["mlp_out.1"] + fc2.weight.sum(1))


# ---- routers

ROUTED = ["mixtral", "qwen2_moe", "deepseek_v3", "gpt_oss", "dbrx", "llama4_text", "glm4_moe", "granitemoehybrid"]


@pytest.mark.parametrize("name", ROUTED)
def test_logits_of_the_router_are_read_and_moved(name: str) -> None:
    model = built(name)
    anatomy = dissect(model)
    site = next(s for s in anatomy.sites if s.kind == "router")
    layer, experts = site.layer, anatomy.tap(site).width
    mlp = f"mlp_out.{layer}"
    delta = torch.zeros(2, 9, experts)
    delta[:, 3] = torch.tensor([5.0, -5.0, 3.0, -3.0])
    before = run(model, [site, mlp])
    assert before[site].shape == (2, 9, experts)
    edited = run(model, [site, mlp], {site: lambda value: delta})
    torch.testing.assert_close(edited[site], before[site] + delta, rtol=1e-4, atol=1e-4)
    moved = (edited[mlp] - before[mlp]).abs().amax(-1) > 1e-5
    assert moved[:, 3].any()
    assert not torch.cat([moved[:, :3], moved[:, 4:]], 1).any()
    torch.testing.assert_close(run(model, [mlp], {site: torch.zeros_like})[mlp], before[mlp])


def test_an_edited_router_is_a_router_with_a_bias() -> None:
    model = built("mixtral")
    bias = torch.tensor([2.0, -1.0, 0.5, -2.0])
    edited = run(model, ["mlp_out.1"], {"router.1": lambda value: bias.expand_as(value)})
    gate = model.model.layers[1].mlp.gate
    linear = torch.nn.functional.linear

    class Biased:
        """`functional.linear` with the bias, for the router's own weight alone."""

        def __enter__(self) -> None:
            torch.nn.functional.linear = lambda x, w, b=None: linear(x, w, bias if w is gate.weight else b)

        def __exit__(self, *exception: object) -> None:
            torch.nn.functional.linear = linear

    with Biased():
        expected = run(model, ["mlp_out.1"])
    assert not torch.allclose(expected["mlp_out.1"], run(model, ["mlp_out.1"])["mlp_out.1"])
    torch.testing.assert_close(edited["mlp_out.1"], expected["mlp_out.1"], rtol=1e-4, atol=1e-5)


def test_a_router_that_has_chosen_already_gives_no_gradient() -> None:
    model = built("mixtral")
    with pytest.raises(ValueError, match="logits that it has already used"):
        run(model, [Read("router.1", keep_graph=True)])
