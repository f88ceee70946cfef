"""Text that the demo model learns from and is examined on, made from tables and grammars."""
