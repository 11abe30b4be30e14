"""Records of steering: against forwards done by hand, what the cache may give back, intervals with known answers."""

import json
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from steering_steps import noise

from microtome.capture import Generation, LoadedModel
from microtome.interventions.evaluation import Evaluation
from microtome.interventions.evaluation_record import EvaluationRecord, mean_interval, ratio_interval
from microtome.interventions.gate import CosineGate
from microtome.interventions.measured_on import fingerprint_of
from microtome.interventions.operations import Add, Function
from microtome.interventions.read_back import read_back
from microtome.interventions.steering import Intervention, Steering, steered

PROMPTS = ["the cat", "she liked the good old film", "a man and a woman saw the big red river"]
NEUTRAL = ["the dog sat in the old house and slept .", "we read a small blue book", "he ran to the city"]


@dataclass
class Letters:
    """How often a letter was written."""

    letter: str = "e"
    name: str = "letters"
    sites: tuple[str, ...] = ()

    def score(self, written):
        return np.array([float(text.count(self.letter)) for text in written.completions])


def push(strength: float = 1.0, positions="generated", seed: int = 0) -> Steering:
    return Steering(Intervention("resid_post.1", Add(noise(32, seed=seed)), positions, strength))


def evaluation(model: LoadedModel, **settings) -> Evaluation:
    held = {"targets": [Letters()], "neutral": NEUTRAL, "generation": Generation(max_new_tokens=5)} | settings
    return Evaluation(model, held.pop("prompts", PROMPTS), **held)


def log_probs(model: LoadedModel, ids: list[int]) -> torch.Tensor:
    """By transformers alone, one text at a time."""
    with torch.no_grad():
        return F.log_softmax(model.module(input_ids=torch.tensor([ids])).logits[0].double(), -1)


def by_hand(model: LoadedModel, prompt: list[int], written: list[int]) -> tuple[float, float]:
    """Nats of the continuation and of the whole text."""
    ids = [*prompt, *written]
    if len(ids) < 2:
        return 0.0, 0.0
    each = F.nll_loss(log_probs(model, ids)[:-1], torch.tensor(ids[1:]), reduction="none")
    return float(each[len(prompt) - 1 :].sum()), float(each.sum())


# ---- reading back


@pytest.mark.parametrize("kind", ["llama", "gpt2", "gemma2", "neox"])
def test_nats_are_those_of_transformers_one_text_at_a_time(loaded, kind):
    model = loaded(kind)
    prompts = [[5], [7, 8, 9, 10, 11, 12], [13, 14], [20, 21, 22]]
    written = [[30, 31, 32, 33, 34, 35, 36], [40], [], [50, 51, 52]]
    for max_tokens in (8, 4096):
        found = read_back(model, prompts, written, ["resid_post.1"], max_tokens=max_tokens)
        for number, (prompt, more) in enumerate(zip(prompts, written, strict=True)):
            row = found.table.iloc[number]
            assert (row["tokens"], row["tokens_whole"]) == (len(more), len(prompt) + len(more) - 1)
            assert (row["nll"], row["nll_whole"]) == pytest.approx(by_hand(model, prompt, more), rel=1e-5, abs=1e-6)
    assert sorted(found.text.tolist()) == sorted([0] * 7 + [1] + [3] * 3)
    means = found.mean_by_text(np.ones(len(found.text)))
    assert means[[0, 1, 3]].tolist() == [1, 1, 1]
    assert np.isnan(means[2])


def test_activations_are_of_the_written_tokens_in_their_order(llama):
    prompts, written = [[5, 6, 7], [8]], [[30, 31], [40, 41, 42, 43]]
    found = read_back(llama, prompts, written, ["resid_post.1"])
    (site,) = found.activations
    for number in range(2):
        with torch.no_grad():
            out = llama.module(input_ids=torch.tensor([prompts[number] + written[number]]), output_hidden_states=True)
        states = out.hidden_states[2][0, len(prompts[number]) :]
        assert torch.allclose(found.activations[site][found.text == number], states, atol=1e-5)


def test_a_prompt_needs_a_token(llama):
    with pytest.raises(ValueError, match="Prompt 1 has no token"):
        read_back(llama, [[5], []], [[6], [7]])


# ---- a record


def test_kl_and_cross_entropy_are_those_of_two_forwards(llama):
    steering = push(2.0, "all")
    found = evaluation(llama, max_tokens=24).neutral_effect(steering)
    for number, text in enumerate(NEUTRAL):
        ids = llama.tokenizer(text)["input_ids"]
        clean = log_probs(llama, ids)
        with steered(llama, steering):
            edited = log_probs(llama, ids)
        kl = F.kl_div(edited, clean, log_target=True, reduction="none").sum(-1)
        row = found.iloc[number]
        assert row["kl"] == pytest.approx(float(kl.mean()), rel=1e-4)
        targets = torch.tensor(ids[1:])
        assert row["clean_nll"] == pytest.approx(float(F.nll_loss(clean[:-1], targets)), rel=1e-5)
        assert row["edited_nll"] == pytest.approx(float(F.nll_loss(edited[:-1], targets)), rel=1e-5)
        assert (row["rows"], row["targets"]) == (len(ids), len(ids) - 1)


def test_side_effects_on_neutral_text_are_of_all_its_tokens(llama):
    """An edit of generated tokens acts on every token of a neutral text, not on its last alone."""
    made = evaluation(llama)
    every, generated = (made.neutral_effect(push(2.0, where)) for where in ("all", "generated"))
    assert generated["kl"].to_numpy() == pytest.approx(every["kl"].to_numpy(), rel=1e-5)


def test_a_record_says_what_the_texts_say(llama):
    made = evaluation(llama)
    record = made.run("push", push(2.0), facts={"method": "noise", "strength": 2.0})
    assert record.texts["letters"].tolist() == [text.count("e") for text in record.texts["completion"]]
    assert record.texts["effort"].to_numpy() == pytest.approx(np.full(3, 4 * float(noise(32).square().sum())), rel=1e-4)
    assert record.facts["tokens"] == record.texts["tokens"].sum()
    frame = record.to_frame()
    assert frame["perplexity"][0] == pytest.approx(record.perplexity)
    assert frame["perplexity"][0] == pytest.approx(
        np.exp(record.texts["nll"].sum() / record.texts["tokens_read"].sum())
    )
    rows = record.neutral["rows"]
    assert frame["kl"][0] == pytest.approx((record.neutral["kl"] * rows).sum() / rows.sum())
    assert frame["kl"][0] == pytest.approx(record.kl)
    assert frame[["method", "strength"]].iloc[0].tolist() == ["noise", 2.0]
    targets = record.neutral["targets"]
    edited, clean = ((record.neutral[f"{w}_nll"] * targets).sum() / targets.sum() for w in ("edited", "clean"))
    assert frame[["cross_entropy", "cross_entropy_added"]].iloc[0].tolist() == pytest.approx([edited, edited - clean])
    assert frame["letters_low"][0] <= frame["letters"][0] <= frame["letters_high"][0]


def test_the_unsteered_model_costs_nothing(llama):
    made = evaluation(llama)
    base, zero = made.run("unsteered"), made.run("zero", push(0.0))
    assert base.kl == 0
    assert zero.kl == pytest.approx(0, abs=1e-12)
    assert zero.texts["completion"].tolist() == base.texts["completion"].tolist()
    assert zero.neutral["edited_nll"].to_numpy() == pytest.approx(base.neutral["clean_nll"].to_numpy(), rel=1e-6)
    assert zero.neutral[["rows", "targets"]].equals(
        base.neutral[["rows", "targets"]].astype(zero.neutral["rows"].dtype)
    )
    assert (base.texts[["effort", "relative"]] == 0).all(axis=None)


def test_texts_of_nothing_have_no_perplexity(llama):
    """Where the model ends at once, perplexity and variety are not known, and no warning is given."""
    record = evaluation(llama).run("unsteered")
    texts = record.texts.assign(tokens=0, tokens_read=0, nll=0.0, completion="", empty=True, repetition=np.nan)
    nothing = replace(record, texts=texts)
    frame = nothing.to_frame()
    assert np.isnan(nothing.perplexity)
    assert frame[["perplexity", "perplexity_low", "perplexity_high", "distinct_1"]].isna().all(axis=None)
    assert frame["empty"][0] == 1
    part = replace(record, texts=record.texts.assign(letters=[np.nan, 2.0, 4.0])).to_frame()
    assert part["letters"][0] == 3
    none = replace(record, texts=record.texts.assign(letters=np.nan)).to_frame()
    assert none[["letters", "letters_low"]].isna().all(axis=None)


def test_passages_of_one_token_have_no_cross_entropy(llama):
    record = evaluation(llama, neutral=["the"]).run("push", push(2.0))
    frame = record.to_frame()
    assert frame["kl"][0] > 0
    assert frame[["cross_entropy", "cross_entropy_added"]].isna().all(axis=None)


def test_a_prompt_that_ends_at_once_is_a_row_of_the_record(llama):
    """A push that lifts the end token: nothing is written, and nothing is read back."""
    end = llama.module.lm_head.weight[2].detach()
    ends = Steering(Intervention("final_norm", Add(1e3 * end), "generated"))
    record = evaluation(llama).run("ends", ends)
    assert record.texts["tokens"].tolist() == [0, 0, 0]
    assert record.texts["empty"].all()
    assert record.texts["ended"].all()
    assert np.isnan(record.perplexity)
    assert record.to_frame()[["perplexity", "distinct_2", "repetition"]].isna().all(axis=None)


def test_evaluations_need_prompts_neutral_text_and_targets_of_different_names(llama):
    with pytest.raises(ValueError, match="0 prompts"):
        evaluation(llama, prompts=[])
    with pytest.raises(ValueError, match="0 neutral"):
        evaluation(llama, neutral=[])
    with pytest.raises(ValueError, match="a name of its own"):
        evaluation(llama, targets=[Letters("a"), Letters("b")])
    with pytest.raises(ValueError, match="at least one"):
        evaluation(llama, targets=[])
    with pytest.raises(ValueError, match="conditions are paired"):
        evaluation(llama).run("asked", prompts=["the"])
    with pytest.raises(ValueError, match="one strength"):
        evaluation(llama).run("by text", Steering([*push([1.0, 2.0, 3.0])]))
    with pytest.raises(TypeError, match="JSON"):
        evaluation(llama).run("facts", facts={"model": llama})


# ---- kept records


def test_a_record_comes_back_as_it_was(llama, tmp_path):
    record = evaluation(llama).run("push", push(), facts={"strength": 1.0})
    record.save(tmp_path / "a")
    again = EvaluationRecord.load(tmp_path / "a")
    assert (again.name, again.targets) == (record.name, record.targets)
    assert again.facts == json.loads(json.dumps(record.facts))
    for part in ("texts", "neutral", "layers"):
        pd.testing.assert_frame_equal(getattr(again, part), getattr(record, part))
    pd.testing.assert_frame_equal(again.to_frame(), record.to_frame())
    with pytest.raises(FileNotFoundError):
        EvaluationRecord.load(tmp_path / "none")


def changed(what: str, llama, loaded) -> dict:
    return {
        "prompts": {"prompts": [*PROMPTS[:2], "the dog"]},
        "neutral": {"neutral": NEUTRAL[:2]},
        "targets": {"targets": [Letters("a")]},
        "target names": {"targets": [Letters(name="others")]},
        "generation": {"generation": Generation(max_new_tokens=4)},
        "batches": {"max_tokens": 16},
        "model": {"model": loaded("llama", 1)},
    }[what]


def is_measured_again(first: Evaluation, second: Evaluation, name: str, *steerings, monkeypatch) -> bool:
    first.run(name, steerings[0])
    calls = []
    own = Evaluation._measured
    monkeypatch.setattr(Evaluation, "_measured", lambda self, *args: calls.append(1) or own(self, *args))
    second.run(name, steerings[-1])
    return bool(calls)


def test_the_same_is_read_and_not_measured(llama, tmp_path, monkeypatch):
    one, other = (evaluation(llama, cache=tmp_path) for _ in range(2))
    assert not is_measured_again(one, other, "push", push(), push(), monkeypatch=monkeypatch)
    assert other.run("push", push(), facts={"site": "here"}).facts["site"] == "here"


@pytest.mark.parametrize("what", ["prompts", "neutral", "targets", "target names", "generation", "batches", "model"])
def test_a_record_of_other_settings_is_measured_again(llama, loaded, tmp_path, monkeypatch, what):
    settings = changed(what, llama, loaded)
    one = evaluation(llama, cache=tmp_path)
    other = evaluation(settings.pop("model", llama), cache=tmp_path, **settings)
    assert is_measured_again(one, other, "push", push(), monkeypatch=monkeypatch)
    fresh = evaluation(other.model, **settings).run("push", push())
    pd.testing.assert_frame_equal(other.run("push", push()).texts, fresh.texts)


@pytest.mark.parametrize(
    "other",
    [
        None,
        push(2.0),
        push(1.0, "all"),
        push(seed=1),
        Steering(Intervention("resid_post.2", Add(noise(32)), "generated")),
        Steering(Intervention("resid_post.1", Add(noise(32), relative=True), "generated")),
        Steering(
            Intervention("resid_post.1", Add(noise(32)), "generated", gate=CosineGate("resid_pre.0", noise(32), -2.0))
        ),
        push() + push(),
    ],
)
def test_a_record_of_another_steering_is_measured_again(llama, tmp_path, monkeypatch, other):
    made = evaluation(llama, cache=tmp_path)
    assert is_measured_again(made, made, "push", push(), other, monkeypatch=monkeypatch)


def test_other_prompts_in_the_run_are_another_condition(llama, tmp_path):
    made = evaluation(llama, cache=tmp_path)
    plain = made.run("asked")
    asked = made.run("asked", prompts=[f"good {text}" for text in PROMPTS])
    assert asked.texts["prompt"].tolist() != plain.texts["prompt"].tolist()


def test_functions_are_measured_every_time(llama, tmp_path, monkeypatch):
    made = evaluation(llama, cache=tmp_path)
    edit = Steering(Intervention("resid_post.1", Function(lambda x, at: x.sin()), "all"))
    assert made.measured_on(edit, PROMPTS) is None
    assert is_measured_again(made, made, "function", edit, monkeypatch=monkeypatch)


def test_names_that_look_alike_are_kept_apart(llama, tmp_path):
    made = evaluation(llama, cache=tmp_path)
    names = ["mean x 1", "mean_x_1", "Mean x 1", "a/b", "a:b", "x" * 300, "x" * 299 + "y"]
    for name in names:
        made.run(name, push())
    assert len({folder.name.lower() for folder in tmp_path.iterdir()}) == len(names)
    assert [made.run(name, push()).name for name in names] == names


def test_a_damaged_or_unfinished_record_is_measured_again(llama, tmp_path, monkeypatch):
    made = evaluation(llama, cache=tmp_path)
    whole = made.run("push", push())
    (folder,) = tmp_path.iterdir()
    for file, data in (("record.json", b"{"), ("texts.parquet", b"no table"), ("record.json", b"[]")):
        (folder / file).write_bytes(data)
        pd.testing.assert_frame_equal(made.run("push", push()).texts, whole.texts)
    (folder / "neutral.parquet").unlink()
    assert made.run("push", push()).kl == whole.kl

    def killed(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(pd.DataFrame, "to_parquet", killed)
    with pytest.raises(KeyboardInterrupt):
        whole.save(folder)
    assert not (folder / "record.json").exists()


def test_a_gate_that_was_used_is_the_same_gate(llama):
    gate = CosineGate("resid_pre.0", noise(32), -2.0)
    steering = Steering(Intervention("resid_post.1", Add(noise(32)), "generated", gate=gate))
    before = fingerprint_of(steering)
    evaluation(llama).run("gated", steering)
    assert len(gate.log) > 0
    assert fingerprint_of(steering) == before


def test_fingerprints_tell_values_apart():
    values = [
        *(None, True, 1, 1.0, "1", b"1", [1], (1, 2), [[1], 2], [1, [2]], ["ab", "c"], ["a", "bc"], {"a": 1}, {}),
        *(
            torch.zeros(2),
            torch.zeros(2).double(),
            torch.zeros(1, 2),
            np.zeros(2),
            [0.0, 0.0],
            torch.tensor([0.0, -0.0]),
        ),
        *(Letters("a"), Letters("b"), Add(noise(4)), Add(noise(4, seed=1)), pd.DataFrame({"a": [1]})),
    ]
    assert len({fingerprint_of(value) for value in values}) == len(values)
    assert fingerprint_of(Add(noise(4))) == fingerprint_of(Add(noise(4)))
    for code in (len, lambda: 0, torch.nn.Linear(1, 1), Letters, {"a": [print]}):
        with pytest.raises(TypeError, match="no fingerprint"):
            fingerprint_of(code)


# ---- intervals


def test_the_interval_of_a_constant_has_no_width():
    assert ratio_interval(np.full(7, 3.0), np.full(7, 2.0)) == (1.5, 1.5, 1.5)
    assert mean_interval(np.array([2.0, np.nan, 2.0])) == (2.0, 2.0, 2.0)
    below = np.array([1.0, 2, 3, 4])
    assert ratio_interval(5 * below, below) == pytest.approx((5, 5, 5))


def test_an_interval_of_nothing_is_not_known():
    for found in (
        mean_interval(np.full(3, np.nan)),
        mean_interval(np.array([])),
        ratio_interval(np.zeros(2), np.zeros(2)),
    ):
        assert np.isnan(found).all()
    assert ratio_interval(np.array([np.nan, 4.0, 2.0]), np.array([1.0, 2.0, 1.0]))[0] == 2


def test_intervals_have_the_width_of_the_standard_error():
    values = np.random.default_rng(0).normal(size=400)
    mean, low, high = mean_interval(values, draws=20_000)
    assert mean == pytest.approx(values.mean())
    assert (high - low) / 2 == pytest.approx(1.96 * values.std() / 20, rel=0.05)
    narrow = mean_interval(values, draws=20_000, level=0.5)
    assert (narrow[2] - narrow[1]) / 2 == pytest.approx(0.6745 * values.std() / 20, rel=0.05)


def test_intervals_hold_a_known_mean_as_often_as_they_say():
    generator = np.random.default_rng(1)
    held = 0
    for seed in range(300):
        below = generator.uniform(1, 3, size=60)
        above = 2 * below + generator.normal(size=60)
        _, low, high = ratio_interval(above, below, draws=300, seed=seed)
        held += low <= 2 <= high
    assert 0.90 <= held / 300 <= 0.98
