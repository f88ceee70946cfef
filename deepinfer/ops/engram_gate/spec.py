"""What engram_gate is, as data.

Knows shapes, cases and tolerances; must not know any backend's code.
"""

from collections.abc import Iterable

import torch

from deepinfer.ops.engram_gate.reference import engram_gate
from deepinfer.ops.spec import Argument, Arguments, Backend, Case, OpSpec, Tolerance, Work, size_of


def draw(
    generator: torch.Generator, device: torch.device, rows: int, S: int, H: int,
    dtype: torch.dtype = torch.bfloat16, size: float = 1.0, form: str = "",
) -> Arguments:  # fmt: skip
    """Arguments of engram_gate; keys and value are parts of one projection, as in the model.

    form: "zeros" has zero streams, "opposite" keys that make every gate's argument large and of
    either sign, "equal" S equal streams, "nan" a NaN in the first row alone.
    """
    streams = torch.randn(rows, S, H, generator=generator) * size
    projected = torch.randn(rows, S + 1, H, generator=generator)
    weight = 1 + 0.1 * torch.randn(S, H, generator=generator)
    if form == "zeros":
        streams = -torch.zeros_like(streams)
    if form == "opposite":
        projected[:, :S] = streams * torch.tensor([1.0, -1.0])[torch.arange(S) % 2].unsqueeze(-1)
    if form == "nan":
        streams[0, -1, 0] = torch.nan
    streams, projected = streams.to(device, dtype), projected.to(device, dtype)
    if form == "equal":
        streams = streams[:, :1].expand(rows, S, H)
    return {
        "streams": streams, "keys": projected[:, :S], "value": projected[:, S],
        "weight": weight.to(device), "eps": 1e-20,
    }  # fmt: skip


def _case(
    name: str, kind: str, rows: int, S: int, H: int, size: float = 1.0, form: str = ""
) -> Case:
    def make(generator: torch.Generator, device: torch.device) -> Arguments:
        return draw(generator, device, rows, S, H, size=size, form=form)

    return Case(name, kind, make)  # type: ignore[arg-type]


def _cases() -> Iterable[Case]:
    yield _case("tiny", "tiny", 5, 4, 96)
    yield _case("no-rows", "hostile", 0, 4, 32)
    yield _case("odd", "hostile", 3, 3, 33)
    yield _case("zeros", "hostile", 2, 4, 32, form="zeros")
    yield _case("opposite", "hostile", 2, 4, 64, form="opposite")
    yield _case("equal-streams", "hostile", 2, 4, 32, form="equal")
    yield _case("large", "hostile", 2, 2, 64, 3e4)
    yield _case("small", "hostile", 2, 2, 64, 1e-30)
    yield _case("nan-in-one-row", "hostile", 2, 2, 32, form="nan")
    for rows in (1, 7, 192, 4096):
        yield _case(f"released-{rows}", "released", rows, 4, 5120)


def _work(a: Arguments) -> Work:
    streams = a["streams"]
    moved = size_of(streams, a["keys"], a["value"], a["weight"], streams)
    return Work(moved, 9 * streams.numel())


SPECS: tuple[OpSpec, ...] = (
    OpSpec(
        name="engram_gate",
        summary="Gated addition of an n-gram value to the residual streams",
        arguments=(
            Argument("streams", "... S H", "bf16 | fp32", "in", "residual streams"),
            Argument("keys", "... S H", "as streams", "in", "one key per stream"),
            Argument("value", "... H", "as streams", "in", "what is added to every stream"),
            Argument("weight", "S H", "fp32", "in", "product of query and key norm weights"),
            Argument("new", "... S H", "as streams", "out", "rounded once"),
        ),
        reference=engram_gate,
        backends=(
            Backend("triton", "deepinfer.ops.engram_gate.triton:engram_gate"),
            Backend("tilelang", "deepinfer.ops.engram_gate.tilelang:engram_gate", narrow=True),
        ),
        cases=_cases,
        work=_work,
        tolerance={"new": Tolerance("rounding", 2**-7, 0.005)},
        stands_for=("tile_kernels.engram.engram_gate_fwd",),
    ),
)
