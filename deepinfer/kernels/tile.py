"""What calls of the TileKernels library share: the forms of tensors that its kernels take.

Knows shapes and dtypes; must not know any operator, and imports nothing of that library. It checks
with assertions, and some of its kernels end all use of the GPU by a process when a value is not
what they expect, so everything is looked at before.
"""

import torch
from torch import Tensor

from deepinfer.errors import Unsupported

ACTIVATIONS = (torch.bfloat16, torch.float32)


def require(x: Tensor, multiple: int, dtypes: tuple[torch.dtype, ...] = ACTIVATIONS) -> None:
    """Raise Unsupported unless `x` has one of the dtypes, so many channels, and no gradient."""
    if x.dtype not in dtypes:
        raise Unsupported(f"takes {' or '.join(map(str, dtypes))}, not {x.dtype}")
    if x.shape[-1] % multiple:
        raise Unsupported(f"takes multiples of {multiple} channels, not {x.shape[-1]}")
    if torch.is_grad_enabled() and x.requires_grad:
        raise Unsupported("has no gradient")


def rows_of(x: Tensor) -> Tensor:
    """`x` [..., C] as contiguous rows [T, C]."""
    return x.reshape(-1, x.shape[-1]).contiguous()
