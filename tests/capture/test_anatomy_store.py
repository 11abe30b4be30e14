"""Anatomies on disk: found again in another process, and never used for a model of another make."""

import json
from pathlib import Path

import pytest
import torch
from tiny_families import built, tiny_family
from torch import nn
from transformers.models.llama import modeling_llama

from microtome.capture import anatomy_store
from microtome.capture.anatomy import Anatomy
from microtome.capture.anatomy_store import anatomy_key, kept
from microtome.capture.attention_seam import switch_on
from microtome.capture.dissect import dissect
from microtome.capture.hashes import text_sha256
from microtome.capture.hooks import attach
from microtome.capture.taps import taps

IDS = {"input_ids": torch.randint(3, 100, (2, 9), generator=torch.Generator().manual_seed(5))}


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """An empty store for one test."""
    monkeypatch.setattr(anatomy_store, "cache_folder", lambda *parts: tmp_path)
    return tmp_path


def without_columns(anatomy: Anatomy) -> dict:
    """Everything that can be compared with ==."""
    taps_of = {site: {k: v for k, v in vars(tap).items() if k != "heads"} for site, tap in anatomy.taps.items()}
    rest = {k: v for k, v in vars(anatomy).items() if k not in ("taps", "proof", "seconds", "repeated")}
    return rest | {"taps": taps_of, "identities": [(i.name, i.site, i.limit, i.holds) for i in anatomy.proof]}


@pytest.mark.parametrize("name", ["llama", "t5", "albert", "mixtral", "qwen3_next", "doge", "granitemoehybrid", "opt"])
def test_what_is_kept_is_the_anatomy(folder: Path, name: str) -> None:
    first = dissect(built(name))
    again = dissect(built(name))
    assert first.repeated == 0
    assert again.repeated > 20
    assert again.proved_at == first.proved_at
    assert without_columns(again) == without_columns(first)
    for site, tap in first.taps.items():
        other = again.taps[site].heads
        assert (tap.heads is None) == (other is None)
        assert tap.heads is None or torch.equal(tap.heads.columns, other.columns), site


def test_a_kept_anatomy_reads_and_edits_as_a_fresh_one(folder: Path) -> None:
    values = []
    for _ in range(2):
        model = built("falcon new")
        anatomy = dissect(model)
        with (
            torch.no_grad(),
            taps(model, ["q.1", "z.1", "resid_post.1"], {"z.0.2": lambda v: v}, anatomy=anatomy) as tape,
        ):
            model(**IDS)
        values.append([tape[site] for site in ("q.1", "z.1", "resid_post.1")])
    assert len(list(folder.iterdir())) == 1
    assert all(torch.equal(a, b) for a, b in zip(*values, strict=True))


def test_other_weights_have_the_same_anatomy_and_are_checked_themselves(folder: Path) -> None:
    dissect(tiny_family("llama", seed=0))
    model = tiny_family("llama", seed=1)
    assert dissect(model).repeated > 0
    vanishing = tiny_family("llama", seed=2)
    with torch.no_grad():
        vanishing.model.layers[1].mlp.down_proj.weight.mul_(1e-7)
    anatomy = dissect(vanishing)
    assert anatomy.repeated == 0  # "not empty" fails, so all is proved anew
    with pytest.raises(KeyError, match="not empty"):
        anatomy.tap("mlp_out.1")
    assert "mlp_out.1" in map(str, dissect(tiny_family("llama", seed=3)).taps)


def test_again_proves_everything(folder: Path) -> None:
    dissect(built("gpt2"))
    assert dissect(built("gpt2"), again=True).repeated == 0


def test_taps_do_not_change_the_key(folder: Path) -> None:
    model = built("llama")
    before = anatomy_key(model, None)
    attach(model, dissect(model))
    switch_on(model)
    assert anatomy_key(model, None) == before


class Wide(nn.Linear):
    """A class of our own."""


def patched(name: str, monkeypatch) -> None:
    """Replace a function or a method of the file that Llama is in."""
    if name == "function":
        written = modeling_llama.repeat_kv
        monkeypatch.setattr(modeling_llama, "repeat_kv", lambda x, n: written(x, n))
    else:
        written = modeling_llama.LlamaMLP.forward
        monkeypatch.setattr(modeling_llama.LlamaMLP, "forward", lambda self, x: 2 * written(self, x))


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.double(),
        lambda m: m.set_attn_implementation("eager"),
        lambda m: setattr(m.config, "hidden_act", "gelu"),
        lambda m: setattr(m.model.layers[1].self_attn, "scaling", 0.3),
        lambda m: setattr(m.model.layers[1].self_attn, "windows", [1, (2, 3)]),
        lambda m: setattr(m.model.layers[1], "mlp", nn.Linear(32, 32)),
        lambda m: m.model.layers.append(m.model.layers[0]),
        lambda m: m.register_buffer("extra", torch.zeros(3)),
    ],
    ids=["dtype", "attention", "configuration", "number", "list", "module", "layer", "buffer"],
)
def test_another_make_has_another_key(change) -> None:
    model, other = built("llama"), built("llama")
    change(other)
    assert anatomy_key(model, None) == anatomy_key(built("llama"), None)
    assert anatomy_key(model, None) != anatomy_key(other, None)


@pytest.mark.parametrize("what", ["function", "method"])
def test_code_that_was_replaced_in_this_process_has_another_key(what: str, monkeypatch) -> None:
    before = anatomy_key(built("llama"), None)
    patched(what, monkeypatch)
    assert anatomy_key(built("llama"), None) != before


def test_whole_numbers_in_buffers_count() -> None:
    one, other = built("llama"), built("llama")
    one.register_buffer("order", torch.tensor([0, 1]))
    other.register_buffer("order", torch.tensor([1, 0]))
    assert anatomy_key(one, None) != anatomy_key(other, None)


@pytest.mark.parametrize("how", ["forward", "hook", "method", "class", "global hook"])
def test_a_model_whose_forward_cannot_be_told_has_no_key(how: str) -> None:
    model = built("llama")
    block = model.model.layers[0]
    handle = None
    if how == "forward":
        block.forward = block.forward
    elif how == "hook":
        block.register_forward_hook(lambda module, args, output: None)
    elif how == "method":
        model.model.get_input_embeddings = lambda: model.model.embed_tokens
    elif how == "class":
        block.self_attn.o_proj = Wide(32, 32)
    else:
        handle = nn.modules.module.register_module_forward_hook(lambda module, args, output: None)
    try:
        assert anatomy_key(model, None) is None
    finally:
        if handle is not None:
            handle.remove()


def test_what_one_checkpoint_does_not_show_is_not_refused_to_others(folder: Path) -> None:
    blank = built("bloom")
    with torch.no_grad():
        blank.transformer.h[1].self_attention.query_key_value.weight.zero_()
    dissect(blank)
    assert not list(folder.iterdir())
    dissect(built("bloom"))
    assert len(list(folder.iterdir())) == 1


@pytest.mark.parametrize("damage", ["", "{", '{"": "Anatomy"}', "[1, 2]", "x" * 64 + "\n[1, 2]"])
def test_a_damaged_file_is_proved_over(folder: Path, damage: str) -> None:
    dissect(built("gpt2"))
    (file,) = folder.iterdir()
    good = file.read_text(encoding="utf-8")
    file.write_text(damage, encoding="utf-8")
    assert kept(file.stem) is None
    assert dissect(built("gpt2")).repeated == 0
    assert len(file.read_text(encoding="utf-8")) == pytest.approx(len(good), abs=200)  # times and rounding differ


def test_a_file_that_was_changed_by_hand_is_proved_over(folder: Path) -> None:
    dissect(built("granite multipliers"))
    (file,) = folder.iterdir()
    file.write_text(file.read_text(encoding="utf-8").replace("0.7", "1.0"), encoding="utf-8")
    anatomy = dissect(built("granite multipliers"))
    assert anatomy.repeated == 0
    assert anatomy.blocks[1].hops[0].factor == pytest.approx(0.7)


def test_a_kept_anatomy_that_does_not_hold_is_proved_over(folder: Path) -> None:
    dissect(built("granite multipliers"))
    (file,) = folder.iterdir()
    held = json.loads(file.read_text(encoding="utf-8").partition("\n")[2])
    held[0]["blocks"][1]["hops"][0]["factor"] = 1.0
    text = json.dumps(held)
    file.write_text(f"{text_sha256(text)}\n{text}", encoding="utf-8")
    anatomy = dissect(built("granite multipliers"))
    assert anatomy.repeated == 0
    assert anatomy.blocks[1].hops[0].factor == pytest.approx(0.7)


def test_a_call_with_inputs_is_not_answered_with_what_was_found_without(folder: Path) -> None:
    model = built("llama")
    first = dissect(model)
    given = {"input_ids": torch.randint(3, 100, (3, 12)), "attention_mask": torch.ones(3, 12, dtype=torch.long)}
    second = dissect(model, inputs=given)
    assert second is not first
    assert dissect(model, inputs=given) is second
    assert dissect(model) is second


def test_a_folder_that_cannot_be_written_costs_nothing_but_time(monkeypatch) -> None:
    def refuse(*parts: str) -> Path:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(anatomy_store, "cache_folder", refuse)
    assert dissect(built("gpt2")).repeated == 0
