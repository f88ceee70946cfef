"""Contract of confidence, as data."""

from collections.abc import Iterator

import torch

from deepinfer.ops.confidence.reference import confidence
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


def _case(
    name: str, kind: str, B: int, H: int, K: int, dtype: torch.dtype = torch.bfloat16,
    scale: float = 1.0,
) -> Case:  # fmt: skip
    """Rows of a slot among slots: their stride is larger than their width."""

    def make(generator: torch.Generator, device: torch.device) -> Arguments:
        x = (torch.randn(B, 2, H, generator=generator) * scale).to(dtype).to(device)
        embedded = torch.randn(B, K, generator=generator).to(dtype)
        weight = torch.randn(1, H + K, generator=generator) / (H + K) ** 0.5
        return {
            "x": x[:, 1],
            "embedded": embedded.to(device),
            "weight": weight.to(dtype).to(device),
        }

    return Case(name, kind, make)  # type: ignore[arg-type]


def _cases() -> Iterator[Case]:
    yield _case("3x64", "tiny", 3, 64, 16)
    yield _case("fp32", "tiny", 2, 300, 33, torch.float32)
    yield _case("0 rows", "hostile", 0, 64, 16)
    yield _case("saturated", "hostile", 4, 1500, 70, torch.bfloat16, 1e4)
    yield _case("almost zero", "hostile", 2, 130, 1, torch.float32, 1e-30)
    for B in (1, 64, 1024):
        yield _case(f"{B}x5376", "released", B, 5120, 256)


def _work(arguments: Arguments) -> Work:
    x, embedded, weight = (arguments[k] for k in ("x", "embedded", "weight"))
    return Work(size_of(x, embedded, weight) + 4 * len(x), 2 * len(x) * weight.numel())


SPECS: tuple[OpSpec, ...] = (
    OpSpec(
        name="confidence",
        summary="Estimated chance that a draft is accepted if those before it were",
        arguments=(
            Argument("x", "B H", "bf16 | fp32", "in", "draft states before the norm"),
            Argument("embedded", "B K", "as x", "in", "embeddings of the tokens before"),
            Argument("weight", "1 H+K", "bf16 | fp32", "in", "or flat"),
            Argument("confidence", "B", "fp32", "out", "0 .. 1"),
        ),
        reference=confidence,
        backends=(Backend("triton", "deepinfer.ops.confidence.triton:confidence"),),
        cases=_cases,
        work=_work,
        tolerance={"confidence": Tolerance("close", 1e-4)},
        stands_for=("draft_heads",),
    ),
)
