"""Named ways of running a checkpoint, and what each of them needs.

Knows settings by name; must not know torch, or how a configuration is run.
"""

import dataclasses
import difflib
import types
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from deepinfer.config import EngineOptions
from deepinfer.errors import ConfigError


@dataclass(frozen=True)
class Configuration:
    """One way of running a checkpoint.

    Attributes:
        settings: fields of EngineOptions that it sets.
        backend: an operator backend without which it is not possible.
        drafts: answers come from greedy speculation with the checkpoint's drafter.
        may_lack: a setting that is refused when the model is loaded makes it not possible here; of
            others that is a failure.
    """

    name: str
    meaning: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    backend: str | None = None
    drafts: bool = False
    may_lack: bool = False


NAMED = (
    Configuration("ref", "every operator by its PyTorch reference", {"ops_backend": "ref"}),
    Configuration("triton", "every operator by Triton, which needs a GPU",
                  {"ops_backend": "triton"}, "triton"),
    Configuration("tilelang", "operators by TileLang where it has them",
                  {"ops_backend": "tilelang"}, "tilelang"),
    Configuration("flaggems", "FlagGems' operators from the allow-list in PyTorch's place",
                  {"flaggems": "fast"}, may_lack=True),
    Configuration("no-tilelang", "as on a machine without TileLang",
                  {"simulate_no_tilelang": True}),
    Configuration("strict", "an operator that falls back is an error", {"ops_strict": True}),
    Configuration("speculation", "answers drafted by the checkpoint's drafter and verified",
                  drafts=True),
    Configuration("no-speculation", "answers without a drafter"),
)  # fmt: skip


def parse(text: str) -> list[Configuration]:
    """Configurations from names with commas between, like "ref,triton+op=rms_norm=ref".

    A name may be followed by +SETTING=VALUE, several times; `op` may be set several times.

    Raises:
        ConfigError: an unknown name or setting, a malformed value, or a configuration named twice.
    """
    found = [_parse_one(part) for part in text.split(",")]
    names = [configuration.name for configuration in found]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"configuration {name!r} is named twice; expected each once")
    return found


def _parse_one(text: str) -> Configuration:
    name, *changes = text.split("+")
    known = {configuration.name: configuration for configuration in NAMED}
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.0)[0]
        raise ConfigError(f"configuration {name!r} is unknown; did you mean {near!r}? There are"
                          f" {', '.join(known)}")  # fmt: skip
    base = known[name]
    settings = dict(base.settings)
    for change in changes:
        setting, value = _parse_setting(change)
        settings[setting] = (*settings.get("op", ()), *value) if setting == "op" else value
    meaning = base.meaning if not changes else f"{base.meaning}; {', '.join(changes)}"
    return replace(base, name=text, meaning=meaning, settings=settings)


def _parse_setting(text: str) -> tuple[str, Any]:
    name, separator, value = text.partition("=")
    hints = get_type_hints(EngineOptions)
    known = [f.name for f in dataclasses.fields(EngineOptions) if f.name != "model"]
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.0)[0]
        raise ConfigError(f"setting {name!r} is unknown; did you mean {near!r}?")
    for kind in _kinds(hints[name]):
        if separator and (read := _READERS[kind](value)) is not None:
            return name, read
    expected = " or ".join(_EXPECTED[kind] for kind in _kinds(hints[name]))
    raise ConfigError(f"{text!r}: expected {name}=VALUE with {expected}")


def _kinds(hint: Any) -> list[type]:
    """The plain types that a field takes, None left out."""
    if get_origin(hint) in (Union, types.UnionType):
        return [kind for part in get_args(hint) for kind in _kinds(part)]
    if get_origin(hint) is Literal:
        return [str]
    if hint is types.NoneType:
        return []
    return [get_origin(hint) or hint]


def _read_number(kind: type) -> Any:
    def read(text: str) -> Any:
        try:
            return kind(text)
        except ValueError:
            return None

    return read


_READERS: dict[type, Any] = {
    bool: {"true": True, "false": False}.get,
    int: _read_number(int),
    float: _read_number(float),
    tuple: lambda text: (text,),
    str: lambda text: text or None,
}
_EXPECTED = {
    bool: "true or false", int: "a whole number", float: "a number", tuple: "a text", str: "a text",
}  # fmt: skip


def options_for(base: EngineOptions, configuration: Configuration) -> EngineOptions:
    """The user's options with those of a configuration, which come first.

    An allow-list only goes to configurations that use one: it would be refused by the others.
    """
    settings = dict(configuration.settings)
    if "op" in settings:
        settings["op"] = (*(base.op or ()), *settings["op"])
    options = replace(base, **settings)
    if (options.flaggems or "off") == "off" and "flaggems_allowlist" not in settings:
        options = replace(options, flaggems_allowlist=None)
    return options
