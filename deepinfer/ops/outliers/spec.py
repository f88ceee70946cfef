"""What count_outliers is, as data.

Knows shapes and cases; must not know any backend's code.
"""

from collections.abc import Iterable

import torch

from deepinfer.ops.outliers.reference import count_outliers
from deepinfer.ops.spec import Argument, Arguments, Backend, Case, OpSpec, Work, size_of


def draw(
    generator: torch.Generator, device: torch.device, rows: int, width: int,
    dtype: torch.dtype = torch.bfloat16, limit: float = 1.0, form: str = "",
) -> Arguments:  # fmt: skip
    """Arguments; "nasty" has NaN of either sign, infinities, the limit itself and -0.0, "strided"
    has gaps between rows that hold NaN.
    """
    x = torch.randn(rows, width, generator=generator)
    if form == "nasty":
        values = [torch.nan, -torch.nan, torch.inf, -torch.inf, limit, -limit, -0.0, 1e-40, 3e38]
        x = torch.tensor(values)[torch.arange(rows * width) % 9].view(rows, width)
    x = x.to(device, dtype)
    if form == "strided":
        x = torch.cat([x, torch.full_like(x, torch.nan)], 1)[:, :width]
    return {"x": x, "limit": limit}


def _case(
    name: str, kind: str, rows: int, width: int, dtype: torch.dtype = torch.bfloat16,
    limit: float = 1.0, form: str = "",
) -> Case:  # fmt: skip
    def make(generator: torch.Generator, device: torch.device) -> Arguments:
        return draw(generator, device, rows, width, dtype, limit, form)

    return Case(name, kind, make)  # type: ignore[arg-type]


def _cases() -> Iterable[Case]:
    yield _case("tiny", "tiny", 5, 40)
    yield _case("no-rows", "hostile", 0, 40)
    yield _case("nasty", "hostile", 17, 33, form="nasty")
    yield _case("nasty-float32", "hostile", 3, 600, torch.float32, 0.1, "nasty")
    yield _case("float16", "hostile", 2, 9, torch.float16, 0.0)
    yield _case("strided", "hostile", 3, 20, form="strided")
    for rows in (1, 192, 4096):
        yield _case(f"released-{rows}", "released", rows, 5120, limit=3.0)


def _work(a: Arguments) -> Work:
    return Work(size_of(a["x"]) + 8)


SPECS: tuple[OpSpec, ...] = (
    OpSpec(
        name="count_outliers",
        summary="Numbers of values that are not finite, and that are larger than a limit",
        arguments=(
            Argument("x", "T C", "bf16 | fp16 | fp32", "in", "any values"),
            Argument("counts", "2", "int32", "out", "not finite; |x| > limit"),
        ),
        reference=count_outliers,
        backends=(Backend("triton", "deepinfer.ops.outliers.triton:count_outliers"),),
        cases=_cases,
        work=_work,
        stands_for=("outlier_detection",),
    ),
)
