"""engram_hash by TileKernels.

Knows classes, multipliers and primes; must not know tokens or tables.
"""

import torch
from tile_kernels import engram
from torch import Tensor

from deepinfer.kernels.tile import rows_of


def engram_hash(classes: Tensor, multipliers: Tensor, primes: Tensor, offsets: Tensor) -> Tensor:
    """See the reference. Classes and table rows have 32 bits on the way.

    A table has at most 2^31 rows then; the released ones have 384 million.
    """
    rows: Tensor = engram.engram_hash(
        rows_of(classes).to(torch.int32), multipliers.contiguous().unsqueeze(0),
        primes.to(torch.int32).unsqueeze(0).contiguous(),
        offsets.to(torch.int32).reshape(1, -1).contiguous(),
    )  # fmt: skip
    return rows[0].to(torch.int64).view(*classes.shape[:-1], primes.numel())
