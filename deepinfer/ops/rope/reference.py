"""Reference of rope: frequency tables, angles and the rotation of the rotary tail.

Knows positions and frequencies; must not know which layer asks.
"""

import math

import torch
from torch import Tensor

from deepinfer.config import RopeScaling
from deepinfer.numerics import accumulate_dtype


def rope_frequencies(dim: int, theta: float, scaling: RopeScaling | None) -> Tensor:
    """Angle per position of each of the dim/2 channel pairs, float32 (model description 3.3).

    f_i = theta^(-2i/dim). With YaRN, pairs below `low` keep f_i, pairs above `high` take f_i /
    factor, and a linear ramp blends between; c(beta) = dim * ln(original / (2 pi beta)) /
    (2 ln theta) gives low = floor(c(beta_fast)) and high = ceil(c(beta_slow)), clamped.
    """
    exponent = torch.arange(0, dim, 2, dtype=torch.float32) / dim
    frequencies = 1.0 / torch.pow(torch.tensor(theta, dtype=torch.float32), exponent)
    if scaling is None:
        return frequencies

    def correction(beta: float) -> float:
        turns = scaling.original_max_position_embeddings / (2 * math.pi * beta)
        return dim * math.log(turns) / (2 * math.log(theta))

    low = max(math.floor(correction(scaling.beta_fast)), 0)
    high = min(math.ceil(correction(scaling.beta_slow)), dim - 1)
    pairs = torch.arange(dim // 2, dtype=torch.float32)
    ramp = ((pairs - low) / max(high - low, 1e-3)).clamp(0.0, 1.0)
    return frequencies * (1.0 - ramp) + (frequencies / scaling.factor) * ramp


def rotation(positions: Tensor, frequencies: Tensor, dtype: torch.dtype) -> Tensor:
    """Unit complex numbers exp(i * p * f) for `positions` [...] and `frequencies` [d/2].

    The angle is formed in float32 whatever the dtype. Returns [..., d/2] complex in the width in
    which `dtype` accumulates.
    """
    angle = positions.to(torch.float32).unsqueeze(-1) * frequencies
    angle = angle.to(accumulate_dtype(dtype))
    return torch.polar(torch.ones_like(angle), angle)


def rope(x: Tensor, rotations: Tensor, inverse: bool = False) -> Tensor:
    """Rotate the last d channels of `x`; channels (2i, 2i + 1) of the tail are one complex number.

    Args:
        x: [..., C] with C >= d.
        rotations: [..., d/2] complex from `rotation`, broadcast against the leading axes of `x`.
        inverse: rotate by the negative angle.

    Returns:
        [..., C] in the dtype of `x`, rounded once; the first C - d channels are unchanged.
    """
    dim = 2 * rotations.shape[-1]
    # A complex view needs the two channels of a pair side by side, and pairs at even places.
    tail = x[..., -dim:].to(accumulate_dtype(x.dtype)).contiguous().unflatten(-1, (-1, 2))
    turned = torch.view_as_complex(tail) * (rotations.conj() if inverse else rotations)
    rotated = torch.view_as_real(turned).flatten(-2).to(x.dtype)
    return torch.cat([x[..., :-dim], rotated], dim=-1)
