import pytest
import torch

from microtome.capture.models import LoadedModel
from microtome.lenses.lens import logit_lens_of
from microtome.lenses.lens_table import lens_table
from microtome.lenses.tuned_lens import zero_tuned_lens
from microtome.lenses.unembedding import unembedding_of

TEXT = "the cat sat on the old house"


@pytest.fixture(scope="module")
def loaded(tiny, word_tokenizer):
    return LoadedModel.from_module(tiny("gemma2"), word_tokenizer, name="tiny")


def test_the_top_row_is_the_model(loaded):
    found = lens_table(loaded, TEXT)
    ids = loaded.tokenizer(TEXT)["input_ids"]
    with torch.no_grad():
        probs = loaded.module(torch.tensor([ids])).logits[0].softmax(-1)
    last = found.table[found.table["depth"] == 3].reset_index(drop=True)
    assert last["token"].tolist() == TEXT.split()
    assert last["word"].tolist() == [loaded.tokenizer.decode([n]) for n in probs.argmax(-1).tolist()]
    assert last["prob"].tolist() == pytest.approx(probs.amax(-1).tolist(), rel=1e-4)
    assert (last["rank"] == 0).all()
    assert last["word"].tolist() == last["final_word"].tolist()
    assert last["next_word"].tolist() == [*TEXT.split()[1:], ""]
    assert last["next_rank"].iloc[-1] == -1
    assert [len(words) for words in last["words"]] == [5] * 7


def test_ranks_are_those_of_the_final_word(loaded):
    found = lens_table(loaded, TEXT).at(-1)
    assert found["depth"].tolist() == [0, 1, 2, 3]
    final = loaded.tokenizer.convert_tokens_to_ids(found["final_word"].iloc[0])
    lens = logit_lens_of(loaded)
    from microtome.capture import taps

    with taps(loaded.module, [str(site) for site in lens.sites]) as tape, torch.no_grad():
        loaded.module(**loaded.tokenizer(TEXT, return_tensors="pt"))
    for depth, site in enumerate(lens.sites):
        scores = unembedding_of(loaded).logits(tape[site][0, -1])
        assert found["rank"].iloc[depth] == int((scores > scores[final]).sum())


def test_several_lenses_lie_under_one_another(loaded):
    found = lens_table(loaded, TEXT, [logit_lens_of(loaded), zero_tuned_lens(loaded).lens(loaded)])
    assert found.table.groupby("lens").size().tolist() == [28, 28]
    assert found.at(2, lens="tuned")["word"].tolist() == found.at(2, lens="logit")["word"].tolist()
    assert len(found.plot("tuned").data[0].z) == 4
    with pytest.raises(KeyError, match="no lens 'mine'"):
        found.plot("mine")
    with pytest.raises(IndexError, match="7 tokens"):
        found.at(7)


def test_one_text_only(loaded):
    with pytest.raises(ValueError, match="one text"):
        lens_table(loaded, [TEXT, TEXT])
    assert len(lens_table(loaded.module, [5, 6, 7]).table) == 12


def test_answers_are_followed_whatever_the_model_says(loaded):
    found = lens_table(loaded, TEXT, answers=["dog", 3]).table
    three = loaded.tokenizer.decode([3])
    dog = loaded.tokenizer.convert_tokens_to_ids("dog")
    ids = loaded.tokenizer(TEXT)["input_ids"]
    with torch.no_grad():
        probs = loaded.module(torch.tensor([ids])).logits[0].softmax(-1)
    last = found[found["depth"] == 3]
    for name, number in (("dog", dog), (three, 3)):
        assert last[f"prob of {name}"].tolist() == pytest.approx(probs[:, number].tolist(), rel=1e-4)
        wanted = (probs > probs[:, number, None]).sum(-1).tolist()
        assert last[f"rank of {name}"].tolist() == wanted
    with pytest.raises(ValueError, match="answers=99999"):
        lens_table(loaded, TEXT, answers=[99999])
    with pytest.raises(ValueError, match=r"'logit' is no lens. Give logit_lens_of\(model\)"):
        lens_table.__wrapped__(loaded, TEXT, ["logit"])
