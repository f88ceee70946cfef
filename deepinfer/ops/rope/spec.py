"""Contract of rope, as data."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from deepinfer.ops.rope.reference import rope, rope_frequencies, rotation
from deepinfer.ops.spec import Argument, Arguments, Backend, Case, OpSpec, Tolerance, Work


def rotations_of(generator: torch.Generator, shape: tuple[int, ...], dim: int) -> Tensor:
    """Rotations [*shape, dim/2] complex64 of positions up to a million."""
    positions = torch.randint(0, 2**20, shape, generator=generator)
    return rotation(positions, rope_frequencies(dim, 10000.0, None), torch.float32)


def exact_rotations(generator: torch.Generator, shape: tuple[int, ...], dim: int) -> Tensor:
    """The same with 16 bits of each cosine and sine.

    Products with bfloat16 channels are then exact, and the result does not depend on whether a
    compiler fuses a product and a sum: what is rounded from it can be compared byte by byte.
    """
    real = torch.view_as_real(rotations_of(generator, shape, dim))
    return torch.view_as_complex((real.view(torch.int32) & -256).view(torch.float32))


def _case(
    lead: tuple[int, ...],
    dim: int,
    tail: int,
    broadcast: tuple[int, ...] | None = None,
    dtype: torch.dtype = torch.bfloat16,
    inverse: bool = False,
) -> Callable[..., Arguments]:
    def make(generator: torch.Generator, device: torch.device) -> Arguments:
        # float32 results are compared bit by bit too: their products have to be exact.
        turns = rotations_of if dtype == torch.bfloat16 else exact_rotations
        x = torch.randn(*lead, dim, generator=generator).to(torch.bfloat16).to(dtype)
        turned = turns(generator, lead if broadcast is None else broadcast, tail)
        return {"x": x.to(device), "rotations": turned.to(device), "inverse": inverse}

    return make


def _special(generator: torch.Generator, device: torch.device) -> Arguments:
    """No rotation, quarter and half turns; zeros, tiny and large values; the head holds NaN."""
    turns = torch.tensor([1.0, 1.0j, -1.0, -1.0j], dtype=torch.complex64).reshape(4, 1)
    x = torch.randn(4, 3, 40, generator=generator)
    x[0] = 0.0
    x[1] *= 1e-30
    x[2] *= 3e4
    x[:, :, :8] = float("nan")
    turns = turns.expand(4, 8).unsqueeze(1)
    return {"x": x.to(torch.bfloat16).to(device), "rotations": turns.to(device)}


def _strided(generator: torch.Generator, device: torch.device) -> Arguments:
    x = torch.randn(3, 4, 128, generator=generator).to(torch.bfloat16).to(device)
    turns = rotations_of(generator, (3,), 32).to(device)
    return {"x": x[:, 1, 32:96], "rotations": turns, "inverse": True}


def cases() -> Iterator[Case]:
    """Tiny, hostile and released cases."""
    yield Case("heads", "tiny", _case((3, 4), 64, 32, (3, 1)))
    yield Case("heads-inverse", "tiny", _case((3, 4), 64, 32, (3, 1), inverse=True))
    yield Case("keys", "tiny", _case((5,), 64, 32))
    yield Case("drafts", "tiny", _case((2, 5, 4), 64, 32, (2, 5, 1)))
    yield Case("fp32", "tiny", _case((5, 2), 64, 32, (5, 1), torch.float32))
    yield Case("no-rows", "hostile", _case((0, 4), 64, 32, (0, 1)))
    yield Case("one-row", "hostile", _case((1,), 512, 64))
    yield Case("all-channels", "hostile", _case((3, 2), 16, 16, (3, 1)))
    yield Case("odd-sizes", "hostile", _case((3, 5), 46, 12, (3, 1)))
    yield Case("one-for-all", "hostile", _case((3, 4), 64, 32, (1, 1)))
    yield Case("one-per-head", "hostile", _case((3, 4), 64, 32, (4,)))
    yield Case("special-values", "hostile", _special)
    yield Case("strided", "hostile", _strided)
    for rows in (1, 128, 4096):
        yield Case(f"{rows}x64x512", "released", _case((rows, 64), 512, 64, (rows, 1)))
        yield Case(f"{rows}x512", "released", _case((rows,), 512, 64))
    yield Case("512x64x512-inverse", "released", _case((512, 64), 512, 64, (512, 1), inverse=True))
    yield Case("16x5x64x512", "released", _case((16, 5, 64), 512, 64, (16, 5, 1)))


def work(arguments: Arguments) -> Work:
    """Read and write x; six operations per rotated pair."""
    x, rotations = arguments["x"], arguments["rotations"]
    pairs = x.numel() // x.shape[-1] * rotations.shape[-1]
    moved = 2 * x.numel() * x.element_size() + 8 * rotations.numel()
    return Work(bytes=moved, flops=6 * pairs)


SPECS: tuple[OpSpec, ...] = (
    OpSpec(
        name="rope",
        summary="rotate adjacent channel pairs of the tail",
        arguments=(
            Argument("x", "... D", "bf16 | fp32", "in", "rows, which may be strided"),
            Argument("rotations", "... d/2", "complex64", "in", "broadcast over the axes of x"),
            Argument("y", "... D", "as x", "out", "the last d channels rotated, rounded once"),
        ),
        reference=rope,
        backends=(
            Backend("triton", "deepinfer.ops.rope.triton:rope"),
            Backend("tilelang", "deepinfer.ops.rope.tilelang:rope", narrow=True),
        ),
        cases=cases,
        work=work,
        # Fusing a product and a sum changes the last bit of a float32, and rarely a bf16 number.
        tolerance={"y": Tolerance("rounding", limit=2.0**-7, share=0.01)},
        stands_for=("fused_transform", "tile_kernels.transform.apply_rotary"),
    ),
)
