"""Reference of the hyper-connection operators: mixes, collapse, expand, and the step of all three.

Knows the residual streams of one sublayer; must not know what the sublayer computes.
"""

from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from deepinfer.numerics import accumulate_dtype, constant
from deepinfer.ops.rms_norm import rms_norm


@cache
def _constants(
    count: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """0/1 matrices [S*S, S*S] that sum the rows and columns of flat S x S matrices, and which of
    the three scales belongs to each of the S * (2 + S) mixing values.
    """
    # Kept for the whole process, so training must be able to use what inference made first.
    with torch.inference_mode(False):
        ones, eye = torch.ones(count, count), torch.eye(count)
        rows, columns = torch.kron(eye, ones), torch.kron(ones, eye)
        parts = torch.arange(3).repeat_interleave(torch.tensor([count, count, count * count]))
        return rows.to(device, dtype), columns.to(device, dtype), parts.to(device)


def _sinkhorn(logits: Tensor, count: int, iterations: int, eps: float) -> Tensor:
    """Near doubly stochastic matrices from flat [..., S * S] logits; the first pass counts as one.

    A pass divides rows, then columns, by their sums + eps; the first row division is the softmax.
    """
    rows, columns, _ = _constants(count, logits.dtype, logits.device)
    matrices = torch.softmax(logits.unflatten(-1, (count, count)), dim=-1)
    matrices = matrices + constant(eps, logits.dtype)
    flat = matrices.reshape(-1, count * count)
    order = [1, *[0, 1] * (iterations - 1)]
    if logits.device.type == "cpu" and not logits.requires_grad:
        _divide_in_place(flat.numpy(), (rows.numpy(), columns.numpy()), order, eps)
    else:
        for axis in order:
            flat = flat / (flat @ (rows, columns)[axis] + eps)
    return flat.view_as(matrices)


def _divide_in_place(flat: Any, divisors: tuple[Any, Any], order: list[int], eps: float) -> None:
    """The passes in numpy: the same arithmetic, for 2 us a pass and row where torch takes 9."""
    sums = np.empty_like(flat)
    for axis in order:
        np.dot(flat, divisors[axis], out=sums)
        np.add(sums, eps, out=sums)
        np.divide(flat, sums, out=flat)


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
    inverse = torch.rsqrt(flat.square().mean(-1, keepdim=True) + constant(norm_eps, flat.dtype))
    m = torch.nn.functional.linear(flat, fn) * inverse
    parts = _constants(count, fn.dtype, fn.device)[-1]
    m = torch.addcmul(base, m, scale[parts])
    gates = torch.sigmoid(m[..., : 2 * count])
    comb = _sinkhorn(m[..., 2 * count :], count, iterations, hc_eps)
    post = gates[..., count:]
    return gates[..., :count] + constant(hc_eps, gates.dtype), post + post, comb


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


def hyper_connection_step(
    y: Tensor | None,
    streams: Tensor,
    post: Tensor | None,
    comb: Tensor | None,
    pre: Tensor,
    fn: Tensor,
    base: Tensor,
    scale: Tensor,
    norm_weight: Tensor,
    *,
    iterations: int,
    hc_eps: float,
    norm_eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """All that happens between two sublayers: expand, mixes, collapse and the next one's norm.

    X' = expand(y, X, post, comb), or X itself when `y` is None;
    x = rms_norm(collapse(X', pre), norm_weight, norm_eps), collapsed streams rounded before the
    norm; the coefficients are mixes(X').

    Args:
        y: [..., H] output of the sublayer before, in the dtype of the streams; None at the start
            and after something else has written the streams: `post`, `comb` are not read then.
        streams: X [..., S, H]; post: [..., S]; comb: [..., S, S]; pre: [..., S], of the mixing
            before.
        fn: [S * (2 + S), S * H]; base: [S * (2 + S)]; scale: [3]; norm_weight: [H].

    Returns:
        X' [..., S, H] (the tensor `streams` itself when `y` is None) and x [..., H], both in the
        dtype of the streams, then next_pre, next_post [..., S], next_comb [..., S, S] in that of
        `fn`.
    """
    if y is not None:
        assert post is not None
        assert comb is not None
        streams = expand(y, streams, post, comb)
    coefficients = mixes(
        streams, fn, base, scale, iterations=iterations, hc_eps=hc_eps, norm_eps=norm_eps
    )
    return streams, rms_norm(collapse(streams, pre), norm_weight, norm_eps), *coefficients
