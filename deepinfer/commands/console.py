"""Where tables are printed.

Knows standard output; must not know what is shown.
"""

import shutil

from rich.console import Console

_WIDE = (160, 24)  # columns and lines where neither a terminal nor COLUMNS says how many


def console() -> Console:
    """Standard output: as wide as the terminal, or as a table needs in a file or a pipe."""
    return Console(width=shutil.get_terminal_size(_WIDE).columns)
