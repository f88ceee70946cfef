"""What happens to the residual streams between two sublayers.

Knows the three mixing parameters of the sublayer that comes; must not know the sublayer.
"""

from typing import NamedTuple

from torch import Tensor, nn

from deepinfer.config import ModelConfig
from deepinfer.model.linear import Precision, parameter
from deepinfer.model.norm import RMSNorm


class SublayerInput(NamedTuple):
    """What a sublayer and the mixing after it need; leading axis = rows.

    Attributes:
        x: normalised input [rows, H].
        streams: residual streams [rows, S, H].
        pre: collapse coefficients that the next sublayer uses [rows, S].
        post, comb: coefficients with which the sublayer's output is expanded, [rows, S] and
            [rows, S, S].
    """

    x: Tensor
    streams: Tensor
    pre: Tensor
    post: Tensor
    comb: Tensor

    def keep(self, rows: Tensor) -> "SublayerInput":
        """The same for a subset of rows."""
        return SublayerInput(*(part[rows] for part in self))


class HyperConnection(nn.Module):
    """Mixing before one sublayer, with its parameters fn, base, scale (model description 3.4)."""

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
        self.operators = precision.operators

    def start(self, streams: Tensor, pre: Tensor, norm: RMSNorm) -> SublayerInput:
        """Input of the sublayer from streams [rows, S, H] and the pre [rows, S] carried to it."""
        return self._step(None, streams, None, None, pre, norm)

    def follow(self, y: Tensor, before: SublayerInput, norm: RMSNorm) -> SublayerInput:
        """The same after another sublayer, whose input was `before` and whose output is `y`."""
        return self._step(y, before.streams, before.post, before.comb, before.pre, norm)

    def _step(
        self, y: Tensor | None, streams: Tensor, post: Tensor | None, comb: Tensor | None,
        pre: Tensor, norm: RMSNorm,
    ) -> SublayerInput:  # fmt: skip
        streams, x, *coefficients = self.operators.hyper_connection_step(
            y, streams, post, comb, pre, self.fn, self.base, self.scale, norm.weight,
            iterations=self.iterations, hc_eps=self.hc_eps, norm_eps=self.norm_eps,
        )  # fmt: skip
        return SublayerInput(x, streams, *coefficients)
