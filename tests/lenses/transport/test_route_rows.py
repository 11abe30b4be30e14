"""A held-out pass takes the rows that routed moments take: the same tokens, sources and sinks, by every route."""

import random

import pytest
import torch

from microtome.capture.models import LoadedModel
from microtome.lenses.pair_moments import PairMoments
from microtome.lenses.strata import STRATA, TokenRule
from microtome.lenses.transport.route_moments import routed_moments
from microtome.lenses.transport.routes import Route, route_site
from microtome.lenses.transport.transport_rows import transport_pass

IDS = random.Random(0)
TEXTS = [[IDS.choice([1, 2, *range(4, 120)]) for _ in range(IDS.randrange(1, 16))] for _ in range(30)]
ROUTES = ["same", "offset 1", "offset 4", "head 1.2", "head 1.2 choice 2", "head 0.1 with sinks", "random 3"]
SOURCE, TARGET = "resid_post.0", "resid_post.2"
RULE = TokenRule(above=0.0, times=5.0)


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_rows_are_those_of_routed_moments(tiny, word_tokenizer, kind, route):
    model = LoadedModel.from_module(tiny(kind), word_tokenizer, name=kind)
    given = {"rule": RULE, "max_tokens": 50}
    moments = routed_moments(model, TEXTS, SOURCE, TARGET, route, shards={"all": 1}, progress=False, **given)
    counts = []
    for stratum in STRATA:
        job = transport_pass(
            model, TEXTS, [SOURCE, TARGET], [Route.parse(route)], stratum=stratum, medians=moments.medians, **given
        )
        x, y = [], []
        for rows in job.batches():
            target, source = rows.pairs(Route.parse(route))
            x.append(rows.values[SOURCE][source])
            y.append(rows.values[TARGET][target])
        counts.append(len(torch.cat(x)))
        assert counts[-1] == moments.count("all", stratum), stratum
        if counts[-1] < 2:
            continue
        found = PairMoments.from_rows(torch.cat(x), torch.cat(y))
        expected = moments.pair(route_site(route, SOURCE), TARGET, "all", stratum)
        torch.testing.assert_close(found.xy, expected.xy, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(found.mean_x, expected.mean_x, rtol=1e-5, atol=1e-5)
    rest, sinks, every = counts
    assert rest + sinks == every
    assert rest > 20 or "with sinks" in route
    assert sinks > 0
