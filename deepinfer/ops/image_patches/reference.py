"""References of the operators around the image encoder (model description 3.13, 3.14).

Knows pixels, grids and token rows; must not know the encoder.
"""

import torch
from torch import Tensor
from torch.nn import functional

PAD_COLOUR = 127
# What a token is: text has none of these.
START, IMAGE, NEWLINE, END = range(4)


def image_patches(pixels: Tensor, height: int, width: int, patch: int = 14) -> Tensor:
    """Patches of an image in the middle of a canvas of PAD_COLOUR.

    The image begins at round((height - h) / 2) and round((width - w) / 2), halves to the even
    number, as Pillow pads. A value v becomes (v / 255 - 0.5) / 0.5, in float32, then bfloat16.

    Args:
        pixels: [h, w, 3] uint8. height >= h, width >= w: multiples of `patch`.

    Returns:
        [height / patch * width / patch, 3, patch, patch] bfloat16, patches row by row.
    """
    h, w, _ = pixels.shape
    top, left = round((height - h) * 0.5), round((width - w) * 0.5)
    around = (0, 0, left, width - w - left, top, height - h - top)
    canvas = functional.pad(pixels, around, value=PAD_COLOUR).to(torch.float32)
    # A number of Python would be multiplied by its reciprocal on a GPU.
    values = (canvas / torch.full_like(canvas, 255.0) - 0.5) * 2.0
    tiles = values.view(height // patch, patch, width // patch, patch, 3)
    patches = tiles.permute(0, 2, 4, 1, 3).reshape(-1, 3, patch, patch)
    return patches.to(torch.bfloat16)


def image_cells(features: Tensor, rows: int, columns: int, side: int = 3) -> Tensor:
    """Square cells of a grid of patches, with zeros below and right of the grid.

    Args:
        features: [rows * columns, D], bfloat16 or float32, row by row.

    Returns:
        [ceil(rows / side) * ceil(columns / side), D * side^2]; element c * side^2 + y * side + x
        is channel c of the patch at (y, x) of the cell.
    """
    D = features.shape[1]
    grid = features.view(rows, columns, D)
    grid = functional.pad(grid, (0, 0, 0, -columns % side, 0, -rows % side))
    cells = grid.view(grid.shape[0] // side, side, grid.shape[1] // side, side, D)
    return cells.permute(0, 2, 4, 1, 3).reshape(-1, D * side * side)


def replace_image_rows(
    x: Tensor, kinds: Tensor, features: Tensor, delimiters: Tensor, first: Tensor
) -> None:
    """Put an image's features and delimiters into token rows, in place.

    The i-th row of kind IMAGE takes features[first + i], START, NEWLINE and END take delimiters
    0, 1 and 2; other rows, and IMAGE rows without a feature, stay.

    Args:
        x: [T, H]; kinds: [T] int8, -1 text; features: [F, H], delimiters: [3, H], dtype of x;
            first: [1] int64, features that rows of earlier chunks have taken.
    """
    count, T = features.shape[0], x.shape[0]
    if T == 0:
        return
    is_image = kinds == IMAGE
    number = torch.cumsum(is_image, 0) - 1 + first
    usable = is_image & (number >= 0) & (number < count)
    # START, NEWLINE, END are 0, 2, 3.
    slot = torch.where(kinds == START, 0, kinds.long() - 1)
    delimited = (kinds == START) | (kinds == NEWLINE) | (kinds == END)
    rows = torch.where(usable, number, torch.where(delimited, count + slot, 0))
    found = torch.cat([features, delimiters])[rows]
    x.copy_(torch.where((usable | delimited).unsqueeze(-1), found, x))
