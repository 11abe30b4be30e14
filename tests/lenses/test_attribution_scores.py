import warnings

import numpy as np
import pandas as pd
import pytest
import torch
from scipy.stats import spearmanr

from microtome.capture.dissect import dissect
from microtome.capture.sites import Site
from microtome.capture.taps import taps
from microtome.lenses.attribution import LogitAttribution, logit_attribution
from microtome.lenses.attribution_scores import ablation_effects, paraphrase_agreement, share_of_heads

TEXTS = [[5, 9, 30, 7, 11], [8, 3, 90], [40, 41, 42, 43, 44]]


def planted(values: list[list[float]]) -> LogitAttribution:
    """Two layers of two heads per logit."""
    rows = [
        {"row": row, "component": "attention", "layer": n // 2, "head": n % 2, "value": value}
        for row, parts in enumerate(values)
        for n, value in enumerate(parts)
    ]
    return LogitAttribution(pd.DataFrame(rows), pd.DataFrame({"residual": [0.0] * len(values)}), "head")


def test_share_of_the_largest_heads():
    found = share_of_heads(planted([[4.0, -3.0, 2.0, -1.0], [0.0, 0.0, 0.0, 5.0]]), k=2)
    assert found["share"].tolist() == pytest.approx([0.7, 1.0])
    assert found["heads"].tolist() == [4, 4]
    with pytest.raises(ValueError, match="k=0: give at least one head"):
        share_of_heads(planted([[1.0, 1.0, 1.0, 1.0]]), k=0)


def test_agreement_is_spearmans():
    rows = [[4.0, -3.0, 2.0, -1.0], [0.1, -0.2, 0.3, 0.0], [-4.0, 3.0, -2.0, 1.0]]
    found = paraphrase_agreement(planted(rows))
    assert found[["row", "other"]].to_numpy().tolist() == [[0, 1], [0, 2], [1, 2]]
    for line in found.itertuples():
        assert line.correlation == pytest.approx(spearmanr(rows[line.row], rows[line.other]).statistic)
    with pytest.raises(ValueError, match="two logits or more"):
        paraphrase_agreement(planted(rows[:1]))


@pytest.mark.parametrize("kind", ["llama", "gemma2"])
def test_total_effect_is_the_change_of_the_logit(tiny, kind):
    model = tiny(kind)
    found = ablation_effects(model, TEXTS, target=17, against=4, heads=[(1, 2), "z.2.0"], reference=TEXTS)
    assert len(found) == 6
    rows = []
    for ids in TEXTS:
        with torch.no_grad(), taps(model, "z.1.2") as tape:
            model(input_ids=torch.tensor([ids]))
        rows.append(tape["z", 1, 2][0, 1:])
    mean = torch.cat(rows).mean(0)

    def difference(logits: torch.Tensor) -> float:
        logits = logits[0, -1].double()
        logits = 30 * torch.atanh(logits / 30) if kind == "gemma2" else logits
        return float(logits[17] - logits[4])

    for line in found[found["layer"] == 1].itertuples():
        ids = torch.tensor([TEXTS[line.text]])
        with torch.no_grad():
            before = difference(model(input_ids=ids).logits)
            with taps(model, edits={"z.1.2": lambda z: mean - z}):
                after = difference(model(input_ids=ids).logits)
        assert line.total == pytest.approx(before - after, abs=1e-3)
        assert line.indirect == pytest.approx(line.total - line.direct)


def test_last_layers_heads_act_directly_up_to_the_scale(tiny):
    """Nothing reads the last layer's attention but its MLP: with that at zero, direct is the whole at a kept scale."""
    model = tiny("neox")  # parallel: the last MLP does not read it
    dissect(model)  # tells a norm by an output that does not change with its input's size
    with torch.no_grad():
        model.gpt_neox.final_layer_norm.eps = 1e2  # the scale hardly depends on the stream
        model.gpt_neox.final_layer_norm.weight *= 10
    found = ablation_effects(model, TEXTS, target=17, against=4, heads=[(2, 1)], reference=TEXTS)
    np.testing.assert_allclose(found["direct"], found["total"], rtol=4e-2, atol=1e-4)
    assert found["total"].abs().min() > 1e-3


def test_the_largest_heads_are_chosen(tiny):
    model = tiny("llama")
    found = ablation_effects(model, TEXTS, target=17, largest=3, reference=TEXTS)
    parts = logit_attribution(model, TEXTS, target=17).heads()
    expected = parts["value"].abs().groupby([parts["layer"], parts["head"]]).mean().nlargest(3).index
    assert list(dict.fromkeys(zip(found["layer"], found["head"], strict=True))) == list(expected)
    with pytest.raises(ValueError, match="target=None: name the token"):
        ablation_effects(model, TEXTS, target=None)
    with pytest.raises(IndexError, match="head 4 is out of range"):
        ablation_effects(model, TEXTS, target=1, heads=[(0, 4)])


def test_a_mean_over_a_few_prompts_is_told(tiny):
    model = tiny("llama")
    settings = {"target": 17, "heads": [(1, 2)]}
    with pytest.warns(UserWarning, match=r"its mean over the prompts' own 10 tokens.*Give reference= ordinary texts"):
        own = ablation_effects(model, TEXTS, **settings)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        given = ablation_effects(model, TEXTS, reference=TEXTS, **settings)
        many = np.random.default_rng(0).integers(3, 120, size=(9, 30)).tolist()
        other = ablation_effects(model, TEXTS, reference=many, **settings)
        assert len(ablation_effects(model, many, **settings)) == 9
    pd.testing.assert_frame_equal(own, given)
    assert (own["total"] - other["total"]).abs().max() > 1e-4


def test_a_token_is_not_its_own_mean(tiny):
    model = tiny("llama")
    settings = {"target": 17, "heads": [(1, 2)]}
    for texts, count in (([[5]], "0 tokens"), ([[5], [6]], "0 tokens"), ([[5, 6]], "1 token")):
        with pytest.raises(ValueError, match=f"texts hold {count} behind the first of each text.*Give reference="):
            ablation_effects(model, texts, **settings)
        with pytest.raises(ValueError, match=f"reference holds {count} behind the first"):
            ablation_effects(model, TEXTS, reference=texts, **settings)
    assert ablation_effects(model, [[5]], reference=TEXTS, **settings)["total"].abs()[0] > 1e-4


def test_short_texts_do_not_enter_the_mean_by_their_batch(tiny):
    """First tokens are left out, also where a batch holds nothing else."""
    model = tiny("llama")
    settings = {"target": 17, "heads": [(1, 2)]}
    long = np.random.default_rng(1).integers(3, 120, size=(4, 60)).tolist()
    with_ones = ablation_effects(model, TEXTS, reference=[*long, *[[3 + n % 100] for n in range(9000)]], **settings)
    pd.testing.assert_frame_equal(with_ones, ablation_effects(model, TEXTS, reference=long, **settings), rtol=1e-4)


def test_heads_by_name_and_what_is_no_head(tiny):
    model = tiny("llama")
    settings = {"target": 17, "reference": TEXTS}
    found = [ablation_effects(model, TEXTS, heads=heads, **settings) for heads in (["z.1.2"], [Site("z", 1, 2)])]
    for named in found:
        pd.testing.assert_frame_equal(named, ablation_effects(model, TEXTS, heads=[(1, 2)], **settings))
    for wrong in ("z.1", "resid_post.1", "q.1.2"):
        with pytest.raises(ValueError, match=rf"heads holds '{wrong}': give \(layer, head\), or a head's z such as"):
            ablation_effects(model, TEXTS, heads=[wrong], **settings)
    for other in (3, (1, 2, 3), (1.0, 2), None):
        with pytest.raises(TypeError, match=r"heads holds .*: give \(layer, head\), or a head's z such as"):
            ablation_effects(model, TEXTS, heads=[other], **settings)
