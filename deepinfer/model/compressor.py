"""Latents of compressed entries.

Knows the projections of a KV source layer; must not know how entries are stored.
"""

from torch import Tensor, nn

from deepinfer.config import ModelConfig
from deepinfer.model.linear import Linear, Precision, WideLinear
from deepinfer.model.norm import RMSNorm
from deepinfer.model.state import SequenceState


class Compressor(nn.Module):
    """Latent of each group of r tokens (model description 3.6); r = 1 needs no pooling."""

    def __init__(self, config: ModelConfig, layer: int, precision: Precision) -> None:
        super().__init__()
        self.layer = layer
        self.ratio = config.compress_ratio(layer)
        size = (config.head_dim, config.hidden_size)
        self.wkv: Linear | WideLinear
        if self.ratio == 1:
            self.wkv = Linear(*size, precision)
        else:
            self.wkv = WideLinear(*size, precision)
            self.wgate = WideLinear(*size, precision)
        self.norm = RMSNorm(config.head_dim, config.rms_norm_eps, precision)

    def forward(self, x: Tensor, state: SequenceState) -> Tensor:
        """Attention input [rows, H] to latents [groups, D] of the groups that the rows complete."""
        if self.ratio == 1:
            return self.norm(self.wkv(x))
        return state.pool(self.layer, self.wkv(x), self.wgate(x), self.norm)
