import pytest
import torch
from transformers.models.gpt_oss import modeling_gpt_oss

from microtome.kernels import attention_statistics_blocked
from microtome.kernels.attention_rows import attention_rows
from microtome.kernels.attention_statistics import TOLERANCE, KeyRule, attention_statistics

HEADS, KV_HEADS, WIDTH = 6, 2, 8
RELATIVE = ("log_sum_exp", "entropy", "mean_distance", "z")


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Blocks of 5 to 7 queries, so that short tests cross many of them."""
    for name, value in (("TILE_BYTES", 4 * 6 * 7 * 20), ("LEAST_ROWS", 5), ("MOST_ROWS", 7)):
        monkeypatch.setattr(attention_statistics_blocked, name, value)


def drawn(queries=23, keys=23, *, batch=3, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    q = 2 * torch.randn(batch, HEADS, queries, WIDTH, generator=generator)
    k, v = (torch.randn(batch, KV_HEADS, keys, WIDTH, generator=generator) for _ in range(2))
    return q.to(dtype), k.to(dtype), v.to(dtype)


def asked(queries=23, keys=23, *, batch=3, seed=1):
    """Windows, two rules and three marked keys, some of them outside."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(-1, 4, (batch, max(queries, keys)), generator=generator)
    shifted = torch.nn.functional.pad(tokens, (1, 0), value=-1)
    rules = [
        KeyRule(tokens[:, :queries], tokens[:, :keys]),
        KeyRule(tokens[:, :queries], shifted[:, :keys], exclude_self=False, only_before=False),
    ]
    marked = torch.randint(-2, keys + 3, (batch, queries, 3), generator=generator)
    return {"scaling": WIDTH**-0.5, "windows": [1, 4, 16], "rules": rules, "marked": marked}


def padding(side, keys=23):
    mask = torch.ones(3, keys, dtype=torch.bool)
    mask[0, -9:] = mask[1, -2:] = False
    return mask.flip(1) if side == "left" else mask


def causal(queries=23, keys=23):
    return torch.ones(1, 1, queries, keys, dtype=torch.bool).tril(keys - queries)


BIAS = torch.randn(1, HEADS, 23, 23, generator=torch.Generator().manual_seed(5))
CASES = {
    "bidirectional": (None, {}),
    "causal": (None, {"is_causal": True}),
    "causal by mask": (causal(), {}),
    "sliding": (None, {"is_causal": True, "sliding_window": 6}),
    "sliding both ways": (None, {"sliding_window": 6}),
    "right padding": (padding("right"), {"is_causal": True}),
    "left padding": (padding("left"), {"is_causal": True, "first_key": torch.tensor([9, 2, 0])}),
    "left padding, 4-D": (padding("left")[:, None, None] & causal(), {"first_key": torch.tensor([9, 2, 0])}),
    "padding both ways": (padding("right"), {}),
    "additive": (torch.where(causal(), 0.0, -torch.inf), {}),
    "additive, finite": (torch.where(causal() & padding("left")[:, None, None], 0.0, -1e9), {}),
    "everything masked": (torch.zeros(3, 23, dtype=torch.bool), {"is_causal": True}),
    "softcap": (None, {"is_causal": True, "softcap": 2.0}),
    "bias": (None, {"is_causal": True, "position_bias": BIAS}),
    "bias of keys": (None, {"position_bias": BIAS[:, :, :1]}),
    "alibi": (None, {"is_causal": True, "alibi_slopes": torch.linspace(0.1, 1, HEADS)}),
    "alibi both ways": (None, {"alibi_slopes": torch.linspace(0.1, 1, HEADS)}),
    "sinks": (padding("left"), {"is_causal": True, "sinks": torch.linspace(-1, 2, HEADS)}),
    "sinks per query": (None, {"sinks": BIAS[..., :1].expand(3, -1, -1, -1)}),
    "sink and sliding": (None, {"is_causal": True, "sliding_window": 3, "sinks": torch.linspace(-1, 9, HEADS)}),
}


ROUNDED = ("additive, finite",)


def differences(found, expected):
    """The largest difference of each field, relative where sizes differ; NaN must meet NaN."""
    result = {}
    for name, value in vars(expected).items():
        got = getattr(found, name).double()
        want = value.double()
        assert got.shape == want.shape, name
        same = (got == want) | (got.isnan() & want.isnan())
        size = want.abs().clamp(min=1) if name in RELATIVE else 1.0
        result[name] = (
            float(torch.where(same, 0.0, (got - want).abs() / size).nan_to_num(nan=torch.inf).max())
            if (want.numel())
            else 0.0
        )
    return result


@pytest.mark.parametrize("case", CASES)
def test_the_blocked_form_is_the_definition(case):
    mask, options = CASES[case]
    settings = asked() | options
    exact = attention_statistics(*map(torch.Tensor.double, drawn()), mask, **settings, form="reference")
    # beside a large finite mask float32 forgets the scores
    expected = attention_statistics(*drawn(), mask, **settings, form="reference") if case in ROUNDED else exact
    for form in ("reference", "blocked"):
        found = attention_statistics(*drawn(), mask, **settings, form=form)
        worst = differences(found, expected)
        assert max(worst.values()) < TOLERANCE[torch.float32], (form, worst)
    found = attention_statistics(*map(torch.Tensor.double, drawn()), mask, **settings)
    assert max(differences(found, exact).values()) < (1e-6 if case in ROUNDED else TOLERANCE[torch.float64])


@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (1, 23), (9, 23), (23, 9), (40, 40), (2, 31)])
@pytest.mark.parametrize("ends_together", [False, True])
def test_other_sizes_and_offsets(queries, keys, ends_together):
    q, k, v = drawn(queries, keys)
    settings = asked(queries, keys) | {"is_causal": True, "causal_offset": keys - queries if ends_together else 0}
    for more in ({}, {"sliding_window": 4}, {"is_causal": False}):
        expected = attention_statistics(q.double(), k.double(), v.double(), None, **settings | more, form="reference")
        found = attention_statistics(q, k, v, None, **settings | more)
        assert max(differences(found, expected).values()) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_computed_in_float32(dtype):
    q, k, v = drawn(dtype=dtype)
    expected = attention_statistics(q.double(), k.double(), v.double(), None, **asked(), form="reference")
    found = attention_statistics(q, k, v, None, **asked())
    assert found.entropy.dtype == torch.float32
    assert max(differences(found, expected).values()) < TOLERANCE[dtype]


@pytest.mark.parametrize("form", ["reference", "blocked"])
def test_statistics_are_those_of_the_rows(form):
    q, k, v = drawn()
    mask, options = padding("left"), {"is_causal": True, "scaling": 0.3, "softcap": 5.0}
    rows = attention_rows(q, k, mask, **options)
    first = torch.tensor([9, 2, 0])
    found = attention_statistics(q, k, v, mask, **options, windows=[3], first_key=first, form=form)
    values = v.repeat_interleave(HEADS // KV_HEADS, 1)
    torch.testing.assert_close(found.z, rows @ values)
    torch.testing.assert_close(found.largest, rows.amax(-1))
    torch.testing.assert_close(found.entropy, -torch.xlogy(rows, rows).sum(-1), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(found.on_self, rows.diagonal(dim1=-2, dim2=-1))
    torch.testing.assert_close(found.on_previous[..., 1:], rows.diagonal(-1, dim1=-2, dim2=-1))
    torch.testing.assert_close(found.on_first, torch.stack([row[..., f] for row, f in zip(rows, first, strict=True)]))
    torch.testing.assert_close(found.within[0], (rows * torch.ones(23, 23).tril().triu(-2)).sum(-1))
    assert (found.log_sum_exp[0, :, :9] == -torch.inf).all()
    for name in ("z", "entropy", "largest", "total", "mean_distance", "on_self"):
        assert (getattr(found, name)[0, :, :9] == 0).all(), name


def test_rules_are_duplicates_and_induction_targets():
    q, k, _ = drawn(6, 6, batch=1)
    tokens = torch.tensor([[7, 8, 7, 9, 8, 7]])
    before = torch.tensor([[-1, 7, 8, 7, 9, 8]])
    rows = attention_rows(q, k, None, scaling=1.0, is_causal=True)[0]
    rules = [KeyRule(tokens, tokens), KeyRule(tokens, before)]
    found = attention_statistics(q, k, None, None, scaling=1.0, is_causal=True, with_z=False, rules=rules)
    assert found.z is None
    torch.testing.assert_close(found.on_rules[0, 0, :, 5], rows[:, 5, 0] + rows[:, 5, 2])
    torch.testing.assert_close(found.on_rules[0, 0, :, 4], rows[:, 4, 1])
    torch.testing.assert_close(found.on_rules[1, 0, :, 5], rows[:, 5, 1] + rows[:, 5, 3])
    assert (found.on_rules[:, 0, :, [0, 1, 3]] == 0).all()


def test_the_sink_of_gpt_oss():
    q, k, v = drawn()

    class Attention(torch.nn.Module):
        num_key_value_groups = HEADS // KV_HEADS
        sinks = torch.linspace(-1, 2, HEADS)

    mask = torch.where(causal(), 0.0, torch.finfo(torch.float32).min)
    z, weights = modeling_gpt_oss.eager_attention_forward(Attention(), q, k, v, mask, scaling=0.4)
    found = attention_statistics(q, k, v, mask, scaling=0.4, sinks=Attention.sinks)
    torch.testing.assert_close(found.z.transpose(1, 2), z)
    torch.testing.assert_close(found.total, weights.sum(-1))


@pytest.mark.parametrize("form", ["reference", "blocked"])
def test_nan_stays_in_its_rows(form):
    q, k, v = drawn()
    q[1, 2, 5] = torch.nan
    found = attention_statistics(q, k, v, None, is_causal=True, **asked(), form=form)
    bad = found.entropy.isnan()
    assert bad[1, 2, 5]
    assert bad.sum() == 1
    for name in ("log_sum_exp", "largest", "total", "mean_distance", "on_self", "on_previous"):
        assert torch.equal(getattr(found, name).isnan(), bad), name


def test_equal_scores_are_uniform():
    q, k, v = drawn()
    found = attention_statistics(q * 0, k, v, None, is_causal=True, **asked())
    count = torch.arange(1.0, 24.0).expand(3, HEADS, -1)
    torch.testing.assert_close(found.entropy, count.log())
    torch.testing.assert_close(found.largest, 1 / count)
    torch.testing.assert_close(found.mean_distance, (count - 1) / 2)


def test_far_previous_tokens_have_distance_one():
    """Distances keep their digits at the end of a long text."""
    q = torch.zeros(1, 1, 1500, 4)
    bias = 30 * torch.eye(1500).roll(-1, 1)[None, None]
    found = attention_statistics(q, q, q, None, scaling=1.0, is_causal=True, position_bias=bias)
    torch.testing.assert_close(found.mean_distance[0, 0, 1:], torch.ones(1499), atol=2e-5, rtol=0)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"k": torch.zeros(3, 4, 23, WIDTH), "v": torch.zeros(3, 4, 23, WIDTH)}, "6 query heads cannot share 4"),
        ({"v": None}, "z needs values"),
        ({"mask": torch.ones(3, 1, 23, 22)}, "The mask has shape"),
        ({"mask": torch.ones(23, 23, 23)}, "The mask has shape"),
        ({"position_bias": torch.ones(3, 2, 23, 23)}, "position_bias has shape"),
        ({"sinks": torch.ones(5)}, "sinks has shape"),
        ({"windows": [0]}, "windows has 0"),
        ({"form": "fast"}, "expected auto, reference or blocked"),
    ],
)
def test_what_does_not_fit_is_refused(change, says):
    q, k, v = drawn()
    given = {"q": q, "k": k, "v": v, "mask": None, "scaling": 1.0} | change
    with pytest.raises(ValueError, match=says):
        attention_statistics(given.pop("q"), given.pop("k"), given.pop("v"), given.pop("mask"), **given)
