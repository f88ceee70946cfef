"""Contract of wide_linear, as data."""

from collections.abc import Iterator

from deepinfer.ops.linear.spec import hostile_cases, random_operands, work_of
from deepinfer.ops.spec import Argument, Backend, Case, OpSpec, Tolerance
from deepinfer.ops.wide_linear.reference import wide_linear

MATRICES = {
    "head": (129280, 5120, (1, 16, 64, 128, 512)),
    "router": (384, 5120, (1, 16, 64, 512, 4096)),
    "compressor": (512, 5120, (1, 16, 64, 512, 4096)),
}


def _cases() -> Iterator[Case]:
    yield from hostile_cases()
    for name, (outputs, columns, counts) in MATRICES.items():
        for rows in counts:
            yield Case(f"{rows}-{name}", "released", random_operands(rows, outputs, columns))


SPECS: tuple[OpSpec, ...] = (
    OpSpec(
        name="wide_linear",
        summary="x W^T of bfloat16 operands in float32",
        arguments=(
            Argument("x", "T in", "bf16 | fp32", "in", "rows, which may be strided"),
            Argument("weight", "out in", "bf16 | fp32", "in", "matrix"),
            Argument("y", "T out", "fp32", "out", "x W^T"),
        ),
        reference=wide_linear,
        backends=(
            Backend("triton", "deepinfer.ops.wide_linear.triton:wide_linear"),
            Backend("torch", "deepinfer.ops.wide_linear.cublas:wide_linear", batch_invariant=False),
        ),
        cases=_cases,
        work=lambda arguments: work_of(arguments, 4),
        tolerance={"y": Tolerance("close", limit=2.0**-12)},
        stands_for=("deep_gemm.bf16_gemm_nt",),
    ),
)
