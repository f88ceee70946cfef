"""swiglu and swiglu_quantise by TileKernels.

Knows gate and up projections; must not know the expert they came from.
"""

import torch
from tile_kernels import quant
from torch import Tensor

from deepinfer.errors import Unsupported
from deepinfer.kernels.tile import require, rows_of
from deepinfer.numerics import FP8_GROUP

_CHANNELS = 64  # whose multiples its kernels take
_FORMATS = {torch.bfloat16: "bf16", torch.float32: "fp32"}


def swiglu(gate: Tensor, up: Tensor, limit: float, weight: Tensor | None = None) -> Tensor:
    """See the reference. Copies both projections side by side, as the library takes them.

    Raises:
        Unsupported: other dtypes than bfloat16 and float32, or differing ones; channels that are
            no multiple of 64; a gradient is wanted.
    """
    require(gate, _CHANNELS)
    require(up, _CHANNELS)
    if gate.dtype != up.dtype:
        raise Unsupported(f"{gate.dtype} and {up.dtype}: takes equal dtypes")
    both = rows_of(torch.cat([gate, up], dim=-1))
    route = None if weight is None else weight.reshape(-1).to(torch.float32).contiguous()
    hidden: Tensor = quant.swiglu_forward(
        both, _FORMATS[gate.dtype], topk_weights=route, clamp_value=limit or None
    )
    return hidden.view(gate.shape)


def swiglu_quantise(
    gate: Tensor, up: Tensor, limit: float, weight: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """See the reference. Two kernels: the library's single one quantises before it rounds.

    Raises:
        Unsupported: see swiglu.
    """
    hidden = rows_of(swiglu(gate, up, limit, weight))
    codes, scales = quant.per_token_cast(hidden, "e4m3", FP8_GROUP, round_sf=True)
    return codes.view(gate.shape), scales.view(*gate.shape[:-1], scales.shape[-1])
