"""capture(): rows are right alone and in any batch, where they are said to be, and what is wrong is named."""

import numpy as np
import pandas as pd
import pytest
import torch

from microtome.capture.collect import _check_settings, capture
from microtome.capture.dissect import dissect
from microtome.capture.models import LoadedModel
from microtome.capture.positions import Span
from microtome.capture.taps import Read, taps

TEXTS = [
    "the cat sat on the big red house .",
    "a dog ran",
    "she liked the film , but he hated the book and the very old city by the river !",
    "good",
    "it was a bad day for the man",
]
KINDS = ["llama", "gpt2", "neox", "gemma2", "qwen3", "bert"]
EVERYTHING = [
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
]


@pytest.fixture(scope="module")
def loaded(tiny, word_tokenizer):
    made: dict[str, LoadedModel] = {}

    def load(kind: str) -> LoadedModel:
        if kind not in made:
            made[kind] = LoadedModel.from_module(tiny(kind), word_tokenizer, name=kind)
        return made[kind]

    return load


def furthest(a: torch.Tensor, b: torch.Tensor) -> float:
    """Largest over rows of |a - b| / |a|."""
    a, b = a.flatten(1), b.flatten(1)
    return float(((a - b).norm(dim=1) / a.norm(dim=1)).max())


@pytest.mark.parametrize("kind", KINDS)
def test_alone_and_in_any_batch_are_the_same(loaded, kind: str) -> None:
    model = loaded(kind)
    together = capture(model, TEXTS, EVERYTHING, "all", progress=False)
    alone = [capture(model, [text], EVERYTHING, "all", progress=False) for text in TEXTS]
    assert together.rows["text"].tolist() == [i for i, one in enumerate(alone) for _ in range(len(one.rows))]
    for site in together.sites:
        assert furthest(torch.cat([one[site] for one in alone]), together[site]) < 1e-5, site


@pytest.mark.parametrize("kind", ["llama", "gpt2", "bert"])
def test_values_are_those_of_transformers(loaded, kind: str) -> None:
    model = loaded(kind)
    ids = model.tokenizer(TEXTS[0], return_tensors="pt")
    with torch.no_grad():
        hidden = model.module(**ids, output_hidden_states=True).hidden_states
    kept = capture(model, [TEXTS[0]], ["resid_pre", "resid_post"], "all", progress=False)
    for layer in range(3):
        assert furthest(hidden[layer][0], kept["resid_pre", layer]) < 1e-6
    for layer in range(2):
        assert furthest(hidden[layer + 1][0], kept["resid_post", layer]) < 1e-6


def test_positions_are_those_asked_for(loaded) -> None:
    model = loaded("llama")
    full = capture(model, TEXTS, "resid_post.1", "all", progress=False)
    rows = full.rows

    def of(text: int) -> torch.Tensor:
        return full["resid_post.1"][np.flatnonzero(rows["text"] == text)]

    def kept(positions, **options) -> torch.Tensor:
        return capture(model, TEXTS, "resid_post.1", positions, progress=False, **options)["resid_post.1"]

    for text in range(len(TEXTS)):
        assert furthest(of(text)[-1:], kept("last")[text : text + 1]) < 1e-5
        assert furthest(of(text)[:1], kept("first")[text : text + 1]) < 1e-5
        assert furthest(of(text)[-1:], kept(-1)[text : text + 1]) < 1e-5
    second = capture(model, TEXTS[:3], "resid_post.1", -2, progress=False)
    for text in range(3):
        assert furthest(of(text)[-2:-1], second["resid_post.1"][text : text + 1]) < 1e-5
    for text in range(len(TEXTS)):
        assert furthest(of(text).mean(0)[None], kept("mean")[text : text + 1]) < 1e-5
    start = TEXTS[0].index("big")
    spans = capture(model, [TEXTS[0]], "resid_post.1", Span(start, start + 3), progress=False)
    assert spans.rows["token"].tolist() == ["big"]


def test_a_mean_leaves_special_tokens_out_unless_told(loaded) -> None:
    ids = [[1, 7, 8, 9, 2], [1, 20, 2]]  # <s> ... </s>
    every = capture(loaded("llama"), ids, "resid_post.1", "all", progress=False)["resid_post.1"]
    inner = capture(loaded("llama"), ids, "resid_post.1", "mean", progress=False)["resid_post.1"]
    outer = capture(loaded("llama"), ids, "resid_post.1", "mean", include_special=True, progress=False)["resid_post.1"]
    assert furthest(torch.stack([every[1:4].mean(0), every[6]]), inner) < 1e-5
    assert furthest(torch.stack([every[:5].mean(0), every[5:].mean(0)]), outer) < 1e-5


def test_heads_come_apart_and_sum_to_the_attention_output(loaded) -> None:
    kept = capture(loaded("llama"), TEXTS, ["head_out", "attn_out", "z.1.2", "k.1.1"], "last", progress=False)
    assert kept["head_out", 0].shape == (5, 4, 32)
    assert kept["z.1.2"].shape == (5, 8)
    assert kept["k.1.1"].shape == (5, 8)
    assert furthest(kept["attn_out", 2], kept["head_out", 2].sum(1)) < 1e-5  # this kind has no bias


@pytest.mark.parametrize("positions", ["last", "all", "mean", [0, [1, 2], [], 0, -1]])
def test_pattern_rows_are_probabilities_over_real_keys(loaded, positions) -> None:
    model = loaded("llama")
    kept = capture(model, TEXTS, ["pattern.1", "pattern.2.3"], positions, progress=False)
    longest = max(len(model.tokenizer(t)["input_ids"]) for t in TEXTS)
    assert kept["pattern.1"].shape == (len(kept.rows), 4, longest)
    assert kept["pattern.2.3"].shape == (len(kept.rows), longest)
    assert torch.allclose(kept["pattern.1"].sum(-1), torch.ones(len(kept.rows), 4), atol=1e-5)
    row = int(np.flatnonzero(kept.rows["text"] == 0)[-1])
    position = kept.rows["position"][row]
    if position >= 0:
        ids = model.tokenizer(TEXTS[0], return_tensors="pt")
        with torch.no_grad(), taps(model, [Read("pattern.1", queries=[int(position)])]) as tape:
            model.module(**ids)
        alone = tape["pattern.1"][0, :, 0]
        assert torch.allclose(kept["pattern.1"][row, :, : alone.shape[-1]], alone, atol=1e-6)
        assert not kept["pattern.1"][row, :, alone.shape[-1] :].any()


def test_left_padded_models_give_the_same_pattern(loaded, monkeypatch) -> None:
    from dataclasses import replace

    import microtome.capture.collect as collect
    from microtome.capture.batches import PaddingRecipe

    model = loaded("llama")
    right = capture(model, TEXTS, ["pattern.1", "resid_post.2"], "all", progress=False)
    left_anatomy = replace(dissect(model), padding=PaddingRecipe("left", "cumsum"))
    monkeypatch.setattr(collect, "dissect", lambda *a, **k: left_anatomy)
    left = capture(model, TEXTS, ["pattern.1", "resid_post.2"], "all", progress=False)
    assert torch.allclose(left["pattern.1"], right["pattern.1"], atol=1e-5)
    assert furthest(right["resid_post.2"], left["resid_post.2"]) < 1e-5


def test_the_forward_stops_after_the_deepest_site(loaded) -> None:
    model = loaded("llama")
    ran: list[str] = []
    handles = [
        module.register_forward_hook(lambda m, a, o, path=path: ran.append(path))
        for path, module in model.module.named_modules()
        if path in ("model.layers.1", "model.layers.2", "model.norm", "lm_head")
    ]
    try:
        capture(model, TEXTS, "z.1", progress=False)
        assert ran == []
        capture(model, TEXTS, "resid_post.2", progress=False)
        assert "lm_head" not in ran
        assert "model.norm" not in ran
        ran.clear()
        logits = capture(model, TEXTS, "logits", progress=False)
        assert "lm_head" in ran
    finally:
        for handle in handles:
            handle.remove()
    assert logits["logits"].shape == (5, 120)


def test_edits_are_seen_by_later_sites_only(loaded) -> None:
    model = loaded("llama")
    plain = capture(model, TEXTS, "resid_post", progress=False)
    edited = capture(model, TEXTS, "resid_post", edits={"mlp_out.1": lambda x: -x}, progress=False)
    assert torch.equal(plain["resid_post.0"], edited["resid_post.0"])
    assert furthest(plain["resid_post.1"], edited["resid_post.1"]) > 0.05
    assert edited.provenance["edits"] == ["mlp_out.1"]


def test_labels_follow_their_texts(loaded) -> None:
    labels = pd.DataFrame({"label": [1, 0, 1, 0, 1]}, index=[7, 3, 1, 9, 5])
    kept = capture(loaded("llama"), TEXTS, "resid_post.0", "all", labels=labels, progress=False)
    assert (kept.rows["label"] == kept.rows["text"].map(dict(enumerate([1, 0, 1, 0, 1])))).all()
    with pytest.raises(ValueError, match="2 entries for 5 texts"):
        capture(loaded("llama"), TEXTS, "resid_post.0", labels={"label": [1, 0]}, progress=False)
    with pytest.raises(ValueError, match="row table has itself"):
        capture(loaded("llama"), TEXTS, "resid_post.0", labels={"token": TEXTS}, progress=False)


def test_token_ids_and_a_bare_module(loaded, tiny) -> None:
    ids = [[5, 6, 7], [8, 9], [10, 11, 12, 13]]
    kept = capture(tiny("gpt2"), ids, ["z", "resid_post"], "last", progress=False)
    assert kept.rows["position"].tolist() == [2, 1, 3]
    with pytest.raises(ValueError, match="tokenizer"):
        capture(tiny("gpt2"), TEXTS, "z", progress=False)


def test_images_as_ready_inputs() -> None:
    from transformers import ViTConfig, ViTModel

    torch.manual_seed(0)
    config = ViTConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48, image_size=16, patch_size=4
    )
    model = ViTModel(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    images = torch.randn(20, 3, 16, 16)
    kept = capture(model, {"pixel_values": images}, ["z", "resid_post"], "first", progress=False)
    assert kept["z.1"].shape == (20, 4, 8)
    with torch.no_grad():
        hidden = model(pixel_values=images, output_hidden_states=True).hidden_states
    assert furthest(hidden[1][:, 0], kept["resid_post.0"]) < 1e-5
    means = capture(model, {"pixel_values": images}, "resid_post.0", "mean", progress=False)
    assert furthest(hidden[1].mean(1), means["resid_post.0"]) < 1e-5


def test_nan_and_overflow_name_the_site_and_row(loaded, tiny) -> None:
    broken = tiny("llama")
    with torch.no_grad():
        broken.model.embed_tokens.weight[9] = 1e7
    dissect(tiny("llama"))
    with pytest.raises(ValueError, match=r"resid_pre\.0: text 1, position 1 overflows torch\.float16"):
        capture(broken, [[5, 6], [7, 9], [8, 8]], "resid_pre.0", dtype=torch.float16, progress=False)
    edits = {"mlp_out.0": lambda x: torch.full_like(x, float("nan"))}
    with pytest.raises(ValueError, match=r"resid_post\.1: text \d+, position \d+ holds NaN or infinity"):
        capture(loaded("llama"), TEXTS, "resid_post.1", edits=edits, progress=False)


@pytest.mark.parametrize(
    ("texts", "sites", "positions", "error", "message"),
    [
        (TEXTS, "resid_pots", "last", ValueError, "Did you mean 'resid_post'"),
        (TEXTS, "z.9", "last", IndexError, "layer 9 is out of range"),
        (TEXTS, "k.0.3", "last", IndexError, "key-value heads"),
        (TEXTS, [], "last", ValueError, "sites is empty"),
        (TEXTS, "z.0", "lst", ValueError, "expected one of last, first"),
        (TEXTS, "z.0", 5, ValueError, "row 1 has 3 tokens"),
        (["good", ""], "z.0", "last", ValueError, "row 1"),
        ([], "z.0", "last", ValueError, "texts is empty"),
        ("good", "z.0", "last", TypeError, "list"),
        (["good " * 100], "z.0", "last", ValueError, "truncate"),
    ],
)
def test_bad_requests_say_what_to_do(loaded, texts, sites, positions, error, message) -> None:
    with pytest.raises(error, match=message):
        capture(loaded("llama"), texts, sites, positions, progress=False)


def test_nothing_is_left_behind_after_an_error(loaded) -> None:
    model = loaded("llama")
    ids = model.tokenizer(TEXTS[2], return_tensors="pt")
    with torch.no_grad():
        before = model.module(**ids).logits
        with pytest.raises(ValueError, match="NaN"):
            capture(model, TEXTS, "resid_post.2", edits={"resid_post.0": lambda x: x * float("nan")}, progress=False)
        assert torch.equal(model.module(**ids).logits, before)


def test_a_model_without_a_padding_recipe_runs_text_by_text(loaded, monkeypatch) -> None:
    from dataclasses import replace

    import microtome.capture.collect as collect

    model = loaded("gpt2")
    padded = capture(model, TEXTS, "resid_post.2", "all", progress=False)
    monkeypatch.setattr(collect, "dissect", lambda *a, **k: replace(dissect(model), padding=None))
    shapes: list[tuple[int, ...]] = []
    hook = model.module.transformer.h[0].register_forward_pre_hook(lambda m, a: shapes.append(tuple(a[0].shape)))
    try:
        single = capture(model, TEXTS, "resid_post.2", "all", progress=False)
    finally:
        hook.remove()
    assert {shape[0] for shape in shapes} == {1}
    assert furthest(padded["resid_post.2"], single["resid_post.2"]) < 1e-5


def test_a_model_in_training_mode_is_refused_even_if_its_parts_were_found_before(tiny) -> None:
    loaded = LoadedModel.from_module(tiny("llama"), name="tiny")
    capture(loaded, [[3, 4, 5]], "resid_post.0", progress=False)
    loaded.module.model.layers[1].train()
    with pytest.raises(ValueError, match=r"model\.layers\.1 is in training mode"):
        capture(loaded, [[3, 4, 5]], "resid_post.0", progress=False)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [((5, None), "sites=5: give a name"), (("z", [1]), "labels is a list; give columns by name")],
)
def test_arguments_of_another_kind(tiny, arguments, message) -> None:
    with pytest.raises(TypeError, match=message):
        _check_settings(tiny("llama"), *arguments, None)


@pytest.mark.parametrize("dtype", [torch.int8, torch.bool, torch.complex64])
def test_a_dtype_that_cannot_hold_activations(tiny, dtype) -> None:
    with pytest.raises(TypeError, match="cannot hold activations"):
        capture(tiny("llama"), [[3, 4, 5]], "resid_post.0", dtype=dtype, progress=False)


def test_activations_captured_in_inference_mode_can_be_trained_on(tiny) -> None:
    with torch.inference_mode():
        acts = capture(tiny("llama"), [[3, 4, 5]], "resid_post.0", progress=False)
    weight = torch.ones(32, requires_grad=True)
    (acts["resid_post.0"] @ weight).sum().backward()
    assert weight.grad.abs().sum() > 0


def test_token_ids_are_in_the_row_table(tiny) -> None:
    acts = capture(tiny("llama"), [[3, 4, 5], [6, 7]], "resid_post.0", "all", progress=False)
    assert acts.rows["token_ids"].tolist() == ["3 4 5"] * 3 + ["6 7"] * 2
    as_array = capture(tiny("llama"), np.array([[3, 4, 5]]), "resid_post.0", progress=False)
    torch.testing.assert_close(as_array["resid_post.0"], acts["resid_post.0"][2:3])
