"""Grammars over the demo vocabulary: what masks let through is right, and what is right passes.

Texts are walked at random through the masks and judged by others: jsonschema, re, json, or all
strings of a finite language.
"""

import contextlib
import ipaddress
import itertools
import json
import random
import re
import threading
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer.checkpoint.tokenizer import Tokenizer
from deepinfer.errors import RequestError
from deepinfer.sampling.batch import SamplingBatch
from deepinfer.sampling.grammar import GrammarCompiler, GrammarState
from deepinfer.sampling.params import SamplingParams
from deepinfer.sampling.schema import FORMATS
from deepinfer.sampling.structured import StructuredOutput
from deepinfer.testing.sync import forbid_sync
from tests.cpu.grammar_helpers import DEMO, EOS, WORDS, V, Walker, allowed, begin

THINK_END = 7


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(DEMO)


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(tokenizer, V, EOS)


@pytest.fixture(scope="module")
def walker(tokenizer: Tokenizer) -> Walker:
    return Walker(tokenizer)


# Masks


def prefixes(language: set[str]) -> set[str]:
    return {text[:end] for text in language for end in range(len(text) + 1)}


FINITE: list[tuple[StructuredOutput, set[str]]] = [
    (StructuredOutput(choice=["yes", "no"]), {"yes", "no"}),
    (StructuredOutput(choice=["a", "ab", "abc", 'q"\\\n', "\u6f22\U0001f642"]),
     {"a", "ab", "abc", 'q"\\\n', "\u6f22\U0001f642"}),
    (StructuredOutput(regex="^[ab]{1,3}-(?:one|two)?$"),
     {"".join(x) + "-" + y for n in (1, 2, 3) for x in itertools.product("ab", repeat=n)
      for y in ("", "one", "two")}),
    (StructuredOutput(regex="the |th|"), {"the ", "th", ""}),
    (StructuredOutput(ebnf='root ::= "x" y | y\ny ::= [0-2] " "?'),
     {x + y + z for x in ("x", "") for y in "012" for z in (" ", "")}),
    (StructuredOutput(json_schema={"enum": ["one", 2, None, {"a": [True]}]}),
     {'"one"', "2", "null", '{"a":[true]}'}),
]  # fmt: skip


@pytest.mark.parametrize(("structured", "language"), FINITE)
def test_a_token_is_allowed_if_and_only_if_a_text_goes_on_with_it(
    compiler: GrammarCompiler,
    walker: Walker,
    tokenizer: Tokenizer,
    structured: StructuredOutput,
    language: set[str],
) -> None:
    """At every place: ordinary tokens, the end token, and no special token."""
    encoded = {text.encode() for text in language}
    begun = {text[:end] for text in encoded for end in range(len(text) + 1)}
    state, rng = begin(compiler, structured), random.Random(1)
    first = state.fork()
    for _ in range(4):
        state, text = first.fork(), b""
        while not state.finished:
            expected = {
                token for token in range(12, V) if text + spelled(tokenizer, token) in begun
            }
            expected |= {EOS} if text in encoded else set()
            found = allowed(state)
            assert found == expected, text
            refused = rng.sample(sorted(set(range(V)) - found), 20)
            assert not any(state.accept(token) for token in [*refused, -1, V])
            token = rng.choice(sorted(found))
            assert state.accept(token)
            text += b"" if token == EOS else spelled(tokenizer, token)
        assert text in encoded


ALPHABET = {}  # bytes of the characters that stand for them in byte-level vocabularies


def spelled(tokenizer: Tokenizer, token: int) -> bytes:
    """The bytes of a token."""
    if not ALPHABET:
        plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
        others = [byte for byte in range(256) if byte not in plain]
        ALPHABET.update({chr(byte): byte for byte in plain})
        ALPHABET.update({chr(256 + i): byte for i, byte in enumerate(others)})
    piece = tokenizer.inner.id_to_token(token)
    return bytes(ALPHABET[character] for character in piece)


PATTERNS = [
    r"[a-z]{1,9}@[a-z]{1,5}\.(?:com|org)", r"\d{3}-\d{4}", r"^(?:\w+\s){2,4}\w+$",
    r"(?:(?:a|bc)*,)+",
    r"\S+", r"[^a-z\s]{3,}", r"\W\D", r"\(\[\{x\}\]\)\\", r"[\]\-\\^]{2}", r"\u0041\x42|\t\n",
    r"..", r"^a|b$", r"(ab?)??c+?",
]  # fmt: skip


@pytest.mark.parametrize("pattern", PATTERNS)
def test_texts_match_their_regular_expression(
    compiler: GrammarCompiler, walker: Walker, pattern: str
) -> None:
    start = begin(compiler, StructuredOutput(regex=pattern))
    rng, found = random.Random(pattern), 0
    for _ in range(6):
        ids = walker.walk(start.fork(), rng)
        if ids is not None:
            found += 1
            text = walker.tokenizer.decode(ids)
            assert re.fullmatch(pattern, text, re.ASCII), text
    assert found >= 2


def accepts(state: GrammarState, text: str) -> bool:
    """Whether a text may be written, and be all."""
    return (not text or state._matcher.accept_string(text)) and state._matcher.is_completed()


SHORT = ["".join(text) for n in range(5) for text in itertools.product("ab1 ", repeat=n)]
EXACT = [
    "(a*b)?1", "1(a*b)??", "(ba*)?1", "(a{2,}b)?", "((a|b)*1)?", "(a*b)*", "(a|ab)(b|)", "(|a)+b",
    "a{2}|b{1,}|1{0,2}a", r"\x61b+|\u0031", "[ab]{2,3}?", "a.b", r"\w\W\w", r"\S+\s?", r"[^\d\s]+",
    "[^a]", "^a|b$", "^(?:a|b|)1", "(a?b?1?){2}", "(?:a+b+)+$",
]  # fmt: skip


@pytest.mark.parametrize("pattern", EXACT)
def test_what_matches_an_expression_and_nothing_else(
    compiler: GrammarCompiler, pattern: str
) -> None:
    """All short texts: as a whole, and searched for in a JSON string."""
    whole = begin(compiler, StructuredOutput(regex=pattern))
    inside = begin(compiler, StructuredOutput(json_schema={"type": "string", "pattern": pattern}))
    for text in SHORT:
        assert accepts(whole.fork(), text) == bool(re.fullmatch(pattern, text)), text
        assert accepts(inside.fork(), f'"{text}"') == bool(re.search(pattern, text)), text


SUM = 'root ::= term ("+" term)*\nterm ::= [1-9] [0-9]{0,2} | "(" root ")"'


def test_texts_follow_their_grammar(compiler: GrammarCompiler, walker: Walker) -> None:
    start, rng = begin(compiler, StructuredOutput(ebnf=SUM)), random.Random(1)
    texts = [walker.tokenizer.decode(ids) for _ in range(20)
             if (ids := walker.walk(start.fork(), rng, 60)) is not None]  # fmt: skip
    assert len(set(texts)) > 5
    for text in texts:
        assert set(text) <= set("+()0123456789")
        assert eval(text) > 0  # Python agrees that it is one


# JSON

PERSON: dict[str, Any] = {
    "$defs": {"node": {"type": "object", "required": ["value"], "additionalProperties": False,
                       "properties": {"value": {"type": "integer"},
                                      "next": {"anyOf": [{"$ref": "#/$defs/node"},
                                                         {"type": "null"}]}}}},
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 12},
        'q"\\é': {"type": "string", "pattern": "b"},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "ratio": {"type": "number", "exclusiveMinimum": -1.5, "maximum": 2},
        "tags": {"type": "array", "items": {"enum": ["x", "y", 3, None]}, "minItems": 1,
                 "maxItems": 3},
        "pair": {"type": "array", "prefixItems": [{"type": "boolean"}, {"const": "z"}],
                 "minItems": 2},
        "list": {"$ref": "#/$defs/node"},
    },
    "required": ["name", "tags", 'q"\\é'],
}  # fmt: skip


def check_walks(
    compiler: GrammarCompiler, walker: Walker, schema: Any, rng: random.Random, walks: int
) -> int:
    """Walk through a schema's texts; returns how many there were, all of which validate."""
    start = begin(compiler, StructuredOutput(json_schema=schema))
    validator = jsonschema.Draft202012Validator(schema)
    found = 0
    for _ in range(walks):
        ids = walker.walk(start.fork(), rng, 250)
        text = "" if ids is None else walker.tokenizer.decode(ids)
        # Bytes that are no text, and a blank of ECMAScript that is none of Python.
        if ids is not None and not {"\ufffd", "\ufeff"} & set(text):
            found += 1
            validator.validate(json.loads(text))
    return found


@pytest.mark.parametrize(
    ("schema", "values"),
    [
        (True, [None, [], {}, 1.5e9, {"a": [{"b": ""}]}, "\n\u00e9", -0.25]),
        (PERSON, [{"name": "A", 'q"\\é': "abc", "tags": ["x", None]},
                  {"name": "é" * 12, 'q"\\é': "b", "age": 150, "ratio": 2, "tags": [3],
                   "pair": [True, "z"],
                   "list": {"value": -1, "next": {"value": 0, "next": None}}}]),
        ({"type": "array", "minItems": 2}, [[1, "a"], [None, None, None]]),
        ({"type": "object", "additionalProperties": {"type": "integer"}}, [{}, {"x": 1, "y": 2}]),
        ({"type": "object", "patternProperties": {"k": {}}}, [{}, {"akb": 1, "k": {}}]),
        ({"oneOf": [{"type": "integer"}, {"type": "string", "maxLength": 2}]}, [7, "ab", ""]),
        ({"type": "string", "format": "date"}, ["2024-02-29"]),
        ({"type": "integer", "multipleOf": 7}, [0, -14, 7007]),
    ],
)  # fmt: skip
def test_valid_json_may_be_written(
    compiler: GrammarCompiler, schema: Any, values: list[Any]
) -> None:
    start = begin(compiler, StructuredOutput(json_schema=schema))
    for value in values:
        jsonschema.validate(value, schema)
        for style in ({"separators": (",", ":")}, {}, {"indent": 2}):
            text = json.dumps(value, ensure_ascii=False, **style)
            assert accepts(start.fork(), text), text


DAY = r"\d{4}-(?:0[1-9]|1[0-2])-(?:0[1-9]|[12]\d|3[01])"
TIME = r"(?:[01]\d|2[0-3]):[0-5]\d:(?:[0-5]\d|60)(?:\.\d+)?(?:Z|[+-](?:[01]\d|2[0-3]):[0-5]\d)"
LABEL = r"[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
POINTER = "(?:/(?:[^/~]|~[01])*)*"
URI_CHARACTER = r"(?:[\w.~!$&'()*+,;=:@/?#\[\]-]|%[0-9A-Fa-f]{2})"
FORM_OF: dict[str, str | Callable[[str], Any]] = {
    "date": DAY, "time": TIME, "date-time": f"{DAY}T{TIME}",
    "duration": r"P(?=.)(?:\d+W|(?:\d+Y)?(?:\d+M)?(?:\d+D)?(?:T(?=.)(?:\d+H)?(?:\d+M)?(?:\d+S)?)?)",
    "hostname": rf"{LABEL}(?:\.{LABEL})*",
    "ipv4": ipaddress.IPv4Address, "ipv6": ipaddress.IPv6Address, "uuid": uuid.UUID,
    "email": r"(?s).+@.+", "uri": rf"[A-Za-z][\w.+-]*:{URI_CHARACTER}*",
    "uri-reference": rf"{URI_CHARACTER}*", "uri-template": r"[^\s<>\"\\^`]*",
    "json-pointer": POINTER, "relative-json-pointer": rf"(?:0|[1-9]\d*)(?:#|{POINTER})",
}  # fmt: skip


@pytest.mark.parametrize("name", FORMATS)
def test_formats(compiler: GrammarCompiler, walker: Walker, name: str) -> None:
    form, rng, found = FORM_OF[name], random.Random(name), 0
    start = begin(compiler, StructuredOutput(json_schema={"type": "string", "format": name}))
    for _ in range(25):
        ids = walker.walk(start.fork(), rng)
        if ids is not None:
            found += 1
            text = json.loads(walker.tokenizer.decode(ids))
            assert re.fullmatch(form, text) if isinstance(form, str) else form(text), text
    assert found or name == "email"  # whose texts hardly end by chance


@pytest.mark.parametrize("schema", [True, {"type": "object"}, {"type": "array"}, PERSON])
def test_json_validates(compiler: GrammarCompiler, walker: Walker, schema: Any) -> None:
    assert check_walks(compiler, walker, schema, random.Random(5), 10) >= 3


def names(least: int = 0) -> st.SearchStrategy[list[str]]:
    return st.lists(st.sampled_from(["a", "b", "k1", "x y", "é"]), unique=True, min_size=least,
                    max_size=3)  # fmt: skip


def limits(low: str, high: str, most: int = 4) -> st.SearchStrategy[dict[str, int]]:
    """Either, both or none."""
    pairs = st.tuples(st.none() | st.integers(0, most), st.none() | st.integers(0, 3))
    return pairs.map(
        lambda pair: (
            ({} if pair[0] is None else {low: pair[0]})
            | ({} if pair[1] is None else {high: (pair[0] or 0) + pair[1]})
        )
    )


VALUES = st.sampled_from([None, True, 0, -3, 2.5, "a", 'é"\n', [1], {"a": 1}, ""])
LEAVES = st.one_of(
    st.just(True),
    st.builds(lambda values: {"enum": values}, st.lists(VALUES, min_size=1, max_size=3)),
    VALUES.map(lambda value: {"const": value}),
    st.sampled_from(["boolean", "null"]).map(lambda name: {"type": name}),
    limits("minLength", "maxLength").map(lambda x: {"type": ["string", "null"], **x}),
    st.sampled_from(["^a+$", "b", "^[a-c]{2,4}$", "x$|^y", r"\d{2}", r"^\w+\s\W$", '[^"]$',
                     "^.{0,3}$", r"\S", "a.b", r"^\u0041\x42"])
    .map(lambda pattern: {"type": "string", "pattern": pattern}),
    st.sampled_from(["date", "time", "email", "ipv4", "uuid", "uri"])
    .map(lambda name: {"type": "string", "format": name}),
    limits("minimum", "maximum", 20).map(lambda x: {"type": "integer", **x}),
    limits("exclusiveMinimum", "maximum", 3).filter(lambda x: x.get("exclusiveMinimum")
    != x.get("maximum", -1)).map(lambda x: {"type": "number", **x}),
    st.integers(1, 12).map(lambda divisor: {"type": "integer", "multipleOf": divisor}),
)  # fmt: skip


def deeper(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    objects = st.dictionaries(st.sampled_from(["a", "b", "k1", "x y", "é"]), inner, max_size=3)
    return st.one_of(
        limits("minItems", "maxItems").flatmap(
            lambda x: inner.map(lambda items: {"type": "array", "items": items, **x})
        ),
        inner.map(lambda first: {"type": "array", "prefixItems": [first]}),
        st.tuples(objects, st.booleans()).map(
            lambda x: {"type": "object", "properties": x[0], "required": sorted(x[0])[: 1 + x[1]]}
        ),
        objects.map(lambda x: {"type": "object", "properties": x, "maxProperties": 1}),
        inner.map(lambda x: {"type": "object", "additionalProperties": x}),
        inner.map(lambda x: {"type": "object", "patternProperties": {"^k": x}}),
        st.lists(inner, min_size=1, max_size=3).map(lambda x: {"anyOf": x}),
        inner.map(lambda x: {"allOf": [x], "title": "one"}),
        inner.map(lambda x: {"oneOf": [{"type": "array", "items": x}, {"type": "null"}]}),
    )


@settings(max_examples=35)
@given(st.recursive(LEAVES, deeper, max_leaves=5), st.integers(0, 2**30))
def test_any_json_that_may_be_written_validates(
    compiler: GrammarCompiler, walker: Walker, schema: Any, seed: int
) -> None:
    pending = compiler.compile(StructuredOutput(json_schema=schema))
    pending.wait()
    with contextlib.suppress(RequestError):  # of bounds that nothing can meet
        pending.state()
        check_walks(compiler, walker, schema, random.Random(seed), 2)


def test_blanks_do_not_go_on_for_ever(compiler: GrammarCompiler, walker: Walker) -> None:
    state = begin(compiler, StructuredOutput(json_schema={"type": "array"}))
    for token in compiler._tokenizer.encode("[", None):
        assert state.accept(token)
    (blank,) = compiler._tokenizer.encode("\n", None)
    count = 0
    while state.accept(blank):
        count += 1
    assert 10 < count < 100


# States


def test_end_tokens_and_finishing(compiler: GrammarCompiler) -> None:
    state = begin(compiler, StructuredOutput(choice=["yes"]))
    assert not state.finished
    assert not state.accept(EOS)
    for token in compiler._tokenizer.encode("yes", None):
        assert not state.finished
        assert state.accept(token)
    assert allowed(state) == {EOS}
    assert state.accept(EOS)
    assert state.finished
    assert not state.accept(EOS)
    with pytest.raises(AssertionError):
        allowed(state)
    state.rollback(1)
    assert not state.finished
    assert allowed(state) == {EOS}


@settings(max_examples=30)
@given(st.booleans(), st.lists(st.integers(-3, 5), max_size=12), st.integers(0, 2**30))
def test_rollback_and_fork_give_the_state_of_the_tokens(
    compiler: GrammarCompiler, after_thinking: bool, moves: list[int], seed: int
) -> None:
    """Whatever was accepted and taken back: as if only what is left had been accepted."""
    structured = StructuredOutput(json_schema={"type": "object"}, after_thinking=after_thinking)
    rng, ids = random.Random(seed), list[int]()
    first = begin(compiler, structured)
    state = first.fork()
    for move in moves:
        if move < 0:
            back = min(-move, len(ids))
            state.rollback(back)
            del ids[len(ids) - back :]
        elif move == 0:
            state = state.fork()
        for _ in range(max(move, 0)):
            if state.finished:
                break
            ids.append(THINK_END if state.thinking and rng.random() < 0.4
                       else rng.choice(sorted(allowed(state))))  # fmt: skip
            assert state.accept(ids[-1])
        again = first.fork()
        assert all(again.accept(token) for token in ids)
        assert (state.finished, state.thinking) == (again.finished, again.thinking)
        if not state.finished:
            assert allowed(state) == allowed(again)


def test_after_thinking_the_form_begins(compiler: GrammarCompiler, walker: Walker) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    plain = begin(compiler, StructuredOutput(json_schema=schema))
    state = begin(compiler, StructuredOutput(json_schema=schema, after_thinking=True))
    everything = set(range(V)) - {EOS}
    for token in (50, 4000, 0, 6, 99):
        assert allowed(state) == everything
        assert not state.accept(EOS)
        assert state.accept(token)
    assert state.thinking
    assert state.accept(THINK_END)
    assert allowed(state) == allowed(plain)
    ids = walker.walk(state, random.Random(3))
    assert ids is not None
    assert set(json.loads(walker.tokenizer.decode(ids))) == {"a"}


def test_masks_of_several_rows(compiler: GrammarCompiler) -> None:
    """Each as its state fills it, whatever the others are."""
    forms = [
        StructuredOutput(choice=["yes", "no"]),
        StructuredOutput(regex="a+", after_thinking=True),
        StructuredOutput(json_schema=True),
        StructuredOutput(ebnf='root ::= "b"'),
    ]
    states = [begin(compiler, form) for form in forms]
    for rows in ([0], [1], [0, 2], [3, 1, 0, 2], []):
        masks = compiler.masks({row + 5: states[row] for row in rows})
        assert masks.rows == [row + 5 for row in rows]
        assert masks.bits.shape == (len(rows), WORDS)
        for number, row in enumerate(rows):
            bits = torch.zeros((1, WORDS), dtype=torch.int32)
            states[row].fill(bits, 0)
            assert torch.equal(masks.bits[number], bits[0])


@pytest.mark.parametrize("temperature", [0.0, 3.0])
def test_sampled_texts_follow_their_forms(
    compiler: GrammarCompiler, tokenizer: Tokenizer, temperature: float
) -> None:
    """Through the batch, from random logits, beside rows without a form."""
    form = StructuredOutput(choice=["apple", "pear", "a"])
    free = SamplingParams(temperature=temperature, seed=1)
    bound = SamplingParams(temperature=temperature, seed=1, structured=form)
    batch = SamplingBatch(3, V, EOS, torch.device("cpu"))
    states: dict[int, GrammarState] = {}
    for slot in range(3):
        batch.open(slot, free if slot == 1 else bound, slot, [5])
        if slot != 1:
            states[slot] = begin(compiler, form)
    texts: dict[int, list[int]] = {0: [], 2: []}
    position = 1
    while states:
        slots = [1, *states]
        masks = compiler.masks({slots.index(slot): state for slot, state in states.items()})
        logits = torch.randn(len(slots), V, generator=torch.Generator().manual_seed(position))
        plain = logits.clone()
        with forbid_sync():
            sampled = batch.sample(logits, slots, [position] * len(slots), masks)
        drawn = sampled.read(sampled.pack())
        assert torch.equal(logits[0], plain[0])
        assert not drawn.faulty
        for slot, token in zip(slots[1:], drawn.tokens[1:], strict=True):
            assert states[slot].accept(token)
            texts[slot].append(token)
            if states[slot].finished:
                del states[slot]
        position += 1
    assert {tokenizer.decode(ids) for ids in texts.values()} <= {"apple", "pear", "a"}


# Compiling


@pytest.mark.parametrize(
    ("form", "words"),
    [
        ({"ebnf": "root ::= nothing"}, "nothing"),
        ({"ebnf": "x"}, "line 1"),
        ({"ebnf": "root ::= root"}, "no text follows it"),
        ({"json_schema": {"type": "integer", "minimum": 5, "maximum": 2}}, "minimum greater"),
        ({"regex": "[z-a]"}, "lower bound"),
    ],
)
def test_what_cannot_be_compiled_fails_alone(
    compiler: GrammarCompiler, form: dict[str, Any], words: str
) -> None:
    failing, fine = (compiler.compile(StructuredOutput(**x)) for x in (form, {"choice": ["a"]}))
    failing.wait()
    with pytest.raises(RequestError, match=words) as caught:
        failing.state()
    assert str(caught.value).startswith("structured: the grammar cannot be compiled: ")
    assert ".cc" not in str(caught.value)
    fine.wait()
    assert not fine.state().finished


def test_equal_forms_are_compiled_once(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[tuple[str, Any]] = []

    def count(self: GrammarCompiler, kind: str, form: Any) -> Any:
        compiled.append((kind, form))
        return original(self, kind, form)

    original = GrammarCompiler._compile
    monkeypatch.setattr(GrammarCompiler, "_compile", count)
    own = GrammarCompiler(tokenizer, V, EOS)
    schema = {"type": "string", "title": "first"}
    for form in (
        {"json_schema": schema},
        {"json_schema": json.dumps(schema, indent=2), "after_thinking": True},
        {"json_schema": {"description": "second", "type": "string"}},
        {"choice": ["b"]},
        {"choice": ("b",)},
    ):
        begin(own, StructuredOutput(**form))
    assert [kind for kind, _ in compiled] == ["json_schema", "choice"]


class Stuck:
    """A compiler whose compilations last until they are let go, and a clock."""

    def __init__(self, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self.running = threading.Semaphore(0)
        self.release = threading.Event()
        monkeypatch.setattr(GrammarCompiler, "_set_up", lambda self: None)
        monkeypatch.setattr(GrammarCompiler, "_compile", self._compile)
        self.compiler = GrammarCompiler(tokenizer, V, EOS, seconds=3, clock=lambda: self.now)

    def _compile(self, kind: str, form: Any) -> Any:
        self.running.release()
        assert self.release.wait(60)
        raise ValueError("let go")


def test_compiling_has_a_time_limit(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of its own work; who waits for others has a longer one. A late answer is an answer."""
    stuck = Stuck(tokenizer, monkeypatch)
    ask: Callable[[str], Any] = lambda text: stuck.compiler.compile(  # noqa: E731
        StructuredOutput(choice=[text])
    )
    first, second, third = ask("a"), ask("b"), ask("c")
    assert stuck.running.acquire(timeout=60)
    assert stuck.running.acquire(timeout=60)
    stuck.now = 3.0
    assert not any(pending.ready for pending in (first, second, third))
    stuck.now = 3.5
    late = [pending for pending in (first, second, third) if pending.ready]
    assert len(late) == 2
    for pending in late:
        with pytest.raises(RequestError, match="more than 3 s"):
            pending.state()
    (waiting,) = (pending for pending in (first, second, third) if not pending.ready)
    stuck.now = 61.0
    with pytest.raises(RequestError, match="busy with others"):
        waiting.state()
    assert ask("a").ready or ask("b").ready, "a form that takes too long is not tried again"
    stuck.release.set()
    for pending in (first, second, third):
        assert pending._job.done.wait(60)
        with pytest.raises(RequestError, match="let go"):
            pending.state()


def test_without_the_package(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(RequestError, match=r"pip install 'deepinfer-hopper\[structured\]'"):
        GrammarCompiler(tokenizer, V, EOS).compile(StructuredOutput(choice=["a"]))


def test_a_vocabulary_without_an_end_of_thinking(small_folder: Path) -> None:
    tokenizer = Tokenizer.load(small_folder)
    if tokenizer.inner.token_to_id("</think>") is not None:
        tokenizer.inner.token_to_id = lambda piece: None  # type: ignore[method-assign]
    own = GrammarCompiler(tokenizer, 512, EOS)
    with pytest.raises(RequestError, match="no token </think>"):
        own.compile(StructuredOutput(choice=["a"], after_thinking=True))
