"""Which forms are refused, with what words, and how the others are spelled for the library."""

import json
from typing import Any

import pytest

from deepinfer.errors import RequestError
from deepinfer.sampling.params import SamplingParams
from deepinfer.sampling.patterns import whole_text, within_json
from deepinfer.sampling.schema import enforceable
from deepinfer.sampling.structured import MOST_CHARACTERS, StructuredOutput

STRING, NUMBER = {"type": "string"}, {"type": "number"}


def tagged(value: str, **more: Any) -> dict[str, Any]:
    """An object that its property `kind` tells from others."""
    properties = {"kind": {"const": value}, **more}
    return {"type": "object", "properties": properties, "required": ["kind"]}


# Schemas


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        # Silently skipped by the library.
        ({"not": STRING}, "not is not supported"),
        ({"if": STRING, "then": STRING}, "if is not supported"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems is not supported"),
        ({"type": "array", "contains": STRING}, "contains is not supported"),
        ({"type": "object", "dependentRequired": {"a": ["b"]}}, "dependentRequired is not"),
        ({"type": "object", "dependentSchemas": {}}, "dependentSchemas is not supported"),
        ({"type": "object", "propertyNames": STRING}, "propertyNames is not supported"),
        ({"type": "object", "unevaluatedProperties": False}, "unevaluatedProperties is not"),
        ({"type": "string", "contentEncoding": "base64"}, "contentEncoding is not supported"),
        ({"type": "string", "nullable": True}, "nullable is not supported"),
        ({"$anchor": "x"}, r"\$anchor is not supported"),
        ({"type": "string", "maxLenght": 3}, "maxLenght is not .* did you mean maxLength"),
        ({"allOf": [STRING, {"minLength": 2}]}, "allOf of several"),
        ({"allOf": [{"minLength": 2}], "type": "string"}, "type beside allOf"),
        ({"anyOf": [STRING, NUMBER], "minLength": 2}, "minLength beside anyOf"),
        ({"$defs": {"x": STRING}, "$ref": "#/$defs/x", "minLength": 2}, r"minLength beside \$ref"),
        ({"enum": ["a"], "minLength": 2}, "minLength beside enum"),
        ({"type": "string", "pattern": "a", "maxLength": 2}, "maxLength beside pattern"),
        ({"type": "string", "format": "date", "pattern": "a"}, "pattern beside format"),
        ({"type": "string", "format": "iri"}, "format 'iri'; expected one of date"),
        ({"type": "number", "multipleOf": 2}, "multipleOf is supported for type integer"),
        ({"type": "integer", "multipleOf": 2, "minimum": 3}, "without bounds"),
        ({"type": "integer", "multipleOf": 2.5}, "multipleOf = 2.5; expected a whole number"),
        ({"type": "integer", "multipleOf": 4096}, "multipleOf = 4096"),
        ({"type": "object", "required": ["a"]}, "'a' is not among properties"),
        # Taken in another sense by the library.
        ({"oneOf": [STRING, {"type": ["string", "null"]}]}, "alternatives 0 and 1 both"),
        ({"oneOf": [{"enum": [1, 2]}, {"enum": [2.0]}]}, "alternatives 0 and 1 both"),
        ({"oneOf": [NUMBER, {"type": "integer"}]}, "alternatives 0 and 1 both"),
        ({"oneOf": [{}, STRING]}, "alternatives 0 and 1 both"),
        ({"oneOf": [tagged("a"), {"type": "object"}]}, "alternatives 0 and 1 both"),
        ({"const": 2**53 + 1}, "whole numbers past 2.53"),
        ({"type": "string", "enum": ["a", 1]}, "1 is not of type string"),
        ({"type": "integer", "const": True}, "True is not of type integer"),
        ({"type": "object", "properties": {}, "additionalProperties": STRING}, "beside properties"),
        ({"type": "object", "properties": {"a": {}}, "patternProperties": {"a": {}}}, "match two"),
        ({"type": "object", "patternProperties": {"a": {}, "b": {}}}, "match two"),
        ({"type": "object", "minProperties": 2}, "minProperties past 1"),
        ({"$ref": "#"}, "# leads back to itself"),
        ({"$defs": {"x": {"anyOf": [{"$ref": "#/$defs/x"}, STRING]}}}, "leads back to itself"),
        ({"$ref": "https://example.org/x"}, r"expected '#' or a name under \$defs"),
        ({"$ref": "#/$defs/x"}, r"expected '#' or a name under \$defs"),
        ({"items": {"$id": "x"}}, r"/items: \$id is supported at the top only"),
        ({"items": {"$defs": {}}}, r"/items: \$defs is supported at the top only"),
        # No schemas.
        (False, "expected a JSON schema"),
        ("no JSON", "expected a JSON schema"),
        ([], "expected a JSON schema"),
        ({"type": "text"}, "type 'text'; expected one or a list of string"),
        ({"type": []}, r"type \[\]"),
        ({"type": "string", "minimum": 2}, "minimum says nothing of type string"),
        ({"type": "string", "minLength": -1}, "minLength = -1"),
        ({"type": "string", "minLength": 1.5}, "minLength = 1.5"),
        ({"type": "string", "pattern": 3}, "/pattern: 3; expected a regular expression"),
        ({"type": "integer", "minimum": "2"}, "minimum = '2'; expected a number"),
        ({"type": "integer", "exclusiveMinimum": True}, "expected a number"),
        ({"enum": []}, "at least one value"),
        ({"anyOf": []}, "/anyOf: expected a list of at least one"),
        ({"anyOf": [3]}, "/anyOf/0: 3; expected an object"),
        ({"properties": 3}, "/properties: expected an object"),
        ({"properties": {"a": False}}, "/properties/a: False"),
        ({"properties": {}, "required": "a"}, "/required: expected a list"),
        ({"additionalProperties": 3}, "/additionalProperties: expected a schema"),
        ({"$defs": 3}, r"/\$defs: expected an object"),
        ({"default": float("nan")}, "expected a JSON schema"),
        ({"default": object()}, "expected a JSON schema"),
    ],
)  # fmt: skip
def test_what_cannot_be_enforced_is_refused(schema: Any, words: str) -> None:
    with pytest.raises(RequestError, match=words) as caught:
        StructuredOutput(json_schema=schema)
    assert "structured.json_schema" in str(caught.value)


def test_nested_too_deeply() -> None:
    schema: Any = STRING
    for _ in range(2000):
        schema = {"items": schema}
    with pytest.raises(RequestError, match=r"nested too deeply|recursion"):
        StructuredOutput(json_schema=schema)


@pytest.mark.parametrize(
    ("schema", "spelled"),
    [
        (True, {}),
        ({"title": "x", "default": 3, "$schema": "y", "uniqueItems": False}, {}),
        ({"minLength": 2}, {"type": "string", "minLength": 2}),
        ({"type": "array", "minItems": 2}, {"type": "array", "minItems": 2, "items": {}}),
        ({"items": False}, {"type": "array", "items": False}),
        ({"type": "string", "pattern": "b"}, {"type": "string", "pattern": "^(?:.*(?:b).*)$"}),
        ({"type": "object"}, {"type": "object", "additionalProperties": {}}),
        (
            {"properties": {"a": {}}, "required": ["a", "a"], "additionalProperties": True},
            {"type": "object", "properties": {"a": {}}, "required": ["a"],
             "additionalProperties": False},
        ),
        ({"allOf": [NUMBER], "title": "x"}, NUMBER),
        ({"oneOf": [STRING, NUMBER]}, {"anyOf": [STRING, NUMBER]}),
        ({"oneOf": [{"const": 1}, {"const": True}]}, {"anyOf": [{"const": 1}, {"const": True}]}),
        ({"type": ["integer", "string"], "minimum": 1, "format": "date"},
         {"type": ["integer", "string"], "minimum": 1, "format": "date"}),
        ({"definitions": {"x/y~": STRING}, "$ref": "#/definitions/x~1y~0"},
         {"definitions": {"x/y~": STRING}, "$ref": "#/definitions/x~1y~0"}),
        ({"type": ["string", "string", "null"], "enum": ["a", None]}, {"enum": ["a", None]}),
    ],
)  # fmt: skip
def test_how_schemas_are_spelled(schema: Any, spelled: Any) -> None:
    assert enforceable(schema) == spelled
    assert StructuredOutput(json_schema=schema).schema == spelled
    assert enforceable(spelled) == spelled or "pattern" in spelled, "spelling is done once"


def test_alternatives_that_a_property_tells_apart() -> None:
    defs = {"b": {"allOf": [tagged("b", other=STRING)]}}
    schema = {"$defs": defs, "oneOf": [tagged("a", x=NUMBER), {"$ref": "#/$defs/b"}, STRING]}
    assert len(enforceable(schema)["anyOf"]) == 3
    defs["b"] = tagged("a")
    with pytest.raises(RequestError, match="alternatives 0 and 1"):
        enforceable(schema)


def test_schemas_may_come_as_text_and_keep_their_order() -> None:
    schema = {"type": "object", "properties": {"z": STRING, "a": STRING}}
    texts = [json.dumps(schema), json.dumps(schema, indent=1)]
    forms = [StructuredOutput(json_schema=x) for x in (schema, *texts)]
    assert len(set(forms)) == 1
    assert list(forms[0].schema["properties"]) == ["z", "a"]
    assert StructuredOutput(json_schema="true") == StructuredOutput(json_schema=True)


# Regular expressions


@pytest.mark.parametrize(
    "pattern",
    [
        "(?=a)b", "(?!a)", "(?<=a)", "(?i)a", "(?P<x>a)", "(?<x>a)", r"(a)\1", r"\bfoo", r"\Aa",
        r"\Z", r"\p{L}", r"\k<x>", r"\q", "a^b", "a$b", "(^a)", "(a$)", "|^a$|b$c", "a**", "a++",
        "*a", "(*a)", "(a", "a)", ")a(", "[]", "[^]", "[[:alpha:]]", "[a", "a{,2}", "a{", "{2}",
        "\\", r"[\b]", r"\ud800", "a|*", "^*", "(?#x)",
    ],
)  # fmt: skip
def test_what_would_be_skipped_in_an_expression_is_refused(pattern: str) -> None:
    with pytest.raises(RequestError, match=r"x = .* at character \d+ is not supported"):
        whole_text(pattern, "x")
    with pytest.raises(RequestError, match=r"x = .* at character \d+ is not supported"):
        within_json(pattern, "x")
    with pytest.raises(RequestError, match=r"structured\.regex"):
        StructuredOutput(regex=pattern)


@pytest.mark.parametrize(
    "pattern",
    ['"', r"\"", "\\\\", "\n", r"\n", r"\t", r"\x1f", r'[a"]', r"[\\]", r"\u0022", "a{1001}"],
)
def test_what_json_spells_with_escapes_is_refused_in_json(pattern: str) -> None:
    with pytest.raises(RequestError, match="in a JSON string"):
        within_json(pattern, "x")
    assert whole_text(pattern, "x") == pattern.replace(r"\x", r"\u00")


@pytest.mark.parametrize(
    ("pattern", "whole", "inside"),
    [
        ("a", "a", "^(?:.*(?:a).*)$"),
        ("^a+?$", "a+", "^(?:(?:a+))$"),
        ("^a|b$", "a|b", "^(?:(?:a).*|.*(?:b))$"),
        ("^(a|b){2,}", "(a|b){2,}", "^(?:(?:(a|b){2,}).*)$"),
        ("", "", "^(?:.*.*)$"),
        (r"^[^\n]$", r"[^\ud800-\udfff\n]", r"^(?:(?:[^\n]))$"),
        (r"^\S.\d$", r"[^\s\ud800-\udfff][^\n\ud800-\udfff]\d", r"^(?:(?:\S.\d))$"),
        (r"^[\w.-]\.\/\x41\u0042$", r"[\w.-]\.\/\u0041\u0042",
         r"^(?:(?:[\w.-]\.\/\u0041\u0042))$"),
        (r"(a*b)?[\x41\\x]", r"(a*b)?[\u0041\\x]", None),
        ("^(a*b)??c$", "(a*b)?c", "^(?:(?:(a*b){0,1}c))$"),
    ],
)  # fmt: skip
def test_how_expressions_are_spelled(pattern: str, whole: str, inside: str | None) -> None:
    assert whole_text(pattern, "x") == whole
    assert inside is None or within_json(pattern, "x") == inside


# The parameter


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({}, "none given; expected one of json_schema, regex, ebnf, choice"),
        ({"regex": "a", "choice": ["a"]}, "regex and choice given"),
        ({"after_thinking": True}, "none given"),
        ({"regex": "a", "after_thinking": 1}, "after_thinking = 1: expected true or false"),
        ({"regex": ""}, "regex = ''"),
        ({"regex": 3}, "regex = 3"),
        ({"ebnf": b"x"}, "ebnf = b'x'"),
        ({"choice": "ab"}, "choice = 'ab'"),
        ({"choice": []}, r"choice = \[\]"),
        ({"choice": ["a", ""]}, "none of them empty"),
        ({"choice": ["\ud800"]}, "unpaired surrogates"),
        ({"ebnf": "x" * (MOST_CHARACTERS + 1)}, "at most 65536 characters, found 65537"),
        ({"regexp": "a"}, "structured.regexp is unknown; did you mean 'regex'"),
    ],
)
def test_other_parameters_are_refused(values: dict[str, Any], words: str) -> None:
    with pytest.raises(RequestError, match=words):
        StructuredOutput.from_dict(values)
    with pytest.raises(RequestError, match=words):
        SamplingParams.from_dict({"structured": values})


def test_the_parameter_is_made_once_and_can_be_compared() -> None:
    form = StructuredOutput(choice=["a", "b"], after_thinking=True)
    assert form.choice == ("a", "b")
    params = SamplingParams.from_dict(
        {"structured": {"choice": ["a", "b"], "after_thinking": True}}
    )
    assert params.structured == form
    assert hash(params) == hash(SamplingParams(structured=form))
    with pytest.raises(RequestError, match="structured = 'json'"):
        SamplingParams(structured="json")  # type: ignore[arg-type]
