"""What engram_gather is, as data.

Knows shapes and cases; must not know any backend's code.
"""

from collections.abc import Iterable

import torch

from deepinfer.ops.engram_gather.reference import engram_gather
from deepinfer.ops.spec import Argument, Arguments, Backend, Case, OpSpec, Work

_FAR = 2**31


def draw(
    generator: torch.Generator, device: torch.device, tokens: int, columns: int, width: int,
    count: int, dtype: torch.dtype = torch.bfloat16, form: str = "",
) -> Arguments:  # fmt: skip
    """Arguments over a table of `count` rows.

    form: "nasty" has every code, scales of all sizes, NaN among both, and row numbers outside of
    the table; "strided" has gaps between rows; "pinned" leaves the table in pinned host memory;
    "far" has rows that lie 2^31 bytes apart.
    """
    codes = torch.randint(0, 256, (count, width), generator=generator, dtype=torch.uint8)
    scales = torch.randint(110, 140, (count, width // 32), generator=generator, dtype=torch.uint8)
    rows = torch.randint(0, count, (tokens, columns), generator=generator)
    codes[(codes & 0x7F) == 0x7F] = 0x38
    if form == "nasty":
        codes[0, :] = torch.arange(width).to(torch.uint8)
        scales[0, :] = torch.tensor([0, 255, 1, 200])[torch.arange(width // 32) % 4]
        rows[:, 0] = torch.tensor([-1, count, 0, -(2**40)])[torch.arange(tokens) % 4]
    if form == "strided":
        codes = torch.cat([codes, torch.full_like(codes, 0xFF)], 1).to(device)[:, :width]
        scales = torch.cat([scales, torch.full_like(scales, 0xFF)], 1).to(device)[:, : width // 32]
    if form == "far":
        room = torch.zeros(_FAR + width, dtype=torch.uint8, device=device)
        room[:width], room[_FAR:] = codes[0].to(device), codes[1].to(device)
        codes = room.as_strided((2, width), (_FAR, 1))
    if form == "pinned" and device.type == "cuda":
        codes, scales = codes.pin_memory(), scales.pin_memory()
    elif form != "far":
        codes = codes.to(device)
    if form != "pinned":
        scales = scales.to(device)
    return {"codes": codes, "scales": scales, "rows": rows.to(device), "dtype": dtype}


def _case(
    name: str, kind: str, tokens: int, columns: int, width: int, count: int,
    dtype: torch.dtype = torch.bfloat16, form: str = "",
) -> Case:  # fmt: skip
    def make(generator: torch.Generator, device: torch.device) -> Arguments:
        return draw(generator, device, tokens, columns, width, count, dtype, form)

    return Case(name, kind, make)  # type: ignore[arg-type]


def _cases() -> Iterable[Case]:
    yield _case("tiny", "tiny", 3, 6, 64, 40)
    yield _case("no-rows", "hostile", 0, 6, 64, 40)
    yield _case("nasty", "hostile", 5, 3, 256, 7, form="nasty")
    yield _case("nasty-float32", "hostile", 5, 3, 96, 7, torch.float32, "nasty")
    yield _case("strided", "hostile", 3, 5, 96, 9, form="strided")
    yield _case("pinned", "hostile", 2, 3, 64, 9, form="pinned")
    yield _case("far-rows", "released", 4, 24, 256, 2, form="far")
    yield _case("released-pinned-192", "released", 192, 24, 256, 100_000, form="pinned")
    for tokens in (1, 192, 4096):
        yield _case(f"released-{tokens}", "released", tokens, 24, 256, 1_000_000)


def _work(a: Arguments) -> Work:
    count, width = a["rows"].numel(), a["codes"].shape[1]
    size = torch.empty((), dtype=a["dtype"]).element_size()
    return Work(count * (8 + width + width // 32 + size * width), count * width)


SPECS: tuple[OpSpec, ...] = (
    OpSpec(
        name="engram_gather",
        summary="Dequantised rows of an n-gram table, joined per token",
        arguments=(
            Argument("codes", "R F", "uint8", "in", "e4m3; may lie in pinned host memory"),
            Argument("scales", "R F/32", "uint8", "in", "e8m0, as codes"),
            Argument("rows", "... C", "int64", "in", "outside of 0 .. R - 1 gives zeros"),
            Argument("values", "... C*F", "bf16 | fp32", "out", "rounded once"),
        ),
        reference=engram_gather,
        backends=(Backend("triton", "deepinfer.ops.engram_gather.triton:engram_gather"),),
        cases=_cases,
        work=_work,
        stands_for=("deep_ep.EngramBuffer.fetch",),
    ),
)
