"""Contract of rms_norm, as data."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from deepinfer.ops.rms_norm.reference import rms_norm
from deepinfer.ops.spec import Argument, Arguments, Backend, Case, OpSpec, Tolerance, Work, size_of

EPS = 1e-20

# Eight numbers whose mean square is 16: their inverse root is exact in any order of summation.
_OCTETS = torch.tensor(
    [
        [7, 5, 4, 4, 3, 3, 2, 0],
        [0, 1, 1, 3, 4, 4, 6, 7],
        [5, 5, 5, 5, 4, 2, 2, 2],
        [4, 4, 4, 4, 4, 4, 4, 4],
    ],
    dtype=torch.float32,
)


def exact_rows(
    generator: torch.Generator, rows: int, width: int, dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    """Rows [rows, width] whose root mean square is a power of two, so that sums are exact.

    Normalised rows, and everything that is rounded from them, can then be compared byte by byte.
    `width` has to be a multiple of 8.
    """
    chosen = torch.randint(0, len(_OCTETS), (rows, width // 8), generator=generator)
    x = _OCTETS[chosen].flatten(1)
    x = x.gather(1, torch.rand(rows, width, generator=generator).argsort(-1))
    sign = torch.randint(0, 2, (rows, width), generator=generator) * 2 - 1
    power = torch.randint(-8, 9, (rows, 1), generator=generator)
    return (x * sign * torch.exp2(power.float())).to(dtype)


def weights(generator: torch.Generator, width: int) -> Tensor:
    """Norm weights [width] float32 around 1, some of them negative or zero."""
    weight = 1.0 + torch.randn(width, generator=generator) * 0.5
    weight[0] = 0.0
    return weight


def _random(rows: int, width: int, act_quant: bool = False) -> Callable[..., Arguments]:
    def make(generator: torch.Generator, device: torch.device) -> Arguments:
        x = torch.randn(rows, width, generator=generator) * 2
        return {
            "x": x.to(torch.bfloat16).to(device),
            "weight": weights(generator, width).to(device),
            "eps": EPS,
            "act_quant": act_quant,
        }

    return make


def _exact(
    rows: int, width: int, dtype: torch.dtype, act_quant: bool = False
) -> Callable[..., Arguments]:
    def make(generator: torch.Generator, device: torch.device) -> Arguments:
        return {
            "x": exact_rows(generator, rows, width, dtype).to(device),
            "weight": weights(generator, width).to(device),
            "eps": EPS,
            "act_quant": act_quant,
        }

    return make


def _magnitudes(generator: torch.Generator, device: torch.device) -> Arguments:
    """Rows of zeros of both signs, 1e-30, 3e4, and one large value among small ones."""
    x = exact_rows(generator, 6, 64, torch.float32)
    scale = torch.tensor([0.0, -0.0, 1e-30, 3e4, 1.0, 1.0]).unsqueeze(-1)
    x = x / x.square().mean(-1, keepdim=True).sqrt() * scale
    x[4] *= 2.0**-40
    x[4, 3] = 2.0**14
    return {"x": x.to(torch.bfloat16).to(device), "weight": torch.ones(64).to(device), "eps": EPS}


def _strided(generator: torch.Generator, device: torch.device) -> Arguments:
    wide = torch.randn(3, 5, 160, generator=generator).to(torch.bfloat16).to(device)
    return {
        "x": wide[1:, :, 32:128],
        "weight": weights(generator, 96).to(device),
        "eps": 1e-6,
        "act_quant": True,
    }


def _far(generator: torch.Generator, device: torch.device) -> Arguments:
    """The last row lies past 2^31 bytes."""
    step = 2**29 + 64
    memory = torch.empty(2 * step + 128, dtype=torch.bfloat16, device=device)
    x = memory.as_strided((3, 128), (step, 1))
    x.copy_(torch.randn(3, 128, generator=generator))
    return {"x": x, "weight": weights(generator, 128).to(device), "eps": EPS}


def cases() -> Iterator[Case]:
    """Tiny, hostile and released cases."""
    yield Case("5x128", "tiny", _random(5, 128))
    yield Case("3x320-act_quant", "tiny", _random(3, 320, True))
    yield Case("5x128-fp32", "tiny", _exact(5, 128, torch.float32))
    yield Case("3x64-fp32-act_quant", "tiny", _exact(3, 64, torch.float32, True))
    yield Case("0x64", "hostile", _random(0, 64))
    yield Case("1x7", "hostile", _random(1, 7))
    yield Case("17x100", "hostile", _random(17, 100))
    yield Case("2x5120-act_quant", "hostile", _random(2, 5120, True))
    yield Case("1x1280", "hostile", _random(1, 1280))
    yield Case("magnitudes", "hostile", _magnitudes)
    yield Case("strided-3d-act_quant", "hostile", _strided)
    yield Case("past-2GiB", "hostile", _far)
    for width in (128, 512, 1280, 5120):
        for rows in (1, 128, 4096):
            yield Case(f"{rows}x{width}", "released", _random(rows, width))
    for width in (1280, 5120):
        yield Case(f"4096x{width}-act_quant", "released", _random(4096, width, True))
    yield Case("333x512-fp32", "released", _exact(333, 512, torch.float32))


def work(arguments: Arguments) -> Work:
    """One sweep: read x and the weight, write as much as x."""
    x = arguments["x"]
    moved = 2 * x.numel() * x.element_size() + size_of(arguments["weight"])
    return Work(bytes=moved, flops=5 * x.numel())


SPECS: tuple[OpSpec, ...] = (
    OpSpec(
        name="rms_norm",
        summary="w * x * rsqrt(mean(x^2) + eps), optionally rounded to FP8 and back",
        arguments=(
            Argument("x", "T C", "bf16 | fp32", "in", "rows, which may be strided"),
            Argument("weight", "C", "fp32", "in", "applied before the only rounding"),
            Argument("y", "T C", "as x", "out", "normalised rows"),
        ),
        reference=rms_norm,
        backends=(Backend("triton", "deepinfer.ops.rms_norm.triton:rms_norm"),),
        cases=cases,
        work=work,
        # A sum that differs in its last bit moves few values to the next bf16 number; of those few,
        # FP8 rounding can move some by one step of 1/8.
        tolerance={"y": Tolerance("rounding", limit=0.13, share=0.01)},
        stands_for=("norm",),
    ),
)
