"""How the next token is chosen: request parameters, filters, seeded draws, log-probabilities.

Knows logits and parameters; must not know requests, caches or the model.
"""
