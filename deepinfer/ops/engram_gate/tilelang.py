"""engram_gate by TileKernels.

Knows streams, keys and values; must not know how the value was looked up.
"""

import torch
from tile_kernels import engram
from torch import Tensor

from deepinfer.errors import Unsupported
from deepinfer.kernels.tile import require

_BLOCKS = (1024, 768, 512, 256)  # channels of a block; a row has two of them at least
_SMALLEST = 1e-6  # of the magnitude whose root is the gate's argument


def engram_gate(streams: Tensor, keys: Tensor, value: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See the reference. Copies keys and value into one tensor, as the library takes them.

    Raises:
        Unsupported: another dtype than bfloat16, channels that are not two or more blocks of 1024,
            768, 512 or 256, a gradient is wanted.
    """
    require(streams, 1, (torch.bfloat16,))
    require(keys, 1, (torch.bfloat16,))
    count, width = streams.shape[-2:]
    if not any(width % block == 0 and width >= 2 * block for block in _BLOCKS):
        raise Unsupported(f"takes two or more blocks of 256 to 1024 channels, not {width}")
    both = torch.cat([keys, value.unsqueeze(-2)], dim=-2)
    new: Tensor = engram.engram_gate_fwd(
        streams.reshape(-1, count, width).contiguous(),
        both.reshape(-1, count + 1, width).contiguous(), weight.contiguous(), eps, _SMALLEST,
        save_for_backward=False,
    )[0]  # fmt: skip
    return new.view(streams.shape)
