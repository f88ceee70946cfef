"""What holds for every test: few torch threads, repeatable seeds, repeatable hypothesis.

Where there is no GPU, Triton kernels run in Triton's interpreter; that is decided when a kernel is
defined, so before anything is imported.
"""

import os
import random
import zlib

import numpy as np
import pytest
import torch
from hypothesis import settings

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

settings.register_profile("ci", deadline=None, derandomize=True, max_examples=50)
settings.load_profile("ci")

# One thread for each of several processes: more would fight for the cores.
torch.set_num_threads(1 if "PYTEST_XDIST_WORKER" in os.environ else min(2, os.cpu_count() or 1))


def pytest_runtest_teardown() -> None:
    """Give the GPU's memory back to the other processes that test on it."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Seed every generator before the test's fixtures run, whatever ran before it."""
    seed = zlib.crc32(item.nodeid.encode())
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
