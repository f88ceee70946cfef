"""act_quant and its codes by TileKernels.

Knows activations; must not know which matrix consumes them.
"""

import torch
from tile_kernels import quant
from torch import Tensor

from deepinfer.kernels.tile import require, rows_of
from deepinfer.numerics import FP4_GROUP, FP8_GROUP, MXFP4_GROUP

_CHANNELS = 64  # whose multiples its kernels take


def act_quant(x: Tensor) -> Tensor:
    """See the reference. Works on a copy, as the library's kernel works in place.

    Raises:
        Unsupported: another dtype than bfloat16 and float32, channels that are no multiple of 64, a
            gradient is wanted.
    """
    require(x, _CHANNELS)
    rounded = x.clone(memory_format=torch.contiguous_format)
    quant.per_token_cast_and_cast_back(rows_of(rounded), "e4m3", FP8_GROUP, round_sf=True)
    return rounded


def _cast(x: Tensor, fmt: str, group: int, **scales: bool) -> tuple[Tensor, Tensor]:
    """Bytes [..., n] and scales [..., m] of the groups of `x` [..., C]."""
    require(x, _CHANNELS)
    data, factors = quant.per_token_cast(rows_of(x), fmt, group, **scales)
    lead = x.shape[:-1]
    return (
        data.view(torch.uint8).view(*lead, data.shape[-1]),
        factors.view(*lead, factors.shape[-1]),
    )


def fp8_quantise(x: Tensor) -> tuple[Tensor, Tensor]:
    """See the reference.

    Raises:
        Unsupported: see act_quant.
    """
    return _cast(x, "e4m3", FP8_GROUP, round_sf=True)


def fp4_quantise(x: Tensor) -> tuple[Tensor, Tensor]:
    """See the reference.

    Raises:
        Unsupported: see act_quant.
    """
    packed, scales = _cast(x, "e2m1", FP4_GROUP, use_e4m3_sf=True)
    return packed, scales.view(torch.uint8)


def mxfp4_quantise(x: Tensor) -> tuple[Tensor, Tensor]:
    """See the reference.

    Raises:
        Unsupported: see act_quant.
    """
    packed, scales = _cast(x, "e2m1", MXFP4_GROUP, round_sf=True)
    # Powers of two in float32 are their exponent bytes alone.
    return packed, (scales.view(torch.int32) >> 23).to(torch.uint8)
