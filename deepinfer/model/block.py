"""One transformer block: two sublayers on shared residual streams, coefficients shifted by one.

Knows the order of operations inside a block; must not know other blocks.
"""

from torch import Tensor, nn

from deepinfer.config import ModelConfig
from deepinfer.model.attention import Attention
from deepinfer.model.hyper_connection import HyperConnection, SublayerInput
from deepinfer.model.linear import Precision
from deepinfer.model.moe import MixtureOfExperts
from deepinfer.model.norm import RMSNorm
from deepinfer.model.state import AttentionState


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

        self.operators = precision.operators

    def prepare(self, streams: Tensor, pre: Tensor) -> SublayerInput:
        """Attention's input and coefficients from streams [rows, S, H] and carried pre."""
        return self.hc_attn.start(streams, pre, self.attn_norm)

    def finish(self, entering: SublayerInput, state: AttentionState) -> tuple[Tensor, Tensor]:
        """Both sublayers: new streams [rows, S, H] and the pre [rows, S] for the next block."""
        middle = self.hc_ffn.follow(self.attn(entering.x, state), entering, self.ffn_norm)
        y = self.ffn(middle.x)
        streams = self.operators.expand(y, middle.streams, middle.post, middle.comb)
        return streams, middle.pre
