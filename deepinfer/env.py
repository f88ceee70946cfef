"""The only reader of the process environment.

Knows every DEEPINFER_* variable, its legal values and the setting it stands for; must not know
what a setting does.
"""

import difflib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from deepinfer.errors import ConfigError

PREFIX = "DEEPINFER_"


@dataclass(frozen=True)
class Variable:
    """One environment variable.

    Attributes:
        name: full name; setting: the field of EngineOptions that it sets.
        parse: text to value, ValueError for a malformed text.
        expected: legal values in words.
        meaning: one line for the documentation.
    """

    name: str
    setting: str
    parse: Callable[[str], Any]
    expected: str
    meaning: str


def _choice(*names: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in names:
            raise ValueError(text)
        return text

    return parse


def _whole(text: str) -> int:
    if not text.isascii() or not text.isdigit():
        raise ValueError(text)
    return int(text)


VARIABLES = (
    Variable(
        "DEEPINFER_YOCO_PREFILL_TRUNCATION_MODE", "yoco_prefill",
        _choice("off", "mask", "compact"), "off, mask or compact",
        "truncated prefill of the layers past the boundary",
    ),
    Variable(
        "DEEPINFER_YOCO_PREFILL_KEEP_TOKENS", "yoco_keep_tokens", _whole, "a whole number",
        "prompt rows that a truncated prefill keeps",
    ),
)  # fmt: skip


def read_environment(environ: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Settings that DEEPINFER_* variables of `environ` (default: the process's) decide.

    An empty value counts as not set.

    Raises:
        ConfigError: an unknown DEEPINFER_* name (with the nearest known one) or a malformed value.
    """
    environ = os.environ if environ is None else environ
    known = {variable.name: variable for variable in VARIABLES}
    settings: dict[str, Any] = {}
    for name, text in environ.items():
        if not name.startswith(PREFIX):
            continue
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.0)[0]
            raise ConfigError(f"environment variable {name} is unknown; did you mean {near}?")
        if text == "":
            continue
        variable = known[name]
        try:
            settings[variable.setting] = variable.parse(text)
        except ValueError:
            raise ConfigError(f"{name} = {text!r}; expected {variable.expected}") from None
    return settings
