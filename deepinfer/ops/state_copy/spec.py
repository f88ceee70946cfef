"""What copy_rows is, as data.

Knows shapes and cases; must not know any backend's code.
"""

from collections.abc import Iterable

import torch

from deepinfer.ops.spec import Argument, Arguments, Backend, Case, OpSpec, Work
from deepinfer.ops.state_copy.reference import copy_rows

_FAR = 2**31


def draw(
    generator: torch.Generator, device: torch.device, pairs: int, row: tuple[int, ...],
    dtype: torch.dtype = torch.uint8, form: str = "",
) -> Arguments:  # fmt: skip
    """Arguments with `pairs` pairs over tables of twice as many rows.

    form: "skips" has pairs that are skipped by either number, as int32; "all-skipped" only those;
    "poison" has rows of 0xFF that no pair reads; "strided" has gaps between rows; "one" copies
    within one table; "far" has target rows 2^31 bytes apart.
    """
    count = 2 * pairs + 1
    size = torch.empty((), dtype=dtype).element_size()
    shape = (count, *row[:-1], row[-1] * size)
    source = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
    target = torch.full_like(source, 0xFF)
    order = torch.randperm(count, generator=generator)
    read, written = order[:pairs], torch.randperm(count, generator=generator)[:pairs]
    if form in ("skips", "all-skipped"):
        number = torch.arange(pairs) % 3
        read = torch.where((number == 0) | (form == "all-skipped"), -1, read).to(torch.int32)
        written = torch.where(number == 1, -5, written).to(torch.int32)
    if form == "poison":
        source[order[pairs:]] = 0xFF
    if form == "one":
        written = order[pairs : 2 * pairs]
    source, target = source.to(device), target.to(device)
    if form == "strided":
        source = torch.cat([source, source], -1).to(device)[..., : shape[-1]]
        target = torch.cat([target, target], -1).to(device)[..., : shape[-1]]
    if form == "far":
        room = torch.zeros(_FAR + shape[-1], dtype=torch.uint8, device=device)
        target, written = room.as_strided((2, shape[-1]), (_FAR, 1)), written.clamp_max(1)
    tables = {"source": source.view(dtype), "target": target.view(dtype)}
    if form == "one":
        tables["target"] = tables["source"]
    return {**tables, "from_rows": read.to(device), "to_rows": written.to(device)}


def _case(
    name: str, kind: str, pairs: int, row: tuple[int, ...], dtype: torch.dtype = torch.uint8,
    form: str = "",
) -> Case:  # fmt: skip
    def make(generator: torch.Generator, device: torch.device) -> Arguments:
        return draw(generator, device, pairs, row, dtype, form)

    return Case(name, kind, make)  # type: ignore[arg-type]


def _cases() -> Iterable[Case]:
    yield _case("tiny", "tiny", 5, (66,))
    yield _case("no-pairs", "hostile", 0, (8,))
    yield _case("skips", "hostile", 7, (33,), torch.bfloat16, "skips")
    yield _case("all-skipped", "hostile", 4, (5,), torch.int64, "all-skipped")
    yield _case("poison", "hostile", 3, (2, 3, 8), torch.float32, "poison")
    yield _case("strided", "hostile", 3, (528,), form="strided")
    yield _case("one-table", "hostile", 3, (17,), torch.bfloat16, "one")
    yield _case("far-rows", "released", 1, (528,), form="far")
    yield _case("released-ring-192", "released", 192, (528,))
    yield _case("released-ring-4096", "released", 4096, (528,))
    yield _case("released-slots-4", "released", 4, (134, 528))
    yield _case("released-slots-64", "released", 64, (134, 528))


def _work(a: Arguments) -> Work:
    source, pairs = a["source"], a["from_rows"].numel()
    row = source[:1].numel() * source.element_size()
    return Work(pairs * (2 * row + 2 * a["from_rows"].element_size()))


SPECS: tuple[OpSpec, ...] = (
    OpSpec(
        name="copy_rows",
        summary="Rows of one table to places in another: state slots, ring stores",
        arguments=(
            Argument("source", "R ...", "any", "in", "copied bit for bit"),
            Argument("target", "R' ...", "as source", "inout", "rows that no pair names stay"),
            Argument("from_rows", "n", "int32 | int64", "in", "negative skips the pair"),
            Argument("to_rows", "n", "as from_rows", "in", "negative skips, others differ"),
        ),
        reference=copy_rows,
        backends=(Backend("triton", "deepinfer.ops.state_copy.triton:copy_rows"),),
        cases=_cases,
        work=_work,
        stands_for=("state_cache",),
    ),
)
