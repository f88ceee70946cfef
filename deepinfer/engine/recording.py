"""A trace of some steps by PyTorch's profiler.

Knows when a recording begins and ends; must not know what a step does.
"""

import atexit
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from deepinfer.env import silence_profiler
from deepinfer.errors import ConfigError
from deepinfer.log import logger


class Recording:
    """Records `steps` steps, then writes a Chrome trace to `file`.

    Raises:
        ConfigError: steps < 1, or the file is a folder or in none.
    """

    def __init__(self, file: Path, steps: int) -> None:
        if type(steps) is not int or steps < 1:
            raise ConfigError(f"profile of {steps!r} steps; expected a whole number of at least 1")
        if file.is_dir() or not file.parent.is_dir():
            raise ConfigError(f"profile to {file}; expected a file in a folder that exists")
        self._file, self._left = file, steps
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        silence_profiler()
        self._profile = profile(activities=activities)
        self._profile.start()
        # A profiler that is still running takes the interpreter down at its exit.
        atexit.register(self.end)

    @property
    def done(self) -> bool:
        """Whether the trace has been written."""
        return self._left == 0

    @contextmanager
    def step(self) -> Iterator[None]:
        """One step; the trace is written at the end of the last, also if that failed.

        A file that cannot be written is an error in the log: the step has nothing to do with it.
        """
        try:
            yield
        finally:
            self._left -= 1
            if self._left == 0:
                self.end()

    def end(self) -> None:
        """Write what was recorded so far; no step is recorded any more."""
        atexit.unregister(self.end)
        self._left = 0
        self._profile.stop()
        try:
            self._profile.export_chrome_trace(str(self._file))
        except Exception as error:
            logger.error(f"the profile could not be written to {self._file}: {error}")
