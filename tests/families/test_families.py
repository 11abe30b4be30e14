"""Every family that builds is found and proved as far as it was when it was last looked at, and no site is wrong.

`expected.json` holds the verdict of each: "full" (every identity holds; attn_out, mlp_out and heads in every block of
the main stack), "part", or "refused". A third of them runs in the fast suite, the others with `-m slow`. Beside the
proof itself, two things are compared that it does not use: the hidden states that transformers reports, and activations
that `capture` keeps of texts alone and in a padded batch.
"""

import json
from pathlib import Path

import pytest
import torch
from tiny_families import AUDIO, FAMILIES, VISION, built, inputs, verdict

from microtome.capture.collect import capture
from microtome.capture.dissect import NotDissectable, dissect
from microtome.capture.models import LoadedModel
from microtome.capture.padding import call_options
from microtome.capture.taps import taps

EXPECTED = json.loads((Path(__file__).parent / "expected.json").read_text(encoding="utf-8"))
NAMES = [
    pytest.param(name, marks=[] if number % 3 == 0 else [pytest.mark.slow]) for number, name in enumerate(EXPECTED)
]
REPORTED_AFTER = ("falcon_mamba", "mamba", "mamba2", "rwkv")  # these report the stream after each block, not before
REPORTED_OTHERWISE = ("dory", "hrm_text", "funnel")  # every pass of a loop; the states of the encoder as well
COMPARED = ("resid_post", "z", "z_attn", "mlp_out", "mixer_out", "q", "k", "v", "mlp_act", "router")
TOKENS = {"input_ids": torch.randint(3, 100, (2, 9), generator=torch.Generator().manual_seed(5))}


def test_every_family_is_listed() -> None:
    assert set(EXPECTED) <= set(FAMILIES)
    unlisted = set(FAMILIES) - set(EXPECTED)
    assert all(isinstance(built(name), str) for name in sorted(unlisted)[:5])  # those that do not build


@pytest.mark.parametrize("name", NAMES)
def test_family(name: str) -> None:
    model = built(name)
    assert not isinstance(model, str), model
    found, anatomy = verdict(model)
    assert found == EXPECTED[name], None if anatomy is None else [i for i in anatomy.proof if not i.holds][:5]
    if anatomy is None:
        return
    assert not model._forward_hooks
    failed = {identity.site for identity in anatomy.proof if not identity.holds}
    assert not failed & {str(site) for site in anatomy.taps}, "a site is offered whose own identity failed"
    _compare_shapes(name, model, anatomy)
    _compare_hidden_states(name, model, anatomy)
    _compare_alone_and_in_a_batch(name, model, anatomy)


def _compare_shapes(name: str, model, anatomy) -> None:
    """Every value is `[batch, position, (head,) width]`, whatever the shape of the tensor it is read from."""
    if getattr(model.config, "is_encoder_decoder", False):
        return
    sites = [s for s in anatomy.sites if s.kind not in ("pattern", "state") and not s.stack]
    streams = next((s for s in sites if s.kind == "resid_post"), None)
    if streams is None:
        return
    with torch.no_grad(), taps(model, sites, anatomy=anatomy) as tape:
        model(**(inputs(model) or TOKENS), **call_options(model))
    for site in sites:
        tap, value = anatomy.tap(site), tape[site]
        heads = () if tap.head_count is None else (tap.head_count,)
        rows = value.shape[:2] if site.kind == "embed" or name == "swin" else tape[streams].shape[:2]  # swin has stages
        assert value.shape == (*rows, *heads, tap.width), site


def _compare_hidden_states(name: str, model, anatomy) -> None:
    """The hidden states that transformers reports are the streams between the blocks, bit for bit."""
    given = inputs(model) or TOKENS
    if getattr(model.config, "is_encoder_decoder", False) or name in REPORTED_OTHERWISE:
        return
    streams = [block.site("resid_post" if name in REPORTED_AFTER else "resid_pre") for block in anatomy.main]
    if not set(streams) <= set(anatomy.taps):
        return
    with torch.no_grad(), taps(model, streams, anatomy=anatomy) as tape:
        reported = model(**given, **call_options(model), output_hidden_states=True).get("hidden_states")
    if reported is None:
        return
    assert len(reported) == len(streams) + 1
    for site, state in zip(streams, reported, strict=False):
        assert torch.equal(state, tape[site]), site


def _compare_alone_and_in_a_batch(name: str, model, anatomy) -> None:
    if anatomy.padding is None or name in (*VISION, *AUDIO):
        return
    loaded = LoadedModel.from_module(model, name=name)
    sites = [str(site) for site in anatomy.taps if site.kind in COMPARED and not site.stack]
    if not sites:
        return
    texts = [TOKENS["input_ids"][0].tolist(), TOKENS["input_ids"][1, :4].tolist()]
    together = capture(loaded, texts, sites, "last", progress=False)
    for row, text in enumerate(texts):
        alone = capture(loaded, [text], sites, "last", progress=False)
        for site in sites:
            value, other = alone[site][0], together[site][row]
            assert float((value - other).norm() / value.norm()) < 1e-4, f"{site}, text {row}"


# ---- families that other tools were reported to get wrong


def test_grouped_queries_have_fewer_key_heads_than_query_heads() -> None:
    anatomy = dissect(built("llama"))
    assert (anatomy.tap("z.0").head_count, anatomy.tap("k.0").head_count) == (4, 2)
    with pytest.raises(IndexError, match="has 2 heads, 0 to 1"):
        anatomy.tap("k.0.2")


def test_what_gemma_2_adds_is_read_after_its_post_norms() -> None:
    anatomy = dissect(built("gemma2"))
    assert anatomy.tap("attn_out.1").point.module.endswith("post_attention_layernorm")
    assert anatomy.tap("mlp_out.1").point.module.endswith("post_feedforward_layernorm")


def test_gpt_2_padded_on_the_left_needs_position_ids() -> None:
    errors = dissect(built("gpt2")).padding_errors
    assert errors["left side, position ids none"] > 0.01
    assert errors["left side, position ids cumsum"] < 1e-4


def test_roberta_counts_positions_itself() -> None:
    errors = dissect(built("roberta")).padding_errors
    assert errors["right side, position ids none"] < 1e-4
    assert errors["right side, position ids cumsum"] > 0.01


def test_an_encoder_decoder_has_two_stacks_and_cross_attention() -> None:
    model = built("t5")
    anatomy = dissect(model)
    assert anatomy.stacks == {"": 2, "encoder": 3}
    given = TOKENS | {"decoder_input_ids": torch.randint(3, 100, (2, 5))}
    sites = ["resid_mid.0", "mlp_out.0", "resid_post.0", "cross_out.0", "encoder.resid_post.2", "encoder.z.1.3"]
    with torch.no_grad(), taps(model, sites, anatomy=anatomy) as tape:
        model(**given)
    torch.testing.assert_close(tape["resid_mid.0"] + tape["mlp_out.0"], tape["resid_post.0"])
    assert tape["cross_out.0"].shape == (2, 5, 32)
    assert tape["encoder.resid_post.2"].shape == (2, 9, 32)
    assert tape["encoder.z.1.3"].shape == (2, 9, 8)


def test_a_block_that_runs_three_times_is_three_calls() -> None:
    model = built("albert")
    anatomy = dissect(model)
    assert anatomy.layers == 1
    assert [str(site) for site in anatomy.expand("resid_post")] == [f"resid_post.0@{n}" for n in range(3)]
    assert anatomy.expand("z.0.2") == anatomy.expand(["z.0.2@0", "z.0.2@1", "z.0.2@2"])
    with pytest.raises(KeyError, match=r"runs 3 times in one forward. Name a call: resid_post\.0@0 to resid_post\.0@2"):
        anatomy.tap("resid_post.0")
    with torch.no_grad(), taps(model, ["resid_post", "resid_pre"], anatomy=anatomy) as tape:
        model(**TOKENS)
    assert torch.equal(tape["resid_post.0@0"], tape["resid_pre.0@1"])


def test_tokens_in_one_axis_are_given_back_their_rows() -> None:
    model = built("opt")
    anatomy = dissect(model)
    delta = torch.randn(32)
    sites = ["resid_pre.1", "attn_out.1", "mlp_out.1", "resid_post.1"]
    with torch.no_grad():
        with taps(model, sites, anatomy=anatomy) as tape:
            model(**TOKENS)
        with taps(model, "resid_post.1", {"mlp_out.1": lambda value: delta}, anatomy=anatomy) as edited:
            model(**TOKENS)
    assert tape["mlp_out.1"].shape == (2, 9, 32)
    torch.testing.assert_close(tape["resid_pre.1"] + tape["attn_out.1"] + tape["mlp_out.1"], tape["resid_post.1"])
    torch.testing.assert_close(edited["resid_post.1"], tape["resid_post.1"] + delta)


@pytest.mark.parametrize("name", ["cpmant", "xlnet"])
def test_a_stream_with_other_axes_than_the_tokens_is_refused(name: str) -> None:
    with pytest.raises(NotDissectable, match=r"it must be \[batch, position, width\]"):
        dissect(built(name))


def test_layers_of_a_hybrid_keep_their_numbers() -> None:
    model = built("jamba")  # Mamba, attention, Mamba: blocks of two classes in one list
    anatomy = dissect(model)
    assert anatomy.layers == 3
    assert [anatomy.tap(f"resid_post.{k}").point.module for k in range(3)] == [f"model.layers.{k}" for k in range(3)]
    assert [site.layer for site in anatomy.sites if site.kind == "z"] == [1]
    with pytest.raises(KeyError, match=r"z\.0 is not available on this JambaForCausalLM: no split into heads"):
        anatomy.tap("z.0")


class Detour(torch.nn.Module):
    """A list of three blocks, of which the middle one is given something else."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(50, 8)
        self.blocks = torch.nn.ModuleList([torch.nn.Linear(8, 8) for _ in range(4)])

    def get_input_embeddings(self) -> torch.nn.Module:
        return self.embed

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
        x = self.blocks[1](self.blocks[0](self.embed(input_ids)))
        return self.blocks[3](x + self.blocks[2](torch.sin(x)))


def test_blocks_beside_the_chain_are_not_passed_over_in_silence() -> None:
    with pytest.raises(NotDissectable, match=r"blocks\.\d.* in the list of its blocks, but not as blocks"):
        dissect(Detour().eval())
