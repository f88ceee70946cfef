"""Reference of stream_mean.

Knows streams; must not know layers.
"""

import torch
from torch import Tensor


def stream_mean(streams: Tensor, out: Tensor | None = None) -> Tensor:
    """Mean over the streams, summed in float32 (float64 stays) and rounded once.

    Args:
        streams: [T, S, H]; out: [T, H] of that dtype to write into, for one layer's columns of
            the features of several; rows may lie anywhere.

    Returns:
        [T, H] in the dtype of the streams: `out`, or a new tensor.
    """
    wide = torch.promote_types(streams.dtype, torch.float32)
    mean = streams.to(wide).mean(-2).to(streams.dtype)
    return mean if out is None else out.copy_(mean)
