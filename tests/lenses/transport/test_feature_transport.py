"""R2 of operators along directions: that of moments of the same rows, whatever the batches; and what is refused."""

import numpy as np
import pandas as pd
import pytest
import torch

from microtome.capture.collect import capture
from microtome.capture.models import LoadedModel
from microtome.capture.tap_plan import Read
from microtome.capture.taps import taps
from microtome.lenses.linear_map import LinearMap
from microtome.lenses.made_for import facts_of
from microtome.lenses.map_scores import map_scores
from microtome.lenses.moments import Moments
from microtome.lenses.moments_pass import moments_of
from microtome.lenses.pair_moments import PairMoments
from microtome.lenses.ridge_pairs import ridge_pairs
from microtome.lenses.strata import TokenRule
from microtome.lenses.transport.feature_sums import FeatureSums
from microtome.lenses.transport.feature_transport import feature_transport
from microtome.lenses.transport.operator import operator_of
from microtome.lenses.transport.routes import Route
from microtome.lenses.transport.transport_rows import TransportRows

SITES = "resid_pre.0", "resid_post.1", "resid_post.2"
PAIRS = [(SITES[0], SITES[2]), (SITES[1], SITES[2])]
NUMBERS = ["r2", "identity_r2", "rescaled_r2", "variance"]
ENDS = ["r2_low", "r2_high"]


def texts_of(count: int, seed: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(6, 14, (count,), generator=generator).tolist()
    return [torch.randint(5, 100, (length,), generator=generator).tolist() for length in lengths]


@pytest.fixture(scope="module")
def model(tiny, word_tokenizer) -> LoadedModel:
    return LoadedModel.from_module(tiny("llama"), word_tokenizer, name="llama")


@pytest.fixture(scope="module")
def held_out() -> tuple[list[list[int]], list[str]]:
    texts = texts_of(24, 1)
    return texts, [f"book {i // 3}" for i in range(24)]


@pytest.fixture(scope="module")
def moments(model, held_out) -> Moments:
    """Fit on 120 texts, test on the held-out ones."""
    texts, documents = held_out
    fit = texts_of(120, 0)
    shards = ["fit"] * len(fit) + ["test"] * len(texts)
    named = [f"fit {i}" for i in range(len(fit))] + documents
    return moments_of(model, fit + texts, "resid", documents=named, shards=shards, progress=False)


@pytest.fixture(scope="module")
def maps(moments) -> list[LinearMap]:
    found = ridge_pairs(moments, PAIRS, shards=("fit", None, "test"), keep_maps=True).maps
    return [found[pair] for pair in PAIRS]


@pytest.fixture(scope="module")
def decoder() -> torch.Tensor:
    return torch.randn(7, 32, generator=torch.Generator().manual_seed(5)) * torch.logspace(-3, 3, 7)[:, None]


def test_r2_is_that_of_moments_of_the_same_rows(model, moments, maps, decoder, held_out):
    texts, documents = held_out
    found = feature_transport(model, texts, maps, decoder, documents=documents, means=moments, draws=20)
    for number, (pair, each) in enumerate(zip(PAIRS, maps, strict=True)):
        table = found.table[found.table["operator"] == number]
        test, fit = (moments.pair(*pair, shard) for shard in ("test", "fit"))
        expected = map_scores(each, test, fit, directions=decoder).r2_directions
        np.testing.assert_allclose(table["r2"], expected, rtol=0, atol=1e-6)
        same = map_scores(LinearMap(torch.eye(32), torch.zeros(32)), test, fit, directions=decoder).r2_directions
        np.testing.assert_allclose(table["identity_r2"], same, rtol=0, atol=1e-6)
        assert set(table["tokens"]) == {test.count}
        assert set(table["documents"]) == {8}
    assert found.facts["mean"] == {SITES[2]: "fit"}


def test_without_fit_means_the_reference_is_the_mean_of_the_scored_rows(model, moments, maps, decoder, held_out):
    texts, documents = held_out
    found = feature_transport(model, texts, maps[0], decoder, documents=documents, draws=20)
    test = moments.pair(*PAIRS[0], "test")
    expected = map_scores(maps[0], test, test, directions=decoder).r2_directions
    np.testing.assert_allclose(found.table["r2"], expected, rtol=0, atol=1e-6)
    assert found.facts["mean"] == {SITES[2]: "scored"}


def test_rescaled_is_the_squared_correlation_of_the_rows(model, maps, decoder, held_out):
    texts, documents = held_out
    found = feature_transport(model, texts, maps[1], decoder, documents=documents, draws=5)
    kept = capture(model, texts, [SITES[1], SITES[2]], "all", progress=False)
    keep = torch.from_numpy(kept.rows["position"].to_numpy() > 0)
    x, y = ((kept[site][keep].double() @ decoder.double().T).numpy() for site in (SITES[1], SITES[2]))
    expected = [np.corrcoef(x[:, i], y[:, i])[0, 1] ** 2 for i in range(7)]
    np.testing.assert_allclose(found.table["rescaled_r2"], expected, atol=1e-6)


def test_batches_and_the_order_of_texts_do_not_matter(model, moments, maps, decoder, held_out):
    texts, documents = held_out
    one = feature_transport(model, texts, maps, decoder, documents=documents, means=moments, draws=50)
    order = torch.randperm(len(texts), generator=torch.Generator().manual_seed(2)).tolist()
    other = feature_transport(
        model,
        [texts[i] for i in order],
        maps,
        decoder,
        documents=[documents[i] for i in order],
        means=moments,
        draws=50,
        max_tokens=30,
    )
    pd.testing.assert_frame_equal(one.table[NUMBERS], other.table[NUMBERS], rtol=0, atol=1e-6)
    pd.testing.assert_frame_equal(one.table[ENDS], other.table[ENDS], rtol=0, atol=1e-5)
    assert one.table["verdict"].tolist() == other.table["verdict"].tolist()


def test_routes_take_the_token_that_they_name(model, maps, decoder, held_out):
    texts, _ = held_out
    kept = capture(model, texts, list(SITES[1:]), "all", progress=False)
    place = {(t, p): i for i, (t, p) in enumerate(zip(kept.rows["text"], kept.rows["position"], strict=True))}
    before = [(place[t, p - 2], i) for (t, p), i in place.items() if p >= 3]  # the source is no first token either
    x, y = (kept[site][[pair[k] for pair in before]] for k, site in enumerate(SITES[1:]))
    found = feature_transport(model, texts, operator_of(maps[1], route="offset 2"), decoder, draws=5, max_tokens=40)
    moments = PairMoments.from_rows(x, y)
    expected = map_scores(maps[1], moments, moments, directions=decoder).r2_directions
    np.testing.assert_allclose(found.table["r2"], expected, rtol=0, atol=1e-6)
    assert found.table["tokens"][0] == len(before)
    every = feature_transport(model, texts, operator_of(maps[1], route="offset 2"), decoder, draws=5, stratum="all")
    assert every.table["tokens"][0] == sum(p >= 2 for _, p in place)


def test_a_head_route_takes_what_its_head_attends_to_most(model, maps, decoder, held_out):
    texts, _ = held_out
    found = feature_transport(model, texts, operator_of(maps[1], route="head 1.2"), decoder, draws=5, max_tokens=40)
    rows = []
    for text in texts:
        with torch.no_grad(), taps(model.module, [*SITES[1:], Read("pattern.1.2", queries="all")]) as tape:
            model.module(torch.tensor([text]))
        pattern = tape["pattern.1.2"][0].clone()
        pattern[:, 0] = 0
        rows += [(tape[SITES[1]][0, int(pattern[j].argmax())], tape[SITES[2]][0, j]) for j in range(1, len(text))]
    moments = PairMoments.from_rows(*(torch.stack([row[k] for row in rows]) for k in (0, 1)))
    expected = map_scores(maps[1], moments, moments, directions=decoder).r2_directions
    np.testing.assert_allclose(found.table["r2"], expected, rtol=0, atol=1e-6)
    assert found.table["tokens"][0] == len(rows)


def test_strata_are_those_of_moments(model, moments, maps, decoder, held_out):
    texts, documents = held_out
    for stratum in ("rest", "sinks", "all"):
        found = feature_transport(
            model, texts, maps[0], decoder, documents=documents, means=moments, stratum=stratum, draws=5
        )
        assert found.table["tokens"][0] == moments.count("test", stratum)


def test_without_medians_massive_tokens_are_those_of_a_pass_of_moments(model, maps, decoder, held_out):
    texts, _ = held_out
    rule = TokenRule(above=0.0, times=5.0)
    expected = moments_of(model, texts, "resid", shards={"all": 1}, rule=rule, progress=False)
    assert expected.counts()["massive"][0] > 0
    for stratum in ("rest", "sinks"):
        found = feature_transport(model, texts, maps[0], decoder, rule=rule, stratum=stratum, draws=5)
        assert found.table["tokens"][0] == expected.count("all", stratum)


def test_names_and_several_targets(model, moments, decoder, held_out):
    texts, _ = held_out
    pairs = [(SITES[0], SITES[1]), (SITES[0], SITES[2])]
    found = ridge_pairs(moments, pairs, shards=("fit", None, "test"), keep_maps=True).maps
    rows = {SITES[1]: decoder[:2], SITES[2]: decoder[2:]}
    names = {SITES[1]: ["this", "that"]}
    scored = feature_transport(model, texts, [found[pair] for pair in pairs], rows, names=names, draws=5)
    assert scored.table["name"].tolist() == ["this", "that", "0", "1", "2", "3", "4"]
    assert scored.table["target"].tolist() == [SITES[1]] * 2 + [SITES[2]] * 5
    assert scored.summary()["directions"].tolist() == [2, 5]
    alone = feature_transport(model, texts, found[pairs[1]], decoder[2:], draws=5)
    np.testing.assert_allclose(scored.table["r2"][2:], alone.table["r2"], atol=1e-6)


def test_bad_input_says_what_to_do(model, tiny, maps, decoder, held_out):
    texts, _ = held_out
    give = maps[0]
    with pytest.raises(ValueError, match=r"directions for resid_post.2 are \(7, 31\); expected \[direction, 32\]"):
        feature_transport(model, texts, give, decoder[:, :31])
    dead = decoder.clone()
    dead[4] = 0
    with pytest.raises(ValueError, match=r"direction 4 for resid_post.2 has length 0"):
        feature_transport(model, texts, give, dead)
    dead[4, 1] = torch.nan
    with pytest.raises(ValueError, match=r"direction 4 for resid_post.2 holds NaN"):
        feature_transport(model, texts, give, dead)
    with pytest.raises(ValueError, match=r"resid_post.1, which no operator writes"):
        feature_transport(model, texts, give, {"resid_post.1": decoder, "resid_post.2": decoder})
    with pytest.raises(ValueError, match=r"no directions for resid_post.2"):
        feature_transport(model, texts, give, {})
    with pytest.raises(ValueError, match="6 names for 7 directions"):
        feature_transport(model, texts, give, decoder, names=list("abcdef"))
    with pytest.raises(ValueError, match=r"no null for resid_pre.0 to resid_post.2"):
        feature_transport(model, texts, give, decoder, null=maps[1])
    other = operator_of(LinearMap(give.weight, give.intercept, "", *PAIRS[0], facts=facts_of(tiny("llama", 3))))
    with pytest.raises(ValueError, match="made for weights"):
        feature_transport(model, texts, other, decoder)
    narrow = LinearMap(give.weight[:30], give.intercept, "", *PAIRS[0])
    with pytest.raises(ValueError, match="is 30 to 32 channels wide; in this model these sites are 32 and 32"):
        feature_transport(model, texts, narrow, decoder)
    with pytest.raises(ValueError, match="no token of these texts counts"):
        feature_transport(model, [[5], [6]], give, decoder)
    with pytest.raises(ValueError, match="Give at least one"):
        feature_transport(model, texts, [], decoder)
    with pytest.raises(ValueError, match=r"threshold=1.5"):
        feature_transport(model, texts, give, decoder, threshold=1.5)
    with pytest.raises(ValueError, match=r"the mean of resid_post.2 is \(31,\), expected \(32,\)"):
        feature_transport(model, texts, give, decoder, means={"resid_post.2": torch.zeros(31)})
    with pytest.raises(ValueError, match="stratum is 'none'"):
        feature_transport(model, texts, give, decoder, stratum="none")
    with pytest.raises(ValueError, match=r"encode gives \(.*, 3\)"):
        feature_transport(model, texts, give, decoder, encode=lambda y: y[:, :3])
    with pytest.raises(ValueError, match=r"encode is given for resid_post.1, which no operator writes"):
        feature_transport(model, texts, give, decoder, encode={"resid_post.1": lambda y: y[:, :7]})


def test_nan_is_no_answer(model, maps, decoder, held_out):
    texts, _ = held_out
    give = maps[0]
    broken = LinearMap(torch.full_like(give.weight, torch.nan), give.intercept, "", *PAIRS[0])
    with pytest.raises(ValueError, match=r"the operator resid_pre.0 to resid_post.2 holds NaN"):
        feature_transport(model, texts, broken, decoder)
    with pytest.raises(ValueError, match=r"the null resid_pre.0 to resid_post.2 holds NaN"):
        feature_transport(model, texts, give, decoder, null=broken)
    values = {SITES[0]: torch.ones(3, 32), SITES[2]: torch.full((3, 32), torch.nan)}
    rows = TransportRows(values, torch.zeros(3).long(), torch.zeros(3).long(), {Route(): torch.arange(3)})
    sums = FeatureSums([operator_of(give)], [None], {SITES[2]: decoder}, {}, 1)
    with pytest.raises(ValueError, match=r"resid_post.2 holds NaN or infinity in these texts"):
        sums.update(rows)


def test_the_length_of_a_direction_does_not_matter(model, maps, decoder, held_out):
    texts, _ = held_out
    expected = feature_transport(model, texts, maps[0], decoder.double(), draws=5).table["r2"]
    for length in (1e-200, 1e250):
        found = feature_transport(model, texts, maps[0], decoder.double() * length, draws=5).table["r2"]
        np.testing.assert_allclose(found, expected, atol=1e-9)
