"""Mean of the residual streams, as the drafter reads them."""

from deepinfer.ops.stream_mean.reference import stream_mean

__all__ = ["stream_mean"]
