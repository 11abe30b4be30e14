"""Results print in a line: no tensor or table in full."""

import numpy as np
import pandas as pd
import torch

from microtome.lenses.lens import logit_lens_of
from microtome.lenses.lens_table import lens_table
from microtome.lenses.linear_map import LinearMap, identity_map
from microtome.lenses.moments import Moments
from microtome.lenses.shortcuts import Shortcuts


def test_shapes_stand_for_tensors_and_tables(tiny):
    found = identity_map(8, "resid_pre.0", "resid_post.1")
    assert repr(found) == (
        "LinearMap(weight=float64 [8, 8], intercept=float64 [8], kind='identity', source='resid_pre.0', "
        "target='resid_post.1', strength=None, rank=None, facts={})"
    )
    maps: dict[tuple[str, str], LinearMap] = {(str(n), "end"): found for n in range(9)}
    shortcuts = Shortcuts(maps, pd.DataFrame({"source": range(9)}), "ridge", "rest")
    assert repr(shortcuts) == "Shortcuts(maps={9 entries}, table=[9 x 1], method='ridge', stratum='rest')"
    model = tiny("llama")
    for result in (logit_lens_of(model), lens_table(model, [1, 2, 3])):
        assert len(repr(result)) < 600
        assert "tensor(" not in repr(result)


def test_moments_say_what_they_hold():
    moments = Moments({"resid_pre.0": 3, "resid_post.0": 3}, shards={"fit": 0.5, "test": 0.5})
    rows = torch.randn(4, 3)
    values = {"resid_pre.0": rows, "resid_post.0": rows + 1}
    moments.update(values, documents=torch.tensor([0, 0, 1, 1]), position=torch.tensor([0, 1, 0, 1]))
    shards = moments.shard_of([0, 1])
    counts = {name: 2 * shards.count(name) for name in ("fit", "test")}
    assert repr(moments) == (
        f"Moments(2 sites, 3 pairs; 2 documents, tokens: fit {counts['fit']}, test {counts['test']})"
    )
    assert {name: moments.count(name, "all") for name in counts} == counts
    assert moments.shard_of(np.array([1, 0])) == shards[::-1]
