"""The attention lens: the small form says what the original says, padding never counts, starts are what they claim."""

import numpy as np
import pytest
import torch
from sklearn.linear_model import Ridge
from torch import nn

from microtome.capture.models import LoadedModel
from microtome.capture.taps import taps
from microtome.kernels.vocabulary_statistics import vocabulary_kl_learned
from microtome.lenses.attention_lens import AttentionLens
from microtome.lenses.attention_lens_loss import best_bias, readout_kl, teacher_blocks
from microtome.lenses.attention_lens_readout import Readout, as_lens, readout_input, readout_shape
from microtome.lenses.attention_lens_rows import last_real_positions, lens_rows
from microtome.lenses.attention_lens_start import (
    closed_form_map,
    closed_form_readout,
    folded_unembedding,
    peer_r2,
    plain_bias,
    plain_weight,
)
from microtome.lenses.head_writes import head_maps
from microtome.lenses.pair_moments import PairMoments
from microtome.lenses.unembedding import Unembedding, unembedding_of

KINDS = ["llama", "gpt2", "neox", "neox_sequential", "gemma2", "qwen3"]
TEXTS = [
    "the cat sat on the red tree .",
    "a dog",
    "she made it , and they liked it so very fast !",
    "two",
    "we ran to you",
]


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


@pytest.fixture(scope="module")
def models(tiny, word_tokenizer) -> dict[str, LoadedModel]:
    return {kind: LoadedModel.from_module(tiny(kind), tokenizer=word_tokenizer, name=kind) for kind in KINDS}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", ["joint", "independent", "shared", "residual"])
def test_small_form_says_what_the_original_form_says(models, kind: str, mode: str) -> None:
    rows = lens_rows(models[kind], TEXTS, 1)
    writes, _ = head_maps(models[kind], 1)
    end = unembedding_of(models[kind])
    shapes = readout_shape(mode, "original", 4, 8, 32, end.vocab)
    original = Readout(mode, "original", 0.3 * random(*shapes[0]), random(*shapes[1], seed=1))
    lens = as_lens(original, writes, layer=1, mean=torch.zeros(4, 8), peer_r2=torch.zeros(4))
    reads = readout_input(rows.mixed, writes, mode, "original")
    expected = torch.einsum("gtw,gwv->gtv", reads, original.weight) + original.bias.sum(1)[:, None]
    if mode == "independent":
        found = torch.stack([lens.head_logits(rows.mixed, head, with_bias=True) for head in range(4)])
    else:
        offset = torch.zeros(len(rows), end.vocab) if mode == "residual" else None
        found = lens.logits(rows.mixed, offset)[None]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    if mode == "joint":
        again = AttentionLens.from_original(original.weight[0].unflatten(0, (4, 32)), original.bias[0], writes, layer=1)
        torch.testing.assert_close(again.logits(rows.mixed), found[0], rtol=1e-4, atol=1e-4)
        small, _ = readout_shape(mode, "small", 4, 8, 32, end.vocab)
        # d_model / d_head = heads here, so the biases shrink by the same number
        assert original.parameters == 4 * lens.parameters
        assert torch.Size(small).numel() == lens.weight.numel()


@pytest.mark.parametrize("kind", KINDS)
def test_head_writes_are_what_the_model_adds(models, kind: str) -> None:
    """Summed with b_O they are the attention's output; in Gemma 2, before the norm behind the branch."""
    model = models[kind]
    rows = lens_rows(model, TEXTS[:1], 1, positions="every")
    writes, bias = head_maps(model, 1)
    total = readout_input(rows.mixed, writes, "shared", "small")[0] + bias
    with taps(model, ["attn_out.1"]) as tape:
        model.module(model.tokenizer(TEXTS[0], return_tensors="pt").input_ids)
    expected = tape["attn_out.1"][0]
    if kind == "gemma2":
        total = model.module.model.layers[1].post_attention_layernorm.forward(total)
    torch.testing.assert_close(total, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_last_real_token_whatever_the_padding(models, kind: str, side: str) -> None:
    """Rows of one big batch, of single texts, and by hand from a batch padded on either side are the same."""
    model = models[kind]
    batched = lens_rows(model, TEXTS, 1, positions="last")
    alone = lens_rows(model, TEXTS, 1, positions="last", max_tokens=1)
    ids = [model.tokenizer(text).input_ids for text in TEXTS]
    assert batched.token_ids.tolist() == [each[-1] for each in ids]
    assert (batched.token_ids != 0).all()
    longest = max(map(len, ids))
    fill = [[0] * (longest - len(each)) for each in ids]
    padded = torch.tensor([pad + each if side == "left" else each + pad for pad, each in zip(fill, ids, strict=True)])
    mask = (padded != 0).long()
    places = (mask.cumsum(1) - 1).clamp(min=0)
    with taps(model, ["z.1", "resid_post.2"]) as tape, torch.no_grad():
        model.module(input_ids=padded, attention_mask=mask, position_ids=places)
    row, last = torch.arange(len(ids)), last_real_positions(mask)
    by_hand = tape["z.1"][row, last]
    torch.testing.assert_close(batched.mixed, by_hand, rtol=1e-4, atol=1e-5)
    end, weight = unembedding_of(model), 0.3 * random(1, 32, 120)
    bias = torch.zeros(1, 1, 120)
    losses = [
        readout_kl(rows.mixed.flatten(1)[None], weight, bias, rows.normed, end).mean() for rows in (batched, alone)
    ]
    by_hand_normed = end.normed(tape["resid_post.2"][row, last])
    losses.append(readout_kl(by_hand.flatten(1)[None], weight, bias, by_hand_normed, end).mean())
    torch.testing.assert_close(torch.stack(losses), losses[0].expand(3), rtol=1e-5, atol=1e-6)


def test_a_mask_without_a_real_token_is_refused() -> None:
    assert last_real_positions(torch.tensor([[0, 1, 1, 0], [1, 0, 0, 0], [0, 0, 0, 1]])).tolist() == [2, 0, 3]
    with pytest.raises(ValueError, match="row 1 of the mask is padding alone"):
        last_real_positions(torch.tensor([[1, 1], [0, 0]]))


def test_rows_leave_out_position_0_and_special_tokens(models) -> None:
    model = models["llama"]
    rows = lens_rows(model, TEXTS, 1, with_stream=True)
    assert rows.position.min() == 1
    assert rows.text.unique().tolist() == [0, 1, 2, 4]
    assert (rows.document == rows.text).all()
    ids = model.tokenizer(TEXTS[4]).input_ids
    assert rows.token_ids[rows.text == 4].tolist() == ids[1:]
    assert rows.targets[rows.text == 4].tolist() == [*ids[2:], -1]
    with taps(model, ["resid_pre.1"]) as tape:
        model.module(model.tokenizer(TEXTS[0], return_tensors="pt").input_ids)
    expected = unembedding_of(model).normed(tape["resid_pre.1"][0, 1:])
    torch.testing.assert_close(rows.stream[rows.text == 0], expected, rtol=1e-4, atol=1e-5)
    few = lens_rows(model, TEXTS, 1, max_rows=5, seed=3)
    assert len(few) == 5
    every = lens_rows(model, TEXTS, 1, positions="every")
    assert len(every) == sum(len(model.tokenizer(text).input_ids) for text in TEXTS)
    # <s> and </s> are 1 and 2
    assert lens_rows(model, [[1, 5, 2, 6, 7]], 1).position.tolist() == [1, 3, 4]


def test_split_keeps_documents_whole(models) -> None:
    rows = lens_rows(models["llama"], TEXTS * 4, 1, documents=[i // 2 for i in range(20)], positions="last")
    shards = rows.split(seed=1)
    documents = [set(part.document.tolist()) for part in shards.values()]
    assert sum(map(len, shards.values())) == 20
    assert all(a.isdisjoint(b) for i, a in enumerate(documents) for b in documents[:i])
    assert set().union(*documents) == set(range(10))


@pytest.mark.parametrize(("kind", "cap"), [("llama", None), ("gemma2", 30.0)])
@pytest.mark.parametrize("block_bytes", [120 * 4, 120 * 4 * 3, 2**26])
def test_loss_and_gradient_are_autograds(models, monkeypatch, kind: str, cap: float | None, block_bytes: int) -> None:
    """All heads at once, in any blocks of rows, is what autograd gives for the heads one by one."""
    monkeypatch.setattr("microtome.lenses.attention_lens_loss.BLOCK_BYTES", block_bytes)
    end = unembedding_of(models[kind])
    assert end.cap == cap
    rows = lens_rows(models[kind], TEXTS, 1)
    heads = [0.3 * random(8, 120, seed=head) for head in range(4)]
    leaves = [head.clone().requires_grad_() for head in heads]
    bias = random(120, seed=9).requires_grad_()
    logits = sum(rows.mixed[:, h] @ leaves[h] for h in range(4)) + bias
    target = end.logits_of_normed(rows.normed).log_softmax(-1)
    expected = (target.exp() * (target - logits.log_softmax(-1))).sum(-1)
    expected.mean().backward()
    weight, shares = torch.cat(heads)[None], bias.detach()[None, None]
    gradients = torch.zeros_like(weight), torch.zeros_like(shares)
    kl = readout_kl(
        rows.mixed.flatten(1)[None],
        weight,
        shares,
        rows.normed,
        end,
        weight_gradient=gradients[0],
        bias_gradient=gradients[1],
    )
    torch.testing.assert_close(kl[0], expected.detach(), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(gradients[0][0], torch.cat([leaf.grad for leaf in leaves]), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(gradients[1][0, 0], bias.grad, rtol=1e-4, atol=1e-5)
    kernel = vocabulary_kl_learned(
        rows.mixed.flatten(1), weight[0].T, shares[0, 0], rows.normed, end.weight, factor=end.factor, cap=end.cap
    )
    torch.testing.assert_close(kl[0], kernel, rtol=1e-4, atol=1e-4)


def test_only_the_sum_of_the_biases_counts(models) -> None:
    end = unembedding_of(models["gpt2"])
    rows = lens_rows(models["gpt2"], TEXTS, 1)
    weight, bias = 0.3 * random(1, 32, 120), random(1, 4, 120)
    args = rows.mixed.flatten(1)[None], weight
    kl = readout_kl(*args, bias, rows.normed, end)
    torch.testing.assert_close(readout_kl(*args, bias[:, [2, 0, 3, 1]], rows.normed, end), kl)
    assert (readout_kl(*args, bias * 1.5, rows.normed, end) - kl).abs().max() > 0.01


def test_best_bias_is_the_best(models) -> None:
    """The log of the mean distribution beats any bias that training finds; the same on top of a residual lens."""
    end = unembedding_of(models["llama"])
    rows = lens_rows(models["llama"], TEXTS, 1, with_stream=True)
    for stream in (None, rows.stream):
        bias = best_bias(rows.normed, end, stream=stream, rounds=60)
        weight, read = torch.zeros(1, 32, 120), rows.mixed.flatten(1)[None]
        best = readout_kl(read, weight, bias[None, None], rows.normed, end, stream=stream).mean()
        learned = torch.zeros(120, requires_grad=True)
        offset = 0 if stream is None else end.logits_of_normed(stream)
        target = end.logits_of_normed(rows.normed).softmax(-1)
        optimiser = torch.optim.Adam([learned], lr=0.05)
        for _ in range(400):
            optimiser.zero_grad()
            loss = torch.nn.functional.kl_div(
                (offset + learned.expand(len(rows), -1)).log_softmax(-1), target, reduction="batchmean"
            )
            loss.backward()
            optimiser.step()
        assert float(best) == pytest.approx(float(loss.detach()), abs=1e-3)


@pytest.mark.parametrize("kind", KINDS)
def test_folded_unembedding_is_the_norm_without_its_scale(models, kind: str) -> None:
    """Logits of a stream are those of the folded weight, once the stream is divided by its own scale."""
    end = unembedding_of(models[kind])
    folded = folded_unembedding(end)
    stream = random(5, 32)
    spread = stream - stream.mean(-1, keepdim=True) if type(end.norm) is nn.LayerNorm else stream
    scaled = stream / spread.square().mean(-1, keepdim=True).sqrt()
    uncapped = Unembedding(end.norm, end.weight, end.bias, end.factor).logits(stream)
    torch.testing.assert_close(scaled @ folded.weight + folded.bias, uncapped, rtol=1e-3, atol=1e-3)


def test_a_norm_of_another_kind_is_refused() -> None:
    class Mixing(nn.Module):
        def forward(self, x):
            return x.cumsum(-1)

    with pytest.raises(ValueError, match="is neither RMSNorm nor LayerNorm"):
        folded_unembedding(Unembedding(Mixing(), random(10, 6)))


def test_plain_lens_of_a_model_of_one_attention_layer_is_exact(models) -> None:
    """Without norm and MLP, logits = (r_0 + sum of o_h + b_O) W_U + b_U: W_h = W_U and r_0 W_U added are the model."""
    rows = lens_rows(models["gpt2"], TEXTS, 1)
    writes, bias = head_maps(models["gpt2"], 1)
    end = Unembedding(None, random(120, 32), random(120, seed=1))
    entering = random(len(rows), 32, seed=2)
    leaving = entering + readout_input(rows.mixed, writes, "shared", "small")[0] + bias
    folded = folded_unembedding(end)
    # b_h = b_U of every head counts b_U once per head, which is the authors' start; here it belongs in once
    constant = plain_bias(1, bias, folded)
    lens = AttentionLens(1, "joint", plain_weight(writes, folded), constant[None], torch.zeros(4, 8), torch.zeros(4))
    found = lens.logits(rows.mixed) + entering @ end.weight.T
    torch.testing.assert_close(found, end.logits(leaving), rtol=1e-4, atol=1e-4)
    without = lens.logits(rows.mixed)
    assert (without - end.logits(leaving)).abs().max() > 1


def test_closed_form_is_scikit_learns_ridge() -> None:
    x, noise = random(200, 12, dtype=torch.float64), random(200, 5, seed=1, dtype=torch.float64)
    y = x @ random(12, 5, seed=2, dtype=torch.float64) + noise + 3
    fit, validation = (PairMoments.from_rows(x[part], y[part]) for part in (slice(0, 120), slice(120, 200)))
    strengths = [1e-6, 1e-3, 0.1, 1.0]
    mapped = closed_form_map(fit, validation, strengths)
    unit = float(fit.xx.trace()) / 12
    errors = []
    for strength in strengths:
        ridge = Ridge(alpha=strength * unit).fit(x[:120].numpy(), y[:120].numpy())
        errors.append(((ridge.predict(x[120:].numpy()) - y[120:].numpy()) ** 2).sum())
    assert mapped.strength == strengths[int(np.argmin(errors))]
    ridge = Ridge(alpha=mapped.strength * unit).fit(x[:120].numpy(), y[:120].numpy())
    np.testing.assert_allclose(mapped.weight.numpy(), ridge.coef_.T, atol=1e-9)
    np.testing.assert_allclose(mapped.intercept.numpy(), ridge.intercept_, atol=1e-9)
    total = ((y[120:] - y[:120].mean(0)) ** 2).sum()
    assert mapped.facts["validation_r2"] == pytest.approx(1 - min(errors) / float(total), abs=1e-9)
    with pytest.raises(ValueError, match="give finite ρ of 0 or more"):
        closed_form_map(fit, validation, [-1.0])
    with pytest.raises(ValueError, match="1 rows cannot be fitted to"):
        closed_form_map(PairMoments.from_rows(x[:1], y[:1]), validation)


def test_closed_form_readout_is_the_map_then_the_unembedding() -> None:
    x, y = random(60, 8), random(60, 6, seed=1)
    moments = PairMoments.from_rows(x, y)
    mapped = closed_form_map(moments, moments)
    end = Unembedding(nn.LayerNorm(6), random(20, 6, seed=2), random(20, seed=3), factor=0.5)
    weight, bias = closed_form_readout(mapped, end, 2)
    assert weight.shape == (2, 4, 20)
    torch.testing.assert_close(x @ weight.flatten(0, 1) + bias, end.logits_of_normed(mapped(x)), rtol=1e-4, atol=1e-4)


def test_peer_r2_finds_the_head_that_its_peers_predict() -> None:
    """Head 2 is a mix of heads 0 and 1 plus noise of known share; head 3 is alone."""
    free = random(4000, 3, 4, dtype=torch.float64)
    mixed = torch.cat([free, torch.zeros(4000, 1, 4, dtype=torch.float64)], 1)
    mixed[:, 3] = mixed[:, 2]
    mixed[:, 2] = (free[:, 0] + free[:, 1]) / 2**0.5 + random(4000, 4, seed=1, dtype=torch.float64)
    parts = [PairMoments.from_rows(v, v) for v in mixed.flatten(1).split([2000, 1000, 1000])]
    found = peer_r2(*parts, 4)
    assert float(found[2]) == pytest.approx(0.5, abs=0.04)
    assert float(found[3]) == pytest.approx(0.0, abs=0.02)
    ridge = Ridge(alpha=1e-6).fit(*(mixed[:2000].numpy().reshape(2000, 16)[:, s] for s in (slice(4, 16), slice(0, 4))))
    guess = ridge.predict(mixed[3000:].numpy().reshape(1000, 16)[:, 4:])
    truth = mixed[3000:, 0].numpy()
    expected = 1 - ((truth - guess) ** 2).sum() / ((truth - mixed[:2000, 0].numpy().mean(0)) ** 2).sum()
    assert float(found[0]) == pytest.approx(expected, abs=0.01)
    assert peer_r2(*[PairMoments.from_rows(v[:, :4], v[:, :4]) for v in mixed.flatten(1).split(1000)[:3]], 1) == 0


def test_centred_lens_has_the_same_distributions(models) -> None:
    lens = AttentionLens(1, "joint", random(4, 8, 120) + 2, random(1, 120) + 5, random(4, 8, seed=1), torch.zeros(4))
    mixed = random(6, 4, 8, seed=2)
    centred = lens.centred()
    torch.testing.assert_close(centred.weight.mean(-1), torch.zeros(4, 8), atol=1e-5, rtol=0)
    torch.testing.assert_close(lens.logits(mixed).softmax(-1), centred.logits(mixed).softmax(-1), rtol=1e-3, atol=1e-6)
    # heads' gauge-fixed logits and the constant add up to the lens
    parts = sum(lens.head_logits(mixed, head) for head in range(4))
    constant = lens.logits(lens.mean[None])
    torch.testing.assert_close((parts + constant).softmax(-1), lens.logits(mixed).softmax(-1), rtol=1e-3, atol=1e-6)


def test_decode_shows_the_caveat_beside_every_head(models) -> None:
    """A lens whose head 2 says "cat" whenever its value rises along one direction says so, with its peer R2."""
    model = models["llama"]
    rows = lens_rows(model, TEXTS, 1, positions="every")
    weight = torch.zeros(4, 8, 120)
    mean, cat = rows.mixed.mean(0), model.tokenizer("cat").input_ids[0]
    target = rows.mixed[(rows.text == 2) & (rows.position == 3)][0, 2] - mean[2]
    weight[2, :, cat] = target
    lens = AttentionLens(1, "joint", weight, torch.zeros(1, 120), mean, torch.tensor([0.1, 0.2, 0.9, float("nan")]))
    readings = lens.decode(model, TEXTS, [3], top=3)
    frame = readings.to_frame()
    row = frame[(frame["text"] == 2) & (frame["head"] == 2)].iloc[0]
    assert row["words"].split()[0] == "cat"
    assert row["peer_r2"] == 0.9
    assert row["token"] == ","
    assert frame["text"].unique().tolist() == [0, 2, 4]
    assert "peer_r2" in repr(readings)
    assert "cannot say whose" in repr(readings)
    assert "cannot say whose" in repr(lens)
    last = lens.decode(model, TEXTS, [-1]).to_frame()
    assert last.equals(lens.decode(model, TEXTS).to_frame())
    plain = lens.decode(model, TEXTS[:1], top=1).plain_ids[0]
    writes, _ = head_maps(model, 1)
    o = readout_input(lens_rows(model, TEXTS[:1], 1, positions="last").mixed, writes, "independent", "original")[:, 0]
    assert plain[:, 0].tolist() == (o @ folded_unembedding(unembedding_of(model)).weight).argmax(-1).tolist()


def test_bad_requests_are_told(models, tiny) -> None:
    model = models["llama"]
    lens = AttentionLens(1, "joint", random(4, 8, 120), random(1, 120), torch.zeros(4, 8), torch.zeros(4))
    with pytest.raises(ValueError, match="no text has them; the longest has 12 tokens"):
        lens.decode(model, TEXTS, [40])
    with pytest.raises(ValueError, match="Give 'last' or a list"):
        lens.decode(model, TEXTS, "first")
    with pytest.raises(ValueError, match="words need a tokenizer"):
        lens.decode(LoadedModel.from_module(tiny("llama"), name="bare"), [[4, 5]])
    with pytest.raises(ValueError, match="Use its own model"):
        AttentionLens(1, "joint", random(4, 8, 99), random(1, 99), torch.zeros(4, 8), torch.zeros(4)).decode(
            model, ["a"]
        )
    with pytest.raises(IndexError, match="head 4 of a layer with heads 0 to 3"):
        lens.head_logits(random(1, 4, 8), 4)
    with pytest.raises(ValueError, match="only their sum is determined"):
        lens.head_logits(random(1, 4, 8), 0, with_bias=True)
    with pytest.raises(ValueError, match="needs the residual lens as offset"):
        lens.logits(random(1, 4, 8), random(1, 120))
    with pytest.raises(ValueError, match="mode='both'"):
        AttentionLens(1, "both", random(4, 8, 9), random(1, 9), torch.zeros(4, 8), torch.zeros(4))
    with pytest.raises(ValueError, match=r"expected \(4, 9\)"):
        AttentionLens(1, "independent", random(4, 8, 9), random(1, 9), torch.zeros(4, 8), torch.zeros(4))
    with pytest.raises(ValueError, match="positions='middle'"):
        lens_rows(model, TEXTS, 1, positions="middle")
    with pytest.raises(ValueError, match="2 documents for 5 texts"):
        lens_rows(model, TEXTS, 1, documents=[0, 1])
    with pytest.raises(ValueError, match="leave no token"):
        lens_rows(model, ["two", "cat"], 1)
    with pytest.raises(ValueError, match="2 documents cannot be in three shards"):
        lens_rows(model, TEXTS[:2], 1).split()
    with pytest.raises(ValueError, match="leave some for the fit"):
        lens_rows(model, TEXTS, 1).split(validation=0.6, test=0.5)


def test_rows_that_do_not_fit_are_refused(models, monkeypatch) -> None:
    monkeypatch.setattr("microtome.lenses.attention_lens_rows.free_memory", lambda: 100)
    with pytest.raises(MemoryError, match="Give max_rows"):
        lens_rows(models["llama"], TEXTS, 1)


def test_teacher_blocks_are_the_models_distribution(models) -> None:
    model = models["gemma2"]
    rows = lens_rows(model, TEXTS[:1], 0, positions="every")
    logits = model.module(model.tokenizer(TEXTS[0], return_tensors="pt").input_ids).logits[0]
    (block,) = teacher_blocks(rows.normed, unembedding_of(model))
    torch.testing.assert_close(block.p, logits.softmax(-1).detach(), rtol=1e-4, atol=1e-6)
