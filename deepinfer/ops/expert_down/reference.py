"""Reference of expert_down.

Knows rows sorted by expert; must not know who chose the experts.
"""

import torch
from torch import Tensor

from deepinfer.ops.expert_up.prepare import ExpertMatrices
from deepinfer.ops.expert_up.reference import multiply_rows


def expert_down(
    hidden: Tensor,
    scales: Tensor,
    weights: ExpertMatrices,
    order: Tensor,
    ends: Tensor,
    tiles: Tensor,
    block: int,
) -> Tensor:
    """y = bf16(w2 h) of every routed row (model description 3.9), back in the order of slots.

    Args:
        hidden: [R, I] e4m3 codes in plan order, uint8 or float8_e4m3fn; scales: [R, I/32] float32.
        weights: `prepare` of w2, [E, H, I].
        order, ends, tiles: see moe_plan; block: what it was called with.

    Returns:
        [R, H] bfloat16; row t * K + k belongs to choice k of token t.
    """
    rows = torch.arange(len(order), device=order.device)
    y = multiply_rows(hidden, scales, weights, rows, ends)
    return torch.empty_like(y).index_copy_(0, order.long(), y)
