"""Text that the demo model learns from and is examined on, made from grammars and tables."""
