"""Tests that need a CUDA GPU; elsewhere they are skipped with the reason."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip everything in this folder on a machine without a GPU."""
    if torch.cuda.is_available():
        return
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.skip(reason="torch sees no CUDA GPU"))


@pytest.fixture(autouse=True)
def memory_for_others() -> Iterator[None]:
    """Several processes share the GPU: what a test no longer needs goes back to all of them."""
    yield
    torch.cuda.empty_cache()
