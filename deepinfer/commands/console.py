"""Where tables are printed.

Knows standard output; must not know what is shown.
"""

from rich.console import Console

_UNKNOWN = 80  # the width that Rich takes where nobody says one
_WIDE = 160


def console() -> Console:
    """Standard output: as wide as the terminal, or as a table needs in a file or a pipe."""
    found = Console()
    return found if found.is_terminal or found.width != _UNKNOWN else Console(width=_WIDE)
