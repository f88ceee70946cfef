"""Reference of the hyper-connection operators: mixes, collapse and expand.

Knows the residual streams of one sublayer; must not know what the sublayer computes.
"""

import torch
from torch import Tensor

from deepinfer.numerics import accumulate_dtype


def _sinkhorn(logits: Tensor, iterations: int, eps: float) -> Tensor:
    """Near doubly stochastic matrices from [..., S, S] logits; the first pass counts as one."""
    matrix = torch.softmax(logits, dim=-1) + eps
    matrix = matrix / (matrix.sum(-2, keepdim=True) + eps)
    for _ in range(iterations - 1):
        matrix = matrix / (matrix.sum(-1, keepdim=True) + eps)
        matrix = matrix / (matrix.sum(-2, keepdim=True) + eps)
    return matrix


def mixes(
    streams: Tensor,
    fn: Tensor,
    base: Tensor,
    scale: Tensor,
    *,
    iterations: int,
    hc_eps: float,
    norm_eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Coefficients of one sublayer from the residual streams (model description 3.4).

    m = (fn . flatten(X)) * rsqrt(mean(X^2) + norm_eps), split into S + S + S*S values;
    pre = sigmoid(m * scale[0] + base) + hc_eps, post = 2 sigmoid(m * scale[1] + base), and the
    S x S rest (row = input stream, column = output stream) through `iterations` Sinkhorn passes.

    Args:
        streams: X [..., S, H].
        fn: [S * (2 + S), S * H]; base: [S * (2 + S)]; scale: [3]; float32 or wider.

    Returns:
        pre [..., S], post [..., S], comb [..., S, S], never rounded below float32.
    """
    count = streams.shape[-2]
    flat = streams.flatten(-2).to(accumulate_dtype(streams.dtype))
    inverse = torch.rsqrt(flat.square().mean(-1, keepdim=True) + norm_eps)
    m = torch.nn.functional.linear(flat, fn) * inverse
    pre = torch.sigmoid(m[..., :count] * scale[0] + base[:count]) + hc_eps
    post = 2.0 * torch.sigmoid(m[..., count : 2 * count] * scale[1] + base[count : 2 * count])
    logits = m[..., 2 * count :] * scale[2] + base[2 * count :]
    return pre, post, _sinkhorn(logits.unflatten(-1, (count, count)), iterations, hc_eps)


def collapse(streams: Tensor, pre: Tensor) -> Tensor:
    """Sublayer input sum_s pre[s] * X[s]: [..., S, H] and [..., S] to [..., H] in X's dtype."""
    wide = streams.to(pre.dtype)
    return torch.matmul(pre.unsqueeze(-2), wide).squeeze(-2).to(streams.dtype)


def expand(y: Tensor, streams: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """New streams X'[o] = post[o] * y + sum_i comb[i][o] * X[i], one rounding.

    Args:
        y: [..., H] sublayer output; streams: X [..., S, H]; post [..., S]; comb [..., S, S].
    """
    mixed = torch.matmul(comb.transpose(-1, -2), streams.to(comb.dtype))
    return (mixed + post.unsqueeze(-1) * y.to(post.dtype).unsqueeze(-2)).to(streams.dtype)
