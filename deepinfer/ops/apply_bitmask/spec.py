"""Contract of apply_bitmask, as data."""

from collections.abc import Iterator

import torch

from deepinfer.ops.apply_bitmask.reference import apply_bitmask
from deepinfer.ops.spec import Argument, Arguments, Backend, Case, OpSpec, Work, size_of


def _case(name: str, kind: str, B: int, M: int, V: int, dtype: torch.dtype = torch.float32) -> Case:
    """M of B rows; a hostile one names rows that do not exist."""

    def make(generator: torch.Generator, device: torch.device) -> Arguments:
        logits = torch.randn(B, V, generator=generator).to(dtype)
        words = (V + 31) // 32
        mask = torch.randint(-(2**31), 2**31, (M, words), generator=generator).to(torch.int32)
        rows = torch.randperm(B, generator=generator)[:M]
        if kind == "hostile" and M > 2:
            logits[:, 0] = torch.nan
            mask[0], mask[1] = 0, -1
            rows[1], rows[2] = -1, B
        wide = torch.zeros(B, V + 3, dtype=dtype, device=device)[:, :V]
        named = {"mask": mask.to(device), "rows": rows.to(device)}
        return {"logits": wide.copy_(logits), **named}

    return Case(name, kind, make)  # type: ignore[arg-type]


def _cases() -> Iterator[Case]:
    yield _case("3 of 4x100", "tiny", 4, 3, 100)
    yield _case("bf16", "tiny", 2, 2, 64, torch.bfloat16)
    yield _case("no masks", "hostile", 3, 0, 40)
    yield _case("no logits", "hostile", 0, 0, 40)
    yield _case("rows that are none", "hostile", 5, 4, 2500)
    yield _case("1 token", "hostile", 1, 1, 1)
    for B in (1, 64, 384):
        yield _case(f"{B}x129280", "released", B, B, 129280)


def _work(arguments: Arguments) -> Work:
    logits, mask = arguments["logits"], arguments["mask"]
    half = mask.shape[0] * logits.shape[1] * logits.element_size() // 2
    return Work(size_of(mask, arguments["rows"]) + half)


SPECS: tuple[OpSpec, ...] = (
    OpSpec(
        name="apply_bitmask",
        summary="Logits of tokens that a grammar forbids become -inf",
        arguments=(
            Argument("logits", "B V", "fp32 | bf16", "inout", "rows that are not named stay"),
            Argument("mask", "M ceil(V/32)", "int32", "in", "token t: bit t % 32 of word t // 32"),
            Argument("rows", "M", "int64", "in", "row of each mask, negative: none"),
        ),
        reference=apply_bitmask,
        backends=(Backend("triton", "deepinfer.ops.apply_bitmask.triton:apply_bitmask"),),
        cases=_cases,
        work=_work,
        stands_for=("structure_output",),
    ),
)
