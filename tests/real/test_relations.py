"""Relations on SmolLM2: what an affine map decodes that its controls do not."""

import pytest

from microtome.data.relations import RELATIONS, relation_pairs
from microtome.lenses.relation_study import relation_study


@pytest.mark.slow
@pytest.mark.network
def test_plurals_are_decoded_by_an_affine_map(smollm2):
    pairs = relation_pairs(["plural"])
    study = relation_study(
        smollm2,
        list(zip(pairs["subject"], pairs["object"], strict=True)),
        RELATIONS["plural"].templates[0],
        groups=pairs["group"].tolist(),
        examples=3,
        depths=[14],
        betas=(1.0, 2.25),
        ranks=(48, 96),
    )
    assert study.pairs["is_known"].mean() > 0.8
    faithful = study.faithfulness[study.faithfulness["prompts"] == "known"].set_index("method")["share"]
    assert faithful["relation"] > 0.6
    assert faithful.drop("relation").max() < 0.3
    causal = study.causality.set_index("method")["share"]
    assert causal["relation"] > 0.3
    assert causal[["identity", "random"]].max() < 0.2
