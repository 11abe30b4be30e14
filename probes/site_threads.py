"""Sites side by side, each on one thread of its own: how solvers use several cores.

The operations of a probe are many and small. Spread over two threads each they gain little, and where another process
holds a core every one of them waits for it: 20 times slower was measured (30 layers x 45 fits, 2 cores, one busy
neighbour). Blocks of sites on threads of their own, with torch on one thread in each, wait for nobody; and a block's
result does not depend, in a single bit, on how many there are.

Beware: `torch.set_num_threads` holds for the thread that calls it and for threads that start later. The caller's
setting is never touched, and the default for later threads is put back as soon as the workers have started.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import TypeVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor

LARGE = 2**24  # numbers in a site's features from which its products are worth several threads
Item = TypeVar("Item")
Result = TypeVar("Result")


def side_by_side(function: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
    """`[function(item) for item in items]`, on as many threads as torch is set to use, with torch on one in each.

    Where torch is set to one thread (in such a worker, too), or there is one item, it is the plain loop. Raises what
    the first failing item raises, once the items that were started are through.
    """
    n_threads = torch.get_num_threads()
    if n_threads == 1 or len(items) < 2:
        return [function(item) for item in items]
    n_workers = min(n_threads, len(items))
    has_started = Barrier(n_workers + 1, timeout=60)

    def start() -> None:
        torch.set_num_threads(1)
        torch.get_num_threads()  # binds the number to this thread, as its first operation would have done only later
        has_started.wait()

    with ThreadPoolExecutor(n_workers, initializer=start) as pool:
        futures = [pool.submit(function, item) for item in items]
        has_started.wait()
        torch.set_num_threads(n_threads)
        try:
            return [future.result() for future in futures]
        finally:
            for future in futures:
                future.cancel()


def fit_in_blocks(
    fit: Callable[[Tensor], tuple[Tensor, ...]],
    features: Float[Tensor, "site example feature"],
    used: Bool[Tensor, " example"],
    *,
    bytes_per_row: int,
    memory_bytes: int,
) -> tuple[Tensor, ...]:
    """`fit` of the used rows of all sites, block by block, its tensors joined along the sites.

    A block holds as many sites as `memory_bytes` allow at `bytes_per_row` for each of a site's rows. Small sites on the
    CPU go side by side.
    """
    together = max(1, memory_bytes // (int(used.sum()) * bytes_per_row))
    is_small = features.device.type == "cpu" and features[0].numel() < LARGE
    if is_small:
        together = min(together, -(-len(features) // torch.get_num_threads()))
    rows = slice(None) if bool(used.all()) else used

    def fit_block(block: Tensor) -> tuple[Tensor, ...]:
        return fit(block[:, rows])

    blocks = features.split(together)
    parts = side_by_side(fit_block, blocks) if is_small else [fit_block(block) for block in blocks]
    return tuple(torch.cat(part) for part in zip(*parts, strict=True))
