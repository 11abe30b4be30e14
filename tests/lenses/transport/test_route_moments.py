"""Routed moments against plain loops over texts run alone, planted links, a head that attends to the token before."""

import random
from dataclasses import replace

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from microtome.capture.models import LoadedModel, load_model
from microtome.capture.tap_plan import Read
from microtome.capture.taps import taps
from microtome.data.plain_english import plain_english
from microtome.lenses.linear_map import identity_map
from microtome.lenses.map_scores import map_scores
from microtome.lenses.moments import Moments
from microtome.lenses.moments_files import load_moments, read_progress
from microtome.lenses.moments_pass import moments_of
from microtome.lenses.pair_moments import PairMoments
from microtome.lenses.ridge_map import ridge_map
from microtome.lenses.ridge_pairs import ridge_pairs
from microtome.lenses.strata import TokenRule
from microtome.lenses.token_windows import token_windows
from microtome.lenses.transport.route_moments import routed_moments
from microtome.lenses.transport.route_splits import (
    held_routes,
    joined_routes,
    route_operator,
    route_pairs,
    route_splits,
)
from microtome.lenses.transport.routes import Route, source_columns
from microtome.lenses.transport.splice import splice_edits

IDS = random.Random(0)
TEXTS = [[IDS.randrange(3, 120) for _ in range(IDS.randrange(1, 20))] for _ in range(24)]
DOCUMENTS = [number // 2 for number in range(24)]
HALVES = {"fit": 0.5, "test": 0.5}
ROUTES = ["same", "offset 2", "head 1.2", "head 1.2 choice 2", "random 3"]
SOURCES, TARGETS = ["resid_post.0", "z.1"], ["resid_post.1", "resid_post.2"]
FAMILIES = ["llama", "gpt2", "neox", "gemma2", "qwen3"]


@pytest.fixture
def made(tiny):
    """`made(family="llama", routes=ROUTES, **changes)`: the pass that most tests make."""

    def make(family="llama", routes=ROUTES, **changes) -> Moments:
        model = changes.pop("model", None) or LoadedModel.from_module(tiny(family), name=family)
        given = {"documents": DOCUMENTS, "shards": HALVES, "progress": False, "chunk": 32} | changes
        texts, sources = given.pop("texts", TEXTS), given.pop("sources", SOURCES)
        return routed_moments(model, texts, sources, given.pop("targets", TARGETS), routes, **given)

    return make


def slow_source(route: Route, ids: list[int], pattern: torch.Tensor | None, target: int) -> int | None:
    """One token's source, without `source_columns` but for a draw."""
    if route.random is not None:
        row = torch.tensor([ids[: target + 1]])
        source = int(source_columns(route, torch.ones_like(row, dtype=torch.bool), None, row)[0, -1])
        return None if source < 0 else source
    if route.head is None:
        return target - route.offset if target >= route.offset else None
    weights = [(-float(pattern[target, key]), key) for key in range(0 if route.sinks else 1, target + 1)]
    return sorted(weights)[route.choice - 1][1] if len(weights) >= route.choice else None


def slow_rows(model: nn.Module, routes: list[str]) -> list[dict]:
    """One row per token with a source by every route, each text run alone: its document, reason and values."""
    known, found = [Route.parse(route) for route in routes], []
    names = [*dict.fromkeys([*SOURCES, *TARGETS])]
    heads = {route.head for route in known if route.head is not None}
    for number, ids in enumerate(TEXTS):
        with torch.no_grad(), taps(model, [*names, *(Read(head, queries="all") for head in heads)]) as tape:
            model(torch.tensor([ids]))
        for target in range(len(ids)):
            sources = [slow_source(r, ids, None if r.head is None else tape[r.head][0], target) for r in known]
            if None in sources:
                continue
            row = {"document": DOCUMENTS[number], "is_sink": min(target, *sources) == 0, "position": target}
            row |= {name: tape[name][0, target].flatten() for name in TARGETS}
            for route, source in zip(known, sources, strict=True):
                row |= {(str(route), name): tape[name][0, source].flatten() for name in SOURCES}
            found.append(row)
    return found


def assert_same(found: PairMoments, x: torch.Tensor, y: torch.Tensor) -> None:
    expected = PairMoments.from_rows(x, y)
    assert found.count == expected.count
    scale = {"xx": ("xx", "xx"), "xy": ("xx", "yy"), "yy": ("yy", "yy")}
    for name, (one, other) in scale.items():
        size = torch.outer(*(getattr(expected, each).diagonal().sqrt() for each in (one, other)))
        assert float(((getattr(found, name) - getattr(expected, name)).abs() / size).max()) < 1e-5, name
    torch.testing.assert_close(found.mean_x, expected.mean_x, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found.mean_y, expected.mean_y, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_are_those_of_a_plain_loop(tiny, made, family):
    moments = made(family, joined=True, max_tokens=64)
    rows = slow_rows(tiny(family), ROUTES)
    shards = moments.split.numbers([row["document"] for row in rows])
    for shard in range(2):
        for stratum in ("rest", "all"):
            picked = [
                r for r, s in zip(rows, shards, strict=True) if s == shard and not (stratum == "rest" and r["is_sink"])
            ]
            for route in ROUTES:
                for source, target in zip(SOURCES, TARGETS, strict=True):
                    x, y = (torch.stack([row[key] for row in picked]) for key in ((route, source), target))
                    found = route_splits(moments, route, source, target, stratum, shards=[shard_name(shard)] * 3)
                    assert_same(found.test, x, y)
            parts = [torch.stack([row[route, "z.1"] for row in picked]) for route in ROUTES]
            y = torch.stack([row["resid_post.2"] for row in picked])
            joined = joined_routes(moments, ROUTES).pair("z.1", "resid_post.2", shard_name(shard), stratum)
            assert_same(joined, torch.cat(parts, 1), y)


def shard_name(number: int) -> str:
    return list(HALVES)[number]


def test_what_is_left_out_is_counted_by_route(tiny, made):
    counts = made(max_tokens=64).counts()
    lengths = [len(ids) for ids in TEXTS]
    assert counts["without offset 2"].sum() == counts["without random 3"].sum() == sum(min(n, 2) for n in lengths)
    assert counts["without head 1.2"].sum() == 24
    assert counts["without head 1.2 choice 2"].sum() == counts["left out"].sum() == sum(min(n, 2) for n in lengths)
    kept = counts[["rest", "first", "special", "massive"]].sum(axis=1)
    assert int((kept + counts["left out"]).sum()) == sum(lengths)
    alone = made(routes="offset 2").counts()
    assert alone["first"].sum() == sum(n > 2 for n in lengths)  # the source of position 2


def test_the_same_token_alone_is_what_moments_of_gives(tiny, made):
    model = LoadedModel.from_module(tiny("llama"), name="llama")
    routed = made(model=model, routes="same", targets="resid_post.2", sources="resid_post.0", max_tokens=64)
    plain = moments_of(
        model, TEXTS, ["resid_post.0", "resid_post.2"], documents=DOCUMENTS, shards=HALVES, progress=False, chunk=32,
        max_tokens=64,
    )  # fmt: skip
    for stratum in ("rest", "sinks", "all"):
        one, other = (each.pair("resid_post.0", "resid_post.2", "fit", stratum) for each in (routed, plain))
        assert torch.equal(one.xy, other.xy)
        assert torch.equal(one.xx, other.xx)
    assert routed.medians == plain.medians
    assert routed.counts()[plain.counts().columns.tolist()].equals(plain.counts())


def test_a_row_is_a_sink_if_its_target_or_its_source_is(tiny, word_tokenizer):
    model = LoadedModel.from_module(tiny("llama"), word_tokenizer, name="words")
    texts = [[1, 5, 6, 2, 7, 8, 9, 10]]  # <s> first, </s> at place 3
    moments = routed_moments(
        model, texts, "resid_post.0", "resid_post.1", ["same", "offset 2"], shards={"all": 1}, progress=False
    )
    # targets 2 to 7 have sources 0 to 5: 2 has a first source; 3 is special, 5 has a special source
    assert moments.counts().loc[0].tolist() == ["all", 3, 1, 2, 0, 2, 2]
    module = tiny("llama")
    with torch.no_grad():
        module.model.embed_tokens.weight[50] = 1e4
    texts = [[5, 6, 7, 50, 8, 9, 10]]
    moments = routed_moments(
        module, texts, "z.1", "z.1", ["offset 1"], shards={"all": 1}, progress=False, rule=TokenRule(above=1e3, times=5)
    )
    assert moments.counts().loc[0].tolist() == ["all", 3, 1, 0, 2, 1, 1]


@pytest.fixture(scope="module")
def copier() -> LoadedModel:
    """Head 0 of layer 0 attends to the token before (scores depend on distance alone, by rotary phases), so that

    resid_post.0[j] = x[j] + x[j-1] Q,   x: embeddings of independent tokens, isotropic;   Q a rotation
    """
    config = LlamaConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=1, num_key_value_heads=1, intermediate_size=8,
        vocab_size=600, max_position_embeddings=64, attention_bias=True, rms_norm_eps=1e-12,
    )  # fmt: skip
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        module = LlamaForCausalLM(config).eval()
        rows = torch.randn(600, 16)
        module.model.embed_tokens.weight.copy_(rows / rows.square().mean(1, keepdim=True).sqrt())
        rotation = torch.linalg.qr(torch.randn(16, 16))[0]
        for layer in module.model.layers:
            layer.mlp.down_proj.weight.zero_()
        attention = module.model.layers[0].self_attn
        angles = module.model.rotary_emb.inv_freq
        for part in (attention.q_proj, attention.k_proj):
            part.weight.zero_()
        attention.k_proj.bias.copy_(torch.cat([torch.ones(8), torch.zeros(8)]))
        attention.q_proj.bias.copy_(200 * torch.cat([angles.cos(), -angles.sin()]))
        attention.v_proj.weight.copy_(torch.eye(16))
        attention.o_proj.weight.copy_(rotation.T)
        for part in (attention.v_proj, attention.o_proj):
            part.bias.zero_()
    return LoadedModel.from_module(module, name="copier")


@pytest.fixture(scope="module")
def copied(copier) -> Moments:
    generator = torch.Generator().manual_seed(1)
    texts = [torch.randint(0, 600, (int(n),), generator=generator).tolist() for n in torch.arange(200) % 11 + 25]
    routes = ["same", "offset 1", "offset 2", "head 0.0", "random 0"]
    return routed_moments(
        copier, texts, "resid_pre.0", ["resid_post.0", "attn_out.0"], routes, shuffled=True, joined=True, progress=False
    )


def r2(moments: Moments, route, target="resid_post.0", **options) -> float:
    splits = route_splits(moments, route, "resid_pre.0", target, **options)
    return map_scores(ridge_map(splits.fit, splits.validation).map, splits.test, splits.fit).r2_vw


def test_a_planted_link_is_found_by_its_route_alone(copied):
    assert r2(copied, "offset 1", "attn_out.0") == pytest.approx(1, abs=1e-6)
    assert r2(copied, "offset 1") == pytest.approx(0.5, abs=0.03)
    assert r2(copied, "same") == pytest.approx(0.5, abs=0.03)
    assert r2(copied, ["same", "offset 1"]) == pytest.approx(1, abs=1e-6)
    assert abs(r2(copied, "same", "attn_out.0")) < 0.02
    assert abs(r2(copied, "offset 2", "attn_out.0")) < 0.02
    assert abs(r2(copied, "random 0", "attn_out.0")) < 0.05  # one draw in some 14 is the token before
    by_head, by_chance = (r2(copied, ["same", route]) - r2(copied, "same") for route in ("head 0.0", "random 0"))
    assert by_head == pytest.approx(0.5, abs=0.03)
    assert abs(by_chance) < 0.05
    assert abs(r2(copied, "offset 1", shuffled=True)) < 0.02


def test_a_head_that_attends_to_the_token_before_is_an_offset_of_one(copied):
    one, other = (route_splits(copied, route, "resid_pre.0", "resid_post.0") for route in ("head 0.0", "offset 1"))
    for shard in ("fit", "validation", "test"):
        assert torch.equal(getattr(one, shard).xy, getattr(other, shard).xy)
        assert torch.equal(getattr(one, shard).xx, getattr(other, shard).xx)


def test_ridge_pairs_and_operators_take_a_route(copied, copier):
    found = ridge_pairs(copied, route_pairs(copied, "head 0.0"), keep_maps=True)
    assert found.table["source"].tolist() == ["head 0.0/resid_pre.0"] * 2
    assert found.table["target"].tolist() == ["resid_post.0", "attn_out.0"]
    assert found.table["r2_vw"][0] == pytest.approx(r2(copied, "head 0.0"), abs=1e-9)
    joined = ridge_pairs(joined_routes(copied, ["same", "head 0.0"]), [("resid_pre.0", "resid_post.0")])
    assert joined.table["r2_vw"][0] == pytest.approx(r2(copied, ["same", "head 0.0"]), abs=1e-9)
    operator = route_operator(found.maps["head 0.0/resid_pre.0", "attn_out.0"])
    assert (operator.source, operator.target, str(operator.route)) == ("resid_pre.0", "attn_out.0", "head 0.0")
    ids = torch.randint(0, 600, (2, 12), generator=torch.Generator().manual_seed(2))
    with torch.no_grad(), taps(copier, ["attn_out.0"]) as clean:
        copier.module(ids)
    with torch.no_grad(), taps(copier, ["attn_out.0"], splice_edits(operator)) as spliced:
        copier.module(ids)
    assert torch.equal(spliced["attn_out.0"][:, 0], clean["attn_out.0"][:, 0])  # no source; that of 1 is no key
    torch.testing.assert_close(spliced["attn_out.0"][:, 2:], clean["attn_out.0"][:, 2:], rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match="does not say its sites"):
        route_operator(ridge_map(route_splits(copied, "same", "resid_pre.0", "attn_out.0").fit).map)


def test_an_edit_draws_as_the_moments_did(copier):
    identity = replace(identity_map(16), source="random 5/resid_pre.0", target="resid_post.0")
    lengths, width = (9, 5), 9
    texts = [torch.randint(1, 600, (n,), generator=torch.Generator().manual_seed(n)) for n in lengths]
    ids = torch.stack([torch.cat([torch.zeros(width - len(t), dtype=torch.int64), t]) for t in texts])
    is_real = torch.stack([torch.arange(width) >= width - n for n in lengths])
    edits = splice_edits(route_operator(identity), is_real=is_real, token_ids=ids)
    with torch.no_grad(), taps(copier, ["resid_post.0"], edits) as tape:
        copier.module(ids, attention_mask=is_real.long())
    for row, text in enumerate(texts):
        rows = copier.module.model.embed_tokens.weight[text]
        for target in range(2, len(text)):
            source = slow_source(Route(random=5), text.tolist(), None, target)
            got = tape["resid_post.0"][row, width - len(text) + target]
            torch.testing.assert_close(got, rows[source], rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match=r"give token_ids="):
        splice_edits(route_operator(identity))


def test_shuffled_pairs_are_of_other_documents_at_the_position_of_the_target(made):
    moments = made(routes=["same", "offset 2"], shuffled=True, max_tokens=64)
    assert route_splits(
        moments, "offset 2", "z.1", "resid_post.1", shards=["fit", None, "test"], shuffled=True
    ).fit.count
    with pytest.raises(ValueError, match="no shuffled control of joined routes"):
        route_splits(moments, ["same", "offset 2"], "z.1", "resid_post.1", shuffled=True)


def test_saved_moments_come_back_and_a_stopped_pass_goes_on(made, tmp_path, monkeypatch):
    updates, update = [], Moments.update

    def counted(self, *given, **named):
        if len(updates) == 3:
            raise KeyboardInterrupt
        updates.append(1)
        update(self, *given, **named)

    options = {"joined": True, "shuffled": True, "max_tokens": 64}
    monkeypatch.setattr(Moments, "update", counted)
    with pytest.raises(KeyboardInterrupt):
        made(save=tmp_path, checkpoint_minutes=0, **options)
    assert read_progress(tmp_path)["next_batch"] == 3
    monkeypatch.setattr(Moments, "update", update)
    made(save=tmp_path, **options)
    back, whole = load_moments(tmp_path, verify=True), made(**options)
    assert back.counts().equals(whole.counts())
    assert list(map(str, held_routes(back))) == ROUTES
    for route in ROUTES:
        one, other = (m.pair(*route_pairs(m, route)[-1], "fit", "all") for m in (back, whole))
        assert torch.equal(one.xy, other.xy)
    with pytest.raises(ValueError, match=r"holds moments of another request .*pairs: "):
        made(save=tmp_path, routes=ROUTES[:-1], **options)


def test_parts_of_a_corpus_merge(made):
    whole = made(shards={"all": 1})
    parts = [
        made(texts=TEXTS[a:b], documents=DOCUMENTS[a:b], shards={"all": 1}, medians=whole.medians)
        for a, b in ((0, 10), (10, 24))
    ]
    parts[0].merge(parts[1])
    assert parts[0].counts().equals(whole.counts())
    pair = route_pairs(whole, "head 1.2")[0]
    one, other = (m.pair(*pair, "all", "all") for m in (parts[0], whole))
    torch.testing.assert_close(one.xy, other.xy, rtol=1e-4, atol=1e-4)


def test_what_cannot_be_asked_for(made):
    with pytest.raises(ValueError, match="no routes"):
        made(routes=[])
    with pytest.raises(ValueError, match=r"given twice: head 1\.2"):
        made(routes=["head 1.2", "same", "head 1.2 choice 1"])
    with pytest.raises(IndexError, match="head 9"):
        made(routes=["head 1.9"])
    with pytest.raises(IndexError, match="layer 7"):
        made(routes=["head 7.0"])
    with pytest.raises(ValueError, match="no row per token"):
        made(sources="pattern.0.1")
    moments = made(routes=["same", "offset 2"])
    with pytest.raises(KeyError, match="offset 3 is no route of these moments, which hold same, offset 2"):
        route_splits(moments, "offset 3", "z.1", "resid_post.1")
    with pytest.raises(KeyError, match="was not accumulated"):  # without joined=True
        route_splits(moments, ["same", "offset 2"], "z.1", "resid_post.1", shards=["fit", None, "test"])
    with pytest.raises(ValueError, match="no routes to join"):
        joined_routes(moments, [])
    with pytest.raises(ValueError, match="know no routes"):
        held_routes(Moments({"a": 2}))


def test_a_value_that_is_not_finite_is_named_at_its_own_token(tiny):
    module = tiny("llama")
    with torch.no_grad():
        module.model.embed_tokens.weight[7] = float("nan")
    with pytest.raises(ValueError, match=r"resid_pre.0 is NaN, infinite or past 1e\+15 at text 1, position 0"):
        routed_moments(module, [[5, 6, 8], [7, 9, 6, 4]], "z.0", "z.0", "offset 2", progress=False)


@pytest.mark.slow
def test_smollm2_carries_more_from_the_token_itself_than_from_others():
    model = load_model("smollm2")
    text = plain_english(characters=120_000)
    windows = token_windows(model, text["text"], documents=text["document"])
    chosen = [i for i, ids in enumerate(windows.texts) if len(ids) == 256][::4][:20]
    texts, documents = [windows.texts[i] for i in chosen], [windows.documents[i] for i in chosen]
    routes = ["same", "offset 1", "head 16.0", "random 0"]
    moments = routed_moments(
        model, texts, "resid_post.8", "resid_post.9", routes, documents=documents, joined=True, progress=False
    )
    source, target = "resid_post.8", "resid_post.9"
    found = {}
    for route in (*routes, ("same", "offset 1"), ("same", "random 0")):
        splits = route_splits(moments, route if isinstance(route, str) else list(route), source, target)
        found[route] = map_scores(ridge_map(splits.fit, splits.validation).map, splits.test, splits.fit).r2_vw
    assert found["same"] > 0.85
    assert found["same"] > found["offset 1"] + 0.5
    assert found["offset 1"] > found["random 0"] + 0.05
    assert abs(found["random 0"]) < 0.02
    assert found["head 16.0"] == pytest.approx(found["offset 1"], abs=0.005)  # a head of the token before
    assert found["same", "offset 1"] > found["same", "random 0"]
