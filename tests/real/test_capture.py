"""The bundled pretrained models: every identity holds, and a text gives the same activations alone or in a batch."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from microtome.capture import LoadedModel, Read, capture, dissect, taps

pytestmark = pytest.mark.slow

TEXTS = [
    "The film was a quiet triumph, and I would see it again tomorrow.",
    "Two hours I will never get back.",
    "No.",
    "It arrived on time; the box was dented, the lamp itself was fine, and the colour is nicer than in the picture.",
]
SITES = [
    "embed",
    "resid_pre",
    "resid_mid",
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
]


@pytest.mark.parametrize(("name", "layers", "heads", "key_heads"), [("smollm2", 30, 9, 3), ("minilm", 6, 12, 12)])
def test_every_identity_holds(request, name: str, layers: int, heads: int, key_heads: int) -> None:
    anatomy = dissect(request.getfixturevalue(name))
    assert [i for i in anatomy.proof if not i.holds] == []
    assert anatomy.layers == layers
    assert anatomy.tap("z.0").head_count == heads
    assert anatomy.tap("k.0").head_count == key_heads
    assert anatomy.padding is not None


@pytest.mark.parametrize("name", ["smollm2", "minilm"])
def test_alone_and_in_a_batch_are_the_same_at_every_position_and_site(request, name: str) -> None:
    model = request.getfixturevalue(name)
    together = capture(model, TEXTS, SITES, "all", progress=False)
    alone = [capture(model, [text], SITES, "all", progress=False) for text in TEXTS]
    for site in together.sites:
        one, many = torch.cat([a[site] for a in alone]).flatten(1), together[site].flatten(1)
        # keys are compared in the norm of the whole site: rotated or not, their biases make every row large
        assert float(((one - many).norm(dim=1) / one.norm(dim=1)).max()) < 1e-5, site


def test_heads_sum_to_what_attention_adds(smollm2: LoadedModel) -> None:
    kept = capture(smollm2, TEXTS, ["head_out.7", "attn_out.7"], "last", progress=False)
    error = (kept["head_out.7"].sum(1) - kept["attn_out.7"]).norm(dim=1) / kept["attn_out.7"].norm(dim=1)
    assert float(error.max()) < 1e-5


def test_pattern_rows_are_those_of_a_separate_eager_run(smollm2: LoadedModel, tmp_path) -> None:
    batch = smollm2.tokenizer(TEXTS, return_tensors="pt", padding=True, padding_side="right")
    with torch.no_grad(), taps(smollm2, [Read("pattern", queries=[0, 3, 5])]) as tape:
        smollm2.module(**batch)
    config = smollm2.module.config.__class__.from_dict(smollm2.module.config.to_dict())
    eager = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    eager.load_state_dict(smollm2.module.state_dict())
    with torch.no_grad():
        patterns = eager(**batch, output_attentions=True).attentions
    real = batch["attention_mask"].bool()
    for layer in range(30):
        rows = tape["pattern", layer]
        for i, query in enumerate([0, 3, 5]):
            wanted = real[:, query]
            assert torch.allclose(rows[wanted][:, :, i], patterns[layer][wanted][:, :, query], atol=1e-5), layer


def test_an_edit_moves_what_comes_after_it_in_generation(smollm2: LoadedModel) -> None:
    ids = smollm2.tokenizer("The capital of France is", return_tensors="pt")
    with torch.no_grad():
        plain = smollm2.module.generate(**ids, max_new_tokens=4, do_sample=False)
        with taps(smollm2, reads=["resid_post.20"], edits={"z.10": lambda z: torch.zeros_like(z)}) as tape:
            same = smollm2.module.generate(**ids, max_new_tokens=4, do_sample=False)
        with taps(smollm2, edits={"resid_post.5": lambda x: -x}):
            other = smollm2.module.generate(**ids, max_new_tokens=4, do_sample=False)
        after = smollm2.module.generate(**ids, max_new_tokens=4, do_sample=False)
    assert torch.equal(plain, same)
    assert len(tape.all("resid_post.20")) == 4
    assert not torch.equal(plain, other)
    assert torch.equal(plain, after)
    assert "Paris" in smollm2.tokenizer.decode(plain[0])
