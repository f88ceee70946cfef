"""The only reader of the process environment, and the only writer.

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


def _switch(text: str) -> bool:
    if text not in ("0", "1"):
        raise ValueError(text)
    return text == "1"


def _inverse_switch(text: str) -> bool:
    return not _switch(text)


def _flaggems(text: str) -> str:
    return {"0": "off", "1": "fast"}.get(text) or _choice("fast", "right")(text)


def _name(text: str) -> str:
    if not text.isascii() or not text.replace("_", "").isalnum():
        raise ValueError(text)
    return text


# DEEPINFER_OPS_<OPERATOR>: which operators there are is known where operators are, not here.
OPERATOR_PREFIX = "DEEPINFER_OPS_"

VARIABLES = (
    Variable(
        "DEEPINFER_OPS_BACKEND", "ops_backend", _name, "a backend like auto, triton or ref",
        "preferred backend of every operator",
    ),
    Variable(
        "DEEPINFER_OPS_STRICT", "ops_strict", _switch, "0 or 1",
        "an operator that falls back to its reference is an error",
    ),
    Variable(
        "DEEPINFER_SPARSE_MLA_BACKEND", "sparse_mla_backend", _name,
        "a backend like triton or ref", "backend of sparse attention",
    ),
    Variable(
        "DEEPINFER_KERNELS", "kernels", _choice("auto", "ref", "triton", "tile"),
        "auto, ref, triton or tile",
        "preferred backend of the operators that the tile_kernels library has",
    ),
    Variable(
        "DEEPINFER_BATCH_INVARIANT", "batch_invariant", _switch, "0 or 1",
        "only implementations whose rows do not depend on each other",
    ),
    Variable(
        "DEEPINFER_SIMULATE_NO_TILELANG", "simulate_no_tilelang", _switch, "0 or 1",
        "act as on a machine without TileLang",
    ),
    Variable(
        "DEEPINFER_ENFORCE_EAGER", "enforce_eager", _switch, "0 or 1",
        "no CUDA graphs",
    ),
    Variable(
        "DEEPINFER_DISABLE_SYNC_GUARD", "sync_guard", _inverse_switch, "0 or 1",
        "operations that make the host wait for the GPU are no errors",
    ),
    Variable(
        "DEEPINFER_ENABLE_FLAGGEMS", "flaggems", _flaggems, "0, 1, fast or right",
        "operators of FlagGems replace PyTorch's: 1 and fast those that are right and not slower,"
        " right all that are right",
    ),
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
            Whether DEEPINFER_OPS_<OPERATOR> names an operator shows when operators are chosen.
    """
    environ = os.environ if environ is None else environ
    known = {variable.name: variable for variable in VARIABLES}
    settings: dict[str, Any] = {}
    for name, text in environ.items():
        if not name.startswith(PREFIX):
            continue
        if name not in known and _names_an_operator(name, known):
            if text:
                settings["op"] = (*settings.get("op", ()), _operator_backend(name, text))
            continue
        if name not in known:
            near = difflib.get_close_matches(name.upper(), known, n=1, cutoff=0.0)[0]
            raise ConfigError(f"environment variable {name} is unknown; did you mean {near}?")
        if text == "":
            continue
        variable = known[name]
        try:
            settings[variable.setting] = variable.parse(text)
        except ValueError:
            raise ConfigError(f"{name} = {text!r}; expected {variable.expected}") from None
    return settings


def export(name: str, value: str, replace: bool = False) -> None:
    """Set a variable that another library reads when it is imported; `replace` one that is set."""
    assert not name.startswith(PREFIX), name
    if replace or name not in os.environ:
        os.environ[name] = value


def silence_profiler() -> None:
    """Keep PyTorch's profiler from writing to standard error when it starts and stops."""
    export("KINETO_LOG_LEVEL", "99")


def _names_an_operator(name: str, known: Mapping[str, Variable]) -> bool:
    """Whether `name` is DEEPINFER_OPS_<OPERATOR>, and no slip of a variable's own name."""
    suffix = name.removeprefix(OPERATOR_PREFIX)
    if suffix == name or not suffix or suffix != suffix.upper():
        return False
    own = [variable for variable in known if variable.startswith(OPERATOR_PREFIX)]
    near = difflib.get_close_matches(suffix, [v.removeprefix(OPERATOR_PREFIX) for v in own], n=1,
                                     cutoff=0.85)  # fmt: skip
    return not near


def _operator_backend(name: str, text: str) -> str:
    try:
        return f"{name.removeprefix(OPERATOR_PREFIX).lower()}={_name(text)}"
    except ValueError:
        raise ConfigError(f"{name} = {text!r}; expected a backend like triton or ref") from None
