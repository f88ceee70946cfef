"""Compiling and loading every kernel that a model needs, before the first request.

Knows which numbers of rows and lengths kernels are told apart by; must not know kernels. A first
pass runs the model without launching: kernels that are missing are compiled by threads meanwhile,
and their results are zeros. A second pass runs it, which loads them. Compiled kernels stay in
Triton's cache on disk, so that this takes long only once for a GPU and a version.
"""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from rich.progress import track
from torch import Tensor

from deepinfer.engine.engine import Engine
from deepinfer.model.cached import run
from deepinfer.model.step import SequenceRows, StepLayout
from deepinfer.sampling.params import SamplingParams

_PACKAGE = __name__.partition(".")[0]
_SAMPLED = SamplingParams(
    top_k=20, top_p=0.9, min_p=0.01, repetition_penalty=1.1, frequency_penalty=0.1,
    banned_token_ids=(3,), logit_bias={4: 0.5}, logprobs=5,
)  # fmt: skip


def forwards(most_rows: int, most_tokens: int) -> list[tuple[int, int]]:
    """(start, rows) of forwards of one sequence in which every kernel appears.

    Every telling number of rows at position 0; then one row, a few and many at the end of every
    length of a power of two, for what depends on how much a row can select from.

    Args:
        most_rows: of one forward; most_tokens: of one sequence.
    """
    from deepinfer.kernels.products import telling_rows  # Triton is imported where it is used

    rows = [count for count in telling_rows(most_rows) if count <= min(most_rows, most_tokens)]
    found = [(0, count) for count in rows]
    lengths = [m * 2**n for n in range(5, 30) for m in (2, 3) if m * 2**n < most_tokens]
    for end in (*lengths, most_tokens):
        found += [(end - n, n) for n in (1, 2, 17, 512) if n <= min(end, most_rows)]
    return list(dict.fromkeys(found))


def warm_up(engine: Engine) -> int:
    """Run what `forwards` lists; the number of kernels that were compiled or found on disk.

    The engine must have no requests. Without a GPU there is nothing to do.
    """
    if engine.runner.device.type != "cuda":
        return 0
    assert not engine.has_work, "warming up writes into state slots and pages"
    with torch.inference_mode():
        with compiling() as kernels:
            _run(engine)
        _run(engine)
    torch.cuda.synchronize()
    return len(kernels)


def capture(engine: Engine, progress: bool) -> None:
    """Capture the graphs of small steps; `progress` shows a bar."""
    graphs = engine.runner.capture()
    steps = track(graphs, "capturing", total=engine.runner.graph_count, transient=True,
                  disable=not progress)  # fmt: skip
    for _ in steps:
        pass


def _run(engine: Engine) -> None:
    config, runner = engine.config, engine.runner
    geometry = runner.geometry
    tokens = min(config.max_model_len, config.cache_tokens)
    for start, count in forwards(config.max_num_batched_tokens, tokens):
        needed = geometry.pages_for(start + count)
        sequence = SequenceRows(
            0, [number % runner.pages for number in range(needed)], start, count
        )
        layout = StepLayout([sequence], geometry, runner.device)
        ids = torch.zeros(count, dtype=torch.int64, device=runner.device)
        runner.take_sampled(ids, torch.zeros_like(ids))
        hidden = run(runner.model, runner.pool, layout, ids, runner.token_map).hidden
        logits = runner.model.logits(hidden.x[: config.max_num_seqs]).float()
        # What stands in unwritten pages need not give a distribution.
        _sample(engine, torch.zeros_like(logits))


def _sample(engine: Engine, logits: Tensor) -> None:
    """Draw from every row with everything that parameters can ask for."""
    slots = list(range(len(logits)))
    for slot in slots:
        engine.drawing.sampler.open(slot, _SAMPLED, 0, [1], [2])
    try:
        sampled = engine.drawing.sampler.sample(logits, slots, [2] * len(slots))
        engine.runner.keep_sampled(slots, sampled.tokens)
    finally:
        for slot in slots:
            engine.drawing.sampler.close(slot)


@contextmanager
def compiling() -> Iterator[dict[Any, Any]]:
    """This package's kernels are compiled by threads and not launched; what they would write to
    is zeros.

    Yields:
        the kernels that were compiled or found on disk, which grow while it runs.
    """
    import triton
    from triton.runtime.jit import JITFunction

    launch = JITFunction.run

    def only_compile(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        # Those of libraries in PyTorch's place keep what a launch returns, and must have run.
        ours = kernel.fn.__module__.partition(".")[0] == _PACKAGE
        return launch(kernel, *args, grid=grid, warmup=warmup or ours, **options)

    with ThreadPoolExecutor(os.cpu_count()) as threads, ExitStack() as stack:
        stack.enter_context(patch.object(JITFunction, "run", only_compile))
        stack.enter_context(patch.object(torch, "empty", torch.zeros))
        stack.enter_context(patch.object(torch, "empty_like", torch.zeros_like))
        mode = stack.enter_context(triton.AsyncCompileMode(threads))
        yield mode.future_kernels
