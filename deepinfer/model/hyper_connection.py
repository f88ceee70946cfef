"""Coefficients of one sublayer's residual-stream mixing.

Knows the three parameters of a sublayer; must not know the sublayer.
"""

from torch import Tensor, nn

from deepinfer.config import ModelConfig
from deepinfer.model.linear import Precision, parameter
from deepinfer.ops.hyper_connection import mixes


class HyperConnection(nn.Module):
    """`mixes` with the parameters fn, base and scale of one sublayer (model description 3.4)."""

    def __init__(self, config: ModelConfig, precision: Precision) -> None:
        super().__init__()
        count = config.hc_mult * (2 + config.hc_mult)
        wide = precision.accumulate
        self.fn = parameter(count, config.hc_mult * config.hidden_size, dtype=wide)
        self.base = parameter(count, dtype=wide)
        self.scale = parameter(3, dtype=wide)
        self.iterations = config.hc_sinkhorn_iters
        self.hc_eps = config.hc_eps
        self.norm_eps = config.rms_norm_eps

    def forward(self, streams: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Streams [..., S, H] to pre [..., S], post [..., S] and comb [..., S, S]."""
        return mixes(
            streams,
            self.fn,
            self.base,
            self.scale,
            iterations=self.iterations,
            hc_eps=self.hc_eps,
            norm_eps=self.norm_eps,
        )
