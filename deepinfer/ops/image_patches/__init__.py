"""Pixels to patches, patches to cells, cells to rows of tokens."""

from deepinfer.ops.image_patches.reference import image_cells, image_patches, replace_image_rows

__all__ = ["image_cells", "image_patches", "replace_image_rows"]
