"""Requests to tokens: the loop that plans steps, runs them and ends sequences."""
