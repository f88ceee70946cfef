"""Residual-stream mixing with doubly stochastic coefficients."""

from deepinfer.ops.hyper_connection.reference import (
    collapse,
    expand,
    hyper_connection_step,
    mixes,
)

__all__ = ["collapse", "expand", "hyper_connection_step", "mixes"]
