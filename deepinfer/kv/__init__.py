"""The cache: packed records in pages shared by sequences, and state slots owned by one sequence."""
