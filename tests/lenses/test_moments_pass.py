"""Moments of a model's texts: those of a capture, on every family; saved, resumed, refused."""

import json
import random

import numpy as np
import pytest
import torch

from microtome.capture.activations import Activations
from microtome.capture.collect import capture
from microtome.capture.models import LoadedModel
from microtome.capture.untrained import untrained
from microtome.lenses import moments_estimate
from microtome.lenses.moments import Moments
from microtome.lenses.moments_files import load_moments, read_progress, save_moments
from microtome.lenses.moments_pass import expand_sites, moments_of, moments_of_activations
from microtome.lenses.pair_moments import PairMoments
from microtome.lenses.strata import TokenRule

IDS = random.Random(0)
TEXTS = [[IDS.randrange(3, 120) for _ in range(IDS.randrange(2, 20))] for _ in range(24)]
DOCUMENTS = [number // 2 for number in range(24)]
FAMILIES = ["llama", "gpt2", "neox", "neox_sequential", "gemma2", "qwen3"]


@pytest.fixture(scope="module")
def model(tiny) -> LoadedModel:
    return LoadedModel.from_module(tiny("llama"), name="llama")


@pytest.fixture
def made(model):
    """`made(**changes)`: the pass that most tests make."""

    def make(texts=TEXTS, sites="resid", **changes) -> Moments:
        given = {"documents": DOCUMENTS, "shards": {"fit": 0.5, "test": 0.5}, "progress": False, "chunk": 32}
        return moments_of(changes.pop("model", model), texts, sites, **(given | changes))

    return make


def assert_same(found: PairMoments, expected: PairMoments, tolerance: float) -> None:
    assert found.count == expected.count
    x, y = expected.xx.diagonal().sqrt(), expected.yy.diagonal().sqrt()
    for name, scale in (("xx", torch.outer(x, x)), ("xy", torch.outer(x, y)), ("yy", torch.outer(y, y))):
        assert float(((getattr(found, name) - getattr(expected, name)).abs() / scale).max()) <= tolerance, name
    torch.testing.assert_close(found.mean_x, expected.mean_x, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("family", FAMILIES)
def test_moments_are_those_of_captured_rows(tiny, made, family):
    model = LoadedModel.from_module(tiny(family), name=family)
    sites = ["resid", "attn_out.1", "mlp_out.1", "z.1", "z.2.3", "mlp_act.0", "final_norm"]
    moments = made(model=model, sites=sites, max_tokens=64)
    assert moments.sites[:4] == ("resid_pre.0", "resid_post.0", "resid_post.1", "resid_post.2")
    kept = capture(model, TEXTS, list(moments.sites), "all", progress=False)
    owners = [DOCUMENTS[text] for text in kept.rows["text"]]
    shards, position = moments.split.numbers(owners), kept.rows["position"].to_numpy()
    for x, y in (("resid_pre.0", "resid_post.2"), ("z.1", "attn_out.1"), ("mlp_act.0", "z.2.3"), ("final_norm", "z.1")):
        for stratum, mask in (("rest", position > 0), ("all", position >= 0)):
            keep = torch.from_numpy((shards == 0) & mask)
            rows = (kept[name].flatten(1)[keep] for name in (x, y))
            assert_same(moments.pair(x, y, "fit", stratum), PairMoments.from_rows(*rows), 1e-5)


def test_batches_change_rounding_only(made):
    one, other = made(max_tokens=40), made(max_tokens=2048)
    assert one.counts().equals(other.counts())
    pair = ("resid_pre.0", "resid_post.2", "fit", "all")
    assert_same(one.pair(*pair), other.pair(*pair), 1e-5)


def test_special_tokens_are_set_apart(tiny, word_tokenizer):
    model = LoadedModel.from_module(tiny("llama"), word_tokenizer, name="words")
    moments = moments_of(model, [[1, 5, 6, 2, 7], [8, 9, 1, 5]], shards={"all": 1}, progress=False)
    assert moments.counts().loc[0].tolist() == ["all", 5, 2, 2, 0]


def test_a_massive_token_is_found_at_sites_that_are_not_asked_for(model, made):
    low = TokenRule(above=0.0, times=5.0)
    one, other = made(sites="resid", rule=low), made(sites=["z.1", "resid_pre.0"], rule=low)
    assert 0 < one.counts()["massive"].sum() < one.counts()["rest"].sum()
    assert one.counts().equals(other.counts())


def test_shards_by_text_and_folds(made):
    named = ["a" if document % 3 else "b" for document in DOCUMENTS]
    moments = made(shards=named)
    lengths = np.array([len(text) for text in TEXTS])
    assert moments.count("b", "all") == lengths[[name == "b" for name in named]].sum()
    folds = made(shards=3)
    assert folds.count(folds.training("fold1"), "all") == lengths.sum() - folds.count("fold1", "all")


def test_an_untrained_model_is_a_control(model, made):
    trained, control = made(), made(model=untrained(model, seed=1))
    assert control.count("fit") == trained.count("fit")
    assert not torch.allclose(
        control.pair("resid_pre.0", "resid_post.2").xy, trained.pair("resid_pre.0", "resid_post.2").xy
    )
    with pytest.raises(ValueError, match="model: "):
        trained.merge(control)


def test_processes_that_share_the_documents_merge_to_one_pass(made):
    whole = made()
    parts = [
        made(texts=[TEXTS[i] for i in chosen], documents=[DOCUMENTS[i] for i in chosen])
        for chosen in (range(10), range(10, 24))
    ]
    parts[0].merge(parts[1])
    assert parts[0].counts().equals(whole.counts())
    for shard in whole.shards:
        pair = ("resid_pre.0", "resid_post.2", shard, "all")
        assert_same(parts[0].pair(*pair), whole.pair(*pair), 1e-5)


def test_captured_activations_give_the_same(model, made, tmp_path):
    expected = made()
    sites = list(expected.sites)
    kept = capture(model, TEXTS, sites, "all", progress=False)
    store = capture(model, TEXTS, sites, "all", store=tmp_path / "store", shard_tokens=60, progress=False)
    given = {"documents": DOCUMENTS, "shards": {"fit": 0.5, "test": 0.5}, "progress": False}
    for activations in (kept, store):
        moments = moments_of_activations(activations, **given)
        pair = ("resid_post.0", "resid_post.2", "test", "all")
        assert_same(moments.pair(*pair), expected.pair(*pair), 1e-5)
    marked = moments_of_activations(kept, **given, special_tokens=[str(kept.rows["token"][1])])
    assert marked.counts()["special"].sum() >= 1
    with pytest.raises(ValueError, match=r"text 23 has no document; 3 were given"):
        moments_of_activations(kept, **given | {"documents": [0, 1, 2]})
    means = Activations.from_arrays({"resid_post.0": np.ones((3, 4))})
    with pytest.raises(ValueError, match="means over positions"):
        moments_of_activations(means, progress=False)


def test_saved_moments_come_back_to_the_bit(made, tmp_path):
    moments = made(save=tmp_path / "m", shuffled=True, sites=["resid", "z.1"], pairs=2)
    back = load_moments(tmp_path / "m", verify=True)
    assert back.settings() == moments.settings()
    assert back.counts().equals(moments.counts())
    for stratum in ("rest", "sinks", "all"):
        for is_shuffled in (False, True):
            one, other = (m.pair("resid_post.2", "z.1", "test", stratum, shuffled=is_shuffled) for m in (moments, back))
            assert torch.equal(one.xy, other.xy)
            assert torch.equal(one.xx, other.xx)
    facts = json.loads((tmp_path / "m" / "moments.json").read_text())
    assert facts["provenance"]["texts"]["token_ids_sha256"]
    assert facts["provenance"]["loaded"]["name"] == "llama"
    assert facts["provenance"]["environments"][0]["torch"] == torch.__version__
    back.merge(Moments(dict(zip(moments.sites, moments.pairs.widths, strict=True)), 2, shards=moments.split,
                       rule=moments.rule, shuffled=True, chunk=32, provenance=moments.provenance))  # fmt: skip


def test_a_finished_pass_is_read_and_a_stopped_one_goes_on(made, tmp_path, monkeypatch):
    updates = []
    update = Moments.update

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
    pair = ("resid_pre.0", "resid_post.2", "fit", "all")
    assert torch.equal(gone_on.pair(*pair).xy, whole.pair(*pair).xy)
    monkeypatch.setattr(Moments, "update", None)  # nothing is run any more
    assert torch.equal(made(save=tmp_path, max_tokens=64).pair(*pair).xy, whole.pair(*pair).xy)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"texts": [*TEXTS[:-1], [5, 6]]}, "texts: "),
        ({"documents": list(range(24))}, "documents: "),
        ({"sites": ["resid_post"]}, "pairs: "),
        ({"pairs": 1}, "pairs: "),
        ({"seed": 2}, "split: "),
        ({"rule": TokenRule(above=7.0)}, "rule: "),
        ({"shuffled": True}, "shuffled: false there, true now"),
        ({"chunk": 33}, "chunk: 32 there, 33 now"),
        ({"max_tokens": 50}, "max_tokens: 2048 there, 50 now"),
    ],
)
def test_another_request_is_refused_by_name(made, tmp_path, changes, said):
    made(save=tmp_path)
    with pytest.raises(ValueError, match=f"holds moments of another request .*{said}"):
        made(save=tmp_path, **changes)


def test_another_model_is_refused(tiny, made, tmp_path):
    made(save=tmp_path)
    with pytest.raises(ValueError, match=r"holds moments of another request .*model: "):
        made(save=tmp_path, model=LoadedModel.from_module(tiny("llama", seed=1), name="llama"))


def test_damaged_and_missing_files(made, tmp_path):
    with pytest.raises(FileNotFoundError, match="holds no moments"):
        load_moments(tmp_path)
    save_moments(made(), tmp_path)
    file = next(tmp_path.glob("moments-*.safetensors"))
    whole = file.read_bytes()
    file.write_bytes(whole[:-9] + b"\x01" + whole[-8:])
    with pytest.raises(ValueError, match="is damaged: its bytes are not those"):
        load_moments(tmp_path, verify=True)
    file.write_bytes(whole[:-8])
    with pytest.raises(ValueError, match="is damaged"):
        load_moments(tmp_path)
    file.unlink()
    with pytest.raises(ValueError, match="is missing"):
        load_moments(tmp_path)
    (tmp_path / "moments.json").write_text("{}")
    with pytest.raises(ValueError, match="is not in the format"):
        load_moments(tmp_path)
    (tmp_path / "moments.json").write_text("{")
    with pytest.raises(ValueError, match="is damaged"):
        load_moments(tmp_path)


def test_errors_before_anything_runs(model, made, monkeypatch, capsys):
    with pytest.raises(ValueError, match="23 documents for 24 texts"):
        made(documents=DOCUMENTS[:-1])
    with pytest.raises(KeyError, match="document 11 is in no shard"):
        made(shards=dict.fromkeys(range(11), "fit"))
    with pytest.raises(ValueError, match="has texts in"):
        made(shards=["a", "b"] * 12)
    with pytest.raises(IndexError, match="layer 9 is out of range"):
        made(sites="resid_post.9")
    with pytest.raises(KeyError, match=r"resid_post.9 is not among"):
        made(pairs=[("resid_post.9", "resid_post.0")])
    with pytest.raises(ValueError, match="no row per token"):
        made(sites=["pattern.0.1"])
    monkeypatch.setattr(moments_estimate, "free_memory", lambda: 250_000)
    with pytest.raises(ValueError, match=r"10 pairs of sites in 2 shards take .*pairs=1 .* would fit"):
        made()
    monkeypatch.undo()
    made(progress=True)
    assert "moments: 10 pairs of sites in 2 shards" in capsys.readouterr().err
    assert [str(site) for site in expand_sites(_anatomy(model), ("resid_post", 1))] == ["resid_post.1"]


def test_a_value_that_is_not_finite_names_site_and_text(tiny):
    module = tiny("llama")
    with torch.no_grad():
        module.model.embed_tokens.weight[7] = float("nan")
    texts = [[5, 6], [8, 9, 7, 4]]
    with pytest.raises(ValueError, match=r"resid_pre.0 is NaN, infinite or past 1e\+15 at text 1, position 2"):
        moments_of(module, texts, progress=False)


def _anatomy(model):
    from microtome.capture.dissect import dissect

    return dissect(model.module)
