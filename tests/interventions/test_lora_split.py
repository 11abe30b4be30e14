"""An update read as classifier and writer: as an edit it is the merged model, of PEFT's own and of any rank."""

import copy
import warnings

import numpy as np
import pytest
import torch
from sklearn.metrics import roc_auc_score
from steering_steps import BAD, GOOD, noise

from microtome.capture import LoadedModel, capture
from microtome.interventions.lora_split import LoraSplit

TEXTS = [*GOOD, *BAD]


def logits(model, steering=None) -> torch.Tensor:
    edits = None if steering is None else steering.edits(model)
    return capture(model, TEXTS, ["logits"], "all", edits=edits, progress=False)["logits"]


@pytest.mark.parametrize("rank", [1, 3])
def test_the_split_is_the_update(rank) -> None:
    down, up = noise(rank, 20), noise(12, rank, seed=1)
    split = LoraSplit.of(down, up, 0.5)
    torch.testing.assert_close(split.write.T @ split.read, 0.5 * up @ down, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(split.read @ split.read.T, torch.eye(rank), rtol=1e-4, atol=1e-5)
    sizes = split.write.norm(dim=1)
    assert (sizes[:-1] >= sizes[1:]).all()
    x = noise(30, 20, seed=2)
    torch.testing.assert_close(split.scores(x), x @ split.read[0])
    labels = (x @ split.read[0] + noise(30, seed=3) > 0).numpy()
    assert split.auroc(x, labels) == pytest.approx(roc_auc_score(labels, x @ split.read[0]))
    assert torch.equal(split.vector(2.0).vector, 2 * split.write[0])


@pytest.mark.parametrize(
    ("kind", "path", "read", "write"),
    [
        ("llama", "model.layers.1.mlp.down_proj", "mlp_act.1", "mlp_out.1"),
        ("llama", "model.layers.1.self_attn.o_proj", "z.1", "attn_out.1"),
    ],
)
@pytest.mark.parametrize("rank", [1, 2])
def test_as_an_edit_it_is_the_merged_model(loaded, kind, path, read, write, rank) -> None:
    model = loaded(kind)
    module = copy.deepcopy(model.module)
    layer = module.get_submodule(path)
    down, up = 0.3 * noise(rank, layer.in_features), 0.3 * noise(layer.out_features, rank, seed=1)
    with torch.no_grad():
        layer.weight += 2.0 * up @ down
    merged = LoadedModel.from_module(module, model.tokenizer, name="merged")
    edit = LoraSplit.of(down, up, 2.0).edit(read, write)
    torch.testing.assert_close(logits(model, edit), logits(merged), rtol=1e-4, atol=1e-4)
    assert (logits(merged) - logits(model)).abs().max() > 1e-3


def test_an_update_of_peft(loaded) -> None:
    peft = pytest.importorskip("peft")
    model = loaded("llama")
    settings = peft.LoraConfig(r=1, lora_alpha=4, target_modules=["down_proj"], layers_to_transform=[1])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of transformers, for a name that PEFT still uses
        with_update = peft.get_peft_model(copy.deepcopy(model.module), settings).eval()
    layer = with_update.base_model.model.model.layers[1].mlp.down_proj
    with torch.no_grad():
        layer.lora_B["default"].weight.copy_(noise(32, 1))
    split = LoraSplit.of(layer.lora_A["default"].weight, layer.lora_B["default"].weight, layer.scaling["default"])
    ids = torch.tensor([model.tokenizer(GOOD[0])["input_ids"]])
    with torch.no_grad():
        theirs = with_update(input_ids=ids).logits[0]
    ours = capture(
        model, [GOOD[0]], ["logits"], "all", edits=split.edit("mlp_act.1", "mlp_out.1").edits(model), progress=False
    )["logits"]
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_what_is_no_update_is_refused(llama) -> None:
    with pytest.raises(ValueError, match="two updates"):
        LoraSplit.of(noise(2, 8), noise(8, 3))
    with pytest.raises(ValueError, match="zero"):
        LoraSplit.of(noise(1, 8), torch.zeros(8, 1))
    wrong = LoraSplit.of(noise(1, 32), noise(32, 1)).edit("mlp_out.2", "resid_post.0")
    with pytest.raises(ValueError, match="before the input"):
        capture(llama, TEXTS, ["logits"], "last", edits=wrong.edits(llama), progress=False)
    assert np.isfinite(logits(llama).numpy()).all()
