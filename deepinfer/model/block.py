"""One transformer block: two sublayers on shared residual streams, coefficients shifted by one.

Knows the order of operations inside a block; must not know other blocks.
"""

from typing import NamedTuple

from torch import Tensor, nn

from deepinfer.config import ModelConfig
from deepinfer.model.attention import Attention
from deepinfer.model.hyper_connection import HyperConnection
from deepinfer.model.linear import Precision
from deepinfer.model.moe import MixtureOfExperts
from deepinfer.model.norm import RMSNorm
from deepinfer.model.state import AttentionState
from deepinfer.ops.hyper_connection import collapse, expand


class BlockInput(NamedTuple):
    """A block after its first mixing, before attention; leading axis = rows.

    Attributes:
        x: normalised attention input [rows, H].
        streams: residual streams [rows, S, H].
        pre: collapse coefficients that the next sublayer uses [rows, S].
        post, comb: coefficients with which attention's output is expanded.
    """

    x: Tensor
    streams: Tensor
    pre: Tensor
    post: Tensor
    comb: Tensor

    def keep(self, rows: Tensor) -> "BlockInput":
        """The same for a subset of rows."""
        return BlockInput(*(part[rows] for part in self))


class Block(nn.Module):
    """Attention and mixture of experts with shifted hyper-connections (model description 3.4)."""

    def __init__(
        self, config: ModelConfig, layer: int, ratio: int, experts: tuple[int, int],
        precision: Precision,
    ) -> None:  # fmt: skip
        super().__init__()
        self.attn_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, precision)
        self.ffn_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, precision)
        self.hc_attn = HyperConnection(config, precision)
        self.hc_ffn = HyperConnection(config, precision)
        self.attn = Attention(config, layer, ratio, precision)
        self.ffn = MixtureOfExperts(config, *experts, precision)

    def prepare(self, streams: Tensor, pre: Tensor) -> BlockInput:
        """Attention's input and coefficients from streams [rows, S, H] and carried pre."""
        next_pre, post, comb = self.hc_attn(streams)
        return BlockInput(self.attn_norm(collapse(streams, pre)), streams, next_pre, post, comb)

    def finish(self, block_input: BlockInput, state: AttentionState) -> tuple[Tensor, Tensor]:
        """Both sublayers: new streams [rows, S, H] and the pre [rows, S] for the next block."""
        x, streams, pre, post, comb = block_input
        streams = expand(self.attn(x, state), streams, post, comb)
        next_pre, post, comb = self.hc_ffn(streams)
        y = self.ffn(self.ffn_norm(collapse(streams, pre)))
        return expand(y, streams, post, comb), next_pre
