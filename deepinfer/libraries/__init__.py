"""Operators of other libraries in PyTorch's place: which may, and how they are put in and out."""
