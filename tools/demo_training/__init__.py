"""Trains the demo checkpoint: the product's recompute path with straight-through quantisation."""
