"""Contract of cp_mirror, as data."""

from collections.abc import Iterator

import torch

from deepinfer.ops.cp_mirror.reference import cp_mirror
from deepinfer.ops.spec import Argument, Arguments, Backend, Case, OpSpec, Work, size_of


def _case(
    name: str, kind: str, sizes: tuple[int, ...], ranks: int, rank: int, spare: int = 0
) -> Case:
    def make(generator: torch.Generator, device: torch.device) -> Arguments:
        starts = torch.tensor((0, *sizes)).cumsum(0)
        length = sum(2 * -(-q // (2 * ranks)) for q in sizes) + spare
        total = sum(sizes) + spare
        static = {"ranks": ranks, "rank": rank, "total": total, "length": length}
        return {"starts": starts.to(device), **static}

    return Case(name, kind, make)  # type: ignore[arg-type]


def _cases() -> Iterator[Case]:
    yield _case("two ranks", "tiny", (10, 3, 40), 2, 1)
    yield _case("four ranks, padding", "tiny", (300, 17), 4, 2, 9)
    yield _case("one rank", "hostile", (5, 6), 1, 0)
    yield _case("empty sequences", "hostile", (0, 7, 0, 0, 1, 0), 3, 0, 2)
    yield _case("no sequences", "hostile", (), 2, 1, 3)
    yield _case("nothing", "hostile", (), 2, 1)
    yield _case("8192 rows", "released", (5000, 3000, 192), 8, 3)
    yield _case("many sequences", "released", tuple(range(1, 129)), 8, 7, 100)


def _work(arguments: Arguments) -> Work:
    rows = int(arguments["total"]) + int(arguments["length"])
    return Work(size_of(arguments["starts"]) + 8 * rows)


SPECS: tuple[OpSpec, ...] = (
    OpSpec(
        name="cp_mirror",
        summary="An early and a late slice of every sequence for each rank",
        arguments=(
            Argument("starts", "n+1", "int64", "in", "first rows of sequences, then their number"),
            Argument("mirror", "length", "int64", "out", "the rank's rows, -1 for padding"),
            Argument("reverse", "total", "int64", "out", "rank * length + place of each row"),
        ),
        reference=cp_mirror,
        backends=(Backend("triton", "deepinfer.ops.cp_mirror.triton:cp_mirror"),),
        cases=_cases,
        work=_work,
        stands_for=("prepare_cp_mirror",),
    ),
)
