"""Reference of expert_up, and the grouped product that expert_down shares.

Knows rows sorted by expert; must not know who chose the experts.
"""

import torch
from torch import Tensor

from deepinfer.numerics import FP8_GROUP, decode_e4m3
from deepinfer.ops.act_quant.reference import fp8_quantise
from deepinfer.ops.expert_up.prepare import ExpertMatrices, dequantise
from deepinfer.ops.grouped_linear import grouped_linear
from deepinfer.ops.swiglu.reference import swiglu


def multiply_rows(
    x: Tensor, scales: Tensor, weights: ExpertMatrices, rows: Tensor, ends: Tensor
) -> Tensor:
    """Rows `rows` of x, sorted by expert, times their expert's matrix: [R, N] bfloat16.

    Args:
        x: [T, C] e4m3 codes; scales: [T, C/32]; rows: [R]; ends: [E] int32.
    """
    # Operands are exact in both; a GPU's grouped product takes no float32.
    dtype = torch.bfloat16 if x.is_cuda else torch.float32
    groups = decode_e4m3(x.view(torch.uint8)).unflatten(-1, (-1, FP8_GROUP)) * scales.unsqueeze(-1)
    values = groups.flatten(-2).to(dtype).index_select(0, rows)
    if len(rows) == 0:
        return values.new_empty((0, weights.rows), dtype=torch.bfloat16)
    return grouped_linear(values, dequantise(weights, dtype), ends).to(torch.bfloat16)


def expert_up(
    x: Tensor,
    x_scales: Tensor,
    weights: ExpertMatrices,
    order: Tensor,
    ends: Tensor,
    tiles: Tensor,
    route: Tensor,
    block: int,
    limit: float,
) -> tuple[Tensor, Tensor]:
    """Hidden rows of the routed experts, quantised (model description 3.9).

    g, u = bf16(w1 x), bf16(w3 x); h = bf16(w * silu(min(g, limit)) * clamp(u, -limit, limit));
    the result is fp8_quantise(h).

    Args:
        x: [T, C] e4m3 codes as uint8 or float8_e4m3fn; x_scales: [T, C/32] float32 powers of two.
        weights: `prepare` of w1 and w3, [E, 2 I, C]: the I rows of w1 first.
        order, ends, tiles: see moe_plan; block: what it was called with.
        route: [T, K] float32 route weights w; limit: 0 disables the clamps.

    Returns:
        codes [T * K, I] float8_e4m3fn in plan order, scales [T * K, I/32] float32.
    """
    slots = order.long()
    both = multiply_rows(x, x_scales, weights, slots // route.shape[1], ends)
    gate, up = both.chunk(2, dim=-1)
    codes, scales = fp8_quantise(swiglu(gate, up, limit, route.flatten()[slots]))
    return codes.view(torch.float8_e4m3fn), scales
