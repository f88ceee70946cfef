"""How far two outputs of one model are apart, position by position.

Knows rows of logits or states; must not know where they come from or what is close enough.
"""

import torch
from torch import Tensor


def distances(actual: Tensor, expected: Tensor) -> Tensor:
    """1 - cosine of each pair of rows, in float64: 0 = same direction, 1 = unrelated.

    Args:
        actual: [..., C]; expected: [..., C].

    Returns:
        [...] float64.
    """
    assert actual.shape == expected.shape, (actual.shape, expected.shape)
    return 1 - torch.nn.functional.cosine_similarity(actual.double(), expected.double(), dim=-1)


def largest_difference(actual: Tensor, expected: Tensor) -> float:
    """Largest |actual - expected|, NaN where either is not a number; 0 for empty tensors."""
    assert actual.shape == expected.shape, (actual.shape, expected.shape)
    if actual.numel() == 0:
        return 0.0
    return (actual.double() - expected.double()).abs().max().item()
