"""Contract of schedule_drafts, as data."""

from collections.abc import Iterator

import torch

from deepinfer.ops.schedule_drafts.reference import schedule_drafts
from deepinfer.ops.spec import Argument, Arguments, Backend, Case, OpSpec, Work, size_of


def _case(name: str, kind: str, B: int, n: int, budget: int) -> Case:
    """Hostile: few different values, and some that are no chances."""

    def make(generator: torch.Generator, device: torch.device) -> Arguments:
        confidence = torch.rand(B, n, generator=generator)
        if kind == "hostile":
            values = torch.tensor([0.0, 0.5, 1.0, 1.5, -1.0, torch.nan, torch.inf, 1e-30])
            confidence = values[torch.randint(0, len(values), (B, n), generator=generator)]
        counts = torch.randint(0, n + 1, (B,), generator=generator).to(torch.int32)
        named = {"confidence": confidence, "counts": counts, "budget": torch.tensor([budget])}
        return {k: v.to(device) for k, v in named.items()}

    return Case(name, kind, make)  # type: ignore[arg-type]


def _cases() -> Iterator[Case]:
    yield _case("6x5", "tiny", 6, 5, 11)
    yield _case("20x3", "tiny", 20, 3, 17)
    yield _case("0 sequences", "hostile", 0, 5, 3)
    yield _case("no drafts", "hostile", 3, 0, 3)
    yield _case("ties", "hostile", 19, 5, 20)
    yield _case("no budget", "hostile", 3, 5, -2)
    yield _case("budget for all", "hostile", 3, 5, 1000)
    for B in (1, 64, 256, 1024):
        yield _case(f"{B}x5", "released", B, 5, 2 * B)


def _work(arguments: Arguments) -> Work:
    return Work(size_of(*arguments.values()) + size_of(arguments["counts"]))


SPECS: tuple[OpSpec, ...] = (
    OpSpec(
        name="schedule_drafts",
        summary="How many drafts of each sequence are verified, within a budget for all",
        arguments=(
            Argument("confidence", "B n", "fp32", "in", "chances, given the drafts before"),
            Argument("counts", "B", "int32", "in", "drafts that there are"),
            Argument("budget", "1", "int64", "in", "drafts to be verified in all"),
            Argument("granted", "B", "int32", "out", "the first ones of each sequence"),
        ),
        reference=schedule_drafts,
        backends=(
            Backend("triton", "deepinfer.ops.schedule_drafts.triton:schedule_drafts", False),
        ),
        cases=_cases,
        work=_work,
        stands_for=("schedule_varlen",),
    ),
)  # fmt: skip
