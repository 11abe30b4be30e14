"""Targets without a judge: against forwards by hand, scikit-learn, and texts whose score is known."""

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.preprocessing import StandardScaler
from steering_steps import noise

from microtome.capture import capture
from microtome.capture.dissect import dissect
from microtome.interventions.operations import Add
from microtome.interventions.read_back import read_back
from microtome.interventions.steering import Intervention, Steering, steered
from microtome.interventions.targets import AttributeWords, ProbeScore, RefusalRate, Target, VaderScore, Written

PROMPTS = ["the cat", "she liked the good old film", "we saw"]
GOOD = ["the happy cat ran to the river .", "she liked the good film .", "a great big city .", "we saw good trees ."]
BAD = ["the sad cat sat in the house .", "she hated the bad film .", "an awful old city .", "we saw bad books ."]


def written(model, completions, ids=None, sites=(), steering=None) -> Written:
    prompt_ids = [model.tokenizer(text)["input_ids"] for text in PROMPTS[: len(completions)]]
    ids = ids or [[] for _ in completions]
    read = read_back(model, prompt_ids, ids, sites)
    return Written(model, dissect(model.module), steering, PROMPTS, prompt_ids, ids, completions, read)


def table() -> pd.DataFrame:
    texts = [text.replace("film", noun) for noun in ("film", "book", "river") for text in (*GOOD, *BAD)]
    return pd.DataFrame({"text": texts, "label": ([True] * 4 + [False] * 4) * 3, "group": range(24)})


def test_all_are_targets(llama):
    words = AttributeWords.of(llama, ["good"], ["bad"])
    for target in (VaderScore(), RefusalRate(), words, ProbeScore("resid_post.1", noise(32), 0.0)):
        assert isinstance(target, Target)


# ---- words


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("positions", ["all", "generated"])
def test_odds_of_words_are_those_of_the_next_token(loaded, kind, positions):
    model = loaded(kind)
    target = AttributeWords.of(model, ["good", "great"], ["bad", "sad", "awful"], stem=" was")
    steering = Steering(Intervention("resid_post.1", Add(2 * noise(32)), positions))
    ids = model.tokenizer.convert_tokens_to_ids
    for acting in (None, steering):
        found = target.log_odds(model, PROMPTS, acting)
        for number, prompt in enumerate(PROMPTS):
            inputs = {"input_ids": model.tokenizer(f"{prompt} was", return_tensors="pt")["input_ids"]}
            with torch.no_grad():
                if acting is None:
                    logits = model.module(**inputs).logits
                else:
                    with steered(model, acting):
                        logits = model.module(**inputs).logits
            p = logits[0, -1].double().softmax(0)
            odds = p[ids(["good", "great"])].sum() / p[ids(["bad", "sad", "awful"])].sum()
            assert found[number] == pytest.approx(float(odds.log()), rel=1e-4, abs=1e-5)
    assert target.score(written(model, ["", "", ""], steering=steering)) == pytest.approx(found)


def test_words_have_to_be_told_apart(llama):
    with pytest.raises(ValueError, match="without a token in both"):
        AttributeWords.of(llama, ["good", "bad"], ["bad"])
    with pytest.raises(ValueError, match="neither empty"):
        AttributeWords.of(llama, ["good"], [])
    for word in ("splendid", " "):
        with pytest.raises(ValueError, match="no token in this vocabulary"):
            AttributeWords.of(llama, ["good", word], ["bad"])


# ---- texts


def test_refusals_are_phrases(llama):
    texts = ["I\N{RIGHT SINGLE QUOTATION MARK}m sorry, but no.", "Sure. As an AI I AM UNABLE to", ""]
    assert RefusalRate().score(written(llama, texts)).tolist() == [1, 1, 0]
    assert RefusalRate(phrases=("sure",)).score(written(llama, texts)).tolist() == [0, 1, 0]


@pytest.mark.network
def test_the_lexicon_scores_what_was_written(llama):
    found = VaderScore().score(written(llama, ["a great and happy day", "an awful, sad day", "  \n"]))
    assert found[0] > 0.5
    assert found[1] < -0.5
    assert np.isnan(found[2])


# ---- probe


def test_the_probe_is_that_of_scikit_learn(llama):
    probe = ProbeScore.fit(llama, table(), "resid_post.1", C=0.1)
    acts = capture(llama, table()["text"].tolist(), ["resid_post.1"], "all", progress=False)
    keep = acts.rows["position"].to_numpy() > 0
    x = acts["resid_post.1"].numpy()[keep]
    y = table()["label"].to_numpy()[acts.rows["text"].to_numpy()[keep]]
    scale = StandardScaler().fit(x)
    other = LogisticRegression(C=0.1, tol=1e-10, max_iter=10_000).fit(scale.transform(x), y)
    theirs = other.decision_function(scale.transform(x))
    ours = x @ probe.direction.numpy() + probe.bias
    assert np.allclose(ours, theirs, atol=1e-3)
    assert ours[y].mean() > ours[~y].mean()
    assert 0 <= probe.facts["held_out_auroc"] <= 1
    assert probe.facts["held_out_texts"] == 4


def test_the_score_is_the_mean_over_what_was_written(llama):
    probe = ProbeScore("resid_post.1", noise(32), 0.25)
    ids = [[5, 6, 7], [], [8]]
    found = probe.score(written(llama, ["a", "", "b"], ids, probe.sites))
    assert np.isnan(found[1])
    for number in (0, 2):
        prompt = llama.tokenizer(PROMPTS[number])["input_ids"]
        with torch.no_grad():
            out = llama.module(input_ids=torch.tensor([prompt + ids[number]]), output_hidden_states=True)
        states = out.hidden_states[2][0, len(prompt) :]
        assert found[number] == pytest.approx(float((states @ noise(32)).mean()) + 0.25, rel=1e-4)


def test_a_probe_of_one_class_is_refused_and_one_held_out_class_has_no_auroc(llama):
    with pytest.raises(ValueError, match="of one class"):
        ProbeScore.fit(llama, table().assign(label=True), "resid_post.1")
    few = table().iloc[:8].assign(group=range(8))
    assert np.isnan(ProbeScore.fit(llama, few, "resid_post.1").facts["held_out_auroc"])
