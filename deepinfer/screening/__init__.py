"""`deepinfer screen`: which operators of a library are right, on this machine, for this engine."""
