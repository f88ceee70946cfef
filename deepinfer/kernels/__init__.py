"""Triton device functions that two operators or more share."""
