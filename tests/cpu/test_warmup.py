"""Which forwards warm up kernels, and that a CPU needs none."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfer import LLM
from deepinfer.engine.warmup import forwards

pytest.importorskip("triton")


@given(st.integers(1, 5000), st.integers(1, 40000))
def test_forwards_stay_within_the_limits(most_rows: int, most_tokens: int) -> None:
    found = forwards(most_rows, most_tokens)
    assert all(count >= 1 and count <= most_rows for _, count in found)
    assert all(start >= 0 and start + count <= most_tokens for start, count in found)
    assert (0, 1) in found
    assert max(start + count for start, count in found) == most_tokens


def test_a_cpu_has_nothing_to_warm_up(tiny_folder: Path) -> None:
    assert LLM(tiny_folder, device="cpu", threads=1).warm_up() == 0
