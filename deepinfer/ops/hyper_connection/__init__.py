"""Residual-stream mixing with doubly stochastic coefficients."""

from deepinfer.ops.hyper_connection.reference import collapse, expand, mixes

__all__ = ["collapse", "expand", "mixes"]
