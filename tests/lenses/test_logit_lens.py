import numpy as np
import pytest
import torch

from microtome.capture import taps
from microtome.capture.models import LoadedModel
from microtome.lenses.lens import depths_of, logit_lens_of
from microtome.lenses.lens_statistics import join_statistics, lens_statistics
from microtome.lenses.logit_lens import logit_lens
from microtome.lenses.unembedding import unembedding_of

DECODERS = ["llama", "gpt2", "neox", "neox_sequential", "gemma2", "qwen3"]
TEXTS = [[5, 6, 7, 8, 9, 10, 11], [20, 21, 22, 23], [40, 41, 42, 43, 44, 45, 46, 47, 48], [9, 8, 7, 6, 5]]


def dense(model, text, site):
    """log-probabilities of the lens at a site, and of the model, from dense logits."""
    with taps(model, [site]) as tape, torch.no_grad():
        logits = model(torch.tensor([text])).logits[0]
        lens = unembedding_of(model).logits(tape[site][0])
    return lens.log_softmax(-1), logits.log_softmax(-1)


@pytest.mark.parametrize("kind", DECODERS)
def test_the_last_depth_is_the_model(kind, tiny):
    model = tiny(kind)
    found = logit_lens(model, TEXTS)
    assert found.sites[0] == "resid_pre.0"
    assert len(found.sites) == 4
    assert found.depth.tolist() == [0, 1, 2, 3]
    assert np.abs(found.kl[-1]).max() < 1e-6
    assert found.agrees[-1].all()
    for number, text in enumerate(TEXTS):
        with torch.no_grad():
            expected = model(torch.tensor([text])).logits[0].log_softmax(-1)
        rows = found.text == number
        probs, ids = expected.exp().topk(5)
        np.testing.assert_allclose(found.top_probs[-1, rows], probs.numpy(), rtol=1e-4)
        assert (found.top_ids[-1, rows, 0] == ids[:, 0].numpy()).all()
    assert found.kl[0].mean() > 0.01


@pytest.mark.parametrize("kind", ["gemma2", "gpt2"])
def test_every_number_agrees_with_dense_softmax(kind, tiny):
    model, text = tiny(kind), TEXTS[2]
    found = logit_lens(
        model, [text], ["resid_mid.1", "resid_post.1"], named={"seven": 7}, previous=True, final_rank=True
    )
    last = None
    for depth, site in enumerate(("resid_mid.1", "resid_post.1")):
        q, p = dense(model, text, site)
        target = torch.tensor(text[1:])
        np.testing.assert_allclose(found.kl[depth], (p.exp() * (p - q)).sum(-1), atol=1e-5)
        np.testing.assert_allclose(found.kl_reverse[depth], (q.exp() * (q - p)).sum(-1), atol=1e-5)
        np.testing.assert_allclose(found.entropy[depth], -(q.exp() * q).sum(-1), rtol=1e-5)
        own = q[:-1].gather(1, target[:, None])
        np.testing.assert_allclose(found.cross_entropy[depth, :-1], -own[:, 0], rtol=1e-5)
        assert found.target_rank[depth, :-1].tolist() == (q[:-1] > own).sum(1).tolist()
        assert found.target_rank[depth, -1] == -1
        assert np.isnan(found.cross_entropy[depth, -1])
        np.testing.assert_allclose(found.named_prob[depth, :, 0], q[:, 7].exp(), rtol=1e-4)
        assert found.named_rank[depth, :, 0].tolist() == (q > q[:, 7:8]).sum(1).tolist()
        first = p.argmax(-1, keepdim=True)
        assert found.final_rank[depth].tolist() == (q > q.gather(1, first)).sum(1).tolist()
        if last is not None:
            np.testing.assert_allclose(found.kl_previous[depth], (q.exp() * (q - last)).sum(-1), atol=1e-5)
        last = q
    assert np.isnan(found.kl_previous[0]).all()


@pytest.mark.parametrize("kind", DECODERS)
def test_writes_of_heads_sum_to_what_attention_adds(kind, tiny):
    model = tiny(kind)
    lens = logit_lens_of(model, "head_out.1")
    assert len(lens.sites) == 4
    heads = lens.heads[lens.sites[0].whole]
    with taps(model, [*map(str, heads.reads), "resid_pre.1", "mlp_out.1", "resid_post.1"]) as tape, torch.no_grad():
        model(torch.tensor([TEXTS[2]]))
    values = {site: tape[site][0] for site in heads.reads}
    total = heads(values).sum(1)
    added = tape["resid_post.1"][0] - tape["resid_pre.1"][0] - tape["mlp_out.1"][0]
    if heads.bias is not None:
        total = total + heads.bias
    torch.testing.assert_close(total, added, rtol=1e-3, atol=1e-4)
    found = logit_lens(model, TEXTS, ["head_out.1.2", "attn_out", "mlp_out.0"])
    assert np.isfinite(found.kl).all()
    assert found.sites[0] == "head_out.1.2"


@pytest.mark.parametrize("kind", DECODERS)
def test_a_write_under_the_gain_is_its_share_of_the_logits(kind, tiny):
    model = tiny(kind)
    site = "mlp_out.2"
    lens = logit_lens_of(model, site, norm="gain")
    with taps(model, [site, "resid_post.2"]) as tape, torch.no_grad():
        model(torch.tensor([TEXTS[0]]))
    write, stream = tape[site][0], tape["resid_post.2"][0]
    end = unembedding_of(model)
    share = lens.states({lens.sites[0]: write})[0] + lens.gain.folded(stream - write)
    scale = lens.gain.scale(stream)[..., None]
    torch.testing.assert_close((share / scale + lens.gain.shift).float(), end.normed(stream), rtol=1e-3, atol=1e-3)
    found = logit_lens(model, TEXTS, [site], norm="gain")
    assert np.isnan(found.kl).all()
    assert np.isfinite(found.entropy).all()


def test_batches_and_joins_do_not_matter(tiny):
    model = tiny("llama")
    whole = logit_lens(model, TEXTS)
    small = logit_lens(model, TEXTS, max_tokens=9, tokens_at_once=2)
    joined = join_statistics([logit_lens(model, TEXTS[:2]), logit_lens(model, TEXTS[2:])])
    for other in (small, joined):
        assert other.text.tolist() == whole.text.tolist()
        assert other.position.tolist() == whole.position.tolist()
        np.testing.assert_allclose(other.kl, whole.kl, atol=1e-5)
    with pytest.raises(ValueError, match="do not join"):
        join_statistics([whole, logit_lens(model, TEXTS, "resid_mid")])


def test_the_curve_is_a_mean_over_tokens_with_an_interval_over_documents(tiny):
    found = logit_lens(tiny("gpt2"), TEXTS, documents=[0, 0, 1, 2])
    curve = found.curve()
    rows = ~found.is_sink
    assert (found.is_sink == (found.position == 0)).all()
    assert curve["kl"].tolist() == pytest.approx(found.kl[:, rows].mean(1).tolist())
    assert curve["cross_entropy"].iloc[0] == pytest.approx(np.nanmean(found.cross_entropy[0, rows]))
    assert (curve["documents"] == 3).all()
    assert (curve["kl_low"] <= curve["kl"] + 1e-9).all()
    assert (curve["kl_high"] >= curve["kl"] - 1e-9).all()
    # a document is drawn whole: the widest draw of document 1 alone is its own mean
    own = found.kl[0, rows & (found.document == 1)].mean()
    assert curve["kl_low"].iloc[0] <= own <= curve["kl_high"].iloc[0]
    assert found.curve(sinks="with")["tokens"].iloc[0] == 25
    assert found.curve(sinks="alone")["tokens"].iloc[0] == 4
    assert found.curve(seed=1).equals(found.curve(seed=1))
    frame = found.to_frame()
    assert len(frame) == 4 * 25
    assert frame["depth"].iloc[:4].tolist() == [0, 1, 2, 3]


def test_the_depth_of_settling_is_where_the_first_token_stays(tiny):
    found = logit_lens(tiny("llama"), TEXTS)
    for row, depth in enumerate(found.settled["depth"]):
        agrees = found.agrees[:, row]
        assert agrees[depth:].all()
        assert depth == 0 or not agrees[depth - 1]


def test_what_cannot_be_read_is_refused(tiny):
    model = tiny("llama")
    with pytest.raises(ValueError, match="neither a stream"):
        logit_lens_of(model, "z.1")
    with pytest.raises(ValueError, match="whole stream"):
        logit_lens_of(model, "resid_post", norm="gain")
    with pytest.raises(ValueError, match="'own' or 'gain'"):
        logit_lens_of(model, norm="both")
    with pytest.raises(ValueError, match="each with a name"):
        lens_statistics(model, TEXTS, [logit_lens_of(model), logit_lens_of(model)])
    with pytest.raises(ValueError, match="top is 1"):
        logit_lens(model, TEXTS, top=1)
    with pytest.raises(ValueError, match="not among the 120"):
        logit_lens(model, TEXTS, named={"x": 120})
    with pytest.raises(ValueError, match="Give the document of every text"):
        logit_lens(model, TEXTS, documents=[0])
    with pytest.raises(ValueError, match="no unembedding"):
        logit_lens_of(tiny("bert"))
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[0, 0] = torch.nan
    with pytest.raises(ValueError, match=r"NaN or infinity|not finite|identit"):
        logit_lens(model, TEXTS)


def test_a_loaded_model_takes_strings(tiny, word_tokenizer):
    loaded = LoadedModel.from_module(tiny("llama"), word_tokenizer, name="tiny")
    found = logit_lens(loaded, ["the cat sat on the old house", "a dog ran"])
    assert len(found.text) == 10
    assert "model" in found.facts
    assert [str(site) for site in depths_of(loaded)] == list(found.sites)
