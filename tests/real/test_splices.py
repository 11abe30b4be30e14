"""Splices in SmolLM2: an operator of one block costs little, less than the identity; mean and zero cost most."""

import pytest

from microtome.capture import LoadedModel
from microtome.data.plain_english import plain_english
from microtome.lenses.documents import document_numbers
from microtome.lenses.moments_pass import moments_of
from microtome.lenses.ridge_pairs import ridge_pairs
from microtome.lenses.token_windows import token_windows
from microtome.lenses.transport.operator import operator_of
from microtome.lenses.transport.splice_conditions import Splice
from microtome.lenses.transport.splice_study import splice_effects

SITES = ["resid_post.5", "resid_post.6"]


@pytest.mark.slow
@pytest.mark.network
def test_splices_of_one_block_stand_in_the_expected_order(smollm2: LoadedModel) -> None:
    table = plain_english(["brown"], characters=40_000, passage=1000)
    windows = token_windows(smollm2, table["text"], documents=table["document"], length=128)
    moments = moments_of(smollm2, windows.texts, SITES, documents=windows.documents, progress=False)
    found = ridge_pairs(moments, [tuple(SITES)], keep_maps=True)
    operator = operator_of(found.maps[tuple(SITES)])
    owners = document_numbers(windows.documents, len(windows))
    shards = moments.split.numbers(owners.tolist())
    held_out = [number for number, shard in enumerate(shards) if moments.shards[shard] == "test"][:8]
    mean = moments.pair(*SITES, "fit").mean_y
    effects = splice_effects(
        smollm2,
        [windows.texts[number] for number in held_out],
        Splice(operator, mean=mean),
        documents=owners[held_out],
        at=(5, "all"),
        conditions=["operator", "identity", "mean", "zero"],
        medians=moments.medians,
    )
    rows = effects.to_frame().set_index(["positions", "condition"])
    entropy = rows["cross_entropy"]["all"]
    assert entropy["clean"] <= entropy["operator"] < entropy["identity"] < entropy["mean"] < entropy["zero"]
    assert entropy["operator"] - entropy["clean"] < 0.2
    assert rows["recovered_mean"]["all"]["operator"] > 0.95
    assert rows["kl_minus_identity_high"]["all"]["operator"] < 0
    behind = rows["kl_later"]["5"]
    assert 0 < behind["operator"] < behind["mean"] < behind["zero"]
    assert (rows["kl_later"]["5"] < rows["kl_spliced"]["5"]).drop("clean").all()
