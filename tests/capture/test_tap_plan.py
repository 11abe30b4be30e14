from dataclasses import replace

import pytest
import torch

from microtome.capture.anatomy import Contribution, Hop, Point, Tap
from microtome.capture.sites import Site
from microtome.capture.tap_plan import Edit, Read, plan_taps
from microtome.capture.taps import taps


@pytest.mark.parametrize(
    ("reads", "expected"),
    [
        ("z", ["z.0", "z.1", "z.2"]),
        (("z", 1), ["z.1"]),
        (("z.1", "resid_post.2"), ["z.1", "resid_post.2"]),
        (["blocks.1.attn.hook_z", ("z", 2, 3)], ["z.1", "z.2.3"]),
        (Site("z", 1, 2), ["z.1.2"]),
        (Read("embed"), ["embed"]),
        ((Read("embed"), "z.1"), ["embed", "z.1"]),
        ([Read("pattern", queries=[-1]), "final_norm"], ["pattern.0", "pattern.1", "pattern.2", "final_norm"]),
        ([], []),
    ],
)
def test_requests_stand_for_single_sites(tappable, reads, expected):
    model, anatomy = tappable("llama")
    assert [str(site) for site in plan_taps(model, anatomy, reads, {}).reads] == expected


def test_only_what_is_tapped_is_planned(tappable):
    model, anatomy = tappable("llama")
    plan = plan_taps(model, anatomy, ["resid_post.1"], {"mlp_out.0": torch.zeros_like})
    assert not plan.uses_seam
    assert {m: len(t) for m, t in plan.at["out"].items()} == {model.model.layers[1]: 1, model.model.layers[0].mlp: 1}
    assert not plan.at["in"]
    assert plan.entrances == frozenset()
    assert plan_taps(model, anatomy, ["q_rot.1"], {}).uses_seam


@pytest.mark.parametrize(
    ("reads", "edits", "message"),
    [
        (["pattern.1"], {}, r"pattern\.1 is heads x queries x keys for every text\. Name a head \('pattern\.1\.0'\)"),
        ([], {"pattern": torch.zeros_like}, r"Read\('pattern\.0', queries=\[-1\]\)"),
        ([Read("z.1", queries=[0])], {}, r"z\.1: queries choose rows of a pattern; use select="),
        ([], {"z.1": Edit(torch.zeros_like, queries=[0])}, r"z\.1: queries choose rows of a pattern"),
        (
            [Read("resid_mid.1", keep_graph=True)],
            {},
            r"through the MLP alone.* Read attn_out\.1: its gradient is 1 times",
        ),
    ],
)
def test_requests_that_cannot_be_met_are_refused(tappable, reads, edits, message):
    model, anatomy = tappable("llama")
    with pytest.raises(ValueError, match=message):
        plan_taps(model, anatomy, reads, edits)


@pytest.mark.parametrize("queries", [-1, "last"])
def test_queries_are_rows(tappable, queries):
    model, anatomy = tappable("llama")
    read = Read("pattern.1")
    object.__setattr__(read, "queries", queries)  # past the type check that only tests have
    with pytest.raises(ValueError, match=rf"pattern\.1: queries are a list of rows, .* Got {queries!r}"):
        plan_taps(model, anatomy, [read], {})


def test_a_stream_behind_a_norm_on_the_trunk_cannot_be_edited_through_the_mixer(tappable):
    model, anatomy = tappable("bert")
    site = Site("resid_mid", 1)
    mid = replace(anatomy.taps[site], through="attn_out.1")
    with pytest.raises(ValueError, match=r"resid_mid\.1 cannot be edited: the norm 'encoder.* is on the trunk"):
        plan_taps(model, replace(anatomy, taps={**anatomy.taps, site: mid}), [], {site: torch.zeros_like})


def test_a_stream_with_a_later_term_cannot_be_edited_through_an_earlier_one(tappable):
    model, anatomy = tappable("llama")
    block = anatomy.blocks[1]
    late = Contribution("mixer", Point("model.layers.1.self_attn.v_proj", "out"), 1.0, None)
    hops = (Hop("add", 0), Hop("add", 2), Hop("add", 1))
    changed = replace(block, contributions=(*block.contributions, late), hops=hops)
    other = replace(anatomy, blocks=(anatomy.blocks[0], changed, anatomy.blocks[2]))
    with pytest.raises(ValueError, match=r"attn_out\.1 is not the last term added before the MLP"):
        plan_taps(model, other, [], {"resid_mid.1": torch.zeros_like})


class ScaledBlock(torch.nn.Module):
    """mid = 0.5 x + first(x) * 3, then + 2 mixer(x); out = mid + mlp(mid)."""

    def __init__(self):
        super().__init__()
        self.first, self.mixer, self.mlp = (torch.nn.Linear(4, 4) for _ in range(3))

    def forward(self, x):
        mid = 0.5 * (x + 6 * self.first(x)) + 2 * self.mixer(x)
        return mid + self.mlp(mid)


def test_a_stream_of_scaled_terms_is_edited_with_their_factors(tappable):
    _, anatomy = tappable("llama")
    model, x, delta = torch.nn.Sequential(ScaledBlock()), torch.randn(2, 3, 4), torch.arange(4.0)
    out = {name: Point(f"0.{name}", "out") for name in ("first", "mixer", "mlp")}
    terms = tuple(
        Contribution(role, out[name], factor, None)
        for role, name, factor in (("mixer", "first", 6.0), ("mixer", "mixer", 2.0), ("mlp", "mlp", 1.0))
    )
    hops = (Hop("add", 0, 6.0), Hop("scale", factor=0.5), Hop("add", 1, 2.0), Hop("add", 2, 1.0))
    block = replace(
        anatomy.blocks[0], entry=Point("0", "in", 0), exit=Point("0", "out"), contributions=terms, hops=hops
    )
    made = [
        Tap(Site("resid_mid", 0), Point("0.mlp", "in", 0), width=4, through="attn_out.0", factor=2.0),
        Tap(Site("attn_out", 0), out["mixer"], width=4, factor=2.0),
        Tap(Site("resid_post", 0), block.exit, width=4),
    ]
    anatomy = replace(anatomy, blocks=(block,), taps={tap.site: tap for tap in made})
    seen = []

    def edit(value):
        seen.append(value)
        return delta

    with taps(model, anatomy=anatomy, reads=["resid_mid"]) as clean:
        model(x)
    with taps(model, ["resid_mid", "attn_out"], {"resid_mid": edit}, anatomy=anatomy) as tape:
        output = model(x)
    torch.testing.assert_close(seen[0], clean["resid_mid.0"])
    torch.testing.assert_close(tape["resid_mid.0"], clean["resid_mid.0"] + delta)
    torch.testing.assert_close(tape["attn_out.0"], model[0].mixer(x))
    mid = clean["resid_mid.0"] + delta
    torch.testing.assert_close(output, mid + model[0].mlp(mid))
