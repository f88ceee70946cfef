"""Operators: one folder each, with its reference in plain PyTorch.

Operators know tensors and formulas; they must not know the model, the engine or the cache manager.
Shapes use the project's alphabet (docs/numerics.md): T tokens, S streams, H hidden, N heads, ...
"""
