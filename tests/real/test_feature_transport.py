"""SmolLM2: R2 of the pass is that of moments, short leaps carry more than long ones, and the null carries nothing."""

import numpy as np
import pytest

from microtome.data import plain_english
from microtome.lenses.map_scores import map_scores
from microtome.lenses.moments_pass import moments_of
from microtome.lenses.ridge_pairs import ridge_pairs
from microtome.lenses.token_windows import token_windows
from microtome.lenses.transport.direction_origin import direction_origin
from microtome.lenses.transport.feature_transport import feature_transport
from microtome.lenses.unembedding import unembedding_of


@pytest.mark.slow
@pytest.mark.network
def test_words_are_carried_over_short_leaps(smollm2):
    target, sources = "resid_post.20", ["resid_post.5", "resid_post.19"]
    corpus = plain_english(characters=40_000, split="test")
    windows = token_windows(smollm2, corpus["text"], documents=corpus["document"], length=128)
    shards = ["test" if number % 4 == 0 else "fit" for number in range(len(windows))]
    pairs = [(source, target) for source in sources] + [tuple(sources)]
    moments = moments_of(
        smollm2,
        windows.texts,
        [*sources, target],
        documents=range(len(windows)),
        pairs=pairs,
        shards=shards,
        shuffled=True,
        progress=False,
    )
    options = {"shards": ("fit", None, "test"), "keep_maps": True}
    maps = ridge_pairs(moments, pairs[:2], **options).maps
    null = ridge_pairs(moments, pairs[:2], shuffled=True, **options).maps
    words = unembedding_of(smollm2).weight[1000:1200].detach()
    held_out = [text for text, shard in zip(windows.texts, shards, strict=True) if shard == "test"]
    found = feature_transport(
        smollm2, held_out, list(maps.values()), words, null=list(null.values()), means=moments, draws=300
    )
    for number, pair in enumerate(pairs[:2]):
        expected = map_scores(maps[pair], *(moments.pair(*pair, s) for s in ("test", "fit")), directions=words)
        table = found.table[found.table["operator"] == number]
        np.testing.assert_allclose(table["r2"], expected.r2_directions, atol=1e-5)
    summary = found.summary().set_index("source")
    assert summary["null_quantile"].max() < 0.1
    assert summary.loc[sources[1], "carried"] > 150
    assert summary.loc[sources[1], "median_r2"] > summary.loc[sources[0], "median_r2"] + 0.1
    origin = direction_origin(moments, words[:5], target, shards=("fit", None, "test"), controls=16, shuffled=True)
    wide = origin.matrix("carried_to_target")
    assert (wide[sources[1]] > wide[sources[0]] + 0.1).all()
    assert origin.table["shuffled_to_target"].max() < 0.1
