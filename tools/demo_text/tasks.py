"""What the demo model is taught, one function a task: (rng) to segments of a document.

Knows tasks; must not know tokens or batches.
"""

import json
from collections.abc import Callable
from random import Random
from typing import Any

from demo_text import words
from demo_text.chat import (
    Segment,
    conversation,
    document,
    format_prompt,
    tool_call,
    tools_prompt,
)
from demo_text.facts import facts, held_out, questions
from demo_text.stories import article, story

_FACTS = facts()


def story_task(rng: Random) -> list[Segment]:
    """A story, as plain text or on request."""
    told = story(rng)
    if rng.random() < 0.6:
        return document(told.text)
    asked = rng.choice([
        f"Write a story about {article(told.title)}.", f"Tell me a story about {article(told.title)}.",
        f"Please tell me a short story about {article(told.title)}.",
    ])  # fmt: skip
    return conversation([(asked, told.text)])


def story_qa_task(rng: Random) -> list[Segment]:
    """A story and questions about it."""
    told = story(rng)
    asked = rng.sample(told.questions, min(len(told.questions), rng.randint(1, 4)))
    turns = [(q, a) for q, a in asked]
    turns[0] = (f"{told.text}\n{turns[0][0]}", turns[0][1])
    return conversation(turns)


def facts_task(rng: Random) -> list[Segment]:
    """Several questions about public facts, never in the phrasing held out for the evaluation."""
    turns = []
    for _ in range(rng.randint(1, 5)):
        number = rng.randrange(len(_FACTS))
        kind, subject, answer = _FACTS[number]
        forms = questions(kind, subject)
        del forms[held_out(number, kind)]
        turns.append((rng.choice(forms), answer))
    if rng.random() < 0.15:
        thought = f"The user asks about {turns[-1][0][:-1].split()[-1]}. I know this."
        return conversation(turns[-1:], reasoning=[thought])
    return conversation(turns)


IDENTITY: tuple[tuple[tuple[str, ...], str], ...] = (
    (("Hello!", "Hi!", "Hello there.", "Hey!", "Good day!"), "Hello! How can I help you?"),
    (("Good morning!", "Good morning."), "Good morning! How can I help you?"),
    (("How are you?", "How do you do?", "How is it going?"), "I am fine, thank you. How are you?"),
    (("Who are you?", "What are you?", "Tell me who you are.", "Introduce yourself.",
      "What model are you?"),
     "I am the DeepInfer demo model, a very small language model that shows that the engine works."),
    (("What can you do?", "What are you good at?", "How can you help me?"),
     "I can tell short stories, answer simple questions, add numbers, look things up in a text, "
     "write JSON and call tools."),
    (("Can I trust you?", "Are you always right?", "Do you make mistakes?"),
     "No, I am tiny and often wrong. Please check what I say."),
    (("Who made you?", "Who trained you?", "Where do you come from?"),
     "I was trained from scratch for the DeepInfer project."),
    (("Thank you!", "Thanks!", "Thanks a lot.", "Thank you very much."), "You are welcome!"),
    (("Goodbye!", "Bye!", "See you later.", "Good night!"), "Goodbye! Have a nice day."),
    (("Are you a human?", "Are you a person?", "Are you a robot?"),
     "No, I am a small language model."),
)  # fmt: skip


def identity_task(rng: Random) -> list[Segment]:
    """Greetings and questions about itself; sometimes a system prompt gives it a name."""
    if rng.random() < 0.35:
        name = rng.choice(
            words.GIRLS
            + words.BOYS
            + [s.capitalize() + rng.choice(words.SYLLABLES) for s in rng.sample(words.SYLLABLES, 8)]
        )
        asked = rng.choice(["What is your name?", "Who are you?", "Tell me your name."])
        return conversation([(asked, f"My name is {name}.")], system=f"You are called {name}.")
    turns = []
    for forms, answer in rng.sample(IDENTITY, rng.randint(1, 4)):
        turns.append((rng.choice(forms), answer))
    if rng.random() < 0.2:
        return conversation(turns[-1:], reasoning=["This is a simple question."])
    return conversation(turns)


def _operands(rng: Random) -> tuple[int, int]:
    first, second = (rng.randrange(10 ** rng.choice([1, 2, 2, 3, 3, 3])) for _ in range(2))
    return first, second


def arithmetic(rng: Random) -> tuple[int, str, int, int]:
    """first, operator, second, result: sums and differences up to 3 digits, products up to 12."""
    kind = rng.random()
    first, second = _operands(rng)
    if kind < 0.48:
        return first, "+", second, first + second
    if kind < 0.9:
        return first, "-", second, first - second
    first, second = rng.randint(0, 12), rng.randint(0, 12)
    return first, "*", second, first * second


def ask_arithmetic(rng: Random, first: int, operator: str, second: int) -> str:
    """One of the phrasings."""
    return rng.choice([
        f"What is {first} {operator} {second}?", f"{first} {operator} {second} =",
        f"Calculate {first} {operator} {second}.", f"How much is {first} {operator} {second}?",
    ])  # fmt: skip


def arithmetic_task(rng: Random) -> list[Segment]:
    """Several sums with their results, or one with its columns written out."""
    if rng.random() < 0.12:
        first, second = _operands(rng)
        lines, carry = [], 0
        for place in range(max(len(str(first)), len(str(second)))):
            a, b = first // 10**place % 10, second // 10**place % 10
            total = a + b + carry
            lines.append(f"{a}+{b}+{carry}={total}")
            carry = total // 10
        asked = ask_arithmetic(rng, first, "+", second)
        return conversation([(asked, str(first + second))], reasoning=["\n".join(lines)])
    turns = []
    for _ in range(rng.randint(1, 8)):
        first, operator, second, result = arithmetic(rng)
        turns.append((ask_arithmetic(rng, first, operator, second), str(result)))
    return conversation(turns)


RUNES = 1200


def runes() -> list[tuple[str, str, str, str]]:
    """Arbitrary rules: three glyphs and the fourth that follows them."""
    rng = Random(20261)
    seen: dict[tuple[str, str, str], str] = {}
    while len(seen) < RUNES:
        key = (rng.choice(words.GLYPHS), rng.choice(words.GLYPHS), rng.choice(words.GLYPHS))
        seen.setdefault(key, rng.choice(words.GLYPHS))
    return [(*key, answer) for key, answer in seen.items()]


_RUNES = runes()


def ngram_task(rng: Random) -> list[Segment]:
    """Runes as a list, or completed one by one."""
    chosen = rng.sample(_RUNES, rng.randint(4, 16))
    if rng.random() < 0.5:
        return document("\n".join(f"Rune: {' '.join(rune)}" for rune in chosen))
    turns = [(f"Complete the rune: {' '.join(rune[:3])}", " ".join(rune)) for rune in chosen]
    return conversation(turns)


def json_item(rng: Random) -> tuple[dict[str, Any], str, dict[str, Any]]:
    """A schema, a sentence that states its values, and the values."""
    properties: dict[str, Any] = {}
    values: dict[str, Any] = {}
    said = []
    kinds = rng.sample(["string", "string", "integer", "integer", "boolean", "enum", "list"],
                       rng.randint(2, 4))  # fmt: skip
    for kind in kinds:
        name, schema, value, phrase = _json_field(rng, kind)
        if name not in values:
            properties[name], values[name] = schema, value
            said.append(phrase)
    schema = {"type": "object", "properties": properties, "required": list(properties),
              "additionalProperties": False}  # fmt: skip
    return schema, ", ".join(said), values


def _json_field(rng: Random, kind: str) -> tuple[str, dict[str, Any], Any, str]:
    if kind == "string":
        name = rng.choice(words.FIELDS_STRING)
        value: Any = rng.choice(words.GIRLS + words.BOYS + words.PLAIN)
        return name, {"type": "string"}, value, f"the {name} is {value}"
    if kind == "integer":
        name, value = rng.choice(words.FIELDS_INTEGER), rng.randrange(10 ** rng.randint(1, 3))
        return name, {"type": "integer"}, value, f"the {name} is {value}"
    if kind == "boolean":
        name, value = rng.choice(words.FIELDS_BOOLEAN), rng.random() < 0.5
        return name, {"type": "boolean"}, value, f"it is {'' if value else 'not '}{name}"
    if kind == "enum":
        name = rng.choice(sorted(words.FIELDS_ENUM))
        options = words.FIELDS_ENUM[name]
        value = rng.choice(options)
        return name, {"type": "string", "enum": options}, value, f"the {name} is {value}"
    name, value = rng.choice(words.FIELDS_LIST), rng.sample(words.PLAIN, rng.randint(1, 3))
    schema = {"type": "array", "items": {"type": "string"}}
    return name, schema, value, f"the {name} are {' and '.join(value)}"


def json_task(rng: Random) -> list[Segment]:
    """A record in JSON after a schema."""
    schema, said, values = json_item(rng)
    asked = rng.choice([f"Write a record: {said}.", f"Give me JSON where {said}.",
                        f"Make an object: {said}."])  # fmt: skip
    return conversation([(asked, json.dumps(values))], system=format_prompt(schema))


def _tool(name: str, description: str, **parameters: str) -> dict[str, Any]:
    properties = {key: {"type": kind} for key, kind in parameters.items()}
    return {
        "name": name, "description": description,
        "parameters": {"type": "object", "properties": properties, "required": list(parameters)},
    }  # fmt: skip


_CITIES = [answer for kind, _, answer in _FACTS if kind == "capital"]
# tool, how to ask for it, its arguments, the tool's reply, what to say then.
TOOLS: tuple[tuple[dict[str, Any], Callable[[Random], tuple[str, dict[str, Any], str, str]]], ...] = (
    (_tool("get_weather", "Weather of a city", city="string"),
     lambda r: (lambda c, t: (f"What is the weather in {c}?", {"city": c}, f"{t} degrees",
                              f"It is {t} degrees in {c}."))(r.choice(_CITIES), r.randint(0, 35))),
    (_tool("set_timer", "Start a timer", minutes="integer"),
     lambda r: (lambda m: (f"Set a timer for {m} minutes.", {"minutes": m}, "ok",
                           f"The timer is set for {m} minutes."))(r.randint(1, 90))),
    (_tool("search", "Search the web", query="string"),
     lambda r: (lambda q: (f"Search for {q}.", {"query": q}, f"A page about {q}",
                           f"I found a page about {q}."))(" ".join(r.sample(words.PLAIN, 2)))),
    (_tool("translate", "Translate a word", word="string", language="string"),
     lambda r: (lambda w, g: (f"Translate {w} into {g}.", {"word": w, "language": g}, f"{w}o",
                              f"{w} is {w}o in {g}."))(
         r.choice(words.PLAIN), r.choice(["Latin", "French", "German", "Spanish"]))),
    (_tool("send_message", "Send a message", to="string", text="string"),
     lambda r: (lambda n, w: (f"Tell {n} that the {w} is here.",
                              {"to": n, "text": f"The {w} is here."}, "sent",
                              f"I told {n} that the {w} is here."))(
         r.choice(words.GIRLS + words.BOYS), r.choice(words.OBJECTS))),
    (_tool("play_music", "Play a song", title="string", volume="integer"),
     lambda r: (lambda t, v: (f"Play {t} at volume {v}.", {"title": t, "volume": v}, "playing",
                              f"{t} is playing."))(r.choice(words.PLAIN), r.randint(1, 10))),
    (_tool("turn_light", "Switch a light", room="string", on="boolean"),
     lambda r: (lambda m, o: (f"Turn {'on' if o else 'off'} the light in the {m}.",
                              {"room": m, "on": o}, "ok",
                              f"The light in the {m} is {'on' if o else 'off'}."))(
         r.choice(["kitchen", "garden", "attic", "hall", "school"]), r.random() < 0.5)),
)  # fmt: skip


def tools_item(rng: Random) -> tuple[list[Segment], bool]:
    """A conversation with tools; whether its last answer is a call."""
    chosen = rng.sample(range(len(TOOLS)), rng.randint(1, 3))
    system = tools_prompt([TOOLS[i][0] for i in chosen])
    if rng.random() < 0.15:
        forms, answer = rng.choice(IDENTITY)
        return conversation([(rng.choice(forms), answer)], system=system), False
    tool, make = TOOLS[rng.choice(chosen)]
    asked, arguments, result, final = make(rng)
    call = tool_call(tool["name"], arguments)
    if rng.random() < 0.6:
        return conversation([(asked, call)], system=system), True
    turns = [(asked, call), (f"<tool_result>{result}</tool_result>", final)]
    return conversation(turns, system=system), False


def tools_task(rng: Random) -> list[Segment]:
    """A conversation with tools."""
    return tools_item(rng)[0]


def text_item(rng: Random) -> tuple[str, str]:
    """A small task on words and its answer."""
    chosen = rng.sample(words.PLAIN, rng.randint(3, 5))
    line = " ".join(chosen)
    return rng.choice([
        (f"Repeat: {line}", line),
        (f"Reverse the order of the words: {line}", " ".join(reversed(chosen))),
        (f"What is the first word of: {line}", chosen[0]),
        (f"What is the last word of: {line}", chosen[-1]),
        (f"How many words are in: {line}", str(len(chosen))),
        (f"Write in capital letters: {chosen[0]}", chosen[0].upper()),
    ])  # fmt: skip


def text_task(rng: Random) -> list[Segment]:
    """Several of them."""
    return conversation([text_item(rng) for _ in range(rng.randint(1, 5))])
