"""SmolLM2's moments: those of captured rows, and position 0 found as massive with no word about positions."""

import pytest
import torch

from microtome.capture import LoadedModel, capture
from microtome.lenses.moments_pass import moments_of
from microtome.lenses.pair_moments import PairMoments
from microtome.lenses.strata import TokenRule

pytestmark = pytest.mark.slow

TEXTS = [
    "The harbour was quiet, and the boats that had left before dawn were only now coming back with their catch.",
    "A committee of twelve met on Thursday to hear what the engineers had found beneath the old railway bridge.",
    "Nobody in the village could say when the well had been dug, or why its water tasted faintly of iron.",
    "She sorted the letters by year, then by hand, and found that two of them had never been opened at all.",
]


def test_moments_are_those_of_captured_rows(smollm2: LoadedModel) -> None:
    moments = moments_of(smollm2, TEXTS, "resid", pairs="resid_post.29", shards={"all": 1}, progress=False)
    kept = capture(smollm2, TEXTS, ["resid_pre.0", "resid_post"], "all", progress=False)
    keep = torch.tensor((kept.rows["position"] > 0).tolist())
    for source in ("resid_pre.0", "resid_post.3", "resid_post.20", "resid_post.28"):
        found = moments.pair(source, "resid_post.29", "all")
        expected = PairMoments.from_rows(kept[source][keep], kept["resid_post.29"][keep])
        scale = torch.outer(expected.xx.diagonal().sqrt(), expected.yy.diagonal().sqrt())
        assert float(((found.xy - expected.xy).abs() / scale).max()) < 1e-5, source
        increment = found.increment().yy.trace() / expected.increment().yy.trace()
        assert abs(float(increment) - 1) < 1e-5, source


def test_position_0_is_massive(smollm2: LoadedModel) -> None:
    rule = TokenRule(first=False, special=False)
    moments = moments_of(smollm2, TEXTS, ["resid_post.15"], shards={"all": 1}, rule=rule, progress=False)
    counts = moments.counts().loc[0]
    assert counts["massive"] == len(TEXTS)
    sinks, rest = (moments.pair("resid_post.15", "resid_post.15", "all", stratum) for stratum in ("sinks", "rest"))
    assert float(sinks.mean_x.norm() / rest.mean_x.norm()) > 20
