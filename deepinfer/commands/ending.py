"""How the program ends: exit statuses, and one line for what went wrong.

Knows signals and exceptions; must not know what ran.
"""

import errno
import io
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn

from cyclopts import CycloptsError

from deepinfer.errors import DeepInferError

# The disk is full, a quota is, or the device fails.
_CANNOT_WRITE = {errno.ENOSPC, errno.EDQUOT, errno.EIO}


def exit_with(run: Callable[[], int | None]) -> NoReturn:
    """End the program with the status that `run` returns.

    0; 1 when a reply broke off; 2 for a wrong request or setting, or output that cannot be written;
    130 after Ctrl-C, 128 and the signal's number when it was asked to end.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal that lacks a character shows ?
    try:
        with _unwinding():
            status = run()
            sys.stdout.flush()
    except CycloptsError as error:
        _fail(f"{error} (see deepinfer --help)")
    except DeepInferError as error:
        _fail(str(error))
    except KeyboardInterrupt:
        if sys.stderr.isatty():
            sys.stderr.write("\n")  # the shell's prompt gets a line of its own
        sys.exit(130)
    except BrokenPipeError:
        # The reader of our output went away: that is its right.
        sys.stderr.close()
        sys.exit(0)
    except OSError as error:
        if error.errno not in _CANNOT_WRITE:
            raise
        if error.filename is None:
            # It was standard output, and what is left in the buffer cannot be written either.
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        _fail(f"{error.filename or 'the output'} cannot be written ({error.strerror})")
    sys.exit(status or 0)


def _fail(message: str) -> NoReturn:
    sys.stderr.write(f"error: {' '.join(message.split())}\n")
    sys.exit(2)


@contextmanager
def _unwinding() -> Iterator[None]:
    """Being asked to end, or losing the terminal, unwinds what runs, as Ctrl-C does."""

    def end(number: int, _: object) -> None:
        sys.exit(128 + number)

    main_thread = threading.current_thread() is threading.main_thread()
    asked = [signal.SIGTERM, signal.SIGHUP] if main_thread else []
    # Whoever ignores them, as nohup does, is not asked.
    before = {n: signal.signal(n, end) for n in asked if signal.getsignal(n) is signal.SIG_DFL}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
