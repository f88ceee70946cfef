"""What gather_rows is, as data.

Knows shapes and cases; must not know any backend's code.
"""

from collections.abc import Iterable

import torch

from deepinfer.ops.gather_rows.reference import gather_rows
from deepinfer.ops.spec import Argument, Arguments, Backend, Case, OpSpec, Work

_FAR = 2**30


def draw(
    generator: torch.Generator, device: torch.device, rows: int, count: int, width: int,
    dtype: torch.dtype = torch.bfloat16, form: str = "",
) -> Arguments:  # fmt: skip
    """Arguments over a table of `count` rows, which is drawn on the device.

    form: "outside" has numbers below and above the table, as int32, and NaN in the table;
    "strided" has gaps between rows; "far" has rows 2^31 bytes apart.
    """
    index = torch.randint(0, max(count, 1), (rows,), generator=generator)
    there = torch.Generator(device).manual_seed(generator.initial_seed())
    if dtype.is_floating_point:
        table = torch.randn(count, width, generator=there, device=device).to(dtype)
    else:
        table = torch.randint(0, 127, (count, width), generator=there, device=device).to(dtype)
    if form == "outside":
        wrong = torch.tensor([-1, count, 0, -(2**31), 2**31 - 1])
        index = wrong[torch.arange(rows) % 5].to(torch.int32)
        table[-1] = torch.nan
    if form == "strided":
        table = torch.cat([table, table], 1)[:, :width]
    if form == "far":
        room = torch.zeros(_FAR + width, dtype=dtype, device=device)
        room[:width], room[_FAR:] = table[0], table[1]
        table = room.as_strided((2, width), (_FAR, 1))
    return {"table": table, "index": index.to(device)}


def _case(
    name: str, kind: str, rows: int, count: int, width: int,
    dtype: torch.dtype = torch.bfloat16, form: str = "",
) -> Case:  # fmt: skip
    def make(generator: torch.Generator, device: torch.device) -> Arguments:
        return draw(generator, device, rows, count, width, dtype, form)

    return Case(name, kind, make)  # type: ignore[arg-type]


def _cases() -> Iterable[Case]:
    yield _case("tiny", "tiny", 7, 11, 32)
    yield _case("no-rows", "hostile", 0, 11, 32)
    yield _case("outside", "hostile", 5, 3, 33, form="outside")
    yield _case("strided-float32", "hostile", 4, 5, 20, torch.float32, "strided")
    yield _case("bytes", "hostile", 3, 5, 7, torch.uint8)
    yield _case("int64", "hostile", 3, 5, 1, torch.int64)
    yield _case("far-rows", "released", 3, 2, 5120, form="far")
    for rows in (1, 192, 4096):
        yield _case(f"released-{rows}", "released", rows, 129280, 5120)


def _work(a: Arguments) -> Work:
    table, index = a["table"], a["index"]
    copied = index.numel() * table.shape[1] * table.element_size()
    return Work(2 * copied + index.numel() * index.element_size())


SPECS: tuple[OpSpec, ...] = (
    OpSpec(
        name="gather_rows",
        summary="Rows of a table by number, zeros for numbers outside of it",
        arguments=(
            Argument("table", "R C", "any", "in", "copied bit for bit"),
            Argument("index", "...", "int32 | int64", "in", "row numbers"),
            Argument("rows", "... C", "as table", "out", "the rows"),
        ),
        reference=gather_rows,
        backends=(Backend("triton", "deepinfer.ops.gather_rows.triton:gather_rows"),),
        cases=_cases,
        work=_work,
        stands_for=("gather",),
    ),
)
