"""The form that a text must have: a JSON schema, a regular expression, a grammar, or a choice.

Knows which of them was asked for, and checks what needs no compiler; must not know tokens, torch or
the library that enforces it.
"""

import dataclasses
import difflib
import json
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NoReturn, Self

from deepinfer.errors import RequestError
from deepinfer.sampling.patterns import whole_text
from deepinfer.sampling.schema import Schema, enforceable

Kind = Literal["json_schema", "regex", "ebnf", "choice"]
MOST_CHARACTERS = 65_536  # of one schema, expression, grammar or string
KINDS: tuple[Kind, ...] = ("json_schema", "regex", "ebnf", "choice")


@dataclass(frozen=True)
class StructuredOutput:
    """Exactly one form, and where it begins. Equal ones compile to the same grammar.

    Attributes:
        json_schema: a schema as a mapping or as JSON text, or True for any JSON value; its JSON
            text afterwards.
        regex: a regular expression that the whole text matches.
        ebnf: a grammar whose rule `root` the whole text follows, like `root ::= "a" | "b"`.
        choice: strings of which the text is one; a tuple afterwards.
        after_thinking: the form is that of the text after </think>; the model thinks freely before.

    Raises:
        RequestError: not exactly one form is given, it is not well-formed, or a schema uses a
            keyword that would not be enforced.
    """

    json_schema: str | Mapping[str, Any] | bool | None = None
    regex: str | None = None
    ebnf: str | None = None
    choice: Sequence[str] | None = None
    after_thinking: bool = False

    def __post_init__(self) -> None:
        given = [name for name in KINDS if getattr(self, name) is not None]
        if len(given) != 1:
            what = " and ".join(given) if given else "none"
            raise RequestError(f"structured: {what} given; expected one of {', '.join(KINDS)}")
        for name in ("regex", "ebnf"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, str) or not value):
                _refuse(name, value, "a string that is not empty")
        if self.regex is not None:
            whole_text(self.regex, "structured.regex")
        if not isinstance(self.after_thinking, bool):
            _refuse("after_thinking", self.after_thinking, "true or false")
        if self.json_schema is not None:
            object.__setattr__(self, "json_schema", _schema_text(self.json_schema))
        if self.choice is not None:
            object.__setattr__(self, "choice", _strings(self.choice))
        for text in [self.json_schema, self.regex, self.ebnf, *(self.choice or ())]:
            _check_text(given[0], text)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """The form that `values` names.

        Raises:
            RequestError: a name is unknown, or as above.
        """
        known = [field.name for field in dataclasses.fields(cls)]
        for name in values:
            if name not in known:
                near = difflib.get_close_matches(str(name), known, n=1, cutoff=0.0)[0]
                raise RequestError(f"structured.{name} is unknown; did you mean {near!r}?")
        return cls(**values)

    @property
    def kind(self) -> Kind:
        """Which form it is."""
        return next(name for name in KINDS if getattr(self, name) is not None)

    @property
    def schema(self) -> Schema:
        """json_schema in the spelling that is enforced."""
        assert isinstance(self.json_schema, str)
        return enforceable(json.loads(self.json_schema))


def _refuse(name: str, value: object, expected: str) -> NoReturn:
    shown = reprlib.Repr()  # plain repr fails on what is nested too deeply
    shown.maxstring = 100
    raise RequestError(f"structured.{name} = {shown.repr(value)}: expected {expected}")


def _check_text(name: str, text: object) -> None:
    """Refuse what would take long to compile, and what is not Unicode."""
    if isinstance(text, str):
        if len(text) > MOST_CHARACTERS:
            _refuse(name, text, f"at most {MOST_CHARACTERS} characters, found {len(text)}")
        try:
            text.encode()
        except UnicodeEncodeError:
            _refuse(name, text, "text without unpaired surrogates")


def _strings(values: Sequence[str]) -> tuple[str, ...]:
    expected = "a list of strings, none of them empty"
    if not isinstance(values, list | tuple) or not values:
        _refuse("choice", values, expected)
    for value in values:
        if not isinstance(value, str) or not value:
            _refuse("choice", values, expected)
    return tuple(values)


def _schema_text(schema: object) -> str:
    """JSON text of a schema, its keys in their order, which is the order that replies have."""
    expected = "a JSON schema (an object, or its JSON text), or true for any JSON value"
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError) as error:
            _refuse("json_schema", schema, f"{expected}; {error}")
    if schema is not True and not isinstance(schema, Mapping):
        _refuse("json_schema", schema, expected)
    try:
        text = json.dumps(schema, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except (TypeError, ValueError, RecursionError) as error:
        _refuse("json_schema", schema, f"{expected}; {error}")
    enforceable(json.loads(text))
    return text
