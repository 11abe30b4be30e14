"""Side by side means the same results, the same errors, and the caller's threads left alone."""

import threading
import time

import pytest
import torch

from microtome.probes.site_threads import side_by_side


@pytest.fixture(params=[1, 2, 4])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def test_results_come_in_the_order_of_the_items(threads) -> None:
    def slow_first(item):
        time.sleep(0.02 if item == 0 else 0)
        return item**2

    assert side_by_side(slow_first, range(9)) == [item**2 for item in range(9)]
    assert side_by_side(slow_first, []) == []


def test_workers_have_one_torch_thread_each_and_the_caller_keeps_his(threads) -> None:
    seen = side_by_side(lambda item: (threading.get_ident(), torch.get_num_threads()), range(8))
    if threads > 1:
        assert {number for _, number in seen} == {1}
        assert threading.get_ident() not in {ident for ident, _ in seen}
    assert torch.get_num_threads() == threads
    later = []
    thread = threading.Thread(target=lambda: later.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    assert later == [threads]


def test_one_item_has_all_of_torchs_threads(threads) -> None:
    assert side_by_side(lambda item: torch.get_num_threads(), [0]) == [threads]


def test_a_failing_item_raises_and_leaves_no_setting_behind(threads) -> None:
    def failing(item):
        if item == 2:
            raise ValueError("item 2")
        return item

    with pytest.raises(ValueError, match="item 2"):
        side_by_side(failing, range(50))
    assert torch.get_num_threads() == threads
