"""A line on standard error now and then, where a progress bar would not be seen.

Knows the clock; must not know what is being done.
"""

import sys
import time
from collections.abc import Callable

SECONDS = 20.0


class Pulse:
    """Says what is being done at most every SECONDS.

    Args:
        shown: whether to say anything.
    """

    def __init__(self, shown: bool, clock: Callable[[], float] = time.monotonic) -> None:
        self._shown = shown
        self._clock = clock
        self._last = clock()

    def tell(self, text: str) -> None:
        """What is being done now."""
        now = self._clock()
        if self._shown and now - self._last >= SECONDS:
            self._last = now
            sys.stderr.write(f"{text}\n")
            sys.stderr.flush()
