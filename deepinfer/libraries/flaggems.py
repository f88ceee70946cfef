"""FlagGems: its table of operators, and putting some of them in PyTorch's place.

Knows FlagGems' names and traps (docs/screening.md); must not know why an operator is chosen.
Importing this module does not import flag_gems: that initialises CUDA, on the current device.
"""

import importlib
import importlib.util
import sys
import warnings
from collections.abc import Collection, Mapping
from typing import Any

from deepinfer.env import export
from deepinfer.errors import ConfigError
from deepinfer.libraries.names import Table
from deepinfer.libraries.replace import Replacement, Signature

PACKAGE = "flag_gems"
NAME = "flaggems"


def imported() -> bool:
    """Whether flag_gems has been imported in this process."""
    return PACKAGE in sys.modules


def load() -> Any:
    """Import flag_gems; only after the process's device is set.

    Raises:
        ConfigError: it is not installed, or its import fails.
    """
    import torch

    if importlib.util.find_spec(PACKAGE) is None:
        raise ConfigError(
            f"{NAME} needs the package {PACKAGE}, which is not installed; docs/screening.md says"
            " how"
        )
    if torch.version.cuda is not None:
        export("GEMS_VENDOR", "nvidia")  # it would try every vendor's tool, and take the first
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return importlib.import_module(PACKAGE)
    except Exception as error:  # whatever breaks inside of it
        told = f"{type(error).__name__}: {error}"
        raise ConfigError(f"{PACKAGE} cannot be imported here ({told})") from error


def table(module: Any) -> Table:
    """What it registers under which name; entries whose condition fails here are left out."""
    return {
        entry[0]: entry[1].__name__ for entry in module._FULL_CONFIG
        if len(entry) < 3 or entry[2]()
    }  # fmt: skip


def put_in(
    module: Any,
    operators: Mapping[str, Collection[Signature] | None],
    replacement: Replacement,
) -> None:
    """Register the functions of `operators`, and nothing else that their names stand for.

    FlagGems is asked by function names, and one name registers several operators: the registrar
    that it is given here takes those that are wanted.

    Args:
        operators: kinds of arguments that each may have, None for any.

    Raises:
        ConfigError: PyTorch has no kernel on the GPU for one of them, so that there is no way back.
    """
    names = table(module)
    failed: dict[str, str] = {}
    register = importlib.import_module(f"{PACKAGE}.runtime.register").Register

    class Wanted(register):  # type: ignore[misc, valid-type]
        """FlagGems' registrar, for what was asked for; its own only logs what goes wrong."""

        def register_impl(self, key: str, fn: Any) -> None:
            """Put one function in."""
            if key not in operators:
                return
            try:
                replacement.add(key, fn, operators[key])
            except Exception as error:  # the caller of this would only log it
                failed[key] = str(error)
            self.all_ops.append(fn.__name__)
            self.all_keys.append(key)

    include = sorted({names[operator] for operator in operators})
    if include:
        module.only_enable(lib=replacement.library, include=include, registrar=Wanted)
    if failed:
        told = "; ".join(f"{key}: {why}" for key, why in failed.items())
        raise ConfigError(f"{PACKAGE} cannot be put in PyTorch's place for some operators ({told})")
    missing = set(operators) - set(replacement.uses)
    assert not missing, f"{PACKAGE} did not register {sorted(missing)}"
