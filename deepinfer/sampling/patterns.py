"""Regular expressions that can be enforced, in the spelling that the grammar library understands.

Knows their syntax; must not know tokens. The language is that of ECMAScript without what a grammar
cannot say: look-around, back-references, word boundaries, flags, and anchors inside. What the
library would skip with a warning is refused here, what it takes wrongly is spelled otherwise.
"""

import re
from collections.abc import Iterator
from typing import NoReturn

from deepinfer.errors import RequestError

# Parts of an expression; a class is taken whole.
_PART = re.compile(
    r"""
    (?P<escape>\\(?:x[0-9A-Fa-f]{2}|u[0-9A-Fa-f]{4}|.)) |
    (?P<set>\[\^?(?:\\.|[^\]\\])*\]) |
    (?P<open>\((?:\?:)?) | (?P<close>\)) | (?P<bar>\|) | (?P<dot>\.) | (?P<start>\^) | (?P<end>\$) |
    (?P<repeat>(?:[*+?]|\{\d+(?:,\d*)?\})\??) |
    (?P<literal>[^\\[(*+?{])
    """,
    re.VERBOSE | re.DOTALL,
)
_CLASSES = "dDwWsS"
_SURROGATES = r"\ud800-\udfff"  # no text has them, though their bytes would match
_MOST_REPEATS = 1000  # in JSON, where compiling takes time that grows with their square
_CONTROLS = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v"}
_ESCAPE = re.compile(r"\\(?:x([0-9A-Fa-f]{2})|.)", re.DOTALL)
_NUMBER = re.compile(r"\d+")
_SET_PART = re.compile(r"\\(?:x[0-9A-Fa-f]{2}|u[0-9A-Fa-f]{4}|.)|.", re.DOTALL)


def whole_text(pattern: str, name: str) -> str:
    """`pattern` for the library such that whole texts match, `.` being all but a line feed.

    Raises:
        RequestError: with `name`, the place, and what is not supported there.
    """
    return "|".join(body for _, body, _ in _alternatives(pattern, name, in_json=False))


def within_json(pattern: str, name: str) -> str:
    """`pattern` for the library such that strings in JSON match where they contain a match.

    The strings are spelled without escapes, so that a quote, a backslash or a control character
    cannot be asked for.

    Raises:
        RequestError: as above.
    """
    found = _alternatives(pattern, name, in_json=True)
    texts = []
    for first, body, last in found:
        texts.append(("" if first else ".*") + (body and f"(?:{body})") + ("" if last else ".*"))
    return f"^(?:{'|'.join(texts)})$"


def _alternatives(pattern: str, name: str, in_json: bool) -> list[tuple[bool, str, bool]]:
    """Alternatives of the top level without their anchors: (from the start, text, to the end)."""
    found: list[tuple[bool, str, bool]] = []
    first, body, last, depth = False, "", False, 0
    before = "bar"
    for place, kind, text in _parts(pattern, name):
        if kind == "bar" and depth == 0:
            found.append((first, body, last))
            first, body, last, before = False, "", False, kind
            continue
        depth += {"open": 1, "close": -1}.get(kind, 0)
        misplaced = last or depth < 0
        if kind == "start":
            misplaced |= bool(body or first)
            first = True
        elif kind == "end":
            misplaced |= depth > 0
            last = True
        elif kind == "repeat":
            misplaced |= before in ("bar", "open", "start", "repeat")
            text = text[:-1] if len(text) > 1 and text[-1] == "?" else text  # lazy: the same texts
        spelled = "" if kind in ("start", "end") else _checked(kind, text, in_json)
        if misplaced or spelled is None:
            where = " here" if misplaced else " in a JSON string" if in_json else ""
            _refuse(name, pattern, place, text + where)
        body += spelled
        before = kind
    if depth:
        _refuse(name, pattern, len(pattern), "the end inside a parenthesis")
    return [*found, (first, body, last)]


def _parts(pattern: str, name: str) -> Iterator[tuple[int, str, str]]:
    """(place, kind, text) of each part."""
    place = 0
    while place < len(pattern):
        part = _PART.match(pattern, place)
        if part is None or part.lastgroup is None:
            _refuse(name, pattern, place, pattern[place : place + 3])
        if pattern.startswith("(?", place) and part.group() == "(":
            _refuse(name, pattern, place, pattern[place : place + 4])
        yield place, part.lastgroup, part.group()
        place = part.end()


def _checked(kind: str, text: str, in_json: bool) -> str | None:
    """A part in the library's spelling, None for one that is not supported."""
    # The library takes \x41b for U+041B.
    text = _ESCAPE.sub(lambda found: rf"\u00{found[1]}" if found[1] else found[0], text)
    if kind == "set":
        if not _is_set(text, in_json):
            return None
        return text if in_json or text[1] != "^" else f"[^{_SURROGATES}{text[2:]}"
    if kind == "dot":
        return "." if in_json else rf"[^\n{_SURROGATES}]"
    if kind == "escape" and text[1] in _CLASSES:
        return text if in_json or text[1].islower() else rf"[^\{text[1].lower()}{_SURROGATES}]"
    if kind in ("escape", "literal"):
        return text if _is_fine(_character(text), in_json) else None
    if kind == "repeat" and in_json:
        if any(int(number) > _MOST_REPEATS for number in _NUMBER.findall(text)):
            return None
        # The library takes (a*b)? for (a*b|a*).
        return "{0,1}" if text == "?" else text
    return text


def _is_set(text: str, in_json: bool) -> bool:
    negated = text.startswith("[^")
    inner = text[2 if negated else 1 : -1]
    if not inner or "[:" in text:
        return False  # empty, or a POSIX name
    for part in _SET_PART.findall(inner):
        if part[0] == "\\" and part[1] in _CLASSES:
            continue
        if not _is_fine(_character(part), in_json and not negated):
            return False
    return True


def _character(part: str) -> str | None:
    """The character that a part of one stands for, None for an escape that is not supported."""
    if part[0] != "\\":
        return part
    if len(part) > 2:
        code = int(part[2:], 16)
        return None if 0xD800 <= code < 0xE000 else chr(code)
    if part[1].isalnum():
        return _CONTROLS.get(part[1])
    return part[1]


def _is_fine(character: str | None, in_json: bool) -> bool:
    if character is None:
        return False
    return not in_json or (character >= " " and character not in '"\\')


def _refuse(name: str, pattern: str, place: int, what: str) -> NoReturn:
    raise RequestError(
        f"{name} = {pattern!r:.200}: {what.strip()} at character {place + 1} is not supported;"
        " expected a regular expression without look-around, back-references, word boundaries,"
        " flags and anchors in the middle"
    )
