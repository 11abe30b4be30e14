"""Spellings of sites: one vocabulary, other people's names for it, and what is refused."""

import pytest

from microtome.capture.sites import KINDS, Site

SAME = {
    "z.5.3": ["z.5.3", ("z", 5, 3)],
    "z.5": ["blocks.5.attn.hook_z", "blocks.5.attn.o.hook_in", ("z", 5), "z5"],
    "resid_pre.0": ["blocks.0.hook_resid_pre", "blocks.0.hook_in", ("resid_pre", 0)],
    "resid_mid.2": ["blocks.2.hook_resid_mid", "blocks.2.ln2.hook_in"],
    "resid_post.12": ["blocks.12.hook_resid_post", "blocks.12.hook_out", "resid_post12"],
    "attn_out.1": ["blocks.1.hook_attn_out", "blocks.1.attn.hook_out"],
    "mlp_out.1": ["blocks.1.hook_mlp_out", "blocks.1.mlp.hook_out"],
    "mlp_act.7": ["blocks.7.mlp.hook_post", "blocks.7.mlp.out.hook_in", ("post", 7)],
    "q.3": ["blocks.3.attn.hook_q", "blocks.3.attn.q.hook_out", "q3"],
    "k.3": ["blocks.3.attn.hook_k", "blocks.3.attn.k.hook_out"],
    "v.3": ["blocks.3.attn.hook_v", "blocks.3.attn.v.hook_out"],
    "q_rot.3": ["blocks.3.attn.hook_rot_q", ("rot_q", 3)],
    "k_rot.3": ["blocks.3.attn.hook_rot_k", ("rot_k", 3)],
    "head_out.4": ["blocks.4.attn.hook_result", ("result", 4)],
    "pattern.4": ["blocks.4.attn.hook_pattern", ("pattern", 4), ("attn", 4)],
    "embed": ["hook_embed", "embed.hook_out"],
    "final_norm": ["ln_final.hook_normalized", "ln_final.hook_out"],
    "logits": ["unembed.hook_out"],
}


@pytest.mark.parametrize(("ours", "theirs"), [(ours, other) for ours, others in SAME.items() for other in others])
def test_other_spellings_name_the_same_site(ours: str, theirs: object) -> None:
    assert Site.parse(theirs) == Site.parse(ours)


@pytest.mark.parametrize(
    "name",
    [
        "embed",
        "final_norm",
        "logits",
        "z",
        "z.5",
        "z.5.3",
        "encoder.resid_post.3",
        "resid_post.3@1",
        "router.2",
        "encoder.z.0.1@4",
    ],
)
def test_a_parsed_name_is_spelled_as_it_was(name: str) -> None:
    assert str(Site.parse(name)) == name
    assert Site.parse(Site.parse(name)) == Site.parse(name)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_says_what_it_is(kind: str) -> None:
    assert KINDS[kind].meaning
    assert KINDS[kind].per_layer or not KINDS[kind].per_head


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("resid_pots.3", ValueError, "Did you mean 'resid_post'"),
        ("z.5.3.1", ValueError, "has 3 numbers"),
        ("z.five", ValueError, "whole numbers"),
        ("z.-1", ValueError, "whole numbers"),
        ("resid_post.3.2", ValueError, "has no heads"),
        ("logits.3", ValueError, "takes no layer"),
        ("resid_post.3@x", ValueError, "call number"),
        ("blocks.5.attn.hook_zz", ValueError, "has no counterpart here. Did you mean 'attn.hook_z'"),
        ("blocks.-1.hook_resid_post", ValueError, "a block's number from 0 follows"),
        ("RESID_POST.3", ValueError, "Did you mean 'resid_post'"),
        (("z", "5"), ValueError, "A site tuple is"),
        (("z", 1, 2, 3), ValueError, "A site tuple is"),
        ((), ValueError, "A site tuple is"),
        (5, TypeError, "A site is a string"),
        ("", ValueError, "No kind of site"),
    ],
)
def test_what_is_refused_says_why(name: object, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Site.parse(name)
