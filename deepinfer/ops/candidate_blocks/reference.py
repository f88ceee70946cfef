"""Reference of candidate_blocks: the coarse level of the two-level selection.

Knows scores and visibility; must not know which layers are restricted by the result.
"""

import torch
from torch import Tensor

from deepinfer.ops.topk_select.reference import order_keys


def candidate_blocks(scores: Tensor, visible: Tensor, block_size: int, blocks: int) -> Tensor:
    """The blocks of entries that later index sources may select from (model description 3.8).

    A block scores the maximum of its entries; the block with the newest visible entry always
    stays. Among equal blocks the lower one wins; blocks of invisible entries never count.

    Args:
        scores: [..., T, n], -inf at entries the query may not see.
        visible: [..., T] number of visible entries of each query.
        block_size: entries of a block; the last block may be shorter.
        blocks: most blocks kept for each query.

    Returns:
        [..., T, n] bool, true for entries of kept blocks.
    """
    entries = scores.shape[-1]
    count = -(-entries // block_size)
    padded = torch.nn.functional.pad(scores, (0, count * block_size - entries), value=float("-inf"))
    best = padded.unflatten(-1, (count, block_size)).amax(-1)
    newest = torch.div(visible - 1, block_size, rounding_mode="floor").unsqueeze(-1)
    numbers = torch.arange(count, device=scores.device)
    best = torch.where((numbers == newest) & (newest >= 0), float("inf"), best)
    kept = torch.zeros_like(best, dtype=torch.bool)
    chosen = order_keys(best).topk(min(blocks, count), dim=-1, sorted=False).indices
    kept.scatter_(-1, chosen, True)
    kept &= best > float("-inf")
    return kept.repeat_interleave(block_size, dim=-1)[..., :entries]
