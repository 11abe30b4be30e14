"""Routes by name, and the columns of sources against plain loops, with padding on either side."""

import pytest
import torch

from microtome.capture.sites import Site
from microtome.lenses.transport.routes import Route, route_of, route_site, source_columns

NAMES = [
    "same",
    "offset 3",
    "head 5.2",
    "head 5.2 with sinks",
    "head 5.2 choice 3",
    "head 5.2 choice 2 with sinks",
    "head decoder.5.2@1",
    "random 7",
]
LENGTHS = (7, 4, 1)


@pytest.mark.parametrize("name", NAMES)
def test_a_name_is_read_as_it_is_written(name):
    route = Route.parse(name)
    assert str(route) == name
    assert Route.parse(str(route)) == route == Route.parse(route)
    assert route.is_same == (name == "same")
    assert route_of(route_site(route, "resid_post.3")) == (route, "resid_post.3")


def test_names_of_sites_and_heads():
    assert route_site("same", ("resid_post", 3)) == "resid_post.3"
    assert route_site("offset 1", "blocks.3.hook_resid_post") == "offset 1/resid_post.3"
    assert Route.parse("offset 0") == Route()
    assert Route.parse("head 5.2 choice 1") == Route(head=Site("pattern", 5, 2))
    assert Route.parse("head decoder.5.2@1").head == Site("pattern", 5, 2, "decoder", 1)


@pytest.mark.parametrize(
    "name", ["", "Same", "offset -1", "offset", "head 5", "head 5.2.1", "head 5.2 choice", "random"]
)
def test_other_names_are_refused(name):
    with pytest.raises(ValueError, match="is no route"):
        Route.parse(name)


@pytest.mark.parametrize(
    ("made", "said"),
    [
        ({"offset": -1}, "behind its target"),
        ({"head": Site("z", 5, 2)}, "no single head's pattern"),
        ({"head": Site("pattern", 5)}, "no single head's pattern"),
        ({"head": Site("pattern", 5, 2), "offset": 1}, "one of"),
        ({"random": 0, "offset": 1}, "one of"),
        ({"head": Site("pattern", 5, 2), "random": 1}, "one of"),
        ({"offset": 1, "sinks": True}, "no head"),
        ({"choice": 2}, "no head"),
        ({"head": Site("pattern", 5, 2), "choice": 0}, "choice 0"),
        ({"random": -1}, "0 or more"),
    ],
)
def test_routes_that_mean_nothing_are_refused(made, said):
    with pytest.raises(ValueError, match=said):
        Route(**made)


def padded(rows: list[torch.Tensor], side: str, fill: float, width: int = 9) -> torch.Tensor:
    """Rows (or square patterns) of some lengths laid into a batch."""
    square = rows[0].ndim == 2
    found = torch.full((len(rows), width, width) if square else (len(rows), width), fill, dtype=rows[0].dtype)
    for number, row in enumerate(rows):
        start = width - len(row) if side == "left" else 0
        part = slice(start, start + len(row))
        found[(number, part, part) if square else (number, part)] = row
    return found


def places(route: str, side: str, patterns=None, ids=None) -> list[list[int]]:
    """Place in its text of each token's source, by `source_columns` of a padded batch."""
    is_real = padded([torch.ones(n, dtype=torch.bool) for n in LENGTHS], side, False)
    pattern = None if patterns is None else padded(patterns, side, float("nan"))
    token_ids = None if ids is None else padded(ids, side, 0)
    columns = source_columns(Route.parse(route), is_real, pattern, token_ids)
    assert bool((columns[~is_real] == -1).all())
    found = []
    for row, length in enumerate(LENGTHS):
        start = 9 - length if side == "left" else 0
        found.append([c - start if c >= 0 else -1 for c in columns[row, start : start + length].tolist()])
    return found


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("offset", [0, 1, 2, 5])
def test_an_offset_counts_tokens_of_the_text(side, offset):
    expected = [[j - offset if j >= offset else -1 for j in range(n)] for n in LENGTHS]
    assert places("same" if not offset else f"offset {offset}", side) == expected


def slow_choice(pattern: list[list[float]], choice: int, sinks: bool) -> list[int]:
    """The choice-th key of each query by weight, ties to the earlier; sources are keys with a weight."""
    found = []
    for query, weights in enumerate(pattern):
        keys = [(-weights[key], key) for key in range(0 if sinks else 1, query + 1) if weights[key] > 0]
        found.append(sorted(keys)[choice - 1][1] if len(keys) >= choice else -1)
    return found


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("choice", [1, 2, 3])
def test_a_head_takes_its_most_attended_keys(side, sinks, choice):
    generator = torch.Generator().manual_seed(choice)
    # few levels, so that ties and zeros come; a bidirectional pattern, whose later keys are no sources
    patterns = [torch.randint(0, 4, (n, n), generator=generator) / 4.0 for n in LENGTHS]
    name = "head 0.0" + (f" choice {choice}" if choice > 1 else "") + (" with sinks" if sinks else "")
    expected = [slow_choice(pattern.tolist(), choice, sinks) for pattern in patterns]
    assert places(name, side, patterns) == expected
    assert {-1} < {place for row in expected for place in row}


def draws(ids: torch.Tensor, seed: int = 0) -> torch.Tensor:
    return source_columns(Route(random=seed), torch.ones_like(ids, dtype=torch.bool), None, ids)


def test_a_draw_depends_on_neither_padding_batch_nor_what_follows():
    ids = [torch.randint(5, 90, (n,), generator=torch.Generator().manual_seed(n)) for n in LENGTHS]
    alone = [draws(row[None])[0].tolist() for row in ids]
    assert places("random 0", "left", ids=ids) == places("random 0", "right", ids=ids) == alone
    assert draws(ids[0][None, :5])[0].tolist() == alone[0][:5]
    assert draws(ids[0][None].int())[0].tolist() == alone[0]
    for row in alone:
        assert row[:2] == [-1, -1][: len(row)]
        assert all(1 <= source < target for target, source in enumerate(row) if target > 1)


def test_a_draw_is_uniform_over_earlier_tokens_but_the_first():
    ids = torch.randint(0, 50_000, (4000, 12), generator=torch.Generator().manual_seed(0))
    columns = draws(ids)
    for target in range(3, 12):
        counts = torch.bincount(columns[:, target], minlength=target)[1:].double()
        assert len(counts) == target - 1
        chi_square = float((counts - counts.mean()).square().sum() / counts.mean())
        assert chi_square < (target - 2) + 5 * (2 * (target - 2)) ** 0.5, (target, counts)
    later, seeded = columns[:, 11], draws(ids, 1)[:, 11]
    for other in (columns[:, 10], seeded, later.roll(1)):  # of a neighbour, another seed, another text: unrelated
        correlation = float(torch.corrcoef(torch.stack([later, other]).double())[0, 1])
        assert abs(correlation) < 5 / 4000**0.5


def test_one_token_changes_every_later_draw():
    ids = torch.randint(0, 50_000, (1, 2000), generator=torch.Generator().manual_seed(0))
    changed = ids.clone()
    changed[0, 5] += 1
    one, other = draws(ids)[0], draws(changed)[0]
    assert torch.equal(one[:5], other[:5])
    assert float((one[1000:] == other[1000:]).float().mean()) < 0.01
    swapped = ids[:, torch.tensor([0, 2, 1, *range(3, 2000)])]
    assert float((one[1000:] == draws(swapped)[0, 1000:]).float().mean()) < 0.01


def test_what_a_route_needs():
    is_real = torch.ones(2, 4, dtype=torch.bool)
    with pytest.raises(ValueError, match=r"needs its head's pattern \(2, 4, 4\), got None"):
        source_columns(Route.parse("head 0.1"), is_real)
    with pytest.raises(ValueError, match=r"got \(2, 1, 4\)"):
        source_columns(Route.parse("head 0.1"), is_real, torch.zeros(2, 1, 4))
    with pytest.raises(ValueError, match=r"needs token ids \(2, 4\), which it hashes; got None"):
        source_columns(Route(random=0), is_real)
