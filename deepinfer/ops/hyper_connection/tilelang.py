"""The hyper-connection operators by TileKernels, with the mixing product by PyTorch.

Knows the residual streams of one sublayer; must not know what the sublayer computes. The library's
one kernel for all of it collapses by the coefficients of the same streams, where this model takes
those of the mixing before, so its single steps are called.
"""

import torch
from tile_kernels import mhc
from torch import Tensor

from deepinfer.kernels.tile import require
from deepinfer.numerics import constant
from deepinfer.ops.rms_norm import rms_norm

_CHANNELS = 128  # whose multiples its kernels take
_BF16 = (torch.bfloat16,)


def _coefficients(x: Tensor, count: int) -> Tensor:
    return x.reshape(-1, count).to(torch.float32).contiguous()


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
    """See the reference. The product with `fn` and the norm are PyTorch's, in float32.

    Raises:
        Unsupported: another dtype than bfloat16, channels that are no multiple of 128, a gradient
            is wanted.
    """
    require(streams, _CHANNELS, _BF16)
    require(fn, 1, (torch.float32,))
    lead, count = streams.shape[:-2], streams.shape[-2]
    flat = streams.reshape(-1, count * streams.shape[-1]).to(torch.float32)
    inverse = torch.rsqrt(flat.square().mean(-1, keepdim=True) + constant(norm_eps, flat.dtype))
    m = torch.nn.functional.linear(flat, fn) * inverse
    pre, post = m.new_empty(len(m), count), m.new_empty(len(m), count)
    logits = m.new_empty(len(m), count * count)
    comb = m.new_empty(len(m), count, count)
    if len(m):
        mhc.mhc_pre_split_mixes_fwd(
            m, scale.contiguous(), base.contiguous(), pre, post, logits, 2.0, hc_eps
        )
        mhc.mhc_sinkhorn_fwd(logits.view(-1, count, count), comb, iterations, hc_eps)
    return pre.view(*lead, count), post.view(*lead, count), comb.view(*lead, count, count)


def collapse(streams: Tensor, pre: Tensor) -> Tensor:
    """See the reference.

    Raises:
        Unsupported: see mixes.
    """
    require(streams, _CHANNELS, _BF16)
    count, width = streams.shape[-2:]
    rows = streams.reshape(-1, count, width).contiguous()
    x = rows.new_empty(len(rows), width)
    if len(rows):
        mhc.mhc_pre_apply_mix_fwd(rows, _coefficients(pre, count), x)
    return x.view(*streams.shape[:-2], width)


def expand(y: Tensor, streams: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """See the reference.

    Raises:
        Unsupported: see mixes.
    """
    require(y, _CHANNELS, _BF16)
    require(streams, _CHANNELS, _BF16)
    count, width = streams.shape[-2:]
    rows = streams.reshape(1, -1, count, width).contiguous()
    if not rows.numel():
        return rows.view(streams.shape).clone()
    new: Tensor = mhc.mhc_post_fwd(
        y.reshape(1, -1, width).contiguous(), rows,
        _coefficients(post, count).view(1, -1, count, 1),
        _coefficients(comb, count * count).view(1, -1, count, count),
    )  # fmt: skip
    return new.view(streams.shape)


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
    """See the reference. The norm of the collapsed streams is the reference's.

    Raises:
        Unsupported: see mixes.
    """
    if y is not None:
        assert post is not None
        assert comb is not None
        streams = expand(y, streams, post, comb)
    coefficients = mixes(
        streams, fn, base, scale, iterations=iterations, hc_eps=hc_eps, norm_eps=norm_eps
    )
    return streams, rms_norm(collapse(streams, pre), norm_weight, norm_eps), *coefficients
