"""Reference of fp8_quantise_wide.

Knows rows; must not know which matrix consumes them.
"""

from torch import Tensor

from deepinfer.ops.act_quant.reference import fp8_quantise
from deepinfer.ops.fp8_linear.reference import fp8_widen


def fp8_quantise_wide(x: Tensor) -> tuple[Tensor, Tensor]:
    """fp8_widen(*fp8_quantise(x)): rounded over groups of 32 channels, codes under the largest
    scale of four.

    Args:
        x: [T, C], C a multiple of 32, finite.

    Returns:
        codes [T, C] uint8 (e4m3), scales [T, ceil(C/128)] float32, powers of two.
    """
    return fp8_widen(*fp8_quantise(x))
