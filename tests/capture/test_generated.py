"""Activations kept during generate are those of one forward over prompt and continuation."""

import numpy as np
import pytest
import torch

from microtome.capture.collect import capture
from microtome.capture.generated import Generation
from microtome.capture.models import LoadedModel
from microtome.capture.store import Store

PROMPTS = ["the cat sat on", "a dog", "she liked the old film but he ran to the house", "good"]
SITES = ["resid_pre", "resid_post", "attn_out", "mlp_act", "q", "k", "v", "q_rot", "k_rot", "z", "head_out"]


def loaded(tiny, word_tokenizer, kind: str) -> LoadedModel:
    module = tiny(kind)
    module.generation_config.eos_token_id = None  # random models end at once else
    module.config.eos_token_id = None
    return LoadedModel.from_module(module, word_tokenizer, name=kind)


@pytest.fixture(scope="module")
def model(tiny, word_tokenizer) -> LoadedModel:
    return loaded(tiny, word_tokenizer, "llama")


@pytest.mark.parametrize("kind", ["llama", "gpt2", "neox", "gemma2", "qwen3"])
@pytest.mark.parametrize("max_tokens", [2048, 8])
def test_equal_to_one_forward_of_the_whole_sequence(tiny, word_tokenizer, kind, max_tokens) -> None:
    model = LoadedModel.from_module(loaded(tiny, word_tokenizer, kind).module, name=kind)
    prompts = [word_tokenizer(prompt)["input_ids"] for prompt in PROMPTS]
    given = {"generate": Generation(7), "max_tokens": max_tokens, "progress": False}
    kept = capture(model, prompts, SITES, "all", **given)
    for number, ids in enumerate(prompts):
        mine = kept.select_rows(kept.rows["text"].to_numpy() == number)
        assert mine.n_rows == len(ids) + 7
        assert mine.rows["position"].tolist() == list(range(len(ids) + 7))
        assert mine.rows["is_generated"].tolist() == [False] * len(ids) + [True] * 7
        whole = [int(token) for token in mine.rows["token"]]  # without a tokenizer a token is its id
        assert whole[: len(ids)] == ids
        assert mine.rows["completion"].unique().tolist() == [" ".join(map(str, whole[len(ids) :]))]
        at_once = capture(model, [whole], SITES, "all", progress=False)
        for site in kept.sites:
            a, b = mine[site].flatten(1), at_once[site].flatten(1)
            assert ((a - b).norm(dim=1) <= 1e-4 * b.norm(dim=1)).all(), site
        logits = capture(model, [whole], "logits", "all", progress=False)["logits"]
        assert logits[len(ids) - 1 : -1].argmax(-1).tolist() == whole[len(ids) :]


@pytest.mark.parametrize(
    ("positions", "expected"),
    [
        ("generated", [4, 5, 6, 2, 3, 4, 11, 12, 13, 1, 2, 3]),
        ("prompt", [*range(4), 0, 1, *range(11), 0]),
        ("last", [6, 4, 13, 3]),
        ("first", [0, 0, 0, 0]),
        (-2, [5, 3, 12, 2]),
        (["generated", [0, -1], "prompt", []], [4, 5, 6, 0, 4, *range(11)]),
    ],
)
def test_positions_count_through_prompt_and_continuation(model, positions, expected) -> None:
    given = {"generate": Generation(3), "progress": False}
    kept = capture(model, PROMPTS, ["resid_post", "z.1"], positions, **given)
    whole = capture(model, PROMPTS, ["resid_post", "z.1"], "all", **given)
    assert kept.rows["position"].tolist() == expected
    index = [
        int(whole.rows.index[(whole.rows["text"] == row.text) & (whole.rows["position"] == row.position)][0])
        for row in kept.rows.itertuples()
    ]
    assert all(torch.equal(kept[site], whole[site][index]) for site in kept.sites)


def test_means_take_in_what_is_written(model) -> None:
    given = {"generate": Generation(3), "progress": False}
    mean = capture(model, PROMPTS, "z.1", "mean", **given)
    whole = capture(model, PROMPTS, "z.1", "all", **given)
    for number in range(len(PROMPTS)):
        torch.testing.assert_close(mean["z.1"][number], whole["z.1"][whole.rows["text"] == number].mean(0))


def test_a_text_that_ends_has_no_rows_beyond_its_end(tiny, word_tokenizer) -> None:
    model = LoadedModel.from_module(loaded(tiny, word_tokenizer, "llama").module, name="llama")
    prompts = [word_tokenizer(prompt)["input_ids"] for prompt in PROMPTS]
    free = capture(model, prompts, "z.0", "generated", generate=Generation(6), progress=False).rows
    third = free[free["text"] == 0]["token"].iloc[2]
    model.module.generation_config.eos_token_id = int(third)
    kept = capture(model, prompts, "z.0", "generated", generate=Generation(6), progress=False)
    for number in range(len(PROMPTS)):
        tokens = free[free["text"] == number]["token"].tolist()
        expected = tokens[: tokens.index(third)] if third in tokens else tokens
        assert kept.rows[kept.rows["text"] == number]["token"].tolist() == expected
    assert (kept.rows["text"] == 0).sum() <= 2


def test_samples_are_drawn_from_the_seed_alone(model) -> None:
    def tokens(seed: int) -> list[str]:
        torch.manual_seed(len(PROMPTS) + seed)
        torch.rand(1)
        given = {"generate": Generation(8, do_sample=True, temperature=1.5, seed=seed), "progress": False}
        return capture(model, PROMPTS, "z.0", "generated", **given).rows["token"].tolist()

    assert tokens(0) == tokens(0)
    assert tokens(0) != tokens(1)


def test_draws_of_other_seeds_are_other_draws(tiny, word_tokenizer) -> None:
    """Text k + 1 under seed 0 must not draw what text k draws under seed 1: repeats would pass for independent ones."""
    model = loaded(tiny, word_tokenizer, "llama")
    drawn = [
        completion
        for seed in range(4)
        for completion in capture(
            model,
            [[5, 6, 7]] * 5,
            "z.0",
            "last",
            generate=Generation(12, do_sample=True, temperature=2.0, seed=seed),
            max_tokens=1,
            progress=False,
        ).rows["completion"]
    ]
    assert len(set(drawn)) == 20


@pytest.mark.parametrize(
    "setting",
    [
        {"repetition_penalty": 5.0},
        {"suppress_tokens": list(range(20, 119))},
        {"no_repeat_ngram_size": 1},
        {"num_beams": 3},
        {"return_dict_in_generate": True},
        {"min_length": 30},
        {"temperature": 0.1, "do_sample": True},
        {"max_length": 5},
    ],
)
def test_settings_that_the_checkpoint_ships_do_not_act(tiny, word_tokenizer, setting) -> None:
    """What is not recorded must not change what is written."""
    model = loaded(tiny, word_tokenizer, "llama")
    plain = capture(model, PROMPTS, "z.0", "generated", generate=Generation(6), progress=False)
    for name, value in setting.items():
        setattr(model.module.generation_config, name, value)
    shipped = model.module.generation_config
    kept = capture(model, PROMPTS, "z.0", "generated", generate=Generation(6), progress=False)
    assert kept.rows["completion"].tolist() == plain.rows["completion"].tolist()
    assert model.module.generation_config is shipped


def test_other_batches_are_another_capture_when_the_model_writes(model, tmp_path) -> None:
    """They round, and so choose or draw, otherwise: a store would mix two sets of texts."""
    given = {"generate": Generation(3, do_sample=True), "store": tmp_path / "s", "shard_tokens": 30, "progress": False}
    capture(model, PROMPTS, "z.0", "generated", **given)
    with pytest.raises(ValueError, match=r"holds another capture .generation: "):
        capture(model, PROMPTS, "z.0", "generated", **given, max_tokens=8)


def test_a_model_whose_steps_are_not_its_forward_is_refused(tiny, word_tokenizer) -> None:
    """An encoder with a language-model head writes, but each step sees what one forward would not."""
    from transformers import BertConfig, BertLMHeadModel

    config = BertConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48, vocab_size=120, pad_token_id=0
    )
    torch.manual_seed(0)
    model = LoadedModel.from_module(BertLMHeadModel(config).eval(), word_tokenizer, name="bert")
    with pytest.raises(ValueError, match=r"resid_post\.0: what BertLMHeadModel computes step by step differs from one"):
        capture(model, PROMPTS, "resid_post", "all", generate=Generation(4), progress=False)


def test_texts_that_end_at_once(tiny, word_tokenizer, tmp_path) -> None:
    model = loaded(tiny, word_tokenizer, "llama")
    ends = list(range(120))
    model.module.generation_config.eos_token_id = ends
    with pytest.raises(ValueError, match="The model ended every text before it wrote a token at these positions"):
        capture(model, PROMPTS, "z.0", "generated", generate=Generation(3), progress=False)
    first = capture(model, PROMPTS, "z.0", "all", generate=Generation(3), progress=False)
    assert first.n_rows == sum(len(prompt.split()) for prompt in PROMPTS)
    assert not first.rows["is_generated"].any()
    model.module.generation_config.eos_token_id = None
    writes = capture(model, PROMPTS, "logits", "generated", generate=Generation(1), progress=False)
    given = {"generate": Generation(3), "store": tmp_path / "s", "shard_tokens": 9, "progress": False}
    token = capture(model, [[5, 6]], "z.0", "generated", generate=Generation(1), progress=False).rows["completion"]
    assert len(writes.rows) == 4
    assert len(token) == 1
    store = capture(model, PROMPTS, "z.0", ["generated", [], "generated", "generated"], **given)
    assert sum(part.n_rows for part in store.parts()) == store.n_rows == 9


def test_prompts_beyond_the_models_positions(tiny, word_tokenizer) -> None:
    model = loaded(tiny, word_tokenizer, "gpt2")
    with pytest.raises(ValueError, match=r"row 1 has 60 tokens; with max_new_tokens=10 that is over the model's 64"):
        capture(model, [[5, 6], [7] * 60], "z.0", "last", generate=Generation(10), progress=False)
    kept = capture(model, [[5, 6], [7] * 60], "z.0", "last", generate=Generation(4), progress=False)
    assert kept.rows["position"].tolist() == [5, 63]


def test_the_generator_of_the_caller_is_left_alone(model) -> None:
    torch.manual_seed(5)
    state = torch.get_rng_state()
    given = {"generate": Generation(4, do_sample=True, top_k=5, top_p=0.9), "progress": False}
    capture(model, PROMPTS, "z.0", "generated", **given)
    assert torch.equal(torch.get_rng_state(), state)


def test_edits_act_in_every_step(model) -> None:
    given = {"generate": Generation(5), "progress": False}
    edits = {"z.1.2": lambda z: -z}
    kept = capture(model, PROMPTS, ["z.1", "resid_post.2"], "generated", edits=edits, **given)
    plain = capture(model, PROMPTS, ["z.1", "resid_post.2"], "generated", **given)
    assert float(kept["z.1.2"].abs().max()) == 0
    assert not torch.equal(kept["resid_post.2"], plain["resid_post.2"])


def test_a_store_of_generated_tokens_goes_on(model, tmp_path) -> None:
    given = {"generate": Generation(4, do_sample=True, seed=2), "progress": False}
    memory = capture(model, PROMPTS * 5, "resid_post", "all", **given, max_tokens=1)
    path = tmp_path / "s"
    store = capture(model, PROMPTS * 5, "resid_post", "all", **given, max_tokens=1, store=path, shard_tokens=40)
    assert isinstance(store, Store)
    assert store.rows["token"].tolist() == memory.rows["token"].tolist()
    assert store.rows["completion"].tolist() == memory.rows["completion"].tolist()
    before = [file.read_bytes() for file in sorted(path.glob("shard-*"))]
    assert len(before) > 2
    (path / "shard-00001.safetensors").unlink()
    capture(model, PROMPTS * 5, "resid_post", "all", **given, max_tokens=1, store=path, shard_tokens=40)
    assert [file.read_bytes() for file in sorted(path.glob("shard-*"))] == before


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"sites": "pattern.0"}, r"pattern\.0: rows of a pattern get longer with every step"),
        ({"sites": "logits", "positions": "all"}, r"logits: generate computes it at 1 position\(s\) of the prompt"),
        ({"token_labels": {"n": lambda text, offsets: []}}, "token_labels and generate= do not go together"),
        ({"positions": (0, 3)}, "spans of characters have no place there"),
        ({"positions": "middle"}, "with generate= expected last, first, mean, all, prompt, generated"),
        ({"labels": {"completion": [1] * 4}}, "labels has a column 'completion', which generate= adds itself"),
    ],
)
def test_what_generation_cannot_give(model, changes, said) -> None:
    given = {"sites": "z.0", "positions": "generated", "generate": Generation(2), "progress": False} | changes
    with pytest.raises(ValueError, match=said):
        capture(model, PROMPTS, **given)


def test_logits_of_generated_tokens(tiny, word_tokenizer) -> None:
    model = LoadedModel.from_module(loaded(tiny, word_tokenizer, "llama").module, name="llama")
    prompts = [word_tokenizer(prompt)["input_ids"] for prompt in PROMPTS]
    kept = capture(model, prompts, "logits", "generated", generate=Generation(4), progress=False)
    longer = capture(model, prompts, "z.0", "generated", generate=Generation(5), progress=False).rows
    for number in range(len(PROMPTS)):
        mine = kept["logits"][torch.tensor((kept.rows["text"] == number).to_numpy())]
        tokens = longer[longer["text"] == number]["token"].tolist()
        assert [str(token) for token in mine.argmax(-1).tolist()] == tokens[1:]


def test_models_that_do_not_write(tiny, word_tokenizer) -> None:
    model = LoadedModel.from_module(tiny("bert"), word_tokenizer, name="bert")
    with pytest.raises(ValueError, match="generate= needs texts and a model that writes; BertModel"):
        capture(model, PROMPTS, "z.0", "last", generate=Generation(2), progress=False)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens=0: give at least 1"),
        ({"max_new_tokens": 1, "temperature": 0.5}, "need do_sample"),
        ({"max_new_tokens": 1, "do_sample": True, "temperature": 0.0}, "give a temperature above 0"),
        ({"max_new_tokens": 1, "do_sample": True, "top_p": 3.0}, "a top_p above 0 and up to 1"),
        ({"max_new_tokens": 1, "do_sample": True, "top_k": 0}, "a top_k of 1 or more"),
        ({"max_new_tokens": 1, "seed": -1}, "seed=-1: give 0 or more"),
    ],
)
def test_settings_that_mean_nothing(given, said) -> None:
    with pytest.raises(ValueError, match=said):
        Generation(**given)


@pytest.mark.parametrize("name", ["max_new_tokens", "seed", "top_k"])
@pytest.mark.parametrize("value", [4.0, np.int64(4), "4", True])
def test_whole_numbers_are_asked_for(name, value) -> None:
    with pytest.raises(Exception, match=name) as caught:
        Generation(**({"max_new_tokens": 3, "do_sample": True} | {name: value}))
    assert isinstance(caught.value, TypeError)
