"""JSON schemas that can be enforced, in the spelling that the grammar library understands.

Knows keywords; must not know tokens. What the library would skip is refused; what it would take in
another sense is rewritten, never so that more would match.
"""

import difflib
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn

from deepinfer.errors import RequestError
from deepinfer.sampling.patterns import within_json

Schema = dict[str, Any]

_NAME = "structured.json_schema"
_NOTES = frozenset((
    "title", "description", "default", "examples", "$comment", "$schema", "$id", "deprecated",
    "readOnly", "writeOnly",
))  # fmt: skip
# Keywords of values of one type.
_OF_TYPE = {
    "string": ("minLength", "maxLength", "pattern", "format"),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    "array": ("items", "prefixItems", "minItems", "maxItems"),
    "object": (
        "properties", "required", "additionalProperties", "patternProperties", "minProperties",
        "maxProperties",
    ),
    "boolean": (),
    "null": (),
}  # fmt: skip
_TYPES = (*_OF_TYPE, "integer")
_COMBINING = ("$ref", "enum", "const", "anyOf", "oneOf", "allOf")
_KNOWN = {*_NOTES, *_COMBINING, "type", "$defs", "definitions"}.union(*_OF_TYPE.values())
_COUNTS = (
    "minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties",
)  # fmt: skip
FORMATS = (
    "date", "date-time", "time", "duration", "email", "hostname", "ipv4", "ipv6", "uri",
    "uri-reference", "uri-template", "uuid", "json-pointer", "relative-json-pointer",
)  # fmt: skip
_BYTE = r"(?:25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)"
_LABEL = "[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
# Formats of which the library takes more: numbers with zeros in front, labels of any length.
_OWN_FORMATS = {"ipv4": rf"^(?:{_BYTE}\.){{3}}{_BYTE}$", "hostname": rf"^{_LABEL}(?:\.{_LABEL})*$"}
_MOST_MULTIPLE = 1024  # larger divisors are skipped by the library
_MOST_EXACT = 2**53  # whole numbers past it are rounded by the library
_MOST_COUNT = 2**31 - 1


def enforceable(schema: object) -> Schema:
    """The schema as the library has to be given it; everything that matches it matches `schema`.

    Objects whose schema lists properties or patterns have no others, unless it says false anyway.
    `pattern` and keys of patternProperties are searched for, as JSON schema says. Formats are
    checked for their form: the 30th of February is a date.

    Args:
        schema: what json.loads gives.

    Raises:
        RequestError: it is no schema, or has a keyword, or keywords side by side, that would not be
            enforced; the message names the place.
    """
    try:
        return _Schemas(schema).rewritten()
    except RecursionError:
        _refuse("", "it is nested too deeply")


def _refuse(path: str, why: str) -> NoReturn:
    raise RequestError(f"{_NAME} at {path or '/'}: {why}")


class _Schemas:
    """One schema with its definitions."""

    def __init__(self, root: object) -> None:
        self.root = root
        self.definitions: Schema = {}  # by reference
        for keyword in ("$defs", "definitions"):
            listed = root.get(keyword, {}) if isinstance(root, dict) else {}
            if not isinstance(listed, dict):
                _refuse(f"/{keyword}", "expected an object")
            for name, schema in listed.items():
                pointer = name.replace("~", "~0").replace("/", "~1")
                self.definitions[f"#/{keyword}/{pointer}"] = schema

    def rewritten(self) -> Schema:
        root = {} if self.root is True else self.root
        new = self._schema(root, "")
        for keyword in ("$defs", "definitions"):
            if isinstance(root, dict) and keyword in root:
                new[keyword] = self._each(root[keyword], f"/{keyword}")
        for name, schema in {"#": root, **self.definitions}.items():
            self._check_circle(schema, (name,))
        return new

    def _check_circle(self, schema: object, names: tuple[str, ...]) -> None:
        """Refuse a definition that is defined by itself, with nothing in between.

        Args:
            names: the definitions on the way to `schema`, all of the same value.
        """
        if not isinstance(schema, dict):
            return
        if "$ref" in schema:
            name = schema["$ref"]
            if name in names:
                _refuse("", f"$ref {name} leads back to itself")
            target = self.root if name == "#" else self.definitions.get(name)
            self._check_circle(target, (*names, name))
        for keyword in ("anyOf", "oneOf", "allOf"):
            for branch in schema.get(keyword, ()):
                self._check_circle(branch, names)

    def _schema(self, schema: object, path: str) -> Schema:
        if schema is True:
            return {}
        if not isinstance(schema, dict):
            _refuse(path, f"{schema!r:.60}; expected an object, or true for any value")
        self._check_keywords(schema, path)
        for keyword in _COMBINING:
            if keyword in schema:
                rewrite: Callable[[Schema, str], Schema] = getattr(
                    self, f"_{keyword.lstrip('$').lower()}"
                )
                return rewrite(schema, path)
        return self._typed(schema, path)

    def _check_keywords(self, schema: Schema, path: str) -> None:
        for keyword in schema:
            if keyword in ("$defs", "definitions", "$id") and path:
                _refuse(path, f"{keyword} is supported at the top only; move it there")
            if keyword not in _KNOWN and not _says_nothing(keyword, schema[keyword]):
                near = difflib.get_close_matches(keyword, _KNOWN, n=1)
                hint = f"; did you mean {near[0]}?" if near else "; leave it out"
                _refuse(path, f"{keyword} is not supported and would not be enforced{hint}")

    def _alone(self, schema: Schema, path: str, *keywords: str) -> None:
        """Refuse constraints beside `keywords`."""
        beside = [k for k in schema if k in _KNOWN - _NOTES - {"$defs", "definitions"}
                  and k not in keywords]  # fmt: skip
        if beside:
            _refuse(path, f"{beside[0]} beside {keywords[0]} is not supported; put it inside")

    def _ref(self, schema: Schema, path: str) -> Schema:
        self._alone(schema, path, "$ref")
        target = schema["$ref"]
        if target != "#" and target not in self.definitions:
            _refuse(path, f"$ref {target!r:.60}; expected '#' or a name under $defs")
        return {"$ref": target}

    def _enum(self, schema: Schema, path: str) -> Schema:
        self._alone(schema, path, "enum", "type")
        values = schema["enum"]
        if not isinstance(values, list) or not values:
            _refuse(path, "enum: expected a list of at least one value")
        self._check_values(values, schema, path)
        return {"enum": values}

    def _const(self, schema: Schema, path: str) -> Schema:
        self._alone(schema, path, "const", "type")
        self._check_values([schema["const"]], schema, path)
        return {"const": schema["const"]}

    def _check_values(self, values: Iterable[object], schema: Schema, path: str) -> None:
        types = _types(schema, path)
        for value in values:
            if types and not _type_names(value) & set(types):
                _refuse(path, f"{value!r:.60} is not of type {' or '.join(types)}")
            if any(abs(number) > _MOST_EXACT for number in _whole_numbers(value)):
                _refuse(path, f"{value!r:.60}: whole numbers past 2^53 are not supported")

    def _anyof(self, schema: Schema, path: str) -> Schema:
        self._alone(schema, path, "anyOf")
        return {"anyOf": self._list(schema["anyOf"], f"{path}/anyOf")}

    def _oneof(self, schema: Schema, path: str) -> Schema:
        self._alone(schema, path, "oneOf")
        branches = schema["oneOf"]
        new = self._list(branches, f"{path}/oneOf")
        for i, one in enumerate(branches):
            for j in range(i):
                if not self._are_disjoint(one, branches[j]):
                    _refuse(
                        path,
                        f"oneOf: a value could match alternatives {j} and {i} both; use anyOf, or"
                        " a required property whose const tells them apart",
                    )
        return {"anyOf": new}

    def _allof(self, schema: Schema, path: str) -> Schema:
        self._alone(schema, path, "allOf")
        new = self._list(schema["allOf"], f"{path}/allOf")
        if len(new) != 1:
            _refuse(path, "allOf of several schemas is not supported; merge them into one")
        return new[0]

    def _typed(self, schema: Schema, path: str) -> Schema:
        """A schema of keywords of types: what it has of each type that it allows."""
        used = [name for name, words in _OF_TYPE.items() if any(w in schema for w in words)]
        types = _types(schema, path) or used
        if not types:
            return {}
        for name in used:
            if name not in types and not (name == "number" and "integer" in types):
                word = next(w for w in _OF_TYPE[name] if w in schema)
                _refuse(path, f"{word} says nothing of type {' or '.join(types)}")
        new: Schema = {"type": types[0] if len(types) == 1 else types}
        for word in _COUNTS:
            if word in schema and not (_is_whole(schema[word]) and 0 <= schema[word] < _MOST_COUNT):
                _refuse(path, f"{word} = {schema[word]!r:.60}; expected a whole number >= 0")
        if "string" in types:
            new |= self._string(schema, path)
        if "number" in types or "integer" in types:
            new |= self._number(schema, path, "number" in types)
        if "array" in types:
            new |= self._array(schema, path)
        if "object" in types:
            new |= self._object(schema, path)
        return new

    def _string(self, schema: Schema, path: str) -> Schema:
        new = {word: schema[word] for word in _OF_TYPE["string"] if word in schema}
        if (
            len(new.keys() - {"minLength", "maxLength"})
            + bool(new.keys() & {"minLength", "maxLength"})
            > 1
        ):
            _refuse(path, f"{' beside '.join(new)} is not supported; keep one of them")
        if "pattern" in new:
            new["pattern"] = self._pattern(new["pattern"], f"{path}/pattern")
        if "format" in new and new["format"] not in FORMATS:
            _refuse(path, f"format {new['format']!r:.60}; expected one of {', '.join(FORMATS)}")
        if new.get("format") in _OWN_FORMATS:
            new["pattern"] = self._pattern(_OWN_FORMATS[new.pop("format")], path)
        return new

    def _pattern(self, pattern: object, path: str) -> str:
        if not isinstance(pattern, str):
            _refuse(path, f"{pattern!r:.60}; expected a regular expression")
        return within_json(pattern, f"{_NAME} at {path}")

    def _number(self, schema: Schema, path: str, fractions: bool) -> Schema:
        new = {word: schema[word] for word in _OF_TYPE["number"] if word in schema}
        for word, value in new.items():
            if not isinstance(value, int | float) or isinstance(value, bool):
                _refuse(path, f"{word} = {value!r:.60}; expected a number")
        if "multipleOf" in new:
            divisor = new["multipleOf"]
            if fractions or len(new) > 1:
                _refuse(path, "multipleOf is supported for type integer, without bounds")
            if not _is_whole(divisor) or not 1 <= divisor <= _MOST_MULTIPLE:
                _refuse(path, f"multipleOf = {divisor}; expected a whole number in"
                        f" 1..{_MOST_MULTIPLE}")  # fmt: skip
        return new

    def _array(self, schema: Schema, path: str) -> Schema:
        new: Schema = {word: schema[word] for word in ("minItems", "maxItems") if word in schema}
        if "prefixItems" in schema:
            new["prefixItems"] = self._list(schema["prefixItems"], f"{path}/prefixItems")
        if "items" in schema:
            items = schema["items"]
            new["items"] = False if items is False else self._schema(items, f"{path}/items")
        elif "prefixItems" not in schema:
            new["items"] = {}
        return new

    def _object(self, schema: Schema, path: str) -> Schema:
        """Keys that are listed cannot be told from others that are spelled with escapes, so an
        object has either listed keys or others.
        """
        bounds = ("minProperties", "maxProperties")
        new: Schema = {word: schema[word] for word in bounds if word in schema}
        listed = self._each(schema.get("properties", {}), f"{path}/properties")
        required = schema.get("required", [])
        if not isinstance(required, list):
            _refuse(f"{path}/required", "expected a list of names")
        for name in required:
            if name not in listed:
                _refuse(f"{path}/required", f"{name!r:.60} is not among properties; list it there")
        patterns = schema.get("patternProperties", {})
        if not isinstance(patterns, Mapping):
            _refuse(f"{path}/patternProperties", "expected an object")
        others = schema.get("additionalProperties", True)
        if not isinstance(others, bool | dict):
            _refuse(f"{path}/additionalProperties", "expected a schema, true or false")
        if "properties" in schema or patterns:
            if others not in (True, False, {}):
                _refuse(path, "additionalProperties with a schema beside properties is not"
                        " supported; set it to false")  # fmt: skip
            others = False
        if patterns:
            new["patternProperties"] = self._patterns(patterns, listed, path)
        if new.get("minProperties", 0) > 1 and (others is not False or patterns):
            _refuse(path, "minProperties past 1 is supported where all properties are listed")
        if "properties" in schema:
            new |= {"properties": listed, "required": list(dict.fromkeys(required))}
        if others is False:
            new["additionalProperties"] = False
        else:
            new["additionalProperties"] = self._schema(others, f"{path}/additionalProperties")
        return new

    def _patterns(self, patterns: Mapping[str, Any], listed: Schema, path: str) -> Schema:
        if len(patterns) > 1 or listed:
            _refuse(path, "patternProperties beside properties, or of several patterns, is not"
                    " supported: a key could match two")  # fmt: skip
        ((pattern, schema),) = patterns.items()
        place = f"{path}/patternProperties"
        return {self._pattern(pattern, place): self._schema(schema, f"{place}/{pattern}")}

    def _each(self, schemas: object, path: str) -> Schema:
        if not isinstance(schemas, dict):
            _refuse(path, "expected an object")
        return {name: self._schema(schema, f"{path}/{name}") for name, schema in schemas.items()}

    def _list(self, schemas: object, path: str) -> list[Schema]:
        if not isinstance(schemas, list) or not schemas:
            _refuse(path, "expected a list of at least one schema")
        return [self._schema(schema, f"{path}/{i}") for i, schema in enumerate(schemas)]

    def _are_disjoint(self, one: object, other: object) -> bool:
        """Whether no value can match both; False where that is not plain to see."""
        one, other = self._resolved(one), self._resolved(other)
        first, second = _values_of(one), _values_of(other)
        if first is not None and second is not None:
            return not any(_equal(a, b) for a in first for b in second)
        kinds = [_kinds_of(schema, values) for schema, values in ((one, first), (other, second))]
        if all(kinds) and not kinds[0] & kinds[1]:
            return True
        shared = set(one.get("required", ())) & set(other.get("required", ()))
        return kinds == [{"object"}, {"object"}] and any(
            self._are_disjoint(one["properties"][name], other["properties"][name])
            for name in shared
        )

    def _resolved(self, schema: object) -> Schema:
        """A schema, references and single allOf followed; {} where they lead in a circle."""
        for _ in range(len(self.definitions) + 2):
            if not isinstance(schema, dict):
                return {}
            if "$ref" in schema:
                schema = self.root if schema["$ref"] == "#" else self.definitions[schema["$ref"]]
            elif "allOf" in schema:
                schema = schema["allOf"][0]
            else:
                return schema
        return {}


def _says_nothing(keyword: str, value: object) -> bool:
    """Whether a keyword that is not supported is spelled out with its default."""
    return (keyword, value) in (("uniqueItems", False), ("nullable", False))


def _types(schema: Schema, path: str) -> list[str]:
    """The types that a schema names; none where it names none."""
    if "type" not in schema:
        return []
    named = schema["type"]
    types = named if isinstance(named, list) else [named]
    if not types or any(name not in _TYPES for name in types):
        _refuse(path, f"type {named!r:.60}; expected one or a list of {', '.join(_TYPES)}")
    return list(dict.fromkeys(types))


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _type_names(value: object) -> set[str]:
    """Names of the types that a JSON value has."""
    if value is None:
        return {"null"}
    if isinstance(value, bool):
        return {"boolean"}
    if isinstance(value, int | float):
        return {"number", "integer"} if value == int(value) else {"number"}
    return {"string" if isinstance(value, str) else "array" if isinstance(value, list)
            else "object"}  # fmt: skip


def _whole_numbers(value: object) -> Iterable[int]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            yield from _whole_numbers(item)
    elif isinstance(value, int):
        yield value


def _equal(one: object, other: object) -> bool:
    """Equality of JSON: 1 is 1.0, but not true."""
    return one == other and isinstance(one, bool) == isinstance(other, bool)


def _values_of(schema: Schema) -> list[object] | None:
    """The only values that match, None where they are not listed."""
    if "const" in schema:
        return [schema["const"]]
    return schema.get("enum")


def _kinds_of(schema: Schema, values: list[object] | None) -> set[str]:
    """Types that a matching value may have, "number" for both kinds; none where that is open."""
    if values is not None:
        names = set().union(*map(_type_names, values))
    else:
        named = schema.get("type", [])
        names = set(named if isinstance(named, list) else [named])
    return {"number" if name == "integer" else name for name in names}
