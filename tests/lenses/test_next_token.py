"""Next-token KL and nats of continuations equal the model's own logits and loss, padded or alone."""

from itertools import pairwise

import pytest
import torch

from microtome.capture import LoadedModel
from microtome.lenses.next_token import continuation_nll, next_token_kl, perplexity, text_nll

KINDS = ["llama", "gpt2", "neox", "neox_sequential", "gemma2", "qwen3"]
TEXTS = [[5, 9, 30, 41, 7, 88, 3], [17, 4, 66], [100, 8, 9, 10, 11], [50, 60]]
PROMPTS = [3, 1, 4, 1]


def scale(values):
    """An edit returns what to add: this one halves."""
    return values * -0.5


@torch.no_grad()
def own_log_probs(model, ids: list[int]) -> torch.Tensor:
    return model(input_ids=torch.tensor([ids])).logits[0].double().log_softmax(-1)


@pytest.mark.parametrize("kind", KINDS)
def test_nats_are_those_of_the_models_own_loss(tiny, kind: str) -> None:
    model = tiny(kind)
    found = text_nll(model, TEXTS)
    assert found.tokens.tolist() == [len(text) - 1 for text in TEXTS]
    assert found.token_id.tolist() == [token for text in TEXTS for token in text[1:]]
    for number, text in enumerate(TEXTS):
        ids = torch.tensor([text])
        with torch.no_grad():
            loss = float(model(input_ids=ids, labels=ids).loss)
        assert float(found.nats[number]) / (len(text) - 1) == pytest.approx(loss, abs=2e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_a_continuation_is_scored_behind_its_prompt_alone(tiny, kind: str) -> None:
    model = tiny(kind)
    prompts = [text[:n] for text, n in zip(TEXTS, PROMPTS, strict=True)]
    rest = [text[n:] for text, n in zip(TEXTS, PROMPTS, strict=True)]
    found = continuation_nll(model, prompts, rest)
    expected = []
    for text, n in zip(TEXTS, PROMPTS, strict=True):
        log_probs = own_log_probs(model, text)
        expected += [-float(log_probs[i, text[i + 1]]) for i in range(n - 1, len(text) - 1)]
    torch.testing.assert_close(found.nll.double(), torch.tensor(expected, dtype=torch.float64), atol=1e-4, rtol=1e-4)
    assert found.position.tolist() == [i for text, n in zip(TEXTS, PROMPTS, strict=True) for i in range(n, len(text))]
    assert found.perplexity == pytest.approx(torch.tensor(expected).mean().exp().item(), rel=1e-4)
    assert perplexity(model, prompts, rest) == found.perplexity
    alone = [continuation_nll(model, [one], [other]).nats.item() for one, other in zip(prompts, rest, strict=True)]
    assert found.nats.tolist() == pytest.approx(alone, abs=1e-4)
    frame = found.per_text()
    assert frame["tokens"].tolist() == [len(ids) for ids in rest]
    assert frame["perplexity"].to_numpy() == pytest.approx((found.nats / found.tokens).exp().numpy())
    assert len(found.to_frame()) == sum(map(len, rest))


@pytest.mark.parametrize("kind", KINDS)
def test_kl_of_an_edit_is_that_of_the_logits(tiny, kind: str) -> None:
    model = tiny(kind)
    found = next_token_kl(model, TEXTS, {"resid_post.1": scale})
    row = 0
    for text in TEXTS:
        p = own_log_probs(model, text)
        handle = find_block(model, 1).register_forward_hook(halved)
        q = own_log_probs(model, text)
        handle.remove()
        rows = slice(row, row + len(text))
        row += len(text)
        assert found.position[rows].tolist() == list(range(len(text)))
        assert found.token_id[rows].tolist() == text
        kl, reverse = (p.exp() * (p - q)).sum(-1), (q.exp() * (q - p)).sum(-1)
        torch.testing.assert_close(found.kl[rows].double(), kl, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(found.kl_reverse[rows].double(), reverse, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(found.clean_entropy[rows].double(), -(p.exp() * p).sum(-1), atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(found.edited_entropy[rows].double(), -(q.exp() * q).sum(-1), atol=1e-4, rtol=1e-4)
        assert torch.equal(found.agrees[rows], p.argmax(-1) == q.argmax(-1))
        for values, log_probs in ((found.clean_nll, p), (found.edited_nll, q)):
            expected = [-float(log_probs[i, b]) for i, (_, b) in enumerate(pairwise(text))]
            assert values[rows][:-1].tolist() == pytest.approx(expected, abs=1e-4)
            assert bool(values[rows][-1].isnan())
    assert float(found.kl.mean()) > 1e-3


def find_block(model, number: int):
    base = model.base_model
    return (base.h if hasattr(base, "h") else base.layers)[number]


def halved(_module, _inputs, output):
    return (output[0] * 0.5, *output[1:]) if isinstance(output, tuple) else output * 0.5


def test_an_edit_that_changes_nothing_has_no_kl_and_edits_act_on_nats(tiny) -> None:
    model = tiny("llama")
    same = next_token_kl(model, TEXTS, {"resid_post.1": torch.zeros_like})
    assert float(same.kl.max()) < 1e-6
    assert bool(same.agrees.all())
    edited = text_nll(model, TEXTS, edits={"resid_post.1": scale})
    table = next_token_kl(model, TEXTS, {"resid_post.1": scale})
    torch.testing.assert_close(edited.nll, table.edited_nll[~table.edited_nll.isnan()], atol=1e-5, rtol=1e-5)
    assert edited.perplexity != text_nll(model, TEXTS).perplexity
    norm = next_token_kl(model, TEXTS, {"final_norm": scale})
    assert float(norm.kl.min()) > 0


def test_rows_from_the_prompts_last_token_on(tiny) -> None:
    model = tiny("gpt2")
    whole = next_token_kl(model, TEXTS, {"resid_post.0": scale})
    part = next_token_kl(model, TEXTS, {"resid_post.0": scale}, prompt_tokens=PROMPTS, max_tokens=8)
    start = torch.tensor(PROMPTS)[whole.text] - 1
    keep = whole.position >= start
    assert torch.equal(part.position, whole.position[keep])
    torch.testing.assert_close(part.kl, whole.kl[keep], atol=1e-5, rtol=1e-4)
    assert part.per_text()["rows"].tolist() == [len(t) - n + 1 for t, n in zip(TEXTS, PROMPTS, strict=True)]
    assert len(part.to_frame()) == len(part.kl)


def test_strings(tiny, word_tokenizer) -> None:
    model = LoadedModel.from_module(tiny("llama"), word_tokenizer, name="tiny")
    words = [word for word in word_tokenizer.get_vocab() if word.isalpha()][:6]
    prompt, rest = " ".join(words[:4]), " ".join(words[4:])
    found = continuation_nll(model, [prompt], [rest])
    ids = [word_tokenizer(text)["input_ids"] for text in (prompt, rest)]
    assert found.token_id.tolist() == ids[1]
    by_ids = continuation_nll(model, [ids[0]], [ids[1]])
    torch.testing.assert_close(found.nll, by_ids.nll)
    with pytest.raises(ValueError, match="continuation of text 1 has no token"):
        continuation_nll(model, [prompt, prompt], [rest, ""])
    with pytest.raises(ValueError, match="Strings need a tokenizer"):
        continuation_nll(model.module, [prompt], [rest])


def test_what_does_not_fit_is_said(tiny) -> None:
    model = tiny("llama")
    with pytest.raises(ValueError, match="give one for each"):
        continuation_nll(model, [[1, 2]], [[3], [4]])
    with pytest.raises(ValueError, match="continuation of text 0 has no token"):
        continuation_nll(model, [[1, 2]], [[]])
    with pytest.raises(ValueError, match="give BOS at least"):
        continuation_nll(model, [[]], [[1, 2]])
    with pytest.raises(ValueError, match="at least one must follow"):
        text_nll(model, TEXTS, prompt_tokens=2)
    with pytest.raises(ValueError, match="4 texts"):
        text_nll(model, TEXTS, prompt_tokens=[1, 1])
    with pytest.raises(ValueError, match="no more than the text"):
        next_token_kl(model, TEXTS, {"resid_post.0": scale}, prompt_tokens=4)
    with pytest.raises(ValueError, match="No edits"):
        next_token_kl(model, TEXTS, {})
    with pytest.raises(ValueError, match="Edit final_norm instead"):
        next_token_kl(model, TEXTS, {"logits": scale})
    with pytest.raises(ValueError, match="no unembedding"):
        text_nll(tiny("bert"), TEXTS)
