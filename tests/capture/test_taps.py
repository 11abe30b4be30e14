import asyncio
import copy
import threading

import pytest
import torch

from microtome.capture.sites import Site
from microtome.capture.tap_plan import Edit, Read
from microtome.capture.taps import TapNeverFired, taps

KINDS = ["llama", "gpt2", "bert"]
STREAM = ["resid_pre", "resid_mid", "resid_post", "attn_out", "mlp_out"]
BY_HEAD = ["q", "k", "v", "q_rot", "k_rot", "z", "head_out"]
SITES = [f"{kind}.1" for kind in STREAM + BY_HEAD] + [f"{kind}.1.1" for kind in BY_HEAD] + ["embed"]
CASES = [(kind, site) for kind in KINDS for site in SITES]


def zeros(value):
    return torch.zeros_like(value)


def noise(shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def read(model, anatomy, sites, run, edits=None):
    with taps(model, sites, edits, anatomy=anatomy) as tape:
        run(model)
    return tape


# ---- identities


@pytest.mark.parametrize("kind", KINDS)
def test_null_edits_of_every_site_change_no_bit(tappable, forward, kind):
    model, anatomy = tappable(kind)
    bare = forward(model)
    for site in anatomy.sites:
        name = site.at(head=2 if site.kind not in ("k", "v", "k_rot") else 1) if site.kind == "pattern" else site
        with taps(model, edits={name: zeros}, anatomy=anatomy):
            assert torch.equal(forward(model), bare), name
    everywhere = {site: zeros for site in anatomy.sites if site.kind != "pattern"}
    with taps(model, list(everywhere), everywhere, anatomy=anatomy):
        assert torch.equal(forward(model), bare)


@pytest.mark.parametrize(("kind", "site"), CASES)
def test_patching_a_site_with_its_own_value_changes_nothing(tappable, forward, kind, site):
    model, anatomy = tappable(kind)
    bare = forward(model)
    own = read(model, anatomy, [site], forward)[site]
    with taps(model, edits={site: lambda value: own - value}, anatomy=anatomy):
        assert torch.equal(forward(model), bare)


@pytest.mark.parametrize(("kind", "site"), CASES)
def test_an_edit_is_what_the_read_after_it_sees_in_every_row_and_position(tappable, forward, kind, site):
    model, anatomy = tappable(kind)
    clean = read(model, anatomy, [site], forward)[site]
    bare, delta = forward(model), noise(clean.shape)
    edited = read(model, anatomy, [site], forward, {site: lambda value: delta})[site]
    torch.testing.assert_close(edited - clean, delta, rtol=0, atol=2e-5)
    with taps(model, edits={site: lambda value: delta}, anatomy=anatomy):
        moved = (forward(model) - bare).abs().amax((1, 2))
    assert (moved > 1e-4).all()


@pytest.mark.parametrize(
    "site", ["resid_post.1", "q.1", "k.1.1", "v.1", "z.1", "z.1.1", "q_rot.1", "head_out.1", "mlp_out.1"]
)
def test_one_vector_is_added_to_every_row_position_and_head(tappable, forward, site):
    model, anatomy = tappable("llama")
    clean = read(model, anatomy, [site], forward)[site]
    for shape in (clean.shape[-1:], (1, *clean.shape[1:]), (2, 1, *clean.shape[2:])):
        delta = noise(shape)
        edited = read(model, anatomy, [site], forward, {site: lambda value, delta=delta: delta})[site]
        torch.testing.assert_close(edited - clean, delta.expand_as(clean), rtol=0, atol=2e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_clean_and_edited_forwards_interleave(tappable, forward, kind):
    model, anatomy = tappable(kind)
    bare, delta = forward(model), noise(32)
    edited = []
    for _ in range(5):
        with taps(model, edits={"resid_post.0": lambda value: delta}, anatomy=anatomy):
            edited.append(forward(model))
        assert torch.equal(forward(model), bare)
    assert all(torch.equal(edited[0], other) for other in edited)
    assert not torch.allclose(edited[0], bare)


# ---- agreement with other ways of doing the same


@pytest.mark.parametrize("kind", KINDS)
def test_reads_are_what_the_model_itself_reports(tappable, forward, inputs, kind):
    model, anatomy = tappable(kind)
    with taps(model, ["resid_pre", "resid_post"], anatomy=anatomy) as tape, torch.no_grad():
        reported = model(**inputs, output_hidden_states=True).hidden_states
    for layer in range(3):
        assert torch.equal(tape["resid_pre", layer], reported[layer])
        if layer < 2 or kind == "bert":  # the last reported state is after the final norm
            assert torch.equal(tape["resid_post", layer], reported[layer + 1])


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_the_stream_is_the_sum_of_its_parts(tappable, forward, kind):
    model, anatomy = tappable(kind)
    tape = read(model, anatomy, ["resid_pre.1", "resid_mid.1", "resid_post.1", "attn_out.1", "mlp_out.1"], forward)
    assert torch.equal(tape["resid_pre.1"] + tape["attn_out.1"], tape["resid_mid.1"])
    assert torch.equal(tape["resid_mid.1"] + tape["mlp_out.1"], tape["resid_post.1"])


@pytest.mark.parametrize("kind", KINDS)
def test_heads_write_what_attention_writes(tappable, forward, kind):
    model, anatomy = tappable(kind)
    tape = read(model, anatomy, ["z.1", "head_out.1", "attn_out.1"], forward)
    projection = model.get_submodule(anatomy.tap("head_out.1").through)
    bias = 0 if projection.bias is None else projection.bias
    assert tape["head_out.1"].shape == (2, 9, 4, 32)
    torch.testing.assert_close(tape["head_out.1"].sum(2) + bias, tape["attn_out.1"], rtol=0, atol=1e-5)
    one = read(model, anatomy, ["head_out.1.2", "z.1.2"], forward)
    torch.testing.assert_close(one["head_out.1.2"], tape["head_out.1.2"], rtol=0, atol=1e-6)
    assert torch.equal(one["z.1.2"], tape["z.1.2"])


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_the_pattern_times_v_are_z(tappable, forward, kind):
    model, anatomy = tappable(kind)
    tape = read(model, anatomy, [Read("pattern.1", queries="all"), "v.1", "z.1"], forward)
    pattern, v = tape["pattern.1"], tape["v.1"].transpose(1, 2)
    z = (pattern @ v.repeat_interleave(4 // v.shape[1], 1)).transpose(1, 2)
    torch.testing.assert_close(z, tape["z.1"], rtol=0, atol=1e-5)


def test_an_edit_of_v_is_a_bias_of_its_projection(tappable, forward):
    model, anatomy = tappable("llama")
    delta = noise(8)
    with taps(model, edits={"v.1.1": lambda value: delta}, anatomy=anatomy):
        edited = forward(model)
    projection = model.model.layers[1].self_attn.v_proj
    projection.bias = torch.nn.Parameter(torch.cat([torch.zeros(8), delta]))
    torch.testing.assert_close(forward(model), edited, rtol=0, atol=1e-4)


@pytest.mark.parametrize(("kind", "start"), [("q", 0), ("k", 32), ("v", 64)])
def test_an_edit_of_a_fused_projection_moves_its_head_and_no_other_column(tappable, forward, kind, start):
    model, anatomy = tappable("gpt2")
    delta = noise(8)
    with taps(model, edits={f"{kind}.1.2": lambda value: delta}, anatomy=anatomy):
        edited = forward(model)
    fused = model.transformer.h[1].attn.c_attn
    columns = slice(start + 16, start + 24)
    fused.bias.data[columns] += delta
    torch.testing.assert_close(forward(model), edited, rtol=0, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_zeroing_z_of_a_head_is_zeroing_its_rows_of_the_projection(tappable, forward, kind):
    model, anatomy = tappable(kind)
    with taps(model, edits={"z.1.3": torch.neg}, anatomy=anatomy):
        by_z = forward(model)
    with taps(model, edits={"head_out.1.3": torch.neg}, anatomy=anatomy):
        torch.testing.assert_close(forward(model), by_z, rtol=0, atol=1e-4)
    projection = model.get_submodule(anatomy.tap("head_out.1").through)
    columns = projection.weight.data if kind == "gpt2" else projection.weight.data.T
    columns[24:32] = 0
    torch.testing.assert_close(forward(model), by_z, rtol=0, atol=1e-4)


@pytest.mark.parametrize(("kind", "heads"), [("q_rot", [1]), ("k_rot", [2, 3]), ("v", [2, 3])])
def test_key_value_heads_move_the_query_heads_of_their_group_only(tappable, forward, kind, heads):
    model, anatomy = tappable("llama")
    clean = read(model, anatomy, ["z.1"], forward)["z.1"]
    edited = read(model, anatomy, ["z.1"], forward, {f"{kind}.1.1": lambda value: -0.5 * value})["z.1"]
    moved = (edited - clean).abs().amax((0, 1, 3)) > 1e-4
    assert moved.nonzero().flatten().tolist() == heads


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_an_edit_of_resid_mid_reaches_trunk_and_mlp(tappable, forward, kind):
    model, anatomy = tappable(kind)
    sites = ["resid_pre.1", "attn_out.1", "resid_mid.1", "mlp_out.1", "resid_post.1"]
    clean = read(model, anatomy, sites, forward)
    seen, delta = [], noise((2, 9, 32))

    def move(value):
        seen.append(value.clone())
        return delta

    edited = read(model, anatomy, sites, forward, {"resid_mid.1": move})
    torch.testing.assert_close(seen[0], clean["resid_mid.1"], rtol=0, atol=1e-6)
    torch.testing.assert_close(edited["resid_mid.1"], clean["resid_mid.1"] + delta, rtol=0, atol=1e-5)
    torch.testing.assert_close(edited["resid_mid.1"] + edited["mlp_out.1"], edited["resid_post.1"], rtol=0, atol=1e-5)
    assert torch.equal(edited["attn_out.1"], clean["attn_out.1"])
    assert (edited["mlp_out.1"] - clean["mlp_out.1"]).abs().amax() > 1e-3


@pytest.mark.parametrize("kind", KINDS)
def test_an_edit_of_the_pattern_moves_z_of_its_rows_and_heads_only(tappable, forward, kind):
    model, anatomy = tappable(kind)
    reads = ["z.1", "v.1", Read("pattern.1", queries="all")]
    clean = read(model, anatomy, reads, forward)
    halve = Edit(lambda rows: -0.5 * rows, queries=[-1, 3])
    edited = read(model, anatomy, reads, forward, {"pattern.1.2": halve})
    torch.testing.assert_close(edited["z.1"][:, [8, 3], 2], 0.5 * clean["z.1"][:, [8, 3], 2], rtol=0, atol=1e-5)
    untouched = torch.ones(9, 4, dtype=torch.bool)
    untouched[[8, 3], 2] = False
    assert torch.equal(edited["z.1"][:, untouched], clean["z.1"][:, untouched])
    pattern, v = edited["pattern.1"], edited["v.1"].transpose(1, 2)
    torch.testing.assert_close(
        (pattern @ v.repeat_interleave(4 // v.shape[1], 1)).transpose(1, 2), edited["z.1"], rtol=0, atol=1e-5
    )


def test_rows_of_the_pattern_may_differ_by_text(tappable, forward):
    model, anatomy = tappable("llama")
    whole = read(model, anatomy, [Read("pattern.1", queries="all")], forward)["pattern.1"]
    last = Read("pattern.1", queries=torch.tensor([[8], [5]]))
    rows = read(model, anatomy, [last], forward)["pattern.1"]
    torch.testing.assert_close(rows, torch.stack([whole[0, :, 8:9], whole[1, :, 5:6]]), rtol=0, atol=1e-6)
    one = read(model, anatomy, [Read("pattern.1.3", queries=[0, -1])], forward)["pattern.1.3"]
    torch.testing.assert_close(one, whole[:, 3, [0, 8]], rtol=0, atol=1e-6)


def test_an_edit_names_each_row_of_the_pattern_once(tappable, forward):
    model, anatomy = tappable("llama")
    twice = Edit(zeros, queries=[-1, 3, 8])
    with (
        pytest.raises(ValueError, match=r"pattern\.1\.2 names a query row twice: \[\[8, 3, 8\]\]"),
        taps(model, edits={"pattern.1.2": twice}, anatomy=anatomy),
    ):
        forward(model)


# ---- order


def test_nested_contexts_compose_outer_first_and_reads_see_edits_around_them(tappable, forward):
    model, anatomy = tappable("llama")
    a, b = noise(32, 1), noise(32, 2)
    clean = read(model, anatomy, ["resid_post.0"], forward)["resid_post.0"]
    order = []

    def outer_edit(value):
        order.append("outer")
        return a

    def inner_edit(value):
        order.append("inner")
        torch.testing.assert_close(value, clean + a)
        return b

    with taps(model, ["resid_post.0"], {"resid_post.0": outer_edit}, anatomy=anatomy) as outer:
        with taps(model, ["resid_post.0"], {"resid_post.0": inner_edit}, anatomy=anatomy) as inner:
            both = forward(model)
        with taps(model, ["resid_post.1"], anatomy=anatomy):
            outer_only = forward(model)
    assert order == ["outer", "inner", "outer"]
    torch.testing.assert_close(inner["resid_post.0"], clean + a + b)
    for value in outer.all("resid_post.0"):
        torch.testing.assert_close(value, clean + a)
    with taps(model, edits={"resid_post.0": lambda value: a + b}, anatomy=anatomy):
        torch.testing.assert_close(forward(model), both, rtol=0, atol=1e-4)
    assert not torch.allclose(outer_only, both)


def test_several_edits_of_one_tensor_act_in_the_order_given(tappable, forward):
    model, anatomy = tappable("gpt2")
    clean = read(model, anatomy, ["z.1"], forward)["z.1"]
    edits = {"z.1.0": lambda value: value, "z.1.3": torch.neg}
    edited = read(model, anatomy, ["z.1"], forward, edits)["z.1"]
    torch.testing.assert_close(edited[:, :, 0], 2 * clean[:, :, 0])
    assert (edited[:, :, 3] == 0).all()
    assert torch.equal(edited[:, :, 1:3], clean[:, :, 1:3])


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_head_writes_is_edited_before_what_attention_writes_is_seen(tappable, forward, kind):
    model, anatomy = tappable(kind)
    reads = ["head_out.1", "attn_out.1"]
    clean = read(model, anatomy, reads, forward)
    delta = noise(32)
    edits = {"attn_out.1": lambda value: value, "head_out.1.2": lambda value: delta, "head_out.1.0": lambda v: -delta}
    edited = read(model, anatomy, reads, forward, {k: edits[k] for k in ("head_out.1.2",)})
    torch.testing.assert_close(edited["head_out.1.2"], clean["head_out.1.2"] + delta, rtol=0, atol=1e-5)
    torch.testing.assert_close(edited["attn_out.1"], clean["attn_out.1"] + delta, rtol=0, atol=1e-5)
    edited = read(model, anatomy, reads, forward, edits)
    torch.testing.assert_close(edited["attn_out.1"], 2 * clean["attn_out.1"], rtol=0, atol=1e-5)
    with taps(model, edits={"head_out.1": lambda value: delta}, anatomy=anatomy):
        all_heads = read(model, anatomy, reads, forward, {"head_out.1.2": lambda value: delta})
    torch.testing.assert_close(all_heads["head_out.1.2"], clean["head_out.1.2"] + 2 * delta, rtol=0, atol=1e-5)
    torch.testing.assert_close(all_heads["attn_out.1"], clean["attn_out.1"] + 5 * delta, rtol=0, atol=1e-5)
    torch.testing.assert_close(
        all_heads["head_out.1"].sum(2) - clean["head_out.1"].sum(2), (5 * delta).expand(2, 9, 32)
    )


@pytest.mark.parametrize("kind", KINDS)
def test_an_outer_read_of_what_attention_writes_sees_an_inner_edit_of_a_head(tappable, forward, kind):
    # For BERT both are the projection's output, so that only their order on it decides.
    model, anatomy = tappable(kind)
    clean, delta = read(model, anatomy, ["attn_out.1"], forward)["attn_out.1"], noise(32)
    with taps(model, ["attn_out.1"], anatomy=anatomy) as outer:
        read(model, anatomy, [], forward, {"head_out.1.2": lambda value: delta})
    torch.testing.assert_close(outer["attn_out.1"], clean + delta, rtol=0, atol=1e-5)


# ---- generate


def generated(model, inputs, **options):
    model.generation_config.eos_token_id = None
    given = {k: v for k, v in inputs.items() if k != "position_ids"}
    given = {k: v.flip(1) for k, v in given.items()}  # padding on the left
    return model.generate(
        **given, max_new_tokens=5, do_sample=False, output_logits=True, return_dict_in_generate=True, **options
    )


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("site", ["resid_post.1", "resid_mid.1", "v.1.0", "k.1.1", "head_out.1.2", "z.1", "mlp_out.0"])
def test_generation_with_cache_is_generation_without(tappable, inputs, kind, site):
    model, anatomy = tappable(kind)
    bare = generated(model, inputs)

    def steer(value):
        return 0.5 * value + 3 * noise(value.shape[-1:])

    with taps(model, ["resid_post.2"], {site: steer}, anatomy=anatomy) as cached:
        with_cache = generated(model, inputs, use_cache=True)
    with taps(model, ["resid_post.2"], {site: steer}, anatomy=anatomy) as uncached:
        without = generated(model, inputs, use_cache=False)
    assert torch.equal(with_cache.sequences, without.sequences)
    for a, b, c in zip(with_cache.logits, without.logits, bare.logits, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-3)
        assert not torch.allclose(a, c, atol=1e-2)
    assert cached.firings[Site("resid_post", 2)] == 5
    assert [len(v[0]) for v in cached.all("resid_post.2")] == [9, 1, 1, 1, 1]
    assert [len(v[0]) for v in uncached.all("resid_post.2")] == [9, 10, 11, 12, 13]


def test_an_edit_is_told_its_site_and_how_often_it_fired(tappable, inputs):
    model, anatomy = tappable("llama")
    told = []

    def note(value, at):
        told.append((str(at.site), at.firing))
        return zeros(value)

    with taps(model, edits={"resid_post": note}, anatomy=anatomy) as tape:
        generated(model, inputs)
    assert told == [(f"resid_post.{layer}", step) for step in range(5) for layer in range(3)]
    assert tape.firings == {Site("resid_post", layer): 5 for layer in range(3)}


def test_keys_and_values_at_the_seam_are_all_keys_so_far(tappable, inputs):
    model, anatomy = tappable("llama")
    with taps(model, ["k_rot.1", "k.1", "q_rot.1"], anatomy=anatomy) as tape:
        generated(model, inputs)
    assert [v.shape for v in tape.all("k_rot.1")] == [(2, keys, 2, 8) for keys in (9, 10, 11, 12, 13)]
    assert [v.shape[1] for v in tape.all("k.1")] == [9, 1, 1, 1, 1]
    assert tape.all("q_rot.1")[3].shape == (2, 1, 4, 8)


# ---- the tape


def test_values_are_copies_that_need_no_gradient(tappable, inputs):
    model, anatomy = tappable("llama")
    with taps(model, ["resid_post.1", "z.1.2", "q.1", "head_out.1", "pattern.1.0"], anatomy=anatomy) as tape:
        model(**inputs)
    assert not any(tape[site].requires_grad for site in tape.sites)
    before = tape["resid_post.1"].clone()
    model(**inputs).logits.sum().backward()
    assert torch.equal(tape["resid_post.1"], before)
    assert tape["z.1.2"].untyped_storage().nbytes() == 2 * 9 * 8 * 4


def test_select_runs_inside_and_only_its_result_is_kept(tappable, forward):
    model, anatomy = tappable("llama")
    reads = [
        Read("resid_post.1", lambda x: x[:, -1]),
        Read("head_out.1", lambda x: x[0, 0]),
        Read("pattern.1.2", lambda p: p[:, -1:]),
    ]
    whole = read(model, anatomy, ["resid_post.1", "head_out.1", "pattern.1.2"], forward)
    tape = read(model, anatomy, reads, forward)
    assert torch.equal(tape["resid_post.1"], whole["resid_post.1"][:, -1])
    torch.testing.assert_close(tape["head_out.1"], whole["head_out.1"][0, 0], rtol=0, atol=1e-6)
    assert torch.equal(tape["pattern.1.2"], whole["pattern.1.2"][:, -1:])
    assert tape["pattern.1.2"].untyped_storage().nbytes() == 2 * 9 * 4
    assert tape["resid_post.1"].untyped_storage().nbytes() == 2 * 32 * 4
    tape = read(model, anatomy, [Read("z.1", lambda z: z[:, -1])], forward)
    with pytest.raises(KeyError, match=r"z\.1\.2 was not read\. z\.1 was read through select="):
        tape["z.1.2"]


@pytest.mark.parametrize("site", ["resid_post.1", "attn_out.1", "q.1", "k.1.1", "z.1", "z.1.2", "q_rot.1", "v.1.0"])
def test_kept_graphs_give_gradients_of_what_follows(tappable, inputs, site):
    model, anatomy = tappable("llama")
    bare = model(**inputs).logits
    for frozen in (False, True):
        model.requires_grad_(not frozen)
        with taps(model, [Read(site, keep_graph=True)], anatomy=anatomy) as tape:
            logits = model(**inputs).logits
        assert torch.equal(logits, bare)
        loss = logits.double().square().sum()
        (gradient,) = torch.autograd.grad(loss, tape[site])
        step = 1e-2 * gradient / gradient.norm()
        moved = []
        for sign in (1, -1):
            with torch.no_grad(), taps(model, edits={site: lambda value, d=sign * step: d}, anatomy=anatomy):
                moved.append(float(model(**inputs).logits.double().square().sum()))
        assert (moved[0] - moved[1]) / 2 == pytest.approx(float((gradient * step).sum()), rel=0.02)


def test_clear_forgets_and_the_tape_goes_on(tappable, forward):
    model, anatomy = tappable("llama")
    with taps(model, ["resid_post.1"], anatomy=anatomy) as tape:
        forward(model)
        tape.clear()
        assert tape.all("resid_post.1") == []
        assert tape.firings == {Site("resid_post", 1): 0}
        forward(model)
        assert tape["resid_post.1"].shape == (2, 9, 32)


def test_stop_ends_the_forward_at_the_deepest_site(tappable, forward):
    model, anatomy = tappable("llama")
    bare = forward(model)
    whole = read(model, anatomy, ["resid_post.0", "z.1"], forward)
    ran = []
    watch = [
        m.register_forward_hook(lambda *_, n=n: ran.append(n)) for n, m in model.named_modules() if n.count(".") == 2
    ]
    with taps(model, ["resid_post.0", "z.1"], anatomy=anatomy, stop=True) as tape:
        forward(model)
        pytest.fail("the block ends with the forward")
    for handle in watch:
        handle.remove()
    assert ran == ["model.layers.0"]
    for site in tape.sites:
        assert torch.equal(tape[site], whole[site])
    assert torch.equal(forward(model), bare)


def test_stop_leaves_hidden_state_capture_of_transformers_whole(tappable, inputs, forward):
    model, anatomy = tappable("gpt2")
    before = model(**inputs, output_hidden_states=True).hidden_states
    with taps(model, ["resid_post.1"], anatomy=anatomy, stop=True):
        model(**inputs, output_hidden_states=True)
    after = model(**inputs, output_hidden_states=True).hidden_states
    assert len(before) == len(after) == 4
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert model(**inputs).hidden_states is None


def test_stop_waits_for_edits_too(tappable, forward):
    model, anatomy = tappable("llama")
    with taps(model, ["resid_post.0"], {"resid_post.2": zeros}, anatomy=anatomy, stop=True) as tape:
        forward(model)
    assert set(tape.firings.values()) == {1}


def test_an_outer_stop_ends_what_is_inside_as_well(tappable, forward):
    model, anatomy = tappable("llama")
    with taps(model, ["resid_post.0"], anatomy=anatomy, stop=True) as outer:
        with taps(model, ["embed"], anatomy=anatomy) as inner:
            forward(model)
        pytest.fail("the outer block ends with the forward")
    assert len(outer.all("resid_post.0")) == len(inner.all("embed")) == 1


def test_an_inner_stop_leaves_outer_taps_active(tappable, forward):
    model, anatomy = tappable("llama")
    delta = noise(32)
    with taps(model, ["resid_post.0"], {"embed": lambda value: delta}, anatomy=anatomy) as outer:
        with taps(model, ["resid_post.1"], anatomy=anatomy, stop=True) as inner:
            forward(model)
        edited = forward(model)
    assert outer.firings == {Site("embed"): 2, Site("resid_post", 0): 2}
    with taps(model, ["resid_post.1"], {"embed": lambda value: delta}, anatomy=anatomy) as tape:
        assert torch.equal(forward(model), edited)
    assert torch.equal(tape["resid_post.1"], inner["resid_post.1"])


# ---- errors


def eager_trunk(model, forward):
    model.set_attn_implementation("eager")
    forward(model.model)


@pytest.mark.parametrize(
    ("reads", "edits", "run", "message"),
    [
        (["resid_post.2"], {"z.1": zeros}, None, r"edit of z\.1, read of resid_post\.2\. No forward of this model ran"),
        (["resid_post.1", "logits"], {}, lambda m, f: f(m.model), r"read of logits\. The forward ended before them"),
        (
            ["resid_post.1", "z"],
            {},
            eager_trunk,
            r"read of z\.0, read of z\.1, read of z\.2\. The attention setting was",
        ),
        (["resid_pre", "resid_post", "mlp_out"], {}, None, r"read of resid_pre\.0, .* and 3 more\. No forward"),
    ],
)
def test_a_tap_that_never_fired_is_an_error(tappable, forward, reads, edits, run, message):
    model, anatomy = tappable("llama")
    run = run or (lambda *_: None)
    with pytest.raises(TapNeverFired, match=f"Never fired: {message}"), taps(model, reads, edits, anatomy=anatomy):
        run(model, forward)


def test_an_exception_inside_is_not_masked(tappable):
    model, anatomy = tappable("llama")
    with pytest.raises(ZeroDivisionError), taps(model, ["resid_post.2"], anatomy=anatomy):
        raise ZeroDivisionError


def test_the_tape_says_what_it_has(tappable, forward):
    model, anatomy = tappable("llama")
    with taps(model, ["z.1", "resid_post.2"], anatomy=anatomy) as tape:
        with pytest.raises(TapNeverFired, match=r"z\.1\.3 has not fired yet"):
            tape["z.1.3"]
        forward(model)
        forward(model)
    with pytest.raises(ValueError, match=r"z\.1 fired 2 times. Use tape\.all\('z\.1'\)"):
        tape["z", 1]
    with pytest.raises(KeyError, match=r"q\.1 was not read. Reads: z\.1, resid_post\.2"):
        tape["q.1"]
    assert len(tape.all("z.1.3")) == 2


@pytest.mark.parametrize(
    ("sites", "error", "message"),
    [
        (["z.7"], IndexError, "layer 7 is out of range"),
        (["k.1.2"], IndexError, r"head 2 is out of range\. k\.1 has 2 heads, 0 to 1 \(key-value heads\)"),
        (["router.1"], KeyError, "offers no site"),
        (["z.1", ("z", 1)], ValueError, r"asked for twice: z\.1"),
        (["z.1", "z.1.2"], ValueError, "the whole site is asked for as well"),
    ],
)
def test_sites_are_checked_before_anything_runs(tappable, sites, error, message):
    model, anatomy = tappable("llama")
    with pytest.raises(error, match=message), taps(model, sites, anatomy=anatomy):
        pytest.fail("entered")
    with pytest.raises(error, match=message), taps(model, edits=dict.fromkeys(sites, zeros), anatomy=anatomy):
        pytest.fail("entered")


def test_a_copy_of_a_model_is_not_tapped_by_taps_of_the_original(tappable, forward):
    model, anatomy = tappable("llama")
    bare = forward(model)
    with taps(model, ["z.1"], {"resid_post.0": lambda value: value}, anatomy=anatomy) as tape:
        twin = copy.deepcopy(model)
        assert torch.equal(forward(twin), bare)
        assert tape.all("z.1") == []
        forward(model)
    with taps(twin, ["z.1"], {"resid_post.0": lambda value: value}, anatomy=anatomy) as twin_tape:
        forward(twin)
    assert torch.equal(twin_tape["z.1"], tape["z.1"])
    assert twin_tape.firings == tape.firings


# ---- contexts that are copied, interleaved or left half way


def test_interleaved_generators_leave_nothing_on(tappable, forward):
    model, anatomy = tappable("llama")
    bare = forward(model)

    def edited(site):
        with taps(model, ["resid_post.0"], {site: zeros if site == "z.0" else (lambda z: -z)}, anatomy=anatomy):
            forward(model)
            yield

    for _ in zip(edited("z.1.0"), edited("z.2.1"), strict=True):
        pass
    assert torch.equal(forward(model), bare)


def test_child_tasks_and_threads_are_not_edited(tappable, forward):
    model, anatomy = tappable("llama")
    bare = forward(model)
    ran = []

    async def child(gate):
        ran.append(forward(model))
        await gate.wait()
        ran.append(forward(model))

    async def parent():
        gate = asyncio.Event()
        with taps(model, [], {"z.1.0": lambda z: -z}, anatomy=anatomy):
            assert not torch.equal(forward(model), bare)
            task = asyncio.create_task(child(gate))
            ran.append(await asyncio.to_thread(forward, model))
            await asyncio.sleep(0)
            assert not torch.equal(forward(model), bare)
        gate.set()
        await task

    asyncio.run(parent())
    assert len(ran) == 3
    assert all(torch.equal(value, bare) for value in ran)


def test_a_generator_closed_in_another_thread_ends_its_taps_here(tappable, forward):
    model, anatomy = tappable("llama")
    bare = forward(model)

    def edited():
        with taps(model, [], {"z.1.0": lambda z: -z}, anatomy=anatomy):
            forward(model)
            yield

    held = edited()
    next(held)
    thread = threading.Thread(target=held.close)
    thread.start()
    thread.join()
    assert torch.equal(forward(model), bare)
