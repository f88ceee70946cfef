"""rope by TileKernels.

Knows rotations; must not know which layer asks.
"""

import torch
from tile_kernels import transform
from torch import Tensor

from deepinfer.errors import Unsupported
from deepinfer.kernels.tile import require

_ROTATED = (64, 128)  # channels that its kernel can rotate


def rope(x: Tensor, rotations: Tensor, inverse: bool = False) -> Tensor:
    """See the reference. Works on a copy, as the library's kernel works in place.

    Raises:
        Unsupported: another dtype than bfloat16 and float32, other than 64 or 128 rotated
            channels, a gradient is wanted.
    """
    require(x, 8)
    dim = 2 * rotations.shape[-1]
    if dim not in _ROTATED:
        raise Unsupported(f"rotates {_ROTATED[0]} or {_ROTATED[1]} channels, not {dim}")
    lead = x.shape[:-1]
    # One row of the table for each token, whose heads share it, or else for each row of x.
    shared = rotations.dim() == x.dim() and rotations.dim() > 1 and rotations.shape[-2] == 1
    tokens = lead[:-1] if shared else lead
    turns = (rotations.squeeze(-2) if shared else rotations).expand(*tokens, dim // 2)
    table = torch.cat([turns.real, turns.imag], dim=-1).reshape(-1, dim).contiguous()
    rotated = x.clone(memory_format=torch.contiguous_format)
    if rotated.numel():
        tail = rotated.view(len(table), -1, x.shape[-1])[..., -dim:]
        transform.apply_rotary(tail, table, interleaved=True, conjugate=inverse)
    return rotated
