"""The model's two rotary tables: one for window layers, one for layers with compressed entries.

Knows which table a layer uses; must not know where positions come from.
"""

import torch
from torch import Tensor, nn

from deepinfer.config import ModelConfig
from deepinfer.ops.rope import rope_frequencies, rotation


class RotaryTables(nn.Module):
    """Frequencies of both tables (model description 3.3); ratio 0 takes the base table."""

    base: Tensor
    compressed: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        dim = config.qk_rope_head_dim
        with torch.device("cpu"):
            base = rope_frequencies(dim, config.rope_theta, None)
            compressed = rope_frequencies(dim, config.compress_rope_theta, config.rope_scaling)
        self.register_buffer("base", base, persistent=False)
        self.register_buffer("compressed", compressed, persistent=False)

    def rotations(self, positions: Tensor, ratio: int, dtype: torch.dtype) -> Tensor:
        """Complex rotations [..., d/2] of `positions` [...] for a layer of ratio `ratio`."""
        return rotation(positions, self.compressed if ratio else self.base, dtype)
