"""The causal test: what is written where, and its KL, nats and intervals against logits from plain hooks."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from microtome.capture import LoadedModel
from microtome.capture.batches import PaddingRecipe
from microtome.capture.dissect import dissect
from microtome.capture.still_blocks import blocks_standing_still
from microtome.capture.taps import taps
from microtome.lenses.linear_map import LinearMap, identity_map
from microtome.lenses.made_for import facts_of
from microtome.lenses.moments_pass import moments_of
from microtome.lenses.ridge_pairs import ridge_pairs
from microtome.lenses.transport.operator import TransportOperator, operator_of
from microtome.lenses.transport.splice import splice_edits
from microtome.lenses.transport.splice_conditions import Splice, splice_from_moments
from microtome.lenses.transport.splice_effects import SpliceEffects
from microtome.lenses.transport.splice_positions import spliced_tokens
from microtome.lenses.transport.splice_study import splice_effects

SCRIPT = Path(__file__).with_name("killed_splices.py")
DRAW = torch.Generator().manual_seed(3)
TEXTS = [torch.randint(5, 110, (n,), generator=DRAW).tolist() for n in (12, 9, 12, 7)]
SOURCE, TARGET = "resid_post.0", "resid_post.1"


def drawn(seed: int = 0, source: str = SOURCE, target: str = TARGET, facts: dict | None = None) -> TransportOperator:
    """A random operator near the identity."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.eye(32) + 0.1 * torch.randn(32, 32, generator=generator)
    return operator_of(
        LinearMap(weight, torch.randn(32, generator=generator), "drawn", source, target, facts=facts or {})
    )


def splice() -> Splice:
    """One with every control."""
    return Splice(drawn(), drawn(1), torch.linspace(-1, 1, 32), {"rank 2": drawn(2)})


def rows(effects: SpliceEffects):
    """The table by positions and condition."""
    return effects.to_frame().set_index(["positions", "condition"])


def chosen_places(text: list[int], at: tuple, seed: int = 0) -> dict:
    """Places of the tokens written over, for a text without special tokens."""
    ids = torch.tensor([text])
    real = torch.ones_like(ids, dtype=torch.bool)
    allowed, has_next = real.clone(), real.clone()
    allowed[:, 0], has_next[:, -1] = False, False
    masks, left_out = spliced_tokens(allowed, has_next, ids, real, at, seed)
    assert not left_out.any()
    return {name: mask[0].nonzero()[:, 0].tolist() for name, mask in masks.items()}


@torch.no_grad()
def hooked_log_probs(model: nn.Module, text: list[int], places: list[int], write) -> Tensor:
    """log p with `write(x)` over block 1's output at places, x block 0's output, by plain torch hooks."""
    held = {}
    base = model.base_model
    blocks = base.h if hasattr(base, "h") else base.layers

    def keep(_module, _inputs, output):
        held["x"] = output[0] if isinstance(output, tuple) else output

    def over(_module, _inputs, output):
        whole = (output[0] if isinstance(output, tuple) else output).clone()
        whole[:, places] = write(held["x"][0, places])
        return (whole, *output[1:]) if isinstance(output, tuple) else whole

    handles = [blocks[0].register_forward_hook(keep), blocks[1].register_forward_hook(over)]
    try:
        return model(input_ids=torch.tensor([text])).logits[0].double().log_softmax(-1)
    finally:
        for handle in handles:
            handle.remove()


@pytest.mark.parametrize("kind", ["llama", "gpt2", "gemma2"])
def test_every_number_is_that_of_logits_from_plain_hooks(tiny, kind: str) -> None:
    model, tested, at = tiny(kind), splice(), (3, "all")
    found = splice_effects(model, TEXTS, tested, at=at, max_tokens=30)
    table = rows(found)
    writes = {
        "operator": lambda x: x @ tested.operator.weight + tested.operator.intercept,
        "identity": lambda x: x,
        "shuffled": lambda x: x @ tested.shuffled.weight + tested.shuffled.intercept,
        "mean": lambda x: tested.mean.expand_as(x),
        "intercept": lambda x: tested.operator.intercept.expand_as(x),
        "zero": torch.zeros_like,
        "rank 2": lambda x: x @ tested.others["rank 2"].weight + tested.others["rank 2"].intercept,
    }
    assert [name for positions, name in table.index if positions == "3"] == [
        "clean",
        "operator",
        "rank 2",
        *list(writes)[1:-1],
    ]
    for name, write in writes.items():
        for one in at:
            sums = dict.fromkeys(["kl_s", "kl_l", "same", "s", "l", "nats", "clean", "tokens", "text", "all"], 0.0)
            for text in TEXTS:
                places = chosen_places(text, at)[one]
                assert places
                assert 0 not in places
                p, q = (hooked_log_probs(model, text, *how) for how in (([], write), (places, write)))
                kl, start = (p.exp() * (p - q)).sum(-1), min(places)
                behind = [i for i in range(start, len(text)) if i not in places]
                sums["kl_s"] += float(kl[places].sum())
                sums["kl_l"] += float(kl[behind].sum())
                sums["same"] += int((p.argmax(-1) == q.argmax(-1))[start:].sum())
                sums["s"] += len(places)
                sums["l"] += len(behind)
                for i in range(len(text) - 1):
                    sums["text"] -= float(q[i, text[i + 1]])
                    sums["all"] += 1
                    if i >= start:
                        sums["nats"] -= float(q[i, text[i + 1]])
                        sums["clean"] -= float(p[i, text[i + 1]])
                        sums["tokens"] += 1
            row = table.loc[(str(one), name)]
            assert (row["spliced"], row["later"], row["tokens"]) == (sums["s"], sums["l"], sums["tokens"])
            assert row["kl_spliced"] == pytest.approx(sums["kl_s"] / sums["s"], rel=1e-3, abs=2e-6)
            if sums["l"]:
                assert row["kl_later"] == pytest.approx(sums["kl_l"] / sums["l"], rel=1e-3, abs=2e-6)
            else:
                assert np.isnan(row["kl_later"])
            assert row["agrees"] == pytest.approx(sums["same"] / (sums["s"] + sums["l"]))
            assert row["cross_entropy"] == pytest.approx(sums["nats"] / sums["tokens"], abs=2e-5)
            assert row["ce_increase"] == pytest.approx((sums["nats"] - sums["clean"]) / sums["tokens"], abs=2e-5)
            assert row["perplexity"] == pytest.approx(np.exp(sums["nats"] / sums["tokens"]), rel=1e-4)
            assert row["text_perplexity"] == pytest.approx(np.exp(sums["text"] / sums["all"]), rel=1e-4)
            assert table.loc[(str(one), "clean"), "cross_entropy"] == pytest.approx(sums["clean"] / sums["tokens"])


def test_recovered_and_differences_are_those_of_the_table(tiny) -> None:
    table = rows(splice_effects(tiny("llama"), TEXTS, splice(), at=(1, "all")))
    for positions in ("1", "all"):
        part = table.loc[positions]
        entropy = part["cross_entropy"]
        for null in ("mean", "zero", "intercept", "shuffled"):
            expected = (entropy[null] - entropy) / (entropy[null] - entropy["clean"])
            assert part[f"recovered_{null}"].to_numpy() == pytest.approx(expected.to_numpy())
            assert part.loc["clean", f"recovered_{null}"] == 1
            assert part.loc[null, f"recovered_{null}"] == 0
        assert part["ce_minus_identity"].to_numpy() == pytest.approx((entropy - entropy["identity"]).to_numpy())
        assert part["kl_minus_identity"].to_numpy() == pytest.approx(part["kl"] - part.loc["identity", "kl"])
    clean = table.xs("clean", level="condition")
    assert (clean["kl"] == 0).all()
    assert (clean["agrees"] == 1).all()


def test_intervals_are_of_documents_and_paired(tiny) -> None:
    """Ratios of sums over resampled documents, written out draw by draw."""
    model, owners = tiny("llama"), ["a", "b", "b", "c"]
    found = splice_effects(model, TEXTS, splice(), documents=owners, at=3, draws=200, seed=4)
    table = rows(found).loc["3"]
    assert (table["documents"] == 3).all()
    texts = found.per_text().pivot(index="text", columns="condition", values=["nats", "tokens", "clean_nats"])
    inside = np.array([sorted({found.document[i] for i in range(4)}).index(one) for one in found.document])
    draws = np.random.default_rng(4).multinomial(3, np.full(3, 1 / 3), size=200)
    differences, recovered = [], []
    for draw in draws:
        sums = (texts.to_numpy() * draw[inside][:, None]).sum(0)
        held = dict(zip(texts.columns, sums, strict=True))
        entropy = {name: held["nats", name] / held["tokens", name] for name in ("operator", "identity", "zero")}
        clean = held["clean_nats", "zero"] / held["tokens", "zero"]
        differences.append(entropy["operator"] - entropy["identity"])
        recovered.append((entropy["zero"] - entropy["operator"]) / (entropy["zero"] - clean))
    row = table.loc["operator"]
    for name, values in (("ce_minus_identity", differences), ("recovered_zero", recovered)):
        expected = np.quantile(values, [0.025, 0.975])
        assert [row[f"{name}_low"], row[f"{name}_high"]] == pytest.approx(list(expected), rel=1e-6)
    assert np.isnan(rows(splice_effects(model, TEXTS[:1], splice(), at=3)).loc[("3", "zero"), "kl_low"])


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_a_padded_batch_says_what_its_texts_say_alone(tiny, kind: str, side: str) -> None:
    model = tiny(kind)
    anatomy = replace(dissect(model), padding=PaddingRecipe(side, "cumsum"))
    options = {"at": (3, "all"), "conditions": ["operator", "mean"], "anatomy": anatomy}
    together = splice_effects(model, TEXTS, splice(), **options)
    for number, text in enumerate(TEXTS):
        alone = splice_effects(model, [text], splice(), **options)
        np.testing.assert_allclose(together.sums[number], alone.sums[0], atol=3e-5, rtol=1e-4)
        np.testing.assert_allclose(together.text_sums[number], alone.text_sums[0], atol=3e-5)


def test_the_identity_from_a_site_to_itself_is_no_change_to_the_bit(tiny) -> None:
    same = operator_of(identity_map(32, TARGET, TARGET))
    found = splice_effects(tiny("llama"), TEXTS, same, at=(1, 3, "all"))
    table = rows(found)
    for positions in ("1", "3", "all"):
        for name in ("operator", "identity"):
            row = table.loc[(positions, name)]
            assert row["cross_entropy"] == table.loc[(positions, "clean"), "cross_entropy"]
            assert (row["kl"], row["agrees"], row["ce_increase"]) == (0, 1, 0)
    assert table.loc[("all", "zero"), "kl"] > 1e-3


class LinearMlp(nn.Module):
    """x A + b."""

    def __init__(self) -> None:
        super().__init__()
        self.own = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.own(x)


class LinearBlock(nn.Module):
    """x + x A + b."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = LinearMlp()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(x)


class LinearNetwork(nn.Module):
    """Embedding, three linear blocks, norm, unembedding."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.embed = nn.Embedding(120, 32)
            self.blocks = nn.ModuleList([LinearBlock() for _ in range(3)])
            self.norm = nn.LayerNorm(32)
            self.head = nn.Linear(32, 120, bias=False)
        self.eval()

    def get_input_embeddings(self) -> nn.Module:
        return self.embed

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def test_the_blocks_own_linear_action_changes_nothing_in_a_linear_network() -> None:
    model = LinearNetwork()
    eye, first, second = torch.eye(32), *(block.mlp.own for block in list(model.blocks)[1:])
    steps = [
        LinearMap((eye + part.weight.T).detach(), part.bias.detach(), "exact", *sites)
        for part, sites in ((first, (SOURCE, TARGET)), (second, (TARGET, "resid_post.2")))
    ]
    both = steps[0].then(steps[1])
    tested = [Splice(operator_of(steps[0])), Splice(operator_of(both))]
    table = splice_effects(model, TEXTS, tested, at=(1, 5, "all")).to_frame()
    operators = table[table["condition"] == "operator"]
    assert len(operators) == 6
    assert operators["ce_increase"].abs().max() < 1e-4
    assert operators["kl"].max() < 1e-5
    assert table.loc[table["condition"] == "identity", "kl"].min() > 1e-3


def test_what_is_written_and_where_in_every_row(tiny) -> None:
    model, tested = tiny("llama"), splice()
    ids = torch.tensor([TEXTS[0], TEXTS[2]])
    at = torch.zeros(2, 12, dtype=torch.bool)
    at[0, 3] = at[1, 5] = at[1, 8] = True
    with torch.no_grad(), taps(model, [SOURCE, TARGET]) as clean:
        model(ids)
    expected = {
        "zero": torch.zeros(3, 32),
        "mean": tested.mean.expand(3, -1),
        "intercept": tested.operator.intercept.expand(3, -1),
        "identity": clean[SOURCE][at],
    }
    for name, value in expected.items():
        with (
            torch.no_grad(),
            taps(model, TARGET, splice_edits(tested.operator, at, by=tested.writer(name))) as tape,
        ):
            model(ids)
        torch.testing.assert_close(tape[TARGET][at], value, atol=1e-6, rtol=1e-6)
        assert torch.equal(tape[TARGET][~at], clean[TARGET][~at])
        if name == "zero":
            assert not tape[TARGET][at].any()


def test_the_first_token_and_special_ones_are_left_alone_unless_asked_for(tiny, word_tokenizer) -> None:
    model = LoadedModel.from_module(tiny("llama"), word_tokenizer, name="tiny")
    bos = word_tokenizer.bos_token_id
    texts = [[bos, *TEXTS[0]], [*TEXTS[1][:4], bos, *TEXTS[1][4:]]]
    without, with_sinks = (
        splice_effects(model, texts, drawn(), at="all", conditions=["zero"], sinks=sinks) for sinks in (False, True)
    )
    assert rows(without).loc[("all", "zero"), ["spliced", "sinks"]].tolist() == [12 + 8, 0]
    assert rows(with_sinks).loc[("all", "zero"), ["spliced", "sinks"]].tolist() == [13 + 10, 3]
    assert without.text_sums[:, 2].tolist() == [1, 2]
    later = splice_effects(model, texts, drawn(), at=(1, "all"), conditions=["zero"], first=6)
    assert rows(later).loc[("all", "zero"), "spliced"] == 7 + 4
    assert rows(later).loc[("1", "zero"), "tokens"] <= 6 + 3


def test_massive_tokens_are_sinks_where_medians_are_given(tiny) -> None:
    model = tiny("llama")
    with torch.no_grad():
        model.base_model.embed_tokens.weight[TEXTS[0][4]] = 500.0
    options = {"at": "all", "conditions": ["zero"]}
    plain = splice_effects(model, TEXTS[:1], drawn(), **options)
    judged = splice_effects(model, TEXTS[:1], drawn(), medians={"resid_pre.0": 0.1}, **options)
    count = TEXTS[0].count(TEXTS[0][4])
    assert plain.sums[0, 0, 0] - judged.sums[0, 0, 0] == count
    assert judged.text_sums[0, 2] == 1 + count


def test_tokens_are_drawn_by_text_and_seed_and_nested() -> None:
    first = chosen_places(TEXTS[0], (1, 5, "all"))
    assert len(first[5]) == 5
    assert set(first[1]) < set(first[5]) < set(first["all"])
    assert first["all"] == list(range(1, 12))
    assert first == chosen_places(TEXTS[0], (1, 5, "all"))
    assert first[1] == chosen_places(TEXTS[0], (1,))[1]
    assert len({tuple(chosen_places(TEXTS[0], (5,), seed)[5]) for seed in range(6)}) > 3
    counts = np.bincount([chosen_places(TEXTS[0], (1,), seed)[1][0] for seed in range(600)], minlength=12)
    assert counts[0] == counts[11] == 0
    assert counts[1:11].min() > 30


def test_a_route_writes_where_it_has_a_source(tiny) -> None:
    offset = operator_of(LinearMap(torch.eye(32), torch.zeros(32), "eye", SOURCE, TARGET), route="offset 3")
    by_head = operator_of(LinearMap(torch.eye(32), torch.zeros(32), "eye", SOURCE, TARGET), route="head 1.2")
    table = splice_effects(tiny("llama"), TEXTS, [offset, by_head], at=("all",)).to_frame().set_index("route")
    assert (table.loc["offset 3", "spliced"] == sum(len(text) - 3 for text in TEXTS)).all()
    assert (table.loc["head 1.2", "spliced"] == sum(len(text) - 1 for text in TEXTS)).all()
    for route in ("offset 3", "head 1.2"):  # the identity operator writes what the identity does
        rows_of = table.loc[route].set_index("condition")
        assert rows_of.loc["operator", "kl"] == pytest.approx(rows_of.loc["identity", "kl"], rel=1e-4)
        assert rows_of.loc["operator", "kl"] > 1e-4


def test_texts_with_too_few_tokens_are_left_out_and_counted(tiny) -> None:
    texts = [*TEXTS, [5, 6, 7, 8]]
    found = splice_effects(tiny("llama"), texts, drawn(), at=(1, 5, "all"), conditions=["zero"])
    assert found.left_out[["texts", "left_out"]].to_numpy().tolist() == [[5, 1]]
    assert (found.to_frame()["texts"] == 4).all()
    assert set(found.per_text()["text"]) == {0, 1, 2, 3}
    whole = splice_effects(tiny("llama"), TEXTS, drawn(), at=(1, 5, "all"), conditions=["zero"])
    values = found.to_frame()["text_perplexity"].to_numpy()
    assert values == pytest.approx(whole.to_frame()["text_perplexity"].to_numpy(), rel=1e-5)
    with pytest.raises(ValueError, match="no text offers 5 tokens"):
        splice_effects(tiny("llama"), [[5, 6, 7, 8]], drawn(), at=(1, 5))


def test_what_does_not_fit_is_said(tiny) -> None:
    model = tiny("llama")
    with pytest.raises(ValueError, match="was made for weights"):
        splice_effects(model, TEXTS, drawn(facts=facts_of(tiny("llama", seed=1))))
    with pytest.raises(ValueError, match="was made for weights"):
        splice_effects(model, TEXTS, Splice(drawn(), drawn(facts=facts_of(tiny("llama", seed=1)))))
    with pytest.raises((KeyError, IndexError)):
        splice_effects(model, TEXTS, drawn(target="resid_post.7"))
    with pytest.raises(ValueError, match="writes logits"):
        splice_effects(model, TEXTS, drawn(target="logits"))
    with pytest.raises(ValueError, match="Compare operators of one pair"):
        Splice(drawn(), drawn(target="resid_post.2"))
    with pytest.raises(ValueError, match="which is a condition"):
        Splice(drawn(), others={"zero": drawn()})
    with pytest.raises(ValueError, match="mean has 31 channels"):
        Splice(drawn(), mean=torch.zeros(31))
    with pytest.raises(ValueError, match="comes after"):
        splice_effects(model, TEXTS, drawn(source="resid_post.2"))
    with pytest.raises(ValueError, match="two operators carry"):
        splice_effects(model, TEXTS, [drawn(), drawn(1)])
    with pytest.raises(ValueError, match=r"give Splice\(operator, mean="):
        splice_effects(model, TEXTS, drawn(), conditions=["mean"])
    with pytest.raises(ValueError, match="There are operator, identity, intercept, zero"):
        splice_effects(model, TEXTS, drawn(), conditions=["resample"])
    with pytest.raises(ValueError, match="Give numbers of tokens"):
        splice_effects(model, TEXTS, drawn(), at=(0,))
    narrow = operator_of(LinearMap(torch.zeros(8, 32), torch.zeros(32), "narrow", "z.1.0", TARGET))
    assert "identity" not in Splice(narrow).conditions
    with pytest.raises(ValueError, match="cannot be copied"):
        splice_effects(model, TEXTS, narrow, conditions=["identity"])
    wrong = operator_of(LinearMap(torch.zeros(32, 8), torch.zeros(8), "narrow", SOURCE, TARGET))
    with pytest.raises(ValueError, match="8 channels were to be written"):
        splice_effects(model, TEXTS, wrong)
    huge = operator_of(LinearMap(torch.zeros(32, 32), torch.full((32,), float("nan")), "nan", SOURCE, TARGET))
    with pytest.raises(ValueError, match="gives NaN"):
        splice_effects(model, TEXTS, huge)


def test_a_splice_from_moments_is_fitted_on_the_fit_shard(tiny) -> None:
    model = LoadedModel.from_module(tiny("llama"), name="tiny")
    texts = [torch.randint(5, 110, (20,), generator=DRAW).tolist() for _ in range(30)]
    moments = moments_of(model, texts, [SOURCE, TARGET], shuffled=True, progress=False)
    made = splice_from_moments(moments, SOURCE, TARGET, ranks=(4,))
    assert made.conditions == ("operator", "rank 4", "identity", "shuffled", "mean", "intercept", "zero")
    pair = (SOURCE, TARGET)
    for operator, mixed in ((made.operator, False), (made.shuffled, True)):
        found = ridge_pairs(moments, [pair], keep_maps=True, shuffled=mixed).maps[pair]
        torch.testing.assert_close(operator.weight, found.weight)
        torch.testing.assert_close(operator.intercept, found.intercept)
        assert (operator.source, operator.target, operator.stratum) == (*pair, "rest")
    torch.testing.assert_close(made.mean, moments.pair(*pair, "fit").mean_y)
    assert int(torch.linalg.matrix_rank(made.others["rank 4"].weight)) == 4
    alone = splice_from_moments(moments_of(model, texts, [SOURCE, TARGET], progress=False), *pair)
    assert alone.shuffled is None
    with pytest.raises(ValueError, match="was made for weights"):
        splice_effects(tiny("llama", seed=1), texts[:2], made)
    table = rows(splice_effects(model, texts[:6], made, at="all"))["cross_entropy"]["all"]
    assert table["mean"] == pytest.approx(table["shuffled"], abs=0.5)


@pytest.mark.parametrize("kind", ["llama", "gpt2", "neox", "neox_sequential", "gemma2", "qwen3"])
def test_only_blocks_behind_the_target_run_again(tiny, kind: str, monkeypatch) -> None:
    model = tiny(kind)
    pairs = [("resid_pre.0", "resid_post.1"), (SOURCE, TARGET), ("resid_pre.1", "mlp_out.2"), ("attn_out.1", "z.2")]
    tested = [drawn(n, *pair) for n, pair in enumerate(pairs)]
    runs = []
    base = model.base_model
    blocks = base.h if hasattr(base, "h") else base.layers
    mixers = [getattr(b, "attn", None) or getattr(b, "self_attn", None) or b.attention for b in blocks]
    handles = [mixer.register_forward_hook(lambda *_, n=n: runs.append(n)) for n, mixer in enumerate(mixers)]
    dissect(model)
    runs.clear()
    options = {"at": "all", "conditions": ["operator", "zero", "intercept"]}
    found = splice_effects(model, TEXTS, tested, **options)
    # 1 clean, and of each operator 3 spliced and 2 to compare, one of which runs all blocks
    assert [runs.count(n) for n in range(3)] == [1 + 4, 1 + 4 + 4, 1 + 20]
    assert all("forward" not in vars(block) for block in blocks)
    runs.clear()
    monkeypatch.setattr("microtome.lenses.transport.splice_pass.still_layers", lambda *_: ((), 0))
    whole = splice_effects(model, TEXTS, tested, **options)
    assert [runs.count(n) for n in range(3)] == [1 + 12] * 3
    assert np.array_equal(found.sums, whole.sums)
    for handle in handles:
        handle.remove()


def test_all_blocks_run_where_standing_still_changes_anything(tiny, monkeypatch) -> None:
    model = tiny("llama")
    dissect(model)
    expected = splice_effects(model, TEXTS, drawn(), at="all", conditions=["zero"])
    seen = []

    def wrong(module, anatomy, held, count):
        seen.append(count)
        return blocks_standing_still(module, anatomy, {layer: _shifted(one) for layer, one in held.items()}, count)

    monkeypatch.setattr("microtome.lenses.transport.splice_pass.blocks_standing_still", wrong)
    found = splice_effects(model, TEXTS, drawn(), at=(1, "all"), conditions=["zero", "identity"])
    assert [count for count in seen if count] == [2]
    assert np.array_equal(found.sums[:, 2], expected.sums[:, 0])


def _shifted(output):
    return (output[0] + 1, *output[1:]) if isinstance(output, tuple) else output + 1


def test_edits_do_not_outlive_an_error(tiny) -> None:
    model = tiny("llama")
    with torch.no_grad():
        before = model(torch.tensor([TEXTS[0]])).logits
    wrong = operator_of(LinearMap(torch.zeros(32, 8), torch.zeros(8), "narrow", SOURCE, TARGET))
    with pytest.raises(ValueError, match="8 channels"):
        splice_effects(model, TEXTS, wrong)
    with torch.no_grad():
        assert torch.equal(model(torch.tensor([TEXTS[0]])).logits, before)
    good = splice_effects(model, TEXTS, drawn(), at=1)
    assert np.array_equal(good.sums, splice_effects(tiny("llama"), TEXTS, drawn(), at=1).sums)


def test_a_killed_run_goes_on_to_the_same_numbers(tmp_path) -> None:
    done = subprocess.run([sys.executable, str(SCRIPT), str(tmp_path)], check=True, capture_output=True, text=True)
    said = json.loads(done.stdout.splitlines()[-1])
    assert said["kills"] == 4
    assert said["resumed"] >= 2
    assert said["same"]


def test_a_finished_folder_is_read_and_another_request_refused(tiny, tmp_path, monkeypatch) -> None:
    model = tiny("llama")
    found = splice_effects(model, TEXTS, splice(), at=(1, "all"), save=tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr("microtome.lenses.transport.splice_pass.SplicePass.run", None)
        again = splice_effects(model, TEXTS, splice(), at=(1, "all"), save=tmp_path)
    assert np.array_equal(found.sums, again.sums)
    for change in ({"at": (1, 2)}, {"seed": 1}, {"sinks": True}):
        with pytest.raises(ValueError, match=f"another request .*{next(iter(change))}"):
            splice_effects(model, TEXTS, splice(), **({"at": (1, "all")} | change), save=tmp_path)
    with pytest.raises(ValueError, match=r"another request \(operators"):
        splice_effects(model, TEXTS, Splice(drawn()), at=(1, "all"), conditions=["zero"], save=tmp_path)
    (tmp_path / "splices.safetensors").write_bytes(b"no")
    with pytest.raises(ValueError, match="damaged"):
        splice_effects(model, TEXTS, splice(), at=(1, "all"), save=tmp_path)
