"""What engram_hash is, as data.

Knows shapes and cases; must not know any backend's code.
"""

from collections.abc import Iterable

import torch

from deepinfer.ops.engram_hash.reference import engram_hash
from deepinfer.ops.spec import Argument, Arguments, Backend, Case, OpSpec, Work, size_of

_CLASSES = 99092
_BOUND = ((2**63 - 1) // _CLASSES) // 2


def draw(
    generator: torch.Generator, device: torch.device, rows: int, orders: int, heads: int,
    form: str = "",
) -> Arguments:  # fmt: skip
    """Arguments; "largest" has the largest classes and multipliers, "strided" rows with gaps."""
    width = orders + 2 if form == "strided" else orders
    classes = torch.randint(_CLASSES, (rows, width), generator=generator)
    multipliers = 2 * torch.randint(_BOUND, (orders,), generator=generator) + 1
    if form == "largest":
        classes = torch.full_like(classes, _CLASSES - 1)
        multipliers = torch.full_like(multipliers, 2 * _BOUND - 1)
    primes = torch.randint(16_000_057, 16_000_890, (orders - 1, heads), generator=generator)
    ends = primes.flatten().cumsum(0)
    return {
        "classes": classes.to(device)[:, :orders],
        "multipliers": multipliers.to(device),
        "primes": primes.to(device),
        "offsets": (ends - primes.flatten()).view_as(primes).to(device),
    }


def _case(name: str, kind: str, rows: int, orders: int, heads: int, form: str = "") -> Case:
    def make(generator: torch.Generator, device: torch.device) -> Arguments:
        return draw(generator, device, rows, orders, heads, form)

    return Case(name, kind, make)  # type: ignore[arg-type]


def _cases() -> Iterable[Case]:
    yield _case("tiny", "tiny", 5, 4, 8)
    yield _case("no-rows", "hostile", 0, 4, 8)
    yield _case("odd", "hostile", 17, 3, 5)
    yield _case("largest", "hostile", 2, 4, 8, "largest")
    yield _case("strided", "hostile", 3, 4, 8, "strided")
    for rows in (1, 192, 4096):
        yield _case(f"released-{rows}", "released", rows, 4, 8)


def _work(a: Arguments) -> Work:
    rows = a["classes"].numel() // a["classes"].shape[-1]
    return Work(size_of(*a.values()) + 8 * rows * a["primes"].numel())


SPECS: tuple[OpSpec, ...] = (
    OpSpec(
        name="engram_hash",
        summary="Table rows of each token's n-grams",
        arguments=(
            Argument("classes", "... G", "int64", "in", "class of the token, of the one before"),
            Argument("multipliers", "G", "int64", "in", "odd; products stay below 2^63"),
            Argument("primes", "G-1 heads", "int64", "in", "order 2 first"),
            Argument("offsets", "G-1 heads", "int64", "in", "first row of each prime's part"),
            Argument("rows", "... (G-1)*heads", "int64", "out", "order-major"),
        ),
        reference=engram_hash,
        backends=(
            Backend("triton", "deepinfer.ops.engram_hash.triton:engram_hash"),
            Backend("tilelang", "deepinfer.ops.engram_hash.tilelang:engram_hash", narrow=True),
        ),
        cases=_cases,
        work=_work,
        stands_for=("tile_kernels.engram.engram_hash",),
    ),
)
