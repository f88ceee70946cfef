"""The distribution that tokens are drawn from, in whole numbers; part of other operators."""

from deepinfer.ops.token_masses.reference import token_masses

__all__ = ["token_masses"]
