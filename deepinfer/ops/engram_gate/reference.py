"""Reference of engram_gate.

Knows streams, keys and values; must not know how the value was looked up.
"""

import torch
from torch import Tensor

from deepinfer.numerics import accumulate_dtype


def engram_gate(streams: Tensor, keys: Tensor, value: Tensor, weight: Tensor, eps: float) -> Tensor:
    """X[s] + g[s] * value with one gate per stream (model description 3.10 d).

    d = sum_h X[s,h] w[s,h] key[s,h] * rsqrt(mean(X[s]^2) + eps) * rsqrt(mean(key[s]^2) + eps)
    * H^-0.5; g = sigmoid(copysign(sqrt(max(|d|, 1e-6)), d)).

    Args:
        streams: X [..., S, H]; keys: [..., S, H]; value: [..., H]; weight: [S, H], the product of
            the query and key weights, float32 or wider.

    Returns:
        [..., S, H] in the dtype of `streams`, one rounding.
    """
    wide = accumulate_dtype(streams.dtype)
    x, k = streams.to(wide), keys.to(wide)
    inverse_x = torch.rsqrt(x.square().mean(-1) + eps)
    inverse_k = torch.rsqrt(k.square().mean(-1) + eps)
    d = (x * weight * k).sum(-1) * inverse_x * inverse_k * streams.shape[-1] ** -0.5
    gate = torch.sigmoid(torch.copysign(torch.sqrt(d.abs().clamp_min(1e-6)), d))
    return (x + gate.unsqueeze(-1) * value.to(wide).unsqueeze(-2)).to(streams.dtype)
