"""moe_gate by TileKernels.

Knows router logits; must not know the experts.
"""

import torch
from tile_kernels import moe
from torch import Tensor

from deepinfer.errors import Unsupported
from deepinfer.kernels.tile import require, rows_of

_EXPERTS = 128  # whose multiples are taken: what was released has 384 and 128
_SELECTED = 32  # at most


def moe_gate(
    logits: Tensor, bias: Tensor, selected: int, scaling: float, normalise: bool
) -> tuple[Tensor, Tensor]:
    """See the reference. Logits that are no finite numbers are taken for ones that are.

    The library's kernel ends all use of the GPU by the process when it meets another; here NaN is
    0, and such a row's ids are not those of the reference. Its hidden state is NaN anyway.

    Raises:
        Unsupported: another dtype than float32, experts that are no multiple of 128, weights that
            are not normalised, one expert or more than 32 a token, a gradient is wanted.
    """
    require(logits, _EXPERTS, (torch.float32,))
    if not normalise or selected == 1:
        raise Unsupported("normalises the weights, of one expert too")
    if selected > _SELECTED:
        raise Unsupported(f"selects {_SELECTED} experts at most, not {selected}")
    ids, weights = moe.moe_topk_gate(
        torch.nan_to_num(rows_of(logits)), selected, use_shared_as_routed=False,
        num_shared_experts=0, routed_scaling_factor=scaling, ep_rank=0,
        bias=bias.to(torch.float32).contiguous(),
    )  # fmt: skip
    shape = (*logits.shape[:-1], selected)
    return ids.view(shape), weights.view(shape)
