"""A trace of some steps by PyTorch's profiler.

Knows when a recording begins and ends; must not know what a step does.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from deepinfer.errors import ConfigError


class Recording:
    """Records `steps` steps, then writes a Chrome trace to `file`.

    Raises:
        ConfigError: steps < 1.
    """

    def __init__(self, file: Path, steps: int) -> None:
        if type(steps) is not int or steps < 1:
            raise ConfigError(f"profile of {steps!r} steps; expected a whole number of at least 1")
        self._file, self._left = file, steps
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        self._profile = profile(activities=activities)
        self._profile.start()

    @property
    def done(self) -> bool:
        """Whether the trace has been written."""
        return self._left == 0

    @contextmanager
    def step(self) -> Iterator[None]:
        """One step; the trace is written at the end of the last, also if that failed."""
        try:
            yield
        finally:
            self._left -= 1
            if self._left == 0:
                self._profile.stop()
                self._profile.export_chrome_trace(str(self._file))
