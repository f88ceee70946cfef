"""How long a call takes: by CUDA graphs on a GPU, by the clock on a CPU.

Knows calls; must not know who answers them. Arguments stay the same, so they may be in a cache;
that is so for PyTorch and for a library alike.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

_CALLS = 10  # of one graph
_REPEATS = 15
_PATIENCE = 0.25  # seconds after which FEWEST repeats are enough
_FEWEST = 3


@dataclass(frozen=True)
class Timing:
    """Seconds of one call, the median; `graph`: whether a CUDA graph was replayed."""

    seconds: float
    graph: bool


def measure(call: Callable[[], Any], device: torch.device) -> Timing:
    """Time `call`, which must have been called before, so that nothing is compiled any more."""
    if device.type != "cuda":
        return Timing(_median(lambda: _clock(call)), False)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    run, graph = _captured(call)
    return Timing(_median(lambda: _events(run)) / _CALLS, graph)


def _median(sample: Callable[[], float]) -> float:
    samples: list[float] = []
    began = time.monotonic()
    while len(samples) < _REPEATS:
        if len(samples) >= _FEWEST and time.monotonic() - began > _PATIENCE:
            break
        samples.append(sample())
    return statistics.median(samples)


def _clock(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _events(run: Callable[[], Any]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1000


def _captured(call: Callable[[], Any]) -> tuple[Callable[[], Any], bool]:
    def eager() -> None:
        for _ in range(_CALLS):
            call()

    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            eager()
    except Exception:  # what it raises depends on what cannot be captured
        torch.cuda.synchronize()
        return eager, False
    return graph.replay, True
