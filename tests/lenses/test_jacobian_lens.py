"""The Jacobian lens against jacrev, and against TransformerLens where that runs."""

import copy
import json
import subprocess
import sys

import pytest
import torch

from microtome.lenses.jacobian_lens import JacobianLens, jacobian_lens

TEXTS = [list(range(4, 12)), list(range(30, 37)), [7, 8, 9]]


def by_jacrev(model, ids: list[int], depth: int, skip: int) -> torch.Tensor:
    """The definition on one text: the tail of the model as a function of r_l, differentiated whole."""
    with torch.no_grad():
        streams = model(input_ids=torch.tensor([ids]), output_hidden_states=True).hidden_states
    last = {}
    block = model.model.layers[-1]
    entry = model.model.layers[depth]

    def tail(stream):
        handles = [
            entry.register_forward_pre_hook(lambda _, arguments: (stream, *arguments[1:])),
            block.register_forward_hook(lambda _, __, out: last.update(out=out if torch.is_tensor(out) else out[0])),
        ]
        try:
            model(input_ids=torch.tensor([ids]), use_cache=False)
        finally:
            for handle in handles:
                handle.remove()
        return last["out"]

    whole = torch.autograd.functional.jacobian(tail, streams[depth])[0, :, :, 0]  # position, output, position, input
    valid = slice(skip, len(ids) - 1)
    return whole[valid, :, valid].sum(0).mean(1)


def test_it_is_the_mean_of_whole_jacobians(tiny):
    model = tiny("llama")
    lens = jacobian_lens(model, TEXTS, [0, 2], skip_first=3, rows=5)
    assert (lens.texts, lens.left_out) == (2, 1)
    for depth in (0, 2):
        expected = (by_jacrev(model, TEXTS[0], depth, 3) + by_jacrev(model, TEXTS[1], depth, 3)) / 2
        torch.testing.assert_close(lens.jacobians[depth], expected, atol=1e-5, rtol=1e-4)
    at_once = jacobian_lens(model, TEXTS, [0, 2], skip_first=3, rows=64)
    torch.testing.assert_close(at_once.jacobians[0], lens.jacobians[0], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("kind", ["gpt2", "gemma2"])
def test_other_families(tiny, kind):
    lens = jacobian_lens(tiny(kind), TEXTS, skip_first=3)
    assert lens.depths == [1, 2]
    stream = torch.randn(4, 32, generator=torch.Generator().manual_seed(0))
    translator = lens.translator(2)
    torch.testing.assert_close(translator(stream), stream @ lens.jacobians[2].T)
    assert translator.facts["texts"] == 2
    # how one block's Jacobian looks: near the identity, not it
    assert 0.01 < float((lens.jacobians[2] - torch.eye(32)).norm() / 32**0.5) < 10


def test_files_are_read_as_they_were_written(tiny, tmp_path):
    lens = jacobian_lens(tiny("llama"), TEXTS, skip_first=3)
    lens.save(tmp_path / "lens.pt", dtype=torch.float32)
    again = JacobianLens.load(tmp_path / "lens.pt")
    assert again.depths == lens.depths
    assert again.texts == 2
    assert again.facts["skip_first_positions"] == 3
    for depth in lens.depths:
        torch.testing.assert_close(again.jacobians[depth], lens.jacobians[depth], atol=0, rtol=0)
    raw = torch.load(tmp_path / "lens.pt", weights_only=True)
    assert raw["source_layers"] == [0, 1]
    with pytest.raises(ValueError, match="depth 0 is the stream before block 0"):
        jacobian_lens(tiny("llama"), TEXTS, [0], skip_first=3).save(tmp_path / "other.pt")
    torch.save({"J": {0: torch.zeros(3, 3)}, "n_prompts": 1, "d_model": 4}, tmp_path / "wrong.pt")
    with pytest.raises(ValueError, match="the matrix of block 0 is not 4 x 4"):
        JacobianLens.load(tmp_path / "wrong.pt")
    torch.save({"weights": 1}, tmp_path / "wrong.pt")
    with pytest.raises(ValueError, match="is no Jacobian lens"):
        JacobianLens.load(tmp_path / "wrong.pt")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"depths": [3]}, r"depths are \[3\]. Give some of 0 to 2"),
        ({"depths": []}, r"depths are \[\]"),
        ({"skip_first": -1}, "skip_first is -1"),
        ({"rows": 0}, "rows 0"),
        ({"skip_first": 30}, "no text has more than 31 tokens"),
    ],
)
def test_bad_settings(tiny, settings, message):
    with pytest.raises(ValueError, match=message):
        jacobian_lens(tiny("llama"), TEXTS, **settings)


def test_a_depth_that_was_not_fitted():
    with pytest.raises(KeyError, match=r"no depth 2; there are \[1\]"):
        JacobianLens({1: torch.eye(2)}, 1).translator(2)


_WITH_TRANSFORMER_LENS = """
import json, sys, torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast
from transformer_lens.model_bridge import TransformerBridge
from transformer_lens.tools.analysis import JacobianLens
folder = sys.argv[1]
tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
bridge = TransformerBridge.boot_transformers(folder, hf_model=model, tokenizer=tokenizer, device="cpu")
texts = json.load(open(folder + "/texts.json"))
settings = {"corpus": "words", "skip_first_positions": 3, "dim_batch": 8, "max_seq_len": 32, "show_progress": False}
lens = JacobianLens.fit(bridge, texts, **settings)
lens.save(folder + "/theirs.pt", dtype=torch.float32)
ours = JacobianLens.load(folder + "/ours.pt")
said = {"tokens": [bridge.to_tokens(t)[0].tolist() for t in texts], "ours": ours.source_layers}
json.dump(said, open(folder + "/said.json", "w"))
"""


@pytest.mark.slow
def test_agreement_with_transformer_lens(tiny, word_tokenizer, tmp_path):
    pytest.importorskip("transformer_lens")
    model = copy.deepcopy(tiny("llama"))
    texts = [
        "the cat sat on the mat and the dog ran by the river .",
        "a man saw two birds in the old tree of the city .",
    ]
    model.save_pretrained(tmp_path)
    word_tokenizer.save_pretrained(tmp_path)
    (tmp_path / "texts.json").write_text(json.dumps(texts))
    jacobian_lens(model, TEXTS, skip_first=3).save(tmp_path / "ours.pt")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _WITH_TRANSFORMER_LENS, str(tmp_path)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    said = json.loads((tmp_path / "said.json").read_text())
    assert said["ours"] == [0, 1]  # they read our file
    lens = jacobian_lens(model, said["tokens"], skip_first=3)
    theirs = JacobianLens.load(tmp_path / "theirs.pt")
    assert theirs.depths == lens.depths
    assert theirs.texts == lens.texts == 2
    for depth in lens.depths:
        torch.testing.assert_close(theirs.jacobians[depth], lens.jacobians[depth], atol=1e-4, rtol=1e-3)


def test_what_would_be_noise_or_lost_is_refused(tiny, word_tokenizer, tmp_path):
    from microtome.capture.models import LoadedModel

    loaded = LoadedModel.from_module(tiny("gpt2"), word_tokenizer, name="tiny")
    lens = jacobian_lens(loaded, TEXTS, skip_first=3)
    assert lens.translator(1).facts["weight_sha256"] == loaded.provenance.weight_sha256
    with torch.inference_mode():
        assert torch.equal(jacobian_lens(loaded, TEXTS, skip_first=3).jacobians[1], lens.jacobians[1])
    with pytest.raises(ValueError, match=r"depth 1 does not fit into torch.float16"):
        JacobianLens({1: 1e6 * torch.eye(2)}, 1).save(tmp_path / "lens.pt")
    loaded.module.train()
    with pytest.raises(ValueError, match="in training mode"):
        jacobian_lens(loaded, TEXTS, skip_first=3)
    loaded.module.eval()
    with torch.no_grad():
        loaded.module.transformer.wte.weight[TEXTS[1][0]] = torch.nan
    with pytest.raises(ValueError, match="text 1 gives NaN or infinity"):
        jacobian_lens(loaded, TEXTS, skip_first=3)
