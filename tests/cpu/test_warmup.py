"""Which forwards warm up kernels, and that a CPU needs none."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deepinfer import LLM, SamplingParams
from deepinfer.engine.warmup import _run, compiling, forwards

pytest.importorskip("triton")
from deepinfer.ops.candidate_blocks.triton import ALIGNED
from deepinfer.ops.topk_select.triton import _FEW, _MANY, MANY_ROWS, _shape


@given(st.integers(1, 5000), st.integers(1, 40000))
def test_forwards_stay_within_the_limits(most_rows: int, most_tokens: int) -> None:
    found = forwards(most_rows, most_tokens)
    assert all(count >= 1 and count <= most_rows for _, count in found)
    assert all(start >= 0 and start + count <= most_tokens for start, count in found)
    assert (0, 1) in found
    assert max(start + count for start, count in found) == most_tokens


def test_a_cpu_has_nothing_to_warm_up(tiny_folder: Path) -> None:
    assert LLM(tiny_folder, device="cpu", threads=1).warm_up() == 0


def test_kernels_of_libraries_are_launched_while_ours_are_only_compiled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """FlagGems launches what a first launch returned once more by itself."""
    from triton.runtime.jit import JITFunction

    seen: list[tuple[str, bool]] = []

    def launch(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        seen.append((kernel.fn.__module__, warmup))

    monkeypatch.setattr(JITFunction, "run", launch)
    names = ["deepinfer.ops.topk_select.triton", "flag_gems.ops.div", "__main__", "deepinfer_x"]
    with compiling():
        for name in names:
            kernel = SimpleNamespace(fn=SimpleNamespace(__module__=name))
            JITFunction.run(kernel, grid=(1,), warmup=False)
    assert seen == [(name, name == names[0]) for name in names]


def selecting_kernels(end: int, rows: int) -> set[tuple[object, ...]]:
    """What the kernels that select are compiled for, of a forward that ends at `end` tokens."""
    found: set[tuple[object, ...]] = set()
    for ratio in (1, 2):
        entries = max(1, -(-(end // ratio) // 64)) * 64
        blocks = -(-entries // 8 // ALIGNED) * ALIGNED
        for width, wanted in ((entries, 128), (blocks, 64), (min(blocks, 64) * 8, 128)):
            plan = _MANY if rows >= MANY_ROWS else _FEW
            shape = _shape(plan, width, min(wanted, width))
            # The number of groups and its remainder by 16 follow from the widths; the registers
            # and whatever else the plan says are options of the launch.
            options = shape._replace(total=shape.total % 16)
            found.add((width % 16 == 0, width == 1, options))
    return found


@given(st.integers(1, 2048), st.integers(1, 20000), st.integers(0, 20000))
def test_whatever_a_request_selects_from_was_warmed_up(most_rows: int, end: int, more: int) -> None:
    warm: set[tuple[object, ...]] = set()
    for start, rows in forwards(most_rows, end + more):
        warm |= selecting_kernels(start + rows, rows)
    for rows in {1, 17, 600, most_rows}:
        if rows <= min(end, most_rows):
            assert selecting_kernels(end, rows) <= warm


def test_every_operator_of_a_request_was_warmed_up(tiny_folder: Path) -> None:
    llm = LLM(tiny_folder, device="cpu", threads=1, overlap=True, max_model_len=64)
    with torch.inference_mode():
        _run(llm.engine)
    operators = llm.model.precision.operators.all()
    warm = {operator.spec.name for operator in operators if operator.calls}
    sampled = SamplingParams(
        max_tokens=3, top_k=5, presence_penalty=0.5, logprobs=1, prompt_logprobs=1
    )
    llm.generate([[5, 6, 7], [8] * 40], [sampled, SamplingParams(max_tokens=3, temperature=0.0)])
    called = {operator.spec.name for operator in operators if operator.calls}
    assert called == warm
