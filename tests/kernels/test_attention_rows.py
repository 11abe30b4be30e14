import pytest
import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.models.gemma2 import modeling_gemma2
from transformers.models.gpt_oss import modeling_gpt_oss
from transformers.models.granite_swa import modeling_granite_swa
from transformers.models.llama import modeling_llama
from transformers.models.t5 import modeling_t5

from microtome.kernels.attention_rows import attention_rows

HEADS, KV_HEADS, QUERIES, KEYS, WIDTH = 6, 2, 5, 7, 4
SCALING = WIDTH**-0.5


@pytest.fixture
def qkv():
    generator = torch.Generator().manual_seed(0)
    q = 2 * torch.randn(3, HEADS, QUERIES, WIDTH, generator=generator)
    k, v = (2 * torch.randn(3, KV_HEADS, KEYS, WIDTH, generator=generator) for _ in range(2))
    return q, k, v


@pytest.fixture
def attends():
    """A bool mask: causal with keys that end with the queries, two padded keys on the left of text 0."""
    mask = torch.ones(3, 1, QUERIES, KEYS, dtype=torch.bool).tril(KEYS - QUERIES)
    mask[0, ..., :2] = False
    return mask


class Attention(torch.nn.Module):
    """What eager functions read off the attention module."""

    num_key_value_groups = HEADS // KV_HEADS
    head_dim = WIDTH
    is_causal = True
    sinks = torch.linspace(-1, 2, HEADS)


def additive(mask):
    return torch.where(mask, 0.0, torch.finfo(torch.float32).min)


def brute_force(q, k, allowed, scaling=SCALING):
    """The definition, one number at a time in float64."""
    probabilities = torch.zeros(q.shape[0], q.shape[1], q.shape[2], k.shape[2], dtype=torch.float64)
    group = q.shape[1] // k.shape[1]
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            for i in range(q.shape[2]):
                scores = [float(scaling * q[b, h, i].double() @ key.double()) for key in k[b, h // group]]
                weights = torch.tensor(scores, dtype=torch.float64).exp() * allowed[b, 0, i]
                probabilities[b, h, i] = weights / weights.sum()
    return probabilities


def test_rows_sum_to_one_and_what_is_masked_is_zero(qkv, attends):
    q, k, _ = qkv
    rows = attention_rows(q, k, attends, scaling=SCALING)
    torch.testing.assert_close(rows.sum(-1), torch.ones(3, HEADS, QUERIES))
    assert (rows[~attends.expand_as(rows)] == 0).all()


def test_adding_a_constant_to_the_scores_of_a_row_changes_nothing(qkv, attends):
    q, k, _ = qkv
    bias = torch.arange(QUERIES)[None, None, :, None].expand(1, 1, QUERIES, KEYS).float()
    with_bias = attention_rows(q, k, attends, scaling=SCALING, position_bias=bias)
    torch.testing.assert_close(with_bias, attention_rows(q, k, attends, scaling=SCALING), rtol=0, atol=1e-6)


def test_chosen_heads_and_rows_are_those_of_the_whole_matrix(qkv, attends):
    q, k, _ = qkv
    bias = torch.randn(1, HEADS, QUERIES, KEYS, generator=torch.Generator().manual_seed(1))
    options = {"scaling": SCALING, "softcap": 3.0, "sinks": torch.linspace(-1, 1, HEADS), "position_bias": bias}
    whole = attention_rows(q, k, attends, **options)
    heads = [5, 1, 2]
    some = attention_rows(q, k, attends, heads=heads, queries=torch.tensor([4, 1]), **options)
    torch.testing.assert_close(some, whole[:, heads][:, :, [4, 1]], rtol=0, atol=1e-6)
    per_text = attention_rows(q, k, attends, heads=heads, queries=torch.tensor([[0], [2], [4]]), **options)
    expected = torch.stack([whole[0, heads, 0:1], whole[1, heads, 2:3], whole[2, heads, 4:5]])
    torch.testing.assert_close(per_text, expected, rtol=0, atol=1e-6)


def test_agrees_with_the_definition(qkv, attends):
    q, k, _ = qkv
    expected = brute_force(q, k, attends)
    torch.testing.assert_close(attention_rows(q, k, attends, scaling=SCALING).double(), expected, rtol=0, atol=1e-6)
    in_double = attention_rows(q.double(), k.double(), attends, scaling=SCALING)
    torch.testing.assert_close(in_double, expected, rtol=0, atol=1e-14)


def test_agrees_with_eager_attention_of_transformers(qkv, attends):
    q, k, v = qkv
    _, expected = modeling_llama.eager_attention_forward(Attention(), q, k, v, additive(attends), scaling=SCALING)
    for mask in (attends, additive(attends)):
        rows = attention_rows(q, k, mask, scaling=SCALING)
        torch.testing.assert_close(rows, expected, rtol=0, atol=1e-6)


def test_agrees_with_eager_attention_with_softcap(qkv, attends):
    q, k, v = qkv
    _, expected = modeling_gemma2.eager_attention_forward(
        Attention(), q, k, v, additive(attends), scaling=SCALING, softcap=2.0
    )
    rows = attention_rows(q, k, attends, scaling=SCALING, softcap=2.0)
    torch.testing.assert_close(rows, expected, rtol=0, atol=1e-6)


def test_agrees_with_eager_attention_with_sinks(qkv, attends):
    q, k, v = qkv
    _, expected = modeling_gpt_oss.eager_attention_forward(Attention(), q, k, v, additive(attends), scaling=SCALING)
    rows = attention_rows(q, k, attends, scaling=SCALING, sinks=Attention.sinks)
    torch.testing.assert_close(rows, expected, rtol=0, atol=1e-6)
    per_query = Attention.sinks.view(1, -1, 1, 1).expand(3, -1, QUERIES, 1)
    rows = attention_rows(q, k, attends, scaling=SCALING, sinks=per_query, heads=[3], queries=torch.tensor([2]))
    torch.testing.assert_close(rows, expected[:, [3], 2:3], rtol=0, atol=1e-6)


def test_rows_with_sinks_times_v_are_z_where_the_sink_scales_z(qkv, attends):
    q, k, v = qkv
    z, _ = modeling_granite_swa.eager_attention_forward(Attention(), q, k, v, additive(attends), scaling=SCALING)
    rows = attention_rows(q, k, attends, scaling=SCALING, sinks=Attention.sinks)
    torch.testing.assert_close(rows @ v.repeat_interleave(3, 1), z.transpose(1, 2), rtol=0, atol=1e-5)


def test_agrees_with_eager_attention_with_position_bias(qkv, attends):
    q, k, v = qkv
    k, v = (x.repeat_interleave(HEADS // KV_HEADS, 1) for x in (k, v))
    bias = torch.randn(1, HEADS, QUERIES, KEYS, generator=torch.Generator().manual_seed(1))
    _, expected = modeling_t5.eager_attention_forward(
        Attention(), q, k, v, additive(attends), scaling=1.0, position_bias=bias
    )
    rows = attention_rows(q, k, additive(attends), scaling=1.0, position_bias=bias)
    torch.testing.assert_close(rows, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("masked", [True, False], ids=["mask", "causal flag"])
def test_rows_times_v_are_the_output_of_sdpa(qkv, attends, masked):
    q, k, v = qkv
    mask = attends if masked else None
    z, _ = sdpa_attention_forward(Attention(), q, k, v, mask, scaling=SCALING)
    rows = attention_rows(q, k, mask, scaling=SCALING, is_causal=not masked)
    torch.testing.assert_close(rows @ v.repeat_interleave(3, 1), z.transpose(1, 2), rtol=0, atol=1e-5)


def test_flags_and_masks_say_the_same(qkv):
    q, k, _ = qkv
    real = torch.ones(3, KEYS, dtype=torch.bool)
    real[1, 5:] = False
    distance = (torch.arange(QUERIES) + KEYS - QUERIES)[:, None] - torch.arange(KEYS)
    window = (distance >= 0) & (distance < 3)
    by_flags = attention_rows(
        q, k, real, scaling=SCALING, is_causal=True, causal_offset=KEYS - QUERIES, sliding_window=3
    )
    by_mask = attention_rows(q, k, window & real[:, None, None], scaling=SCALING)
    torch.testing.assert_close(by_flags, by_mask, rtol=0, atol=0)
    assert not torch.allclose(by_flags, attention_rows(q, k, real, scaling=SCALING))


def test_a_query_with_nothing_to_attend_to(qkv, attends):
    q, k, _ = qkv
    attends[2, :, 1] = False
    q.requires_grad_()
    rows = attention_rows(q, k, attends, scaling=SCALING)
    assert (rows[2, :, 1] == 0).all()
    infinite = torch.where(attends, 0.0, -torch.inf)
    by_adding = attention_rows(q, k, infinite, scaling=SCALING)
    torch.testing.assert_close(by_adding, rows, rtol=0, atol=1e-6)
    by_adding.square().sum().backward()
    assert q.grad.isfinite().all()
    uniform = attention_rows(q, k, additive(attends), scaling=SCALING)[2, :, 1]
    torch.testing.assert_close(uniform, torch.full_like(uniform, 1 / KEYS))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_computed_in_float32(qkv, attends, dtype):
    q, k, _ = (x.to(dtype) for x in qkv)
    rows = attention_rows(q, k, attends, scaling=SCALING)
    assert rows.dtype == torch.float32
    torch.testing.assert_close(rows.double(), brute_force(q, k, attends), rtol=0, atol=1e-6)


def test_errors_say_what_is_there(qkv, attends):
    q, k, _ = qkv
    with pytest.raises(ValueError, match=r"Heads \[6\] are out of range: there are 6 heads, 0 to 5"):
        attention_rows(q, k, attends, scaling=SCALING, heads=[0, 6])
    with pytest.raises(ValueError, match=r"Query rows \[-1\] are out of range: there are 5, 0 to 4"):
        attention_rows(q, k, attends, scaling=SCALING, queries=torch.tensor([-1]))
    with pytest.raises(ValueError, match="5 query heads cannot share 2 key-value heads"):
        attention_rows(q[:, :5], k, attends, scaling=SCALING)
    with pytest.raises(ValueError, match="covers 6 keys, there are 7"):
        attention_rows(q, k, attends[..., :6], scaling=SCALING)
    with pytest.raises(ValueError, match=r"shape \(3, 5, 7\); expected \[batch, key\] or \[batch or 1, head or 1"):
        attention_rows(q, k, attends[:, 0], scaling=SCALING)
