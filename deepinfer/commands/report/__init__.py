"""`deepinfer report`: a checkpoint end to end, on several ranks and in several configurations."""
