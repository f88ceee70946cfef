"""The model: one file per module of the architecture, and the two ways of running it.

Modules know formulas and parameters; they must not know requests, pages or scheduling. What a
module needs of earlier tokens it asks of a state object (`recompute` or `cached`).
"""
