"""Helpers for tests and for people who port: tiny checkpoints, comparisons."""
