"""Which sites and strengths stay in a block."""

import torch

from microtome.probes.open_fits import open_block, within


def block(*open_fits: tuple[int, int, int]) -> torch.Tensor:
    is_open = torch.zeros(4, 3, 2, dtype=torch.bool)
    for fit in open_fits:
        is_open[fit] = True
    return is_open


def test_a_block_with_work_everywhere_stays_whole() -> None:
    assert open_block(torch.ones(4, 3, 2, dtype=torch.bool)) is None
    assert open_block(block((0, 0, 1), (1, 2, 0), (3, 1, 1))) is None  # one of four sites done: copying does not pay


def test_strengths_leave_from_the_front_and_sites_once_half_are_done() -> None:
    sites, strengths = open_block(block((0, 1, 0), (1, 2, 1), (2, 2, 0)))
    assert (sites.tolist(), strengths) == ([0, 1, 2, 3], slice(1, None))
    sites, strengths = open_block(block((1, 0, 0), (3, 2, 1)))
    assert (sites.tolist(), strengths) == ([1, 3], slice(0, None))


def test_nothing_open_leaves_nothing() -> None:
    sites, _ = open_block(block())
    assert sites.tolist() == []


def test_a_block_within_a_block_is_counted_in_the_whole() -> None:
    sites, strengths = within((torch.tensor([1, 3, 5]), slice(2, None)), (torch.tensor([0, 2]), slice(1, None)))
    assert (sites.tolist(), strengths) == ([1, 5], slice(3, None))
