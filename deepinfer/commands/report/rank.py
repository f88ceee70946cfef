"""A process of `deepinfer report`: takes its device, then does the job of the file it is given.

Knows the order of things in a fresh process; must not know models. Nothing that could touch a GPU
is imported before the device is set.
"""

import faulthandler
import logging
import os
import signal
import sys
import threading
import traceback
from pathlib import Path

from deepinfer.commands.report.records import Job, RankResult
from deepinfer.errors import ConfigError, DeepInferError


def take_device(job: Job) -> None:
    """Make the job's GPU the current one of this process."""
    if job.gpu is not None:
        import torch

        torch.cuda.set_device(job.gpu)


def run(job: Job) -> RankResult:
    """Do a job; whatever goes wrong is in the result, and in the log."""
    try:
        take_device(job)
        return _work(job)
    except ConfigError as error:
        if job.may_lack:
            return RankResult(job.rank, "impossible", str(error))
        return _broken(job, error)
    except Exception as error:
        return _broken(job, error)


def _work(job: Job) -> RankResult:
    if job.kind == "answers":
        from deepinfer.commands.report.exercise import answers

        return answers(job)
    from deepinfer.commands.report import inspection

    return inspection.dump_states(job) if job.kind == "dump" else inspection.compare_operators(job)


def _broken(job: Job, error: Exception) -> RankResult:
    if not isinstance(error, DeepInferError):
        traceback.print_exc()
    return RankResult(job.rank, "error", f"{type(error).__name__}: {error}")


def end_with_parent() -> None:
    """End this process and what it started once whoever started it is gone, however it went."""

    def watch() -> None:
        os.read(0, 1)  # returns when the other end of standard input is closed
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


def main(arguments: list[str]) -> int:
    """Exit status 0, also where the configuration is not possible here; 1 when it broke off."""
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)
    logging.basicConfig(format="%(levelname)s: %(message)s", level=logging.WARNING)
    job = Job.read(Path(arguments[0]))
    result = run(job)
    result.write(job)
    if result.status == "error":
        sys.stderr.write(f"error: {result.reason}\n")
    return 1 if result.status == "error" else 0


if __name__ == "__main__":
    end_with_parent()
    sys.exit(main(sys.argv[1:]))
