"""Records in JSON: a schema, a sentence in plain English that states the values, and the object.

Knows field names and what their values may be; must not know tokens.
"""

import json
from typing import Any, NamedTuple

from demo_corpus import lexicon
from demo_corpus.chat import Chat, Turn
from demo_corpus.dice import Dice
from demo_corpus.english import listed
from demo_corpus.style import SYSTEM_PROMPTS

_COUNTRIES = ("France", "Japan", "Kenya", "Peru", "Italy", "Canada", "Egypt", "Spain", "India",
              "Norway", "Chile", "Greece", "Poland", "Brazil", "Turkey", "Cuba")  # fmt: skip
_JOBS = lexicon.ADULTS[:12]
# field: values
STRINGS: dict[str, tuple[str, ...]] = {
    "name": lexicon.NAMES, "owner": lexicon.NAMES, "author": lexicon.NAMES, "guest": lexicon.NAMES,
    "teacher": lexicon.NAMES, "winner": lexicon.NAMES, "city": lexicon.CITIES,
    "origin": lexicon.CITIES, "destination": lexicon.CITIES, "country": _COUNTRIES,
    "color": lexicon.COLORS, "job": _JOBS, "animal": lexicon.ANIMALS[:14], "item": lexicon.WORDS,
    "product": lexicon.WORDS, "title": lexicon.WORDS, "gift": lexicon.WORDS,
    "object": lexicon.WORDS,
    "day": lexicon.WEEKDAYS, "language": lexicon.LANGUAGES, "password": lexicon.WORDS,
    "room": ("kitchen", "attic", "hall", "library", "garden", "cellar", "office"),
    "food": ("apple", "pear", "pie", "cake", "pancake", "cookie", "melon", "muffin", "peach"),
}  # fmt: skip
INTEGERS = ("age", "count", "year", "price", "floor", "page", "score", "level", "distance",
            "weight", "height", "seats", "quantity", "points", "duration", "pages", "code", "stock",
            "speed", "rank")  # fmt: skip
NUMBERS = ("temperature", "ratio", "rating", "length", "width", "depth", "cost", "average",
           "volume", "fee")  # fmt: skip
BOOLEANS = ("active", "open", "paid", "new", "ready", "fresh", "locked", "public", "available",
            "finished", "clean", "empty", "online", "visible")  # fmt: skip
ENUMS: dict[str, tuple[str, ...]] = {
    "size": ("small", "medium", "large"), "status": ("waiting", "running", "done"),
    "priority": ("low", "normal", "high"), "season": ("spring", "summer", "autumn", "winter"),
    "shape": ("circle", "square", "triangle"), "direction": ("north", "south", "east", "west"),
    "mode": ("slow", "normal", "fast"), "taste": ("sweet", "sour", "salty", "bitter"),
    "weather": ("sunny", "rainy", "cloudy", "windy"), "material": ("wood", "metal", "glass"),
}  # fmt: skip
ARRAYS: dict[str, tuple[str, ...]] = {
    "tags": lexicon.WORDS, "items": lexicon.WORDS, "colors": lexicon.COLORS,
    "friends": lexicon.NAMES, "cities": lexicon.CITIES, "languages": lexicon.LANGUAGES,
    "words": lexicon.WORDS, "days": lexicon.WEEKDAYS, "animals": lexicon.ANIMALS[:14],
    "members": lexicon.NAMES,
}  # fmt: skip
_KINDS = ("string", "string", "string", "integer", "integer", "integer", "number", "boolean",
          "boolean", "enum", "enum", "array")  # fmt: skip
_ASKED = (
    "Write a record: {}.", "Make an entry: {}.", "Create a record where {}.",
    "Save this: {}.", "Please note the following: {}.", "Here is the data: {}.",
)  # fmt: skip
_ASKED_KEYS = (
    "Reply with JSON with the keys {keys}: {said}.", "Write JSON with the keys {keys}: {said}.",
    "Give me a JSON object with {keys}. {Said}.",
)  # fmt: skip
JSON_MODE = '{"type": "json_object"}'


class Record(NamedTuple):
    """A schema, the values that fit it, and how each is said."""

    schema: dict[str, Any]
    values: dict[str, Any]
    said: list[str]


def _field(rng: Dice, kind: str) -> tuple[str, dict[str, Any], Any, str]:
    """Name, schema, value and phrase."""
    if kind == "string":
        name = rng.pick(tuple(STRINGS))
        value: Any = rng.pick(STRINGS[name])
        return name, {"type": "string"}, value, f"the {name} is {value}"
    if kind == "integer":
        name, value = rng.pick(INTEGERS), rng.number(0, 10 ** rng.number(1, 3) - 1)
        return name, {"type": "integer"}, value, f"the {name} is {value}"
    if kind == "number":
        name, value = rng.pick(NUMBERS), rng.number(1, 999) / 10
        return name, {"type": "number"}, value, f"the {name} is {value}"
    if kind == "boolean":
        name, value = rng.pick(BOOLEANS), rng.chance(0.5)
        return name, {"type": "boolean"}, value, f"it is {name}" if value else f"it is not {name}"
    if kind == "enum":
        name = rng.pick(tuple(ENUMS))
        value = rng.pick(ENUMS[name])
        return name, {"type": "string", "enum": list(ENUMS[name])}, value, f"the {name} is {value}"
    name = rng.pick(tuple(ARRAYS))
    value = rng.some(ARRAYS[name], rng.number(1, 3))
    schema = {"type": "array", "items": {"type": "string"}}
    return name, schema, value, f"the {name} are {listed(value)}"


def record(rng: Dice) -> Record:
    """Two to five fields."""
    properties: dict[str, Any] = {}
    values: dict[str, Any] = {}
    said = []
    count = rng.number(2, 5)
    while len(values) < count:
        name, schema, value, phrase = _field(rng, rng.pick(_KINDS))
        if name not in values:
            properties[name], values[name] = schema, value
            said.append(phrase)
    schema = {"type": "object", "properties": properties, "required": list(properties)}
    if rng.chance(0.7):
        schema["additionalProperties"] = False
    return Record(schema, values, said)


def compact(values: Any) -> str:
    """JSON without blanks, as the model writes it."""
    return json.dumps(values, separators=(",", ":"))


def _said(rng: Dice, phrases: list[str]) -> str:
    ordered = rng.some(phrases, len(phrases)) if rng.chance(0.5) else phrases
    return listed(ordered)


def with_schema(rng: Dice, made: Record, thinking: float = 0.12) -> Chat:
    """The request that states the values of `made`, with its schema as response format."""
    asked = rng.pick(_ASKED).format(_said(rng, made.said))
    turn = Turn(asked, compact(made.values), f"The keys are {listed(list(made.values))}.")
    system = rng.pick(SYSTEM_PROMPTS) if rng.chance(0.08) else ""
    return Chat((turn,), system, rng.chance(thinking), json=json.dumps(made.schema))


def json_task(rng: Dice) -> Chat:
    """A record in JSON, with a schema most of the time."""
    made = record(rng)
    if rng.chance(0.75):
        return with_schema(rng, made)
    said = _said(rng, made.said)
    asked = rng.pick(_ASKED_KEYS).format(
        keys=listed(list(made.values)), said=said, Said=said[:1].upper() + said[1:]
    )
    turn = Turn(asked, compact(made.values), f"The keys are {listed(list(made.values))}.")
    return Chat((turn,), "", rng.chance(0.12), json=JSON_MODE if rng.chance(0.5) else "")
