"""Contract of fp8_quantise_wide, as data."""

from collections.abc import Callable, Iterator

import torch

from deepinfer.numerics import FP8_GROUP
from deepinfer.ops.fp8_quantise_wide.reference import fp8_quantise_wide
from deepinfer.ops.spec import Argument, Arguments, Backend, Case, OpSpec, Work, size_of


def _random(
    rows: int, columns: int, spread: int = 2, dtype: torch.dtype = torch.bfloat16
) -> Callable[..., Arguments]:
    """Normal values, groups of 32 of sizes 2^-spread to 2^spread."""

    def make(generator: torch.Generator, device: torch.device) -> Arguments:
        x = torch.randn(rows, columns, generator=generator).unflatten(-1, (-1, FP8_GROUP))
        power = torch.randint(-spread, spread + 1, (*x.shape[:-1], 1), generator=generator)
        return {"x": (x * torch.exp2(power.float())).flatten(-2).to(dtype).to(device)}

    return make


def _ties(generator: torch.Generator, device: torch.device) -> Arguments:
    """Multiples of half a step of 448's scale, beside groups that are larger by 2^0 to 2^20."""
    values = torch.arange(-448.0, 448.0, 0.5).unflatten(0, (-1, 32))
    rows = len(values)
    large = torch.full((rows, 32), 448.0) * torch.exp2(torch.arange(rows) % 21)[:, None]
    small = torch.randint(-1024, 1025, (rows, 64), generator=generator) * 2.0**-10
    return {"x": torch.cat([large, values, small], dim=1).to(device)}


def _extreme(generator: torch.Generator, device: torch.device) -> Arguments:
    """Groups of 1e-30, 1e-4, 3e4, 1e30, zeros of both signs, in every order."""
    sizes = torch.tensor([1e-30, 1e-4, 1.0, 3e4, 1e30, 0.0, -0.0])
    picked = torch.randint(7, (24, 13), generator=generator)
    picked[:7] = torch.arange(7)[:, None]
    x = torch.rand(24, 13, 32, generator=generator) - 0.5
    return {"x": (x * sizes[picked].unsqueeze(-1)).flatten(1).to(device)}


def _strided(generator: torch.Generator, device: torch.device) -> Arguments:
    x = _random(8, 512)(generator, device)["x"]
    return {"x": x[::2, 32:288]}


def _transposed(generator: torch.Generator, device: torch.device) -> Arguments:
    return {"x": _random(128, 32)(generator, device)["x"].t()[:, :96]}


def _far(generator: torch.Generator, device: torch.device) -> Arguments:
    """The last row lies past 2^31 bytes."""
    step = 2**29 + 64
    memory = torch.empty(2 * step + 256, dtype=torch.bfloat16, device=device)
    x = memory.as_strided((3, 256), (step, 1))
    x.copy_(_random(3, 256)(generator, device)["x"])
    return {"x": x}


def cases() -> Iterator[Case]:
    """Tiny, hostile and released cases."""
    yield Case("5x256", "tiny", _random(5, 256))
    yield Case("5x256-fp32", "tiny", _random(5, 256, 2, torch.float32))
    yield Case("0x128", "hostile", _random(0, 128))
    yield Case("1x32", "hostile", _random(1, 32))
    yield Case("7x416", "hostile", _random(7, 416, 12))
    yield Case("21x128-spread", "hostile", _random(21, 128, 20, torch.float32))
    yield Case("ties", "hostile", _ties)
    yield Case("extreme", "hostile", _extreme)
    yield Case("strided", "hostile", _strided)
    yield Case("transposed", "hostile", _transposed)
    yield Case("past-2GiB", "hostile", _far)
    for columns in (1280, 2304, 5120, 8192):
        for rows in (1, 64, 4096):
            yield Case(f"{rows}x{columns}", "released", _random(rows, columns))


def _work(arguments: Arguments) -> Work:
    x = arguments["x"]
    return Work(bytes=size_of(x) + x.numel() + 4 * x.shape[0] * -(-x.shape[1] // 128))


SPECS: tuple[OpSpec, ...] = (
    OpSpec(
        name="fp8_quantise_wide",
        summary="activations to FP8 with one scale per 128 channels",
        arguments=(
            Argument("x", "T C", "bf16 | fp32", "in", "rows, which may be strided"),
            Argument("codes", "T C", "u8 e4m3", "out", "codes under the largest of four scales"),
            Argument("scales", "T ceil(C/128)", "fp32", "out", "the largest of four scales"),
        ),
        reference=fp8_quantise_wide,
        backends=(Backend("triton", "deepinfer.ops.fp8_quantise_wide.triton:fp8_quantise_wide"),),
        cases=cases,
        work=_work,
        stands_for=("deep_gemm.transform_sf_into_required_layout",),
    ),
)
