"""Reference of confidence.

Knows draft states; must not know how drafts are verified.
"""

import torch
from torch import Tensor


def confidence(x: Tensor, embedded: Tensor, weight: Tensor) -> Tensor:
    """sigmoid(weight . concat(x, embedded)) (model description 3.12).

    Args:
        x: [B, H], draft states before the norm; embedded: [B, K], embeddings of the tokens before
            the drafts; weight: [H + K] or [1, H + K]. bfloat16 or float32, or all float64.

    Returns:
        [B], float32 or float64, summed in that.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    joined = torch.cat([x, embedded], dim=-1).to(wide)
    return torch.sigmoid((joined * weight.reshape(-1).to(wide)).sum(-1))
