"""How long calls take on a GPU: CUDA graphs over inputs that do not fit the cache.

Knows calls and events; must not know operators.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

REPEATS = 20
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
    samples = []
    for _ in range(REPEATS):
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
    """Bytes per second, read and written, of a device copy of 1 GiB."""
    source = torch.empty(2**30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    timing = measure([lambda: target.copy_(source)])
    return 2 * source.numel() / (timing.median * 1e-6)


def matrix_throughput() -> float:
    """Operations per second of a bfloat16 product of 8192 x 8192 matrices."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    timing = measure([lambda: a @ b])
    return 2 * 8192**3 / (timing.median * 1e-6)
