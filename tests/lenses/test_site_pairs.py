"""Which pairs are held: all, a band, to one target, a list; where each lies; what is refused."""

import pytest

from microtome.capture.sites import Site
from microtome.lenses.site_pairs import SitePairs, site_name

WIDTHS = {"resid_pre.0": 4, "resid_post.0": 4, "z.1.2": 3, "resid_post.1": 4}


def held(pairs: SitePairs) -> set[tuple[int, int]]:
    return {(i, j) for i, targets in enumerate(pairs.targets) for j in targets}


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ("all", {(i, j) for i in range(4) for j in range(i, 4)}),
        (0, {(i, i) for i in range(4)}),
        (1, {(i, j) for i in range(4) for j in range(i, min(4, i + 2))}),
        (9, {(i, j) for i in range(4) for j in range(i, 4)}),
        ("z.1.2", {(0, 0), (1, 1), (2, 2), (3, 3), (0, 2), (1, 2), (2, 3)}),
        (Site("resid_post", 1), {(0, 0), (1, 1), (2, 2), (3, 3), (0, 3), (1, 3), (2, 3)}),
        ([("resid_post.1", "resid_pre.0")], {(0, 0), (1, 1), (2, 2), (3, 3), (0, 3)}),
    ],
)
def test_pairs_asked_for_are_held_and_each_site_with_itself(asked, expected):
    pairs = SitePairs.of(WIDTHS, asked)
    assert held(pairs) == expected
    assert pairs.pairs == len(expected)
    widths = list(WIDTHS.values())
    assert pairs.numbers == sum(widths[i] * widths[j] for i, j in expected)


def test_runs_cover_the_targets_in_order():
    pairs = SitePairs.of(WIDTHS, [("resid_pre.0", "z.1.2"), ("resid_pre.0", "resid_post.1")])
    assert pairs.runs(0) == [slice(0, 4), slice(8, 15)]
    assert pairs.place_in_block(0, 3) == slice(7, 11)
    assert SitePairs.of(WIDTHS).runs(0) == [slice(0, 15)]


def test_sites_are_found_by_any_spelling():
    pairs = SitePairs.of(WIDTHS | {("teacher", Site("resid_post", 1)): 5, "sounds": 2})
    assert pairs.find("blocks.1.hook_resid_post") == 3
    assert pairs.find(("resid_post", 1)) == 3
    assert pairs.find("teacher/resid_post.1") == pairs.find(("teacher", Site("resid_post", 1))) == 4
    assert pairs.find("sounds") == 5
    assert site_name("blocks.0.hook_resid_pre") == "resid_pre.0"


def test_errors():
    with pytest.raises(ValueError, match="no sites"):
        SitePairs.of({})
    with pytest.raises(ValueError, match=r"given twice: resid_pre.0"):
        SitePairs.of({"resid_pre.0": 4, "blocks.0.hook_resid_pre": 4})
    with pytest.raises(ValueError, match="a band is 0 or more"):
        SitePairs.of(WIDTHS, -1)
    with pytest.raises(ValueError, match="pairs=True"):
        SitePairs.of(WIDTHS, True)
    with pytest.raises(KeyError, match=r"resid_post.7 is not among these 4 sites"):
        SitePairs.of(WIDTHS, [("resid_post.7", "resid_pre.0")])
    with pytest.raises(ValueError, match="no pair of sites"):
        SitePairs.of(WIDTHS, [("resid_pre.0", "z.1.2", "resid_post.1")])
    with pytest.raises(KeyError, match=r"\(resid_post.1, resid_pre.0\) was not accumulated.*'band 1'.*pairs=3"):
        SitePairs.of(WIDTHS, 1).block_of(3, 0)
