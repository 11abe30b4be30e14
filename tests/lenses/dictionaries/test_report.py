from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from microtome.capture import taps
from microtome.lenses.dictionaries.dictionary import Dictionary
from microtome.lenses.dictionaries.report import dictionary_report, untrained_dictionary
from microtome.lenses.dictionaries.site_rows import NO_SINKS
from microtome.lenses.dictionaries.training import DictionarySettings, train_dictionary

SITE, WIDTH = "resid_post.0", 32


def written(model, lengths=(5, 9, 12, 7, 11, 6, 10, 8)):
    """Texts that the model itself continues a random token with: what zeroing its stream makes less probable."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for length in lengths:
        ids = torch.randint(3, 120, (1, 1), generator=generator)
        while ids.shape[1] < length:
            with torch.no_grad():
                probabilities = (3 * model(ids).logits[0, -1]).softmax(-1)
            ids = torch.cat([ids, probabilities.multinomial(1, generator=generator)[None]], 1)
        found.append(ids[0].tolist())
    return found


@pytest.fixture(scope="module")
def texts(tiny):
    return written(tiny("llama"))


def exact(site=SITE, width=WIDTH):
    """x = relu(x) - relu(-x)."""
    eye = torch.eye(width)
    both = torch.cat([eye, -eye])
    return Dictionary(both.T.contiguous(), torch.zeros(2 * width), both, torch.zeros(width), "relu", site)


def constant(value, site=SITE):
    zeros = torch.zeros(4, len(value))
    return Dictionary(zeros.T.contiguous(), torch.zeros(4), zeros, value, "relu", site, centred=False)


def rows_of(report):
    return report.table.set_index("reconstruction")


@pytest.mark.parametrize("kind", ["llama", "gpt2", "gemma2", "neox"])
def test_an_exact_reconstruction_loses_nothing_and_a_zero_one_all(kind, tiny):
    model = tiny(kind)
    given = {"exact": exact(), "nothing": constant(torch.zeros(WIDTH))}
    table = rows_of(dictionary_report(model, given, written(model), max_tokens=30, controls=False))
    assert table.loc["exact", ["explained", "explained_all"]].tolist() == pytest.approx([1, 1], abs=1e-6)
    assert table.loc["exact", "loss_recovered"] == pytest.approx(1, abs=1e-4)
    assert table.loc["exact", "cross_entropy"] == pytest.approx(table.loc["clean", "cross_entropy"], abs=1e-5)
    for score in ("explained", "explained_all", "cross_entropy", "loss_recovered_mean"):
        assert table.loc["nothing", score] == table.loc["zero", score]
    assert table.loc["nothing", "loss_recovered"] == 0
    assert table.loc["nothing", "dead"] == 1
    assert table.loc["exact", "dead"] < 0.1
    assert table.loc["clean", ["explained", "loss_recovered"]].tolist() == [1, 1]
    assert table.loc["mean", "explained"] == pytest.approx(0, abs=1e-6)
    assert table.loc["mean", "loss_recovered_mean"] == 0
    assert table.loc["zero", "cross_entropy"] != table.loc["mean", "cross_entropy"]


@pytest.mark.parametrize("replace_sinks", [False, True])
def test_scores_are_their_formulas_text_by_text(replace_sinks, tiny):
    """Padding, batches, sinks and sums, against one text at a time with a plain edit and the model's own logits."""
    model = tiny("gpt2")
    texts = written(model)
    dictionary = untrained_dictionary(torch.full((WIDTH,), 0.2), 50, 6, site=SITE)
    report = dictionary_report(model, dictionary, texts, max_tokens=30, replace_sinks=replace_sinks)
    streams, nats, count = [], {"dictionary": 0.0, "clean": 0.0, "zero": 0.0}, 0
    first = 0 if replace_sinks else 1

    def swapped(make):
        def edit(x):
            delta = make(x) - x
            delta[:, :first] = 0
            return delta

        return edit

    makes = {"dictionary": dictionary, "clean": lambda x: x, "zero": torch.zeros_like}
    for text in texts:
        ids = torch.tensor([text])
        count += len(text) - 1
        for name, make in makes.items():
            with taps(model, [], {SITE: swapped(make)}), torch.no_grad():
                logits = model(ids).logits[0]
            nats[name] += float(cross_entropy(logits[:-1], ids[0, 1:], reduction="sum"))
        with taps(model, [SITE]) as tape, torch.no_grad():
            model(ids)
        streams.append(tape[SITE][0])
    rest = torch.cat([stream[1:] for stream in streams])
    table = rows_of(report)
    for name in makes:
        assert table.loc[name, "cross_entropy"] == pytest.approx(nats[name] / count, abs=2e-5)
    recovered = (nats["zero"] - nats["dictionary"]) / (nats["zero"] - nats["clean"])
    assert table.loc["dictionary", "loss_recovered"] == pytest.approx(recovered, abs=1e-3)
    for score, rows in (("explained", rest), ("explained_all", torch.cat(streams))):
        explained = 1 - (dictionary(rows) - rows).square().sum() / (rows - rows.mean(0)).square().sum()
        assert table.loc["dictionary", score] == pytest.approx(float(explained), abs=1e-5)
    z = dictionary.encode(rest)
    assert table.loc["dictionary", "l0"] == pytest.approx(float((z > 0).sum(1).float().mean()))
    assert table.loc["dictionary", "dead"] == pytest.approx(float((z == 0).all(0).float().mean()))
    _, values, _ = torch.linalg.svd(rest - rest.mean(0))
    k = report.facts["k_of_controls"]
    assert k == round(float((z > 0).sum(1).float().mean()))
    explained = values.square()[:k].sum() / values.square().sum()
    assert table.loc["pca", "explained"] == pytest.approx(float(explained), abs=1e-5)
    assert report.facts["sinks"] == len(texts)
    assert report.facts["predicted_tokens"] == count


def test_intervals_are_of_documents(tiny, texts):
    model, dictionary = tiny("llama"), untrained_dictionary(torch.zeros(WIDTH), 50, 6, site=SITE)
    by_text = rows_of(dictionary_report(model, dictionary, texts, controls=False))
    pairs = rows_of(dictionary_report(model, dictionary, texts, documents=[0, 0, 1, 1, 2, 2, 3, 3], controls=False))
    one = rows_of(dictionary_report(model, dictionary, texts, documents=["a"] * 8, controls=False))
    for score in ("explained", "cross_entropy", "loss_recovered"):
        low, value, high = by_text.loc["dictionary", [f"{score}_low", score, f"{score}_high"]]
        assert low < value < high
        assert pairs.loc["dictionary", score] == value
        assert pairs.loc["dictionary", f"{score}_low"] != low
        assert np.isnan(one.loc["dictionary", f"{score}_low"])
    again = rows_of(dictionary_report(model, dictionary, texts, controls=False))
    assert by_text.equals(again)


def test_what_was_trained_is_better_than_what_it_began_with(tiny):
    model = tiny("llama")
    corpus = written(model, [12] * 60)
    settings = DictionarySettings(steps=200, batch=64, rate=0.01, evaluate_every=100)
    found = train_dictionary(model, corpus[:50], SITE, features=100, k=6, settings=settings, progress=False)
    table = rows_of(dictionary_report(model, found, corpus[50:]))
    assert table.loc["dictionary", "explained"] > table.loc["untrained", "explained"] + 0.1
    assert table.loc["dictionary", "loss_recovered"] > table.loc["untrained", "loss_recovered"]
    assert table.loc["dictionary", "l0"] <= 6


def test_heads_can_be_rebuilt_side_by_side(tiny, texts):
    model = tiny("llama")
    table = rows_of(dictionary_report(model, exact("z.1"), texts, controls=False))
    assert table.loc["dictionary", "explained"] == pytest.approx(1, abs=1e-6)
    one = rows_of(dictionary_report(model, exact("z.1.2", 8), texts, controls=False))
    assert one.loc["dictionary", "explained"] == pytest.approx(1, abs=1e-6)
    assert one.loc["zero", "explained"] < 1


def test_requests_that_make_no_sense_are_refused(tiny, texts):
    model = tiny("llama")
    with pytest.raises(ValueError, match="there is no dictionary"):
        dictionary_report(model, {}, texts)
    with pytest.raises(ValueError, match=r"asked for at resid_post\.0"):
        dictionary_report(model, {"one": exact(), "two": exact("resid_post.1")}, texts)
    with pytest.raises(ValueError, match="directions of 16 channels, and 32 are given"):
        dictionary_report(model, exact(width=16), texts)
    with pytest.raises(KeyError):
        dictionary_report(model, exact("router.0"), texts)
    with pytest.raises(ValueError, match="was made for weights"):
        dictionary_report(model, replace(exact(), facts={"weight_sha256": "other"}), texts)
    with pytest.raises(ValueError, match=r"no token but sinks"):
        dictionary_report(model, exact(), [[5], [6]])
    assert dictionary_report(model, exact(), texts, rule=NO_SINKS, controls=False).facts["sinks"] == 0
