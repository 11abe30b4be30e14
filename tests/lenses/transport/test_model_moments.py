"""Moments across models: those of rows captured from each, sinks of either, resumed, refused."""

import random

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from microtome.capture.collect import capture
from microtome.capture.models import LoadedModel
from microtome.capture.untrained import untrained
from microtome.lenses.moments import Moments
from microtome.lenses.moments_files import load_moments, read_progress
from microtome.lenses.moments_pass import moments_of
from microtome.lenses.pair_moments import PairMoments
from microtome.lenses.strata import TokenRule
from microtome.lenses.transport.alignment import alignment
from microtome.lenses.transport.model_moments import moments_of_models

IDS = random.Random(0)
TEXTS = [[IDS.randrange(3, 120) for _ in range(IDS.randrange(2, 20))] for _ in range(24)]
DOCUMENTS = [number // 2 for number in range(24)]


@pytest.fixture(scope="module")
def models(tiny) -> dict[str, LoadedModel]:
    """A llama of three blocks, and one of two blocks and another width."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        small = LlamaForCausalLM(LlamaConfig(hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
                                             intermediate_size=24, vocab_size=120)).eval()  # fmt: skip
    return {
        "small": LoadedModel.from_module(small, name="small"),
        "large": LoadedModel.from_module(tiny("llama"), name="large"),
    }


@pytest.fixture
def made(models):
    """`made(**changes)`: the pass that most tests make."""

    def make(texts=TEXTS, sites="resid", **changes) -> Moments:
        given = {"documents": DOCUMENTS, "shards": {"fit": 0.5, "test": 0.5}, "progress": False, "chunk": 32}
        return moments_of_models(changes.pop("models", models), texts, sites, **(given | changes))

    return make


def assert_same(found: PairMoments, expected: PairMoments, tolerance: float = 1e-5) -> None:
    assert found.count == expected.count
    x, y = expected.xx.diagonal().sqrt(), expected.yy.diagonal().sqrt()
    for name, scale in (("xx", torch.outer(x, x)), ("xy", torch.outer(x, y)), ("yy", torch.outer(y, y))):
        assert float(((getattr(found, name) - getattr(expected, name)).abs() / scale).max()) <= tolerance, name
    torch.testing.assert_close(found.mean_x, expected.mean_x, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found.mean_y, expected.mean_y, rtol=1e-5, atol=1e-6)


def test_moments_are_those_of_rows_captured_from_each(models, made):
    moments = made(max_tokens=64)
    assert moments.sites == ("small/resid_pre.0", "small/resid_post.0", "small/resid_post.1", "large/resid_pre.0",
                             "large/resid_post.0", "large/resid_post.1", "large/resid_post.2")  # fmt: skip
    kept = {name: capture(model, TEXTS, ["resid_pre.0", "resid_post"], "all", progress=False)
            for name, model in models.items()}  # fmt: skip
    rows = kept["small"].rows
    shards = moments.split.numbers([DOCUMENTS[text] for text in rows["text"]])
    for x, y in (("small/resid_post.0", "large/resid_post.2"), ("large/resid_pre.0", "small/resid_post.1")):
        values = [kept[name.split("/")[0]][name.split("/")[1]] for name in (x, y)]
        for stratum, mask in (("rest", rows["position"] > 0), ("all", rows["position"] >= 0)):
            keep = torch.from_numpy((shards == 0) & mask.to_numpy())
            assert_same(moments.pair(x, y, "fit", stratum), PairMoments.from_rows(*(value[keep] for value in values)))
    with pytest.raises(KeyError, match="was not accumulated"):
        moments.pair("small/resid_pre.0", "small/resid_post.1")


def test_sites_of_each_model_and_pairs_within(models, made):
    moments = made(sites={"small": ["z.1", "mlp_out"], "large": "resid_post.2"}, pairs="all")
    assert moments.sites == ("small/z.1", "small/mlp_out.0", "small/mlp_out.1", "large/resid_post.2")
    given = {"documents": DOCUMENTS, "shards": {"fit": 0.5, "test": 0.5}, "progress": False}
    alone = moments_of(models["small"], TEXTS, ["z.1", "mlp_out"], **given)
    pair = moments.pair("small/z.1", "small/mlp_out.1", "test", "all")
    assert_same(pair, alone.pair("z.1", "mlp_out.1", "test", "all"))
    one = made(pairs=[("small/resid_pre.0", "large/resid_post.1")])
    assert ("small/resid_pre.0", "large/resid_post.1") in one.held_pairs()
    assert ("small/resid_pre.0", "large/resid_post.0") not in one.held_pairs()


def test_a_sink_of_one_model_is_a_sink_of_the_pair(tiny, models, made):
    heavy = tiny("llama", seed=1)
    with torch.no_grad():
        heavy.model.embed_tokens.weight[TEXTS[0][1]] *= 1e6
    expected = sum(text[1:].count(TEXTS[0][1]) for text in TEXTS)
    pair = {"small": models["small"], "heavy": LoadedModel.from_module(heavy, name="heavy")}
    for sites in ("resid", {"small": "resid", "heavy": "z.1"}):
        assert made(models=pair, sites=sites).counts()["massive"].sum() == expected > 0
    assert made(models=pair, rule=TokenRule(looked_at=("small/resid_pre.0",))).counts()["massive"].sum() == 0
    assert made().counts()["massive"].sum() == 0


def test_a_model_aligned_with_itself_and_with_its_untrained_twin(models, made):
    same = {"a": models["large"], "b": models["large"]}
    found = alignment(made(models=same, shuffled=True), "a", "b", shards=("fit", None, "test"))
    assert found.matrix("cka").to_numpy().diagonal() == pytest.approx(1, abs=1e-5)
    assert found.matrix("procrustes").to_numpy().diagonal() == pytest.approx(1, abs=1e-5)
    assert found.matrix("canonical").to_numpy().diagonal() == pytest.approx(1, abs=1e-4)
    fresh = made(models={"a": models["large"], "b": untrained(models["large"], seed=1)})
    assert fresh.count("fit") == made(models=same).count("fit")


def test_saved_and_gone_on(made, tmp_path, monkeypatch):
    updates, update = [], Moments.update

    def counted(self, *given, **named):
        if len(updates) == 3:
            raise KeyboardInterrupt
        updates.append(1)
        update(self, *given, **named)

    monkeypatch.setattr(Moments, "update", counted)
    with pytest.raises(KeyboardInterrupt):
        made(save=tmp_path, checkpoint_minutes=0, max_tokens=64)
    assert read_progress(tmp_path)["next_batch"] == 3
    monkeypatch.setattr(Moments, "update", update)
    gone_on, whole = made(save=tmp_path, max_tokens=64), made(max_tokens=64)
    pair = ("small/resid_post.0", "large/resid_post.2", "fit", "all")
    assert torch.equal(gone_on.pair(*pair).xy, whole.pair(*pair).xy)
    assert torch.equal(load_moments(tmp_path).pair(*pair).xy, whole.pair(*pair).xy)
    facts = load_moments(tmp_path).provenance
    assert {name: facts["loaded"][name]["name"] for name in facts["loaded"]} == {"small": "small", "large": "large"}


def test_another_pair_is_refused(tiny, models, made, tmp_path):
    made(save=tmp_path)
    other = models | {"large": LoadedModel.from_module(tiny("llama", seed=1), name="large")}
    with pytest.raises(ValueError, match=r"holds moments of another request .*model: "):
        made(save=tmp_path, models=other)
    with pytest.raises(ValueError, match=r"holds moments of another request .*pairs: "):
        made(save=tmp_path, pairs="all")


def test_tokens_have_to_agree(tiny, word_tokenizer):
    words = word_tokenizer.get_vocab()
    order = sorted(words, key=words.get)
    swapped = Tokenizer(WordLevel({word: i for i, word in enumerate([*order[:4], *order[:3:-1]])}, unk_token="<unk>"))
    swapped.pre_tokenizer = Whitespace()
    another = PreTrainedTokenizerFast(tokenizer_object=swapped, pad_token="<pad>", bos_token="<s>", eos_token="</s>",
                                      unk_token="<unk>")  # fmt: skip
    one = LoadedModel.from_module(tiny("llama"), word_tokenizer, name="one")
    two = LoadedModel.from_module(tiny("llama"), another, name="two")
    models = {"one": one, "two": two}
    said = r"text 1 is 3 tokens for 'one' and 3 for 'two', or other ones: .*on='word_end'"
    with pytest.raises(ValueError, match=said):
        moments_of_models(models, ["zzz zzz", "the cat sat"], shards={"all": 1}, progress=False)
    with pytest.raises(ValueError, match=said):  # the same ids that mean other words
        moments_of_models(models, [[3, 3], [5, 6, 7]], shards={"all": 1}, progress=False)
    bare = {"one": one, "two": LoadedModel.from_module(tiny("llama"), name="two")}
    assert moments_of_models(bare, [[3, 3], [5, 6, 7]], shards={"all": 1}, progress=False).count("all", "all") == 5


def test_errors(models, made):
    with pytest.raises(ValueError, match="models has 1 of them"):
        made(models={"small": models["small"]})
    with pytest.raises(ValueError, match="a model is called 'a/b'"):
        made(models={"a/b": models["small"], "c": models["large"]})
    with pytest.raises(KeyError, match=r"sites are given for \['small'\]"):
        made(sites={"small": "resid"})
    with pytest.raises(IndexError, match="layer 2 is out of range"):
        made(sites=["resid_post.2"])
    with pytest.raises(ValueError, match="23 documents for 24 texts"):
        made(documents=DOCUMENTS[:-1])
