"""What a user may say about a screening.

Knows names and defaults; must not know torch, which the command line loads only where it must.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class ScreenOptions:
    """Fields are options of `deepinfer screen`.

    Attributes:
        library: flaggems, torch.compile, tile_kernels, backend:NAME for a backend of this
            project's operators, or MODULE:OBJECT or FILE.py:OBJECT for functions of yours.
        out: folder for reports and allow-list; an interrupted screening in it is continued.
        operators: names in any spelling, separated by commas. Default: every operator that the
            traced run calls.
        jobs: child processes at a time. Default: one per core, at most 16.
        case_seconds: longest time for one case, compilation included.
        operator_seconds: longest time for all cases of an operator.
        memory_gib: main memory, and GPU memory, of one child.
        seconds: after which what is not finished is reported as not tried; the same command goes
            on. Default: no limit.
        hostile: try more than the calls of the traced run.
        speed: measure what is right.
    """

    library: str = "flaggems"
    out: str = "screening"
    operators: str | None = None
    jobs: int | None = None
    case_seconds: float = 30.0
    operator_seconds: float = 180.0
    memory_gib: float = 16.0
    seconds: float | None = None
    hostile: bool = True
    speed: bool = True
