import pytest
import torch
from threadpoolctl import threadpool_limits


@pytest.fixture(autouse=True)
def one_thread():
    """Small products are slower on two threads, and far slower where another process holds a core."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with threadpool_limits(1):
        yield
    torch.set_num_threads(threads)
