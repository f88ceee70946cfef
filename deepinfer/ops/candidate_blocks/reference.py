"""References of the coarse level of the two-level selection: candidate_blocks as a mask,
candidate_block_list as block numbers, and the way back from columns to entries, restore_entries.

Knows scores and visibility; must not know which layers are restricted by the result.
"""

import torch
from torch import Tensor

from deepinfer.ops.topk_select.reference import order_keys, topk_select


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


def candidate_block_list(scores: Tensor, visible: Tensor, block_size: int, blocks: int) -> Tensor:
    """The blocks that candidate_blocks keeps, as a list of numbers.

    NaN counts as -inf: it hides the other entries of its block neither here nor in a kernel.

    Args:
        scores, visible, block_size, blocks: see candidate_blocks; T is one axis here.

    Returns:
        [T, min(blocks, ceil(n / block_size))] int32 block numbers, ascending, padded with -1.
    """
    entries = scores.shape[-1]
    count = -(-entries // block_size)
    low = float("-inf")
    clean = torch.where(torch.isnan(scores), low, scores)
    padded = torch.nn.functional.pad(clean, (0, count * block_size - entries), value=low)
    best = padded.unflatten(-1, (count, block_size)).amax(-1)
    newest = torch.div(visible - 1, block_size, rounding_mode="floor").unsqueeze(-1)
    numbers = torch.arange(count, device=scores.device)
    best = torch.where((numbers == newest) & (newest >= 0), float("inf"), best)
    return topk_select(best, blocks).to(torch.int32)


def restore_entries(selected: Tensor, blocks: Tensor, block_size: int) -> Tensor:
    """Entry numbers of columns of candidate scores.

    Column c * block_size + i is entry blocks[t, c] * block_size + i. Ascending columns give
    ascending entries, as blocks ascend.

    Args:
        selected: [T, K] int32 or int64 columns, below C * block_size; -1: none.
        blocks: [T, C] int32 or int64 block numbers.
        block_size: entries of a block.

    Returns:
        [T, K] in the dtype of `selected`; -1 where the column or its block is -1.
    """
    if blocks.shape[-1] == 0:
        return torch.full_like(selected, -1)
    column = selected.long().clamp_min(0)
    block = blocks.long().gather(-1, column // block_size)
    entry = block * block_size + column % block_size
    return torch.where((selected >= 0) & (block >= 0), entry, -1).to(selected.dtype)
