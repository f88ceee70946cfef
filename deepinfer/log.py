"""The package's logger, and the helper for messages that are worth saying once per process."""

import logging

logger = logging.getLogger("deepinfer")

_said: set[str] = set()


def warn_once(message: str) -> None:
    """Log `message` as a warning the first time it is given in this process, then never again."""
    if message not in _said:
        _said.add(message)
        logger.warning(message)
