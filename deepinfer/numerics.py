"""Number formats in plain PyTorch: power-of-two scales, e4m3, e2m1, e8m0, and their rounding.

Knows how one group of values is rounded and packed; must not know tensors of the model, layers or
files. Every function follows section 3 of the model description; docs/numerics.md has the table.

Rounding functions are straight-through for autograd: the gradient passes as if they were absent.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

E4M3_MAX = 448.0
E2M1_MAX = 6.0
FP8_GROUP = 32  # values that share one scale in FP8 activations, window records and weights
FP4_GROUP = 16  # values that share one e4m3 scale in compressed records
MXFP4_GROUP = 32  # values that share one power-of-two scale in index keys and expert weights

FP8_AMAX_FLOOR = 1e-4
FP4_AMAX_FLOOR = E2M1_MAX * 2.0**-9  # keeps the e4m3 scale at or above its smallest value
MXFP4_AMAX_FLOOR = E2M1_MAX * 2.0**-126

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@cache
def constant(value: float, dtype: torch.dtype) -> Tensor:
    """`value` as an operand for tensors of `dtype` on any device.

    An operation with a Python number makes a tensor of it first, which on a CPU costs as much as
    the operation itself; the reference path of a small model consists of little else.
    """
    with torch.inference_mode(False):
        return torch.tensor(value, dtype=dtype, device="cpu")


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which sums over `dtype` values are taken: float64 for itself, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def ceil_power_of_two(x: Tensor) -> Tensor:
    """2^ceil(log2(x)) for positive normal float32 or float64 `x`, exactly, in the dtype of `x`."""
    if x.dtype == torch.float64:
        bits = x.view(torch.int64)
        return ((bits + (2**52 - 1)) & ~(2**52 - 1)).view(torch.float64)
    bits = x.view(torch.int32)
    return ((bits + constant(0x7FFFFF, torch.int32)) & constant(-0x800000, torch.int32)).view(
        torch.float32
    )


def encode_e8m0(scale: Tensor) -> Tensor:
    """Exponent byte (uint8, bias 127) of power-of-two `scale` values (float32 or float64)."""
    if scale.dtype == torch.float64:
        return ((scale.view(torch.int64) >> 52) - 1023 + 127).to(torch.uint8)
    return (scale.view(torch.int32) >> 23).to(torch.uint8)


def decode_e8m0(code: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """2^(code - 127) for uint8 `code`; 0 gives the subnormal 2^-127, 255 is NaN."""
    bits = code.to(torch.int32) << 23
    bits = torch.where(code == 0, 1 << 22, bits)
    bits = torch.where(code == 255, 0x7FC00000, bits)
    return bits.view(torch.float32).to(dtype)


def encode_e4m3(x: Tensor) -> Tensor:
    """Bytes (uint8) of `x` rounded to e4m3 (nearest, ties to even); |x| must be at most 448."""
    return x.to(torch.float32).to(torch.float8_e4m3fn).view(torch.uint8)


def decode_e4m3(code: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Values of e4m3 bytes (uint8); 0x7F and 0xFF are NaN."""
    return code.view(torch.float8_e4m3fn).to(dtype)


def round_e2m1(x: Tensor) -> Tensor:
    """`x` rounded to the e2m1 grid {0, .5, 1, 1.5, 2, 3, 4, 6} with sign, ties to the even code.

    |x| must be at most 6. Below 2 the grid step is 1/2, below 4 it is 1, above it is 2; dividing
    by the step turns ties to the even code into ties to the even integer.
    """
    magnitude = x.abs()
    step = torch.where(magnitude < 2.0, 0.5, torch.where(magnitude < 4.0, 1.0, 2.0)).to(x.dtype)
    return torch.round(x / step) * step


def encode_e2m1(x: Tensor) -> Tensor:
    """Nibbles (uint8, sign << 3 | magnitude code) of values that lie on the e2m1 grid."""
    doubled = x.abs() * 2.0
    code = torch.where(doubled <= 4.0, doubled, torch.where(doubled <= 8.0, doubled / 2 + 2, 7.0))
    return code.to(torch.uint8) | (torch.signbit(x).to(torch.uint8) << 3)


def pack_nibbles(codes: Tensor) -> Tensor:
    """[..., n] nibbles to [..., n/2] bytes: even positions in the low half, odd in the high."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


_PAIR_TABLES: dict[tuple[torch.device, torch.dtype], Tensor] = {}


def unpack_e2m1(packed: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """[..., n/2] bytes of packed nibbles to [..., n] e2m1 values (a look-up of 256 pairs)."""
    key = (packed.device, dtype)
    table = _PAIR_TABLES.get(key)
    if table is None:
        grid = [*_E2M1, *(-value for value in _E2M1)]
        pairs = [[grid[byte & 15], grid[byte >> 4]] for byte in range(256)]
        table = _PAIR_TABLES[key] = torch.tensor(pairs, dtype=dtype, device=packed.device)
    # A third of the time of table[packed].
    return torch.nn.functional.embedding(packed.to(torch.int32), table).flatten(-2)


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
        return function(x)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        return grad_outputs[0], None


def straight_through(x: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
    """`function(x)`, whose gradient with respect to `x` is taken as the identity."""
    if torch.is_grad_enabled() and x.requires_grad:
        result: Tensor = _StraightThrough.apply(x, function)  # type: ignore[no-untyped-call]
        return result
    return function(x)


def _quotient(amax: Tensor, largest: float) -> Tensor:
    """amax / largest, rounded once: with a number on the host a GPU multiplies by 1 / largest."""
    if amax.device.type == "cpu":
        return amax / constant(largest, amax.dtype)
    return amax / amax.new_full((), largest)


def fp8_scale(groups: Tensor) -> Tensor:
    """Power-of-two scale of each group of the last axis: 2^ceil(log2(max(amax, 1e-4) / 448))."""
    amax = groups.abs().amax(-1, keepdim=True).clamp_min(FP8_AMAX_FLOOR)
    return ceil_power_of_two(_quotient(amax, E4M3_MAX))


def fp4_scale(groups: Tensor) -> Tensor:
    """e4m3 scale of each group of the last axis: e4m3(max(amax, 6 * 2^-9) / 6), at most 448."""
    amax = groups.abs().amax(-1, keepdim=True).clamp_min(FP4_AMAX_FLOOR)
    scale = _quotient(amax, E2M1_MAX).clamp_max(E4M3_MAX)
    return scale.to(torch.float32).to(torch.float8_e4m3fn).to(groups.dtype)


def mxfp4_scale(groups: Tensor) -> Tensor:
    """Power-of-two scale of each group: 2^ceil(log2(max(amax, 6 * 2^-126) / 6))."""
    amax = groups.abs().amax(-1, keepdim=True).clamp_min(MXFP4_AMAX_FLOOR)
    return ceil_power_of_two(_quotient(amax, E2M1_MAX))
