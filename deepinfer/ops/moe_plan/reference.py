"""Reference of moe_plan.

Knows expert ids; must not know the experts.
"""

import torch
from torch import Tensor


def plan_block(rows: int, experts: int) -> int:
    """Rows of one tile for `rows` routed rows in all, from static sizes only."""
    average = rows // max(experts, 1)
    return 16 if average < 16 else 32 if average < 48 else 64


def plan_tiles(rows: int, experts: int, block: int) -> int:
    """Most tiles that `rows` rows can need: each expert in use may leave one tile unfilled."""
    return min(rows, experts) + rows // block


def moe_plan(ids: Tensor, experts: int, block: int) -> tuple[Tensor, Tensor, Tensor]:
    """Rows sorted by expert, and the tiles of a grouped product over them.

    Slot t * K + k is choice k of token t. Slots of one expert keep their order.

    Args:
        ids: [T, K] int64, from 0 to E - 1; experts: E; block: rows of a tile.

    Returns:
        order [T * K] int32: the slot of each row; ends [E] int32: the row after each expert's last;
        tiles [plan_tiles, 2] int32: expert and first row of each tile, ascending, then -1. A tile
        ends after `block` rows or with its expert.
    """
    flat = ids.flatten()
    rows = len(flat)
    order = flat.argsort(stable=True)
    numbers = torch.arange(experts, device=ids.device)
    ends = torch.searchsorted(flat[order], numbers, right=True)
    starts = torch.nn.functional.pad(ends, (1, 0))[:-1]
    tile_ends = ((ends - starts + block - 1) // block).cumsum(0)
    tile = torch.arange(plan_tiles(rows, experts, block), device=ids.device)
    expert = torch.searchsorted(tile_ends, tile, right=True)
    exists = expert < experts
    expert = expert.clamp_max(experts - 1)
    before = torch.nn.functional.pad(tile_ends, (1, 0))[:-1]
    first = starts[expert] + (tile - before[expert]) * block
    tiles = torch.stack([expert, first], dim=-1)
    tiles = torch.where(exists.unsqueeze(-1), tiles, -1)
    return order.to(torch.int32), ends.to(torch.int32), tiles.to(torch.int32)
