"""Depth maps with planted answers: a deep model that is a shallow one with idle blocks between."""

from itertools import combinations_with_replacement

import numpy as np
import pandas as pd
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from microtome.lenses.transport.alignment import Alignment, alignment
from microtome.lenses.transport.depth_map import depth_map, monotone_path
from microtome.lenses.transport.model_moments import moments_of_models


def llama(layers: int) -> LlamaForCausalLM:
    config = LlamaConfig(hidden_size=16, num_hidden_layers=layers, num_attention_heads=2, intermediate_size=32,
                         vocab_size=60, initializer_range=0.5)  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def planted() -> Alignment:
    """Blocks 0 and 2 of the deep model are the shallow model's, 1 and 3 add next to nothing."""
    shallow, deep = llama(2), llama(4)
    with torch.no_grad():
        deep.model.embed_tokens.weight.copy_(shallow.model.embed_tokens.weight)
        for block, idle in ((0, 1), (2, 3)):
            deep.model.layers[block].load_state_dict(shallow.model.layers[block // 2].state_dict())
            deep.model.layers[idle].self_attn.o_proj.weight.mul_(1e-4)
            deep.model.layers[idle].mlp.down_proj.weight.mul_(1e-4)
    texts = torch.randint(60, (120, 24), generator=torch.Generator().manual_seed(1)).tolist()
    moments = moments_of_models({"shallow": shallow, "deep": deep}, texts, progress=False)
    return alignment(moments, "shallow", "deep")


@pytest.mark.parametrize("value", ["r2_vw", "r2_wh", "cka", "canonical", "procrustes"])
def test_idle_blocks_are_found(planted, value):
    found = depth_map(planted, value, tolerance=1e-3)
    for direction in ("predicts", "predicted by"):
        rows = found.table[found.table["direction"] == direction].reset_index(drop=True)
        assert list(rows["close_from"]) == ["deep/resid_pre.0", "deep/resid_post.0", "deep/resid_post.2"]
        assert list(rows["close_to"]) == ["deep/resid_pre.0", "deep/resid_post.1", "deep/resid_post.3"]
        assert list(rows["close"]) == [1, 2, 2]
        assert rows["score"].to_numpy() == pytest.approx(1, abs=1e-3)
        assert rows["path_score"].to_numpy() == pytest.approx(1, abs=1e-3)
        assert list(rows["depth"]) == [0, 0.5, 1]
        assert rows["margin"][0] > 0.01 > 1e-3 > rows["margin"][1]
    assert list(found.summary["direction"]) == ["predicts", "predicted by"]
    assert found.summary["is_monotone"].all()
    assert (found.summary["distance"] <= 1 / 4).all()
    assert found.summary["proportional_score"].to_numpy() == pytest.approx(1, abs=1e-3)  # 0, 2 and 4 of the deep one


def test_the_shallow_model_in_the_deep_ones_eyes(planted):
    found = depth_map(planted.reversed(), tolerance=1e-3)
    rows = found.table[found.table["direction"] == "predicted by"]
    assert [name.removeprefix("shallow/") for name in rows["best"]] == [
        "resid_pre.0", "resid_post.0", "resid_post.0", "resid_post.1", "resid_post.1",
    ]  # fmt: skip


def by_hand(scores: list[list[float]], back: list[list[float]] | None = None, name: str = "r2_vw") -> Alignment:
    sources, targets = tuple(f"x{i}" for i in range(len(scores))), tuple(f"y{j}" for j in range(len(scores[0])))
    pairs = [(i, j) for i in range(len(sources)) for j in range(len(targets))]
    table = pd.DataFrame({"source": [sources[i] for i, _ in pairs], "target": [targets[j] for _, j in pairs]})
    table[name] = [scores[i][j] for i, j in pairs]
    if back is not None:
        table[f"back_{name}"] = [back[i][j] for i, j in pairs]
    return Alignment(table, sources, targets)


def test_a_crossed_match_is_not_monotone_and_its_path_costs():
    scores = [[0.1, 0.2, 0.9], [0.8, 0.3, 0.5], [0.0, 0.1, 0.7]]
    found = depth_map(by_hand(scores, np.eye(3).tolist()), tolerance=0.25)
    rows = found.table.iloc[:3]
    assert list(rows["best"]) == ["y2", "y0", "y2"]
    assert list(rows["path"]) == ["y2", "y2", "y2"]  # 0.9 + 0.5 + 0.7
    assert list(rows["path_score"]) == [0.9, 0.5, 0.7]
    assert rows["margin"].to_numpy() == pytest.approx([0.7, 0.3, 0.6])
    summary = found.summary.iloc[0]
    assert not summary["is_monotone"]
    assert summary["matched"] == 2
    assert summary["score"] == pytest.approx(0.8)
    assert summary["path_score"] == pytest.approx(0.7)
    assert summary["proportional_score"] == pytest.approx((0.1 + 0.3 + 0.7) / 3)
    assert summary["distance"] == pytest.approx((1 + 0.5 + 0) / 3)
    assert summary["path_distance"] == pytest.approx((1 + 0.5 + 0) / 3)
    back = found.table.iloc[3:]
    assert list(back["best"]) == list(back["path"]) == ["y0", "y1", "y2"]
    assert found.summary["is_monotone"][1]


def test_a_symmetric_value_is_its_own_other_direction():
    found = depth_map(by_hand([[0.5, 0.6], [0.1, 0.9]], name="cka"), "cka")
    assert list(found.table["best"]) == ["y1", "y1"] * 2
    beyond = depth_map(
        Alignment(
            by_hand([[1, 0]]).table.assign(beyond_r2_vw=[0.1, 0.9], beyond_back_r2_vw=[0.9, 0.1]), ("x0",), ("y0", "y1")
        ),
        "beyond_r2_vw",
    )
    assert list(beyond.table["best"]) == ["y1", "y0"]


@pytest.mark.parametrize("shape", [(1, 4), (4, 1), (3, 5), (5, 3), (6, 6)])
def test_no_path_that_never_goes_back_is_better(shape):
    random = np.random.default_rng(shape[0])
    for draw in range(20):
        scores = random.normal(size=shape) if draw % 2 else random.integers(0, 3, shape).astype(float)
        path = monotone_path(scores)
        assert (np.diff(path) >= 0).all()
        every = combinations_with_replacement(range(shape[1]), shape[0])
        best = max(sum(scores[i, j] for i, j in enumerate(other)) for other in every)
        assert scores[np.arange(shape[0]), path].sum() == pytest.approx(best)


def test_errors():
    with pytest.raises(KeyError, match="no column 'canonical'"):
        depth_map(by_hand([[1.0]]), "canonical")
    with pytest.raises(ValueError, match="tolerance is -1"):
        depth_map(by_hand([[1.0]]), tolerance=-1)
    with pytest.raises(ValueError, match="tolerance is nan"):
        depth_map(by_hand([[1.0]]), tolerance=float("nan"))
    with pytest.raises(ValueError, match="r2_vw is missing for some pairs"):
        depth_map(by_hand([[1.0, float("nan")]]))
