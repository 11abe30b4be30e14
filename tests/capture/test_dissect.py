"""Anatomies of tiny models of each kind, against what their authors' modules say; and a model left as it was."""

import threading
from collections.abc import Callable
from functools import cache

import pytest
import torch
from torch import nn

from microtome.capture.anatomy import Anatomy
from microtome.capture.dissect import NotDissectable, dissect
from microtome.capture.sites import Site
from microtome.capture.taps import taps

# what each kind's own module names say, known to this test alone
OUTPUT_PROJECTION = {
    "llama": "model.layers.{}.self_attn.o_proj",
    "gpt2": "transformer.h.{}.attn.c_proj",
    "neox": "gpt_neox.layers.{}.attention.dense",
    "neox_sequential": "gpt_neox.layers.{}.attention.dense",
    "gemma2": "model.layers.{}.self_attn.o_proj",
    "qwen3": "model.layers.{}.self_attn.o_proj",
    "bert": "encoder.layer.{}.attention.output.dense",
    "bert_masked_lm": "bert.encoder.layer.{}.attention.output.dense",
}
QUERY = {
    "llama": "model.layers.{}.self_attn.q_proj",
    "gpt2": "transformer.h.{}.attn.c_attn",
    "neox": "gpt_neox.layers.{}.attention.query_key_value",
    "qwen3": "model.layers.{}.self_attn.q_norm",
    "bert": "encoder.layer.{}.attention.self.query",
}
ALL_LAYERS = {
    "resid_pre",
    "resid_post",
    "attn_out",
    "mlp_out",
    "mlp_act",
    "q",
    "k",
    "v",
    "q_rot",
    "k_rot",
    "z",
    "head_out",
    "pattern",
}


@pytest.fixture(scope="module")
def anatomy_of(tiny) -> Callable[[str], Anatomy]:
    """The anatomy of one tiny model of a kind, found once for this file."""
    return cache(lambda kind: dissect(tiny(kind)))


@pytest.mark.parametrize("kind", OUTPUT_PROJECTION)
def test_every_identity_holds_and_every_site_is_offered(anatomy_of, kind: str) -> None:
    anatomy = anatomy_of(kind)
    assert not [i for i in anatomy.proof if not i.holds]
    assert anatomy.layers == 3
    assert anatomy.d_model == 32
    for name in ALL_LAYERS:
        assert [s.layer for s in anatomy.sites if s.kind == name] == [0, 1, 2], name
    assert anatomy.tap("head_out.1").point.module == OUTPUT_PROJECTION[kind].format(1)
    assert anatomy.padding is not None


@pytest.mark.parametrize("kind", QUERY)
def test_queries_are_found_after_any_norm_and_before_rotation(anatomy_of, kind: str) -> None:
    assert anatomy_of(kind).tap("q.2").point.module == QUERY[kind].format(2)


def test_fused_and_interleaved_columns(anatomy_of) -> None:
    gpt2 = anatomy_of("gpt2")
    assert gpt2.tap("q.0").heads.columns.tolist() == torch.arange(32).view(4, 8).tolist()
    assert gpt2.tap("k.0").heads.columns.tolist() == torch.arange(32, 64).view(4, 8).tolist()
    assert gpt2.tap("v.0").heads.columns.tolist() == torch.arange(64, 96).view(4, 8).tolist()
    neox = torch.arange(96).view(4, 3, 8)  # per head: query, key, value
    for part, kind in enumerate("qkv"):
        assert anatomy_of("neox").tap(f"{kind}.1").heads.columns.tolist() == neox[:, part].tolist()


def test_grouped_queries_have_fewer_key_value_heads(anatomy_of) -> None:
    anatomy = anatomy_of("llama")
    counts = {kind: anatomy.tap((kind, 0)).head_count for kind in ("q", "k", "v", "k_rot", "z", "pattern")}
    assert counts == {"q": 4, "k": 2, "v": 2, "k_rot": 2, "z": 4, "pattern": 4}
    with pytest.raises(IndexError, match=r"has 2 heads, 0 to 1 .key-value heads."):
        anatomy.tap("k.0.2")


def test_parallel_blocks_have_no_stream_between(anatomy_of) -> None:
    parallel, sequential = anatomy_of("neox"), anatomy_of("neox_sequential")
    assert all(b.is_parallel for b in parallel.blocks)
    assert not any(b.is_parallel for b in sequential.blocks)
    assert sequential.tap("resid_mid.1").through == "attn_out.1"
    with pytest.raises(KeyError, match="added in parallel"):
        parallel.tap("resid_mid.1")


def test_post_norm_families(anatomy_of) -> None:
    gemma = anatomy_of("gemma2")
    assert gemma.tap("attn_out.0").point.module == "model.layers.0.post_attention_layernorm"
    assert gemma.tap("mlp_out.0").point.module == "model.layers.0.post_feedforward_layernorm"
    assert gemma.logits_cap == 30.0
    assert gemma.logits_factor == pytest.approx(1.0)
    bert = anatomy_of("bert")
    assert bert.tap("resid_mid.0").through is None
    assert [hop.step for hop in bert.blocks[0].hops] == ["add", "norm", "add", "norm"]


def test_the_end_of_the_model(anatomy_of) -> None:
    assert anatomy_of("llama").final_norm == "model.norm"
    assert anatomy_of("llama").unembedding == "lm_head"
    with pytest.raises(KeyError, match="no unembedding"):
        anatomy_of("bert").tap("logits")
    with pytest.raises(KeyError, match="more than a norm lies between"):
        anatomy_of("bert_masked_lm").tap("final_norm")


def test_positions_under_padding_are_tried_not_assumed(anatomy_of) -> None:
    errors = anatomy_of("gpt2").padding_errors
    assert errors["left side, position ids none"] > 0.1
    assert errors["left side, position ids cumsum"] < 1e-5
    assert errors["right side, position ids none"] < 1e-5


@pytest.mark.parametrize("kind", ["llama", "gpt2", "gemma2", "bert"])
def test_the_model_is_left_as_it_was(tiny, kind: str) -> None:
    model = tiny(kind)
    ids = torch.randint(3, 100, (2, 7), generator=torch.Generator().manual_seed(0))

    def state() -> tuple:
        hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
        implementation = str(model.config._attn_implementation_internal)
        return list(dict(model.named_modules())), list(model.state_dict()), hooks, implementation

    with torch.no_grad():
        before, output = state(), model(ids, attention_mask=torch.ones_like(ids))[0]
        generator_state = torch.get_rng_state()
        dissect(model)
        assert state() == before
        assert torch.equal(model(ids, attention_mask=torch.ones_like(ids))[0], output)
        assert torch.equal(torch.get_rng_state(), generator_state)


def test_the_anatomy_is_kept_for_a_module_and_made_again_on_request(tiny) -> None:
    model = tiny("llama")
    first = dissect(model)
    assert dissect(model) is first
    assert dissect(model, again=True) is not first


def test_names_are_expanded_and_checked(anatomy_of) -> None:
    anatomy = anatomy_of("llama")
    assert [str(s) for s in anatomy.expand(["z", "resid_post.1"])] == ["z.0", "z.1", "z.2", "resid_post.1"]
    assert anatomy.expand(("z", 2)) == [Site("z", 2)]
    with pytest.raises(IndexError, match="layer 3 is out of range"):
        anatomy.tap("z.3")
    with pytest.raises(IndexError, match="head 4 is out of range"):
        anatomy.tap("z.0.4")
    with pytest.raises(ValueError, match="asked for twice"):
        anatomy.expand(["z.0", "z"])
    with pytest.raises(ValueError, match="whole site is asked for as well"):
        anatomy.expand(["z.0", "z.0.1"])
    with pytest.raises(KeyError, match="offers no site"):
        anatomy.tap("router.0")


def test_the_proof_is_a_table(anatomy_of) -> None:
    table = anatomy_of("llama").proof_table()
    assert {"name", "site", "error", "limit", "holds", "note"} <= set(table.columns)
    assert {"fires", "chain", "sum", "edit", "head sum", "head causality", "seam parity", "tail", "null edit"} <= set(
        table["name"]
    )


def test_a_model_whose_attention_ignores_the_interface(tiny_bloom) -> None:
    anatomy = dissect(tiny_bloom)
    assert anatomy.tap("z.0").point.side == "in"
    assert anatomy.tap("z.0").head_count == 4
    with pytest.raises(KeyError, match="does not go through transformers' attention interface"):
        anatomy.tap("pattern.0")


@pytest.fixture(scope="module")
def tiny_bloom() -> nn.Module:
    from transformers import BloomConfig, BloomForCausalLM

    torch.manual_seed(0)
    model = BloomForCausalLM(BloomConfig(vocab_size=120, hidden_size=32, n_layer=2, n_head=4)).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn_like(p))
    return model


def test_what_cannot_be_dissected_says_why(tiny) -> None:
    with pytest.raises(NotDissectable, match=r"call model\.eval"):
        dissect(tiny("llama").train())
    with pytest.raises(NotDissectable, match="takes no input_ids"):
        dissect(nn.Linear(3, 3).eval())

    noisy = tiny("llama")
    noisy.model.norm.register_forward_hook(lambda m, a, out: out + torch.rand_like(out))
    with pytest.raises(NotDissectable, match="two results for the same input"):
        dissect(noisy)


def test_threads_may_dissect_one_model_at_once_beside_forwards(tiny) -> None:
    model = tiny("llama")
    ids = torch.arange(3, 12)[None]
    bare = model(ids).logits
    found, seen = [], []

    def plain() -> None:
        seen.extend(model(ids).logits for _ in range(30))

    threads = [threading.Thread(target=lambda: found.append(dissect(model))) for _ in range(3)]
    threads.append(threading.Thread(target=plain))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 3
    assert all(anatomy is found[0] for anatomy in found)
    assert all(identity.holds for identity in found[0].proof)
    assert len(seen) == 30
    assert all(torch.equal(logits, bare) for logits in seen)


def test_replaced_added_and_removed_modules_are_noticed(tiny) -> None:
    model = tiny("llama")
    before = dissect(model)
    assert dissect(model) is before
    model.model.layers[2] = tiny("llama", seed=1).model.layers[2]
    after = dissect(model)
    assert after is not before
    del model.model.layers[2]
    model.config.num_hidden_layers = 2
    assert dissect(model).layers == 2


def test_taps_that_are_open_are_not_part_of_what_is_proved(tiny) -> None:
    model = tiny("llama")
    expected = set(dissect(model).taps)
    with taps(model, ["resid_post.0"], {"z.1.0": lambda z: -z}):
        assert set(dissect(model, again=True).taps) == expected
        model(torch.arange(3, 12)[None])


def test_weights_of_nan_are_named(tiny) -> None:
    model = tiny("llama")
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[0, 0] = torch.nan
    with pytest.raises(NotDissectable, match="returns NaN for random tokens"):
        dissect(model)
