"""Contract of stream_mean, as data."""

from collections.abc import Iterator

import torch

from deepinfer.ops.spec import (
    Argument,
    Arguments,
    Backend,
    Case,
    OpSpec,
    Tolerance,
    Work,
    size_of,
)
from deepinfer.ops.stream_mean.reference import stream_mean


def _case(
    name: str, kind: str, T: int, S: int, H: int, dtype: torch.dtype = torch.bfloat16,
    into: bool = False, scale: float = 1.0,
) -> Case:  # fmt: skip
    """`into`: a column slice of a wider tensor is written."""

    def make(generator: torch.Generator, device: torch.device) -> Arguments:
        streams = (torch.randn(T, S, H, generator=generator) * scale).to(dtype).to(device)
        features = torch.zeros(T, 3 * H, dtype=dtype, device=device)
        return {"streams": streams, "out": features[:, H : 2 * H] if into else None}

    return Case(name, kind, make)  # type: ignore[arg-type]


def _cases() -> Iterator[Case]:
    yield _case("3x4x64", "tiny", 3, 4, 64)
    yield _case("into columns", "tiny", 3, 4, 64, torch.bfloat16, True)
    yield _case("fp32", "tiny", 2, 4, 1100, torch.float32)
    yield _case("0 rows", "hostile", 0, 4, 64)
    yield _case("1 stream", "hostile", 2, 1, 33)
    yield _case("3 streams, large", "hostile", 2, 3, 33, torch.bfloat16, True, 3e4)
    yield _case("tiny values", "hostile", 2, 4, 40, torch.bfloat16, False, 1e-30)
    for T in (1, 64, 4096):
        yield _case(f"{T}x4x5120", "released", T, 4, 5120, torch.bfloat16, True)


def _work(arguments: Arguments) -> Work:
    streams = arguments["streams"]
    return Work(size_of(streams) + size_of(streams[:, 0]), streams.numel())


SPECS: tuple[OpSpec, ...] = (
    OpSpec(
        name="stream_mean",
        summary="Mean of the residual streams, as the drafter reads them",
        arguments=(
            Argument("streams", "T S H", "bf16 | fp32", "in", "entering a layer"),
            Argument("out", "T H", "as streams", "inout", "written if given"),
            Argument("mean", "T H", "as streams", "out", "`out`, or a new tensor"),
        ),
        reference=stream_mean,
        backends=(Backend("triton", "deepinfer.ops.stream_mean.triton:stream_mean"),),
        cases=_cases,
        work=_work,
        tolerance=dict.fromkeys(("mean", "out"), Tolerance("rounding", 2**-7, 0.01)),
        stands_for=("draft_heads",),
    ),
)
