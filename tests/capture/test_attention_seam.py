import copy
import pickle
import sys
import threading

import pytest
import torch
from transformers import AttentionInterface, AttentionMaskInterface, BloomConfig, BloomForCausalLM, StaticCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import flash_attention_mask, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from microtome.capture.attention_seam import (
    SeamCall,
    SeamName,
    intercepted,
    seam_calls,
    seam_configs,
    seam_observed,
    switch_off,
    switch_on,
)

INTERFACE_KINDS = ["llama", "gpt2", "neox", "gemma2", "qwen3", "bert"]


def batch(side="right"):
    ids = torch.randint(3, 120, (2, 9), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[1, -4:] = 0
    if side == "left":
        mask = mask.flip(1)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    return {"input_ids": ids, "attention_mask": mask, "position_ids": positions}


def first_output(model, **inputs):
    with torch.no_grad():
        return model(**inputs)[0]


def settings(model):
    configs = {id(m.config): m.config for m in model.modules() if hasattr(m, "config")}
    return [(type(c._attn_implementation), str(c._attn_implementation)) for c in configs.values()]


@pytest.fixture
def bloom():
    torch.manual_seed(0)
    return BloomForCausalLM(BloomConfig(vocab_size=120, hidden_size=32, n_layer=2, n_head=4)).eval()


@pytest.mark.parametrize(
    ("kind", "implementation"),
    [
        (k, i) for k in INTERFACE_KINDS for i in ("sdpa", "eager") if (k, i) != ("gemma2", "sdpa")
    ],  # sdpa has no soft cap
)
def test_inert_seam_changes_no_bit_and_is_called_by_every_layer(tiny, kind, implementation):
    model = tiny(kind)
    model.set_attn_implementation(implementation)
    inputs = batch("left")
    bare, before = first_output(model, **inputs), settings(model)
    changed = switch_on(model)
    assert torch.equal(first_output(model, **inputs), bare)
    switch_off(changed)
    counts = seam_calls(model, lambda: first_output(model, **inputs))
    assert list(counts.values()) == [1, 1, 1]
    assert all(model.get_submodule(path) for path in counts)
    assert settings(model) == before
    assert torch.equal(first_output(model, **inputs), bare)


@pytest.mark.parametrize("kind", ["llama", "gemma2"])
def test_inert_seam_changes_no_generated_token(tiny, kind):
    model = tiny(kind)
    options = {"max_new_tokens": 20, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    inputs = {k: v for k, v in batch("left").items() if k != "position_ids"}
    bare = model.generate(**inputs, **options)
    switch_on(model)
    seamed = model.generate(**inputs, **options)
    assert torch.equal(bare.sequences, seamed.sequences)
    assert all(torch.equal(a, b) for a, b in zip(bare.logits, seamed.logits, strict=True))


def test_models_that_ignore_the_interface_are_told_apart_and_left_alone(bloom):
    before = settings(bloom)
    assert seam_calls(bloom, lambda: first_output(bloom, input_ids=batch()["input_ids"])) == {}
    assert switch_on(bloom) == []
    assert settings(bloom) == before


def test_switching_on_twice_is_switching_on_once(tiny):
    model = tiny("llama")
    assert len(switch_on(model)) == 1
    assert switch_on(model) == []
    assert model.config._attn_implementation.beside == "sdpa"
    assert seam_configs(model) == [model.config]
    switch_off(seam_configs(model))
    assert type(model.config._attn_implementation) is str


def test_a_setting_changed_meanwhile_is_kept(tiny):
    model = tiny("llama")
    changed = switch_on(model)
    model.set_attn_implementation("eager")
    assert seam_configs(model) == []
    switch_off(changed)
    assert settings(model)[0] == (str, "eager")


def test_the_seam_name_equals_both_and_is_found_by_its_own_hash():
    name = SeamName("microtome_sdpa")
    assert name == "sdpa"
    assert "sdpa" == name  # noqa: SIM300 (a plain string on the left asks the same)
    assert name == "microtome_sdpa"
    assert name in ("eager", "sdpa")
    assert not name != "sdpa"  # noqa: SIM202 (the operator under test)
    assert name != "eager"
    assert name is not None
    assert name != None  # noqa: E711
    assert name not in {"sdpa": 0}
    for twin in (copy.deepcopy(name), pickle.loads(pickle.dumps(name))):
        assert type(twin) is SeamName
        assert twin == name


def test_a_model_that_asks_for_the_name_takes_the_same_branch(tiny):
    # GPT-2 with this option computes attention itself, and only if the setting == "eager".
    model = tiny("gpt2")
    model.set_attn_implementation("eager")
    for block in model.transformer.h:
        block.attn.reorder_and_upcast_attn = True
    inputs = batch()
    bare = first_output(model, **inputs)
    with_scores = model(**inputs, output_attentions=True).attentions
    assert seam_calls(model, lambda: first_output(model, **inputs)) == {}
    switch_on(model)
    assert torch.equal(first_output(model, **inputs), bare)
    assert torch.equal(model(**inputs, output_attentions=True).attentions[0], with_scores[0])


def test_the_saved_configuration_does_not_mention_the_seam(tiny, tmp_path):
    model = tiny("gpt2")
    model.set_attn_implementation("eager")
    model.config.output_attentions = True
    switch_on(model)
    model.save_pretrained(tmp_path)  # validates: output_attentions needs the setting to be eager
    assert "microtome" not in (tmp_path / "config.json").read_text()


def test_eager_attention_of_a_file_with_two_is_the_one_the_module_uses(tiny):
    model = tiny("llama")
    model.set_attn_implementation("eager")
    file = sys.modules[type(model).__module__]
    bare = first_output(model, **batch())
    try:
        file.aaa_eager_attention_forward = lambda *args, **kwargs: pytest.fail("the wrong function")
        switch_on(model)
        assert torch.equal(first_output(model, **batch()), bare)
    finally:
        del file.aaa_eager_attention_forward


def test_missing_eager_function_is_an_error():
    class Lonely(torch.nn.Module):
        def forward(self, x):
            return x

    switch_on_name = SeamName("microtome_eager")
    if switch_on_name not in ALL_ATTENTION_FUNCTIONS:
        pytest.skip("registered by the first eager model of this run")
    with pytest.raises(RuntimeError, match=r"Lonely uses 'eager' attention, and its file .* defines no eager"):
        ALL_ATTENTION_FUNCTIONS[switch_on_name](Lonely(), *torch.zeros(3, 1, 1, 1, 1), None)


def test_an_interceptor_sees_and_changes_every_call_in_its_context_only(tiny):
    class Doubler:
        def arguments(self, call):
            return call

        def result(self, call, z):
            seen.append(call.module)
            return 2 * z

    model, seen, doubler = tiny("llama"), [], Doubler()
    inputs = batch()
    bare = first_output(model, **inputs)
    switch_on(model)
    with intercepted(doubler), intercepted(doubler):  # once, however often it is entered
        doubled = first_output(model, **inputs)
    assert seen == [layer.self_attn for layer in model.model.layers]
    assert not torch.allclose(doubled, bare)
    assert torch.equal(first_output(model, **inputs), bare)
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.data.mul_(2)
    torch.testing.assert_close(first_output(model, **inputs), doubled, rtol=0, atol=1e-4)


def eager_twin(model):
    twin = copy.deepcopy(model)
    twin.set_attn_implementation("eager")
    return twin


def recorded_calls(model, run):
    calls: list[SeamCall] = []
    with seam_observed(model, lambda call, z: calls.append(call)):
        run()
    return calls


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("kind", ["llama", "gpt2", "gemma2", "qwen3", "bert"])
def test_pattern_rows_match_an_eager_run_and_the_eager_function(tiny, kind, side):
    model, inputs = tiny(kind), batch(side)
    twin = eager_twin(model)
    calls = recorded_calls(model, lambda: first_output(model, **inputs))
    of_eager_run = twin(**inputs, output_attentions=True).attentions
    eager = sys.modules[type(model).__module__].eager_attention_forward
    real = inputs["attention_mask"].bool()
    for call, expected in zip(calls, of_eager_run, strict=True):
        rows = call.pattern_rows(None, None)
        for text in range(2):
            difference = (rows - expected)[text][:, real[text]]
            assert difference.abs().max() < 1e-5
        mask = call.mask
        if mask is not None and mask.dtype == torch.bool:
            mask = torch.where(mask, 0.0, torch.finfo(torch.float32).min)
        _, by_function = eager(call.module, call.query, call.key, call.value, mask, **call.options)
        assert (rows - by_function)[0][:, real[0]].abs().max() < 1e-6
        assert (rows - by_function)[1][:, real[1]].abs().max() < 1e-6
        some = call.pattern_rows([3, 1], torch.tensor([8, 2]))
        torch.testing.assert_close(some, rows[:, [3, 1]][:, :, [8, 2]], rtol=0, atol=1e-6)


def test_gemma2_rows_are_those_of_its_soft_cap(tiny):
    model = tiny("gemma2")
    model.config.attn_logit_softcapping = 2.0
    for layer in model.model.layers:
        layer.self_attn.attn_logit_softcapping = 2.0
    (call, *_) = recorded_calls(model, lambda: first_output(model, **batch()))
    assert call.options["softcap"] == 2.0
    expected = eager_twin(model)(**batch(), output_attentions=True).attentions[0]
    assert (call.pattern_rows(None, None) - expected)[0].abs().max() < 1e-5


@pytest.mark.parametrize("kind", ["llama", "gpt2", "gemma2"])
def test_pattern_rows_of_a_cached_step_match_an_eager_run(tiny, kind):
    model, inputs = tiny(kind), batch("left")
    twin = eager_twin(model)
    with torch.no_grad():
        first = model(**inputs, use_cache=True)
        of_twin = twin(**inputs, use_cache=True)
    mask = torch.cat([inputs["attention_mask"], torch.ones(2, 1, dtype=torch.long)], dim=1)
    positions = mask.sum(1, keepdim=True) - 1
    step = {"input_ids": torch.tensor([[5], [7]]), "attention_mask": mask, "position_ids": positions}
    calls = recorded_calls(model, lambda: first_output(model, **step, cache=first.past_key_values))
    expected = twin(**step, cache=of_twin.past_key_values, output_attentions=True).attentions
    for call, weights in zip(calls, expected, strict=True):
        rows = call.pattern_rows(None, None)
        assert rows.shape == (2, 4, 1, 10)
        torch.testing.assert_close(rows, weights, rtol=0, atol=1e-5)


def test_rows_without_a_mask_are_causal_as_sdpa_makes_them(tiny):
    model = tiny("llama")
    ids = batch()["input_ids"]
    (call, *_) = recorded_calls(model, lambda: first_output(model, input_ids=ids))
    assert call.mask is None
    expected = eager_twin(model)(input_ids=ids, output_attentions=True).attentions[0]
    torch.testing.assert_close(call.pattern_rows(None, None), expected, rtol=0, atol=1e-5)


@pytest.fixture
def flash_stand_in():
    """sdpa under a name with flash in it, with the masks of flash attention: padding only, `[batch, key]`."""

    def attention(module, query, key, value, attention_mask, **options):
        assert module.config._attn_implementation == "flash_stand_in"
        queries, keys = query.shape[2], key.shape[2]
        mask = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)[None, None]
        if options.get("sliding_window"):
            mask = mask & ~torch.ones_like(mask).tril(keys - queries - options["sliding_window"])
        if attention_mask is not None:
            mask = mask & attention_mask[:, None, None].bool()
        options["is_causal"] = False
        return sdpa_attention_forward(module, query, key, value, mask, **options)

    AttentionInterface.register("flash_stand_in", attention)
    AttentionMaskInterface.register("flash_stand_in", flash_attention_mask)
    yield "flash_stand_in"
    for mapping in (AttentionInterface._global_mapping, AttentionMaskInterface._global_mapping):
        del mapping["flash_stand_in"]


@pytest.mark.parametrize("side", ["left", "right"])
def test_rows_under_flash_attention_come_from_its_flags(tiny, flash_stand_in, side):
    model, inputs = tiny("llama"), batch(side)
    expected = eager_twin(model)(**inputs, output_attentions=True).attentions
    bare = first_output(model, **inputs)
    model.config._attn_implementation_internal = flash_stand_in
    real = inputs["attention_mask"].bool()
    torch.testing.assert_close(first_output(model, **inputs)[real], bare[real], rtol=0, atol=1e-4)
    for call, weights in zip(recorded_calls(model, lambda: first_output(model, **inputs)), expected, strict=True):
        assert call.mask.shape == (2, 9)
        rows = call.pattern_rows(None, None)
        assert (rows - weights)[0][:, real[0]].abs().max() < 1e-5
        assert (rows - weights)[1][:, real[1]].abs().max() < 1e-5


def test_rows_of_a_cached_step_under_flash_attention_see_all_keys(tiny, flash_stand_in):
    model, ids = tiny("llama"), batch()["input_ids"]
    whole = eager_twin(model)(input_ids=ids, output_attentions=True).attentions
    model.config._attn_implementation_internal = flash_stand_in
    with torch.no_grad():
        start = model(input_ids=ids[:, :-2], use_cache=True).past_key_values
    calls = recorded_calls(model, lambda: first_output(model, input_ids=ids[:, -2:], cache=start))
    for call, weights in zip(calls, whole, strict=True):
        torch.testing.assert_close(call.pattern_rows(None, None), weights[:, :, -2:], rtol=0, atol=1e-5)


def test_rows_under_eager_attention_without_a_mask_are_not_causal(tiny):
    module = tiny("llama").model.layers[0].self_attn
    eager = sys.modules[type(module).__module__].eager_attention_forward
    q, k, v = (torch.randn(2, n, 5, 8, generator=torch.Generator().manual_seed(n)) for n in (4, 2, 2))
    _, expected = eager(module, q, k, v, None, scaling=0.5)
    rows = SeamCall(module, "eager", q, k, v, None, {"scaling": 0.5}).pattern_rows(None, None)
    torch.testing.assert_close(rows, expected, rtol=0, atol=1e-6)


def test_rows_refuse_a_mask_object_of_another_implementation():
    call = SeamCall(torch.nn.Identity(), "flex_attention", *torch.zeros(3, 1, 1, 1, 1), object())
    with pytest.raises(TypeError, match="'flex_attention' attention passes a object as mask"):
        call.pattern_rows(None, None)


def test_an_implementation_without_a_mask_function_stays_without(tiny):
    AttentionInterface.register("maskless", sdpa_attention_forward)
    try:
        model = tiny("llama")
        model.config._attn_implementation_internal = "maskless"
        bare = first_output(model, **batch("left"))
        switch_on(model)
        assert torch.equal(first_output(model, **batch("left")), bare)
    finally:
        del AttentionInterface._global_mapping["maskless"]
    assert AttentionMaskInterface._global_mapping["microtome_sdpa"] is sdpa_mask


@pytest.mark.parametrize("kind", ["llama", "gpt2", "gemma2"])
@pytest.mark.parametrize("new", [1, 3])
def test_statistics_of_a_cached_step_are_those_of_the_last_rows(tiny, kind, new):
    """Keys and queries end together: without that, self and previous would be the first keys of the cache."""
    model, ids = tiny(kind), batch()["input_ids"]
    whole = [c.statistics(windows=[3]) for c in recorded_calls(model, lambda: first_output(model, input_ids=ids))]
    with torch.no_grad():
        start = model(input_ids=ids[:, :-new], use_cache=True).past_key_values
    calls = recorded_calls(model, lambda: first_output(model, input_ids=ids[:, -new:], cache=start))
    for call, expected in zip(calls, whole, strict=True):
        found = call.statistics(windows=[3])
        for name in ("on_self", "on_previous", "mean_distance", "within", "on_first", "entropy"):
            wanted = getattr(expected, name)[..., -new:]
            torch.testing.assert_close(getattr(found, name), wanted, atol=2e-5, rtol=1e-4, msg=name)
        moved = call.statistics(causal_offset=0)
        assert not torch.allclose(moved.on_self, found.on_self)


def test_statistics_of_a_cache_with_empty_places_need_the_offset(tiny):
    model, ids = tiny("llama"), batch()["input_ids"]
    (whole, *_) = recorded_calls(model, lambda: first_output(model, input_ids=ids))
    cache = StaticCache(config=model.config, max_cache_len=16)
    with torch.no_grad():
        model(input_ids=ids[:, :-1], use_cache=True, cache=cache)
    (call, *_) = recorded_calls(model, lambda: first_output(model, input_ids=ids[:, -1:], cache=cache))
    found, expected = call.statistics(causal_offset=8), whole.statistics()
    for name in ("on_self", "on_previous", "mean_distance"):
        torch.testing.assert_close(getattr(found, name)[..., 0], getattr(expected, name)[..., -1], atol=2e-5, rtol=1e-4)


def test_threads_that_observe_one_model_do_not_end_each_other(tiny):
    model, inputs = tiny("llama"), batch()
    before, seen = settings(model), []
    with seam_observed(model, lambda call, z: seen.append(call)):

        def other():
            with seam_observed(model, lambda call, z: seen.append("other")):
                first_output(model, **inputs)
                inside.set()
                outer_is_over.wait(10)
                first_output(model, **inputs)

        inside, outer_is_over = threading.Event(), threading.Event()
        thread = threading.Thread(target=other)
        thread.start()
        inside.wait(10)
    outer_is_over.set()
    thread.join()
    assert seen == ["other"] * 6
    assert settings(model) == before


def test_taps_keep_the_seam_that_an_observer_had_put_there(tiny):
    model = tiny("llama")
    with seam_observed(model, lambda call, z: None):
        switch_on(model)
    assert seam_configs(model)
    switch_off(seam_configs(model))
