"""Anatomies written by hand, so that the tests of taps do not rest on how a model's parts are found."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from microtome.capture.anatomy import Anatomy, Block, Contribution, HeadColumns, Hop, Point, Tap
from microtome.capture.sites import Site

HEADS, KV_HEADS, D_HEAD, D_MODEL = 4, 2, 8, 32
SEQUENTIAL = (Hop("add", 0), Hop("add", 1))


def columns(heads: int, start: int = 0) -> HeadColumns:
    return HeadColumns(torch.arange(start, start + heads * D_HEAD).view(heads, D_HEAD))


def seam_taps(layer: int, module: str, kv_heads: int) -> list[Tap]:
    """q_rot, k_rot, z and pattern at the attention interface."""
    return [
        Tap(Site("q_rot", layer), Point(module, "seam", "q"), None, HEADS, D_HEAD),
        Tap(Site("k_rot", layer), Point(module, "seam", "k"), None, kv_heads, D_HEAD),
        Tap(Site("z", layer), Point(module, "seam", "z"), None, HEADS, D_HEAD),
        Tap(Site("pattern", layer), Point(module, "seam", "pattern"), None, HEADS),
    ]


def head_out_tap(layer: int, projection: str) -> Tap:
    return Tap(Site("head_out", layer), Point(projection, "out"), columns(HEADS), HEADS, D_MODEL, through=projection)


def stream_taps(layer: int, block: Block, mid: Tap) -> list[Tap]:
    attn_out, mlp_out = (c.point for c in block.contributions)
    return [
        Tap(Site("resid_pre", layer), block.entry, width=D_MODEL),
        mid,
        Tap(Site("resid_post", layer), block.exit, width=D_MODEL),
        Tap(Site("attn_out", layer), attn_out, width=D_MODEL),
        Tap(Site("mlp_out", layer), mlp_out, width=D_MODEL),
    ]


def llama_layer(layer: int) -> tuple[Block, list[Tap]]:
    at = f"model.layers.{layer}"
    attention, mlp = Point(f"{at}.self_attn", "out", 0), Point(f"{at}.mlp", "out")
    terms = (Contribution("mixer", attention, 1.0, None), Contribution("mlp", mlp, 1.0, None))
    block = Block(at, Point(at, "in", 0), Point(at, "out"), terms, SEQUENTIAL)
    norm = Point(f"{at}.post_attention_layernorm", "in", 0)
    mid = Tap(Site("resid_mid", layer), norm, width=D_MODEL, through=f"attn_out.{layer}")
    projections = [
        Tap(Site(kind, layer), Point(f"{at}.self_attn.{kind}_proj", "out"), columns(n), n, D_HEAD)
        for kind, n in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS))
    ]
    act = Tap(Site("mlp_act", layer), Point(f"{at}.mlp.down_proj", "in", 0), width=48)
    taps = [*stream_taps(layer, block, mid), *seam_taps(layer, f"{at}.self_attn", KV_HEADS), *projections, act]
    return block, [*taps, head_out_tap(layer, f"{at}.self_attn.o_proj")]


def gpt2_layer(layer: int) -> tuple[Block, list[Tap]]:
    at = f"transformer.h.{layer}"
    attention, mlp = Point(f"{at}.attn", "out", 0), Point(f"{at}.mlp", "out")
    terms = (Contribution("mixer", attention, 1.0, None), Contribution("mlp", mlp, 1.0, None))
    block = Block(at, Point(at, "in", 0), Point(at, "out"), terms, SEQUENTIAL)
    mid = Tap(Site("resid_mid", layer), Point(f"{at}.ln_2", "in", 0), width=D_MODEL, through=f"attn_out.{layer}")
    fused = [
        Tap(Site(kind, layer), Point(f"{at}.attn.c_attn", "out"), columns(HEADS, start), HEADS, D_HEAD)
        for kind, start in (("q", 0), ("k", D_MODEL), ("v", 2 * D_MODEL))
    ]
    taps = [*stream_taps(layer, block, mid), *seam_taps(layer, f"{at}.attn", HEADS), *fused]
    return block, [*taps, head_out_tap(layer, f"{at}.attn.c_proj")]


def bert_layer(layer: int) -> tuple[Block, list[Tap]]:
    at = f"encoder.layer.{layer}"
    attention, mlp = Point(f"{at}.attention.output.dense", "out"), Point(f"{at}.output.dense", "out")
    terms = (Contribution("mixer", attention, 1.0, None), Contribution("mlp", mlp, 1.0, None))
    norms = [Hop("norm", module=f"{at}.attention.output.LayerNorm"), Hop("norm", module=f"{at}.output.LayerNorm")]
    hops = (Hop("add", 0), norms[0], Hop("add", 1), norms[1])
    block = Block(at, Point(at, "in", 0), Point(at, "out"), terms, hops)
    mid = Tap(Site("resid_mid", layer), Point(f"{at}.attention", "out", 0), width=D_MODEL)
    projections = [
        Tap(Site(kind, layer), Point(f"{at}.attention.self.{name}", "out"), columns(HEADS), HEADS, D_HEAD)
        for kind, name in (("q", "query"), ("k", "key"), ("v", "value"))
    ]
    taps = [*stream_taps(layer, block, mid), *seam_taps(layer, f"{at}.attention.self", HEADS), *projections]
    return block, [*taps, head_out_tap(layer, f"{at}.attention.output.dense")]


LAYERS = {"llama": llama_layer, "gpt2": gpt2_layer, "bert": bert_layer}
ENDS = {
    "llama": {"embed": Point("model.embed_tokens", "out"), "final_norm": Point("model.norm", "out")},
    "gpt2": {"embed": Point("transformer.wte", "out"), "final_norm": Point("transformer.ln_f", "out")},
    "bert": {"embed": Point("embeddings.word_embeddings", "out")},
}


def written_anatomy(kind: str) -> Anatomy:
    parts = [LAYERS[kind](layer) for layer in range(3)]
    taps = [tap for _, found in parts for tap in found]
    taps += [Tap(Site(name), point, width=D_MODEL) for name, point in ENDS[kind].items()]
    if kind != "bert":
        taps.append(Tap(Site("logits"), Point("", "out", "logits"), width=120))
    return Anatomy(kind, tuple(block for block, _ in parts), D_MODEL, {tap.site: tap for tap in taps})


@pytest.fixture
def tappable(tiny) -> Callable[[str], tuple[nn.Module, Anatomy]]:
    """`tappable("llama" | "gpt2" | "bert")`: a new tiny model and its hand-written anatomy."""
    return lambda kind: (tiny(kind), written_anatomy(kind))


@pytest.fixture
def inputs() -> dict[str, torch.Tensor]:
    """Two texts of 9 and 6 tokens, padded on the right, with mask and position ids."""
    ids = torch.randint(3, 120, (2, 9), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[1, 6:] = 0
    return {"input_ids": ids, "attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(min=0)}


@pytest.fixture
def forward(inputs) -> Callable[..., torch.Tensor]:
    """`forward(model)`: the logits (BERT: last hidden state) of `inputs`, without gradients."""

    def run(model: nn.Module, **options) -> torch.Tensor:
        with torch.no_grad():
            return model(**inputs, **options)[0]

    return run
