"""Tools that the demo model can be given: definitions, requests for them, results and replies.

Knows tools as data; must not know chat formats. Words in braces are drawn anew for each request;
the arguments of a call are those named like its parameters.
"""

import json
from collections.abc import Callable
from typing import Any, NamedTuple

from demo_corpus import lexicon
from demo_corpus.arithmetic import result
from demo_corpus.chat import Tool
from demo_corpus.dice import Dice

_PLACES_TO_EAT = ("pizza", "soup", "salad", "noodles", "rice", "pasta", "curry", "tacos")
_EVENTS = ("meeting", "lunch", "party", "dentist", "lesson", "concert", "walk", "dinner")
_ROOMS = ("kitchen", "garden", "attic", "hall", "cellar", "office", "garage", "library")
_CONDITIONS = ("sunny", "rainy", "cloudy", "windy", "snowy", "foggy")
# from, to, factor
_UNITS = (("meters", "feet", 3.281), ("kilograms", "pounds", 2.205), ("liters", "pints", 2.113),
          ("miles", "meters", 1609.34), ("feet", "inches", 12),
          ("hours", "minutes", 60))  # fmt: skip


def _words(rng: Dice, count: int) -> str:
    return " ".join(rng.some(lexicon.WORDS, count))


# What is drawn for each word in braces.
DRAWN: dict[str, Callable[[Dice], Any]] = {
    "city": lambda r: r.pick(lexicon.CITIES), "to_city": lambda r: r.pick(lexicon.CITIES),
    "degrees": lambda r: r.number(-9, 38), "condition": lambda r: r.pick(_CONDITIONS),
    "minutes": lambda r: r.number(2, 90), "hour": lambda r: r.number(5, 11),
    "problem": lambda r: (r.number(2, 999), r.pick("+-*"), r.number(2, 99)),
    "query": lambda r: _words(r, 2), "text": lambda r: _words(r, r.number(2, 4)),
    "word": lambda r: r.pick(lexicon.WORDS), "language": lambda r: r.pick(lexicon.LANGUAGES),
    "name": lambda r: r.pick(lexicon.NAMES), "title": lambda r: r.pick(lexicon.WORDS),
    "event": lambda r: r.pick(_EVENTS), "day": lambda r: r.pick(lexicon.WEEKDAYS),
    "room": lambda r: r.pick(_ROOMS), "volume": lambda r: r.number(1, 10),
    "value": lambda r: r.number(2, 500), "dish": lambda r: r.pick(_PLACES_TO_EAT),
    "item": lambda r: r.pick(lexicon.WORDS), "count": lambda r: r.number(2, 20),
    "price": lambda r: r.number(2, 99), "company": lambda r: r.pick(lexicon.SYLLABLES).title(),
    "sides": lambda r: r.pick((4, 6, 8, 12, 20)), "low": lambda r: r.number(1, 9),
    "high": lambda r: r.number(20, 99), "path": lambda r: f"{r.pick(lexicon.WORDS)}.txt",
    "color": lambda r: r.pick(lexicon.COLORS), "on": lambda r: r.chance(0.5),
    "number": lambda r: r.number(2, 999), "units": lambda r: r.pick(_UNITS),
}  # fmt: skip


class ToolSpec(NamedTuple):
    """A tool with everything that is said around it.

    Attributes:
        parameters: name to JSON type.
        result: what the tool returns.
        reply: what the model says then.
    """

    name: str
    description: str
    parameters: dict[str, str]
    requests: tuple[str, ...]
    result: str
    reply: str

    def tool(self) -> Tool:
        """The definition that a client sends."""
        schema = {
            "type": "object",
            "properties": {name: {"type": kind} for name, kind in self.parameters.items()},
            "required": list(self.parameters),
        }
        return Tool(self.name, self.description, json.dumps(schema))


SPECS: tuple[ToolSpec, ...] = (
    ToolSpec("get_weather", "Get the current weather of a city", {"city": "string"},
             ("What is the weather in {city}?", "How is the weather in {city} today?",
              "Tell me the weather in {city}."),
             "{condition}, {degrees} degrees", "It is {condition} in {city}, {degrees} degrees."),
    ToolSpec("set_timer", "Start a timer", {"minutes": "integer"},
             ("Set a timer for {minutes} minutes.", "Start a timer of {minutes} minutes.",
              "Wake me in {minutes} minutes."),
             "started", "The timer is set for {minutes} minutes."),
    ToolSpec("set_alarm", "Set an alarm for a day", {"day": "string", "hour": "integer"},
             ("Set an alarm for {day} at {hour}.", "Wake me on {day} at {hour}."),
             "ok", "The alarm is set for {day} at {hour}."),
    ToolSpec("calculator", "Evaluate an expression", {"expression": "string"},
             ("Use the calculator for {expression}.", "Calculate {expression} with the tool.",
              "Let the calculator compute {expression}."),
             "{computed}", "The result is {computed}."),
    ToolSpec("search", "Search the web", {"query": "string"},
             ("Search for {query}.", "Look up {query} on the web.", "Search the web for {query}."),
             "A page about {query}", "I found a page about {query}."),
    ToolSpec("translate", "Translate a text into a language",
             {"text": "string", "language": "string"},
             ('Translate "{text}" into {language}.', 'How do you say "{text}" in {language}?'),
             "{word}", "In {language} it is {word}."),
    ToolSpec("convert_units", "Convert a value from one unit to another",
             {"value": "integer", "from": "string", "to": "string"},
             ("Convert {value} {from} to {to}.", "How many {to} are {value} {from}?"),
             "{converted} {to}", "{value} {from} are {converted} {to}."),
    ToolSpec("add_event", "Add an event to the calendar", {"event": "string", "day": "string"},
             ("Add {event} to my calendar on {day}.", "Put {event} on {day} in the calendar."),
             "added", "I added {event} on {day}."),
    ToolSpec("list_events", "List the events of a day", {"day": "string"},
             ("What is on my calendar on {day}?", "Which events do I have on {day}?"),
             "{event} at {hour}", "On {day} you have {event} at {hour}."),
    ToolSpec("send_message", "Send a message to a person", {"name": "string", "text": "string"},
             ('Send "{text}" to {name}.', 'Write "{text}" to {name}.'),
             "sent", "I sent the message to {name}."),
    ToolSpec("call_person", "Call a person", {"name": "string"},
             ("Call {name}.", "Please call {name}.", "Phone {name} for me."),
             "calling", "I am calling {name}."),
    ToolSpec("play_music", "Play a song at a volume", {"title": "string", "volume": "integer"},
             ("Play {title} at volume {volume}.", "Play the song {title}, volume {volume}."),
             "playing", "The song {title} is playing now."),
    ToolSpec("turn_light", "Switch the light of a room", {"room": "string", "on": "boolean"},
             ("Turn {switch} the light in the {room}.", "Switch {switch} the {room} light."),
             "ok", "The light in the {room} is {switch}."),
    ToolSpec("set_light_color", "Set the color of a light", {"room": "string", "color": "string"},
             ("Make the light in the {room} {color}.", "Set the {room} light to {color}."),
             "ok", "The light in the {room} is {color}."),
    ToolSpec("set_temperature", "Set the temperature of a room",
             {"room": "string", "degrees": "integer"},
             ("Set the {room} to {degrees} degrees.", "Make it {degrees} degrees in the {room}."),
             "ok", "The {room} is set to {degrees} degrees."),
    ToolSpec("order_food", "Order a dish", {"dish": "string", "count": "integer"},
             ("Order {count} {dish}.", "I want to order {dish}, {count} times."),
             "ordered", "I ordered {dish}, {count} times."),
    ToolSpec("add_to_list", "Add an item to the shopping list",
             {"item": "string", "count": "integer"},
             ("Put {count} {item} on the shopping list.", "Add {item} to my list, {count} of it."),
             "added", "I put {item} on the list."),
    ToolSpec("get_stock", "Get the stock price of a company", {"company": "string"},
             ("What is the stock price of {company}?", "How much is a share of {company}?"),
             "{price}", "A share of {company} costs {price}."),
    ToolSpec("roll_dice", "Roll a die", {"sides": "integer"},
             ("Roll a die with {sides} sides.", "Throw a die that has {sides} sides."),
             "{low}", "It is a {low}."),
    ToolSpec("random_number", "Draw a random number", {"low": "integer", "high": "integer"},
             ("Draw a number between {low} and {high}.",
              "Give me a random number from {low} to {high}."),
             "{number}", "The number is {number}."),
    ToolSpec("read_file", "Read a file", {"path": "string"},
             ("Read the file {path}.", "What is in {path}?", "Open {path}."),
             "{text}", "The file says: {text}"),
    ToolSpec("write_file", "Write a text to a file", {"path": "string", "text": "string"},
             ('Write "{text}" to {path}.', 'Save "{text}" as {path}.'),
             "ok", "I wrote it to {path}."),
    ToolSpec("find_train", "Find a train between two cities",
             {"city": "string", "to_city": "string"},
             ("Find a train from {city} to {to_city}.",
              "When is a train from {city} to {to_city}?"),
             "{hour} o'clock", "There is a train to {to_city} at {hour} o'clock."),
    ToolSpec("get_time", "Get the local time of a city", {"city": "string"},
             ("What time is it in {city}?", "Tell me the time in {city}."),
             "{hour} o'clock", "It is {hour} o'clock in {city}."),
    ToolSpec("define_word", "Look up a word in the dictionary", {"word": "string"},
             ("Look up the word {word}.", "What does the dictionary say about {word}?"),
             "{item}", "The dictionary says: {item}"),
    ToolSpec("remember", "Store a value under a name", {"name": "string", "value": "integer"},
             ("Store {value} under the name {name}.", "Remember {value} as {name}."),
             "stored", "I stored {value} as {name}."),
)  # fmt: skip
TOOLS = {spec.name: spec.tool() for spec in SPECS}
_CONVERT = {"from": 0, "to": 1}


class Request(NamedTuple):
    """A drawn request: what is said, the arguments, the result and the reply to it."""

    asked: str
    arguments: dict[str, Any]
    result: str
    reply: str


def request(rng: Dice, spec: ToolSpec) -> Request:
    """A request for this tool."""
    slots = _Drawn(rng)
    asked = rng.pick(spec.requests).format_map(slots)
    arguments = {name: slots[name] for name in spec.parameters}
    return Request(asked, arguments, spec.result.format_map(slots), spec.reply.format_map(slots))


class _Drawn(dict[str, Any]):
    """Slots that are drawn when they are first read."""

    def __init__(self, rng: Dice) -> None:
        super().__init__()
        self.rng = rng

    def __missing__(self, name: str) -> Any:
        if name in _CONVERT:
            value: Any = self["units"][_CONVERT[name]]
        elif name == "expression":
            value = "{} {} {}".format(*self["problem"])
        elif name == "computed":
            value = result(self["problem"])
        elif name == "converted":
            value = round(self["value"] * self["units"][2])
        elif name == "switch":
            value = "on" if self["on"] else "off"
        else:
            value = DRAWN[name](self.rng)
            while name == "to_city" and value == self["city"]:
                value = DRAWN[name](self.rng)
        self[name] = value
        return value
