"""How long calls take on a GPU: CUDA graphs over inputs that do not fit the cache.

Knows calls and events; must not know operators.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

REPEATS = 20
FEWEST = 5  # repeats of calls so slow that REPEATS would take longer than PATIENCE seconds
PATIENCE = 0.3
Call = Callable[[], Any]


@dataclass(frozen=True)
class Timing:
    """Microseconds of one call: median, and the tenth and ninetieth percentile.

    Attributes:
        graph: whether a CUDA graph was replayed; otherwise launches from Python are included.
    """

    median: float
    low: float
    high: float
    graph: bool


def measure(calls: Sequence[Call]) -> Timing:
    """Time per call of `calls`, which do the same with different memory, run in turn.

    All of them together should touch more memory than the L2 cache holds.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    run, graph = _captured(calls)
    samples: list[float] = []
    began = time.monotonic()
    while len(samples) < REPEATS:
        if len(samples) >= FEWEST and time.monotonic() - began > PATIENCE:
            break
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
        samples.append(start.elapsed_time(end) * 1000 / len(calls))
    samples.sort()
    tenth = len(samples) // 10
    return Timing(statistics.median(samples), samples[tenth], samples[-1 - tenth], graph)


def _captured(calls: Sequence[Call]) -> tuple[Call, bool]:
    """All calls as one graph, or one after the other where something cannot be captured."""

    def eager() -> None:
        for call in calls:
            call()

    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            eager()
    except RuntimeError:
        torch.cuda.synchronize()
        return eager, False
    return graph.replay, True


def copy_bandwidth() -> float:
    """Bytes per second, read and written, of a copy of 4 GiB by a kernel of PyTorch's.

    A copy of equal dtypes is done by the driver, and is a third slower inside of a graph.
    """
    source = torch.empty(2**30, dtype=torch.float32, device="cuda").normal_()
    target = torch.empty_like(source)
    timing = measure([lambda: torch.neg(source, out=target)])
    return 8 * source.numel() / (timing.median * 1e-6)


def matrix_throughput() -> float:
    """Operations per second of a bfloat16 product of 8192 x 8192 matrices."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    timing = measure([lambda: a @ b])
    return 2 * 8192**3 / (timing.median * 1e-6)


def fp8_throughput() -> float:
    """Operations per second of a block-scaled e4m3 product of 8192 x 8192 matrices by cuBLAS.

    Scales are one per 128 channels of a row and one per 128 x 128 of the matrix.
    """
    size, blocks = 8192, 8192 // 128
    a, b = (
        torch.randn(size, size, device="cuda").clamp(-448, 448).to(torch.float8_e4m3fn)
        for _ in range(2)
    )
    rows = torch.rand(blocks, size, device="cuda").t()
    columns = torch.rand(blocks, blocks, device="cuda").t()
    timing = measure([
        lambda: torch._scaled_mm(a, b.t(), rows, columns, out_dtype=torch.bfloat16)
    ])  # fmt: skip
    return 2 * size**3 / (timing.median * 1e-6)
