"""The process's switch for FlagGems: on with what an allow-list holds, off again, and what ran.

Knows when it may be thrown and what is said about it; must not know how operators are judged.
PyTorch's operators belong to the process, so there is one switch for all models in it.
"""

import atexit
from dataclasses import dataclass, field
from pathlib import Path

import torch

from deepinfer.errors import ConfigError
from deepinfer.libraries import flaggems
from deepinfer.libraries.allowlist import AllowList, Entry, Mode, find
from deepinfer.libraries.host import versions
from deepinfer.libraries.names import Table, nearest
from deepinfer.libraries.replace import Replacement
from deepinfer.log import logger


@dataclass
class Enabled:
    """FlagGems at work in this process.

    Attributes:
        names: of the library, as it was asked for them.
        device: number of the GPU that was current when it was put in.
        replacement: the registered functions, and what became of their calls.
    """

    mode: Mode
    allowed: AllowList
    names: tuple[str, ...]
    device: int
    replacement: Replacement

    def line(self) -> str:
        """Like "19 operators from 37 names on 152 call sites with 43 registrations".

        Operators and call sites are those that were dispatched so far.
        """
        total = self.replacement.totals()
        return (
            f"{total['operators']} operators from {len(self.names)} names on {total['sites']} call"
            f" sites with {len(self.replacement.uses)} registrations"
        )


@dataclass
class _Process:
    """What is so of this process.

    Attributes:
        devices: that were current when the library was used; it is imported once, and keeps what
            it saw of the first.
    """

    enabled: Enabled | None = None
    devices: set[int] = field(default_factory=set)


_process = _Process()


def active() -> Enabled | None:
    """What is enabled in this process, or None."""
    return _process.enabled


def disable() -> None:
    """Give PyTorch all its operators back, if any is replaced, and say what was dispatched.

    It happens at the end of the process at the latest.
    """
    if _process.enabled is not None:
        logger.warning("FlagGems: %s", _process.enabled.line())
        _process.enabled.replacement.close()
        _process.enabled = None


def switch(mode: Mode, file: Path | None, device: torch.device) -> Enabled | None:
    """Set the switch as a model wants it that is about to be loaded.

    Call it after the process's device is set and before anything is put on it: importing the
    library uses the current device.

    Args:
        mode: off; fast: operators that are right and not slower; right: all that are right.
        file: an allow-list, None for a shipped one.
        device: what the model will be put on.

    Raises:
        ConfigError: the library cannot be used here, no allow-list holds, or it was imported before
            the device was set.
    """
    if mode == "off":
        if _process.enabled is not None:
            logger.warning("FlagGems is switched off for the whole process, older models included")
        disable()
        return None
    number = _checked_number(device)
    allowed = find(flaggems.NAME, versions(device.type, flaggems.PACKAGE), file)
    module = flaggems.load()
    if not _process.devices:
        atexit.register(disable)
    _process.devices.add(number)
    disable()
    table = flaggems.table(module)
    chosen = _known(allowed.chosen(mode), table)
    replacement = Replacement(device.type)
    try:
        kinds = {operator: frozenset(entry.kinds) for operator, entry in chosen.items()}
        flaggems.put_in(module, kinds, replacement)
    except BaseException:
        replacement.close()
        raise
    names = tuple(sorted({table[operator] for operator in chosen}))
    _process.enabled = Enabled(mode, allowed, names, number, replacement)
    logger.warning(
        "FlagGems %s: %d registrations from %d names (%s)", allowed.made_with[flaggems.PACKAGE],
        len(replacement.uses), len(names), ", ".join(names) or "none is allowed",
    )  # fmt: skip
    return _process.enabled


def _checked_number(device: torch.device) -> int:
    """Number of the current device, if it is the one to use."""
    if flaggems.imported() and not _process.devices:
        raise ConfigError(
            "flag_gems was imported before the engine had set its device; leave the import to the"
            " engine"
        )
    number = torch.cuda.current_device() if device.type == "cuda" else 0
    if device.index not in (None, number):
        raise ConfigError(
            f"FlagGems would be imported on GPU {number}, the model is for GPU {device.index}; set"
            " the process's device first"
        )
    if _process.devices - {number}:
        raise ConfigError(
            f"FlagGems was imported on GPU {min(_process.devices)}, the model is for GPU {number};"
            " use one process for each GPU"
        )
    return number


def _known(chosen: dict[str, Entry], table: Table) -> dict[str, Entry]:
    """Operators that the library has; a warning for each of the others."""
    for operator, entry in chosen.items():
        if operator not in table:
            near = ", ".join(nearest(operator, table)) or "nothing"
            logger.warning(
                "FlagGems has no %s (name %s); nearest: %s", operator, entry.name, near
            )  # fmt: skip
    return {operator: entry for operator, entry in chosen.items() if operator in table}
