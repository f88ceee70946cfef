"""Conversations: the text that a server renders for the model, and the request that leads to it.

Knows the V4.1 prompt format as deepseek-recipe 0.2.0 renders it; tests compare the two. Must not
know tasks or tokens. The library itself is not needed to make text.
"""

import json
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

BOS, EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
SYSTEM, USER, ASSISTANT = "<｜System｜>", "<｜User｜>", "<｜Assistant｜>"
THINK, THOUGHT, DSML = "<think>", "</think>", "｜DSML｜"

_EFFORT = (
    "Reasoning Effort: 75 (range 1-100, the higher the value, the more thorough the reasoning)\n\n"
)
_TOOLS_HEAD = """

## Tools

You have access to a set of tools to help answer the user's question. You can invoke tools by writing a "<｜DSML｜ calls>" block like the following:

<｜DSML｜ calls>
<｜DSML｜ invoke name="$TOOL_NAME">
<｜DSML｜ parameter name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE</｜DSML｜ parameter>
...
</｜DSML｜ invoke>
<｜DSML｜ invoke name="$TOOL_NAME2">
...
</｜DSML｜ invoke>
</｜DSML｜ calls>

String parameters should be specified as is and set `string="true"`. For all other types (numbers, booleans, arrays, objects), pass the value in JSON format and set `string="false"`.

If thinking_mode is enabled (triggered by <think>), you MUST output your complete reasoning inside <think>...</think> BEFORE any tool calls or final response.

Otherwise, output directly after </think> with tool calls or final response.

### Available Tool Schemas

"""
_TOOLS_TAIL = (
    "\n\nYou MUST strictly follow the above defined tool name and parameter schemas to invoke tool "
    "calls.\n"
)
_FORMAT = "\n\n## Response Format:\n\nYou MUST strictly adhere to the following schema to reply:\n"


class Segment(NamedTuple):
    """A piece of a document, and whether the model has to write it."""

    text: str
    is_answer: bool


class Tool(NamedTuple):
    """A tool definition; the JSON texts of its parts are made once."""

    name: str
    description: str
    parameters: str

    def schema(self) -> str:
        """The line of the prompt that defines the tool."""
        head = f'{{"name": "{self.name}", "description": "{self.description}", "parameters": '
        return f"{head}{self.parameters}}}"


class Call(NamedTuple):
    """A tool call; arguments in order."""

    tool: str
    arguments: dict[str, Any]


class Turn(NamedTuple):
    """What comes in and what the model writes.

    Attributes:
        user: the user's text; not used when there are results.
        answer: final text, "" when calls are the answer.
        results: what the calls of the turn before gave.
        reasoning: thinking before the answer; used in thinking mode.
    """

    user: str
    answer: str
    reasoning: str = ""
    calls: tuple[Call, ...] = ()
    results: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation; its last turn is what the model is asked for.

    Attributes:
        json: "" or the JSON text of response_format's schema; '{"type": "json_object"}' stands for
            the mode without a schema.
    """

    turns: tuple[Turn, ...]
    system: str = ""
    thinking: bool = False
    tools: tuple[Tool, ...] = ()
    json: str = ""

    def segments(self) -> list[Segment]:
        """Prompts and answers in turn. Earlier reasoning stays only beside tools."""
        found = []
        text = BOS + self._head()
        last = len(self.turns) - 1
        for number, turn in enumerate(self.turns):
            thinks = self.thinking and (number == last or bool(self.tools))
            text += f"{USER}{_incoming(turn)}{ASSISTANT}{THINK if thinks else THOUGHT}"
            found.append(Segment(text, False))
            thought = turn.reasoning + THOUGHT if thinks else ""
            found.append(Segment(f"{thought}{turn.answer}{calls_text(turn.calls)}{EOS}", True))
            text = ""
        return found

    def prompt(self) -> str:
        """The rendered prompt of the last turn."""
        return "".join(segment.text for segment in self.segments()[:-1])

    def expected(self) -> str:
        """What the model has to write after the prompt, without the end token."""
        return self.segments()[-1].text.removesuffix(EOS)

    def body(self) -> dict[str, Any]:
        """The chat completion request whose prompt `prompt` is."""
        messages: list[dict[str, Any]] = []
        if self.system:
            messages.append({"role": "system", "content": self.system})
        for number, turn in enumerate(self.turns):
            if turn.results:
                messages += [
                    {"role": "tool", "tool_call_id": f"{number - 1}-{i}", "content": result}
                    for i, result in enumerate(turn.results)
                ]
            else:
                messages.append({"role": "user", "content": turn.user})
            if number < len(self.turns) - 1:
                messages.append(_assistant_message(turn, number))
        kind = "enabled" if self.thinking else "disabled"
        body: dict[str, Any] = {"model": "demo", "messages": messages, "thinking": {"type": kind}}
        if self.tools:
            body["tools"] = [
                {
                    "type": "function",
                    "function": {
                        "name": t.name,
                        "description": t.description,
                        "parameters": json.loads(t.parameters),
                    },
                }
                for t in self.tools
            ]
        if self.json:
            body["response_format"] = _response_format(self.json)
        return body

    def _head(self) -> str:
        text = (_EFFORT if self.thinking else "") + self.system
        if self.tools:
            text += tools_text(self.tools)
        if self.json:
            text += _FORMAT + self.json
        return SYSTEM + text if text else ""


def _incoming(turn: Turn) -> str:
    if not turn.results:
        return turn.user
    return "\n\n".join(f"<tool_result>{result}</tool_result>" for result in turn.results)


def _assistant_message(turn: Turn, number: int) -> dict[str, Any]:
    message: dict[str, Any] = {
        "role": "assistant", "content": turn.answer, "reasoning_content": turn.reasoning,
    }  # fmt: skip
    if turn.calls:
        message["tool_calls"] = [
            {
                "id": f"{number}-{i}",
                "type": "function",
                "function": {"name": call.tool, "arguments": json.dumps(call.arguments)},
            }
            for i, call in enumerate(turn.calls)
        ]
    return message


def _response_format(schema: str) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(schema)
    if value == {"type": "json_object"}:
        return value
    return {"type": "json_schema", "json_schema": {"name": "reply", "schema": value}}


@cache
def tools_text(tools: tuple[Tool, ...]) -> str:
    """The system text that defines tools."""
    return _TOOLS_HEAD + "\n".join(tool.schema() for tool in tools) + _TOOLS_TAIL


def calls_text(calls: tuple[Call, ...]) -> str:
    """Tool calls as the model writes them; "" for none."""
    if not calls:
        return ""
    lines = [f"\n\n<{DSML} calls>"]
    for call in calls:
        lines.append(f'<{DSML} invoke name="{call.tool}">')
        for key, value in call.arguments.items():
            is_text = isinstance(value, str)
            shown = value if is_text else json.dumps(value)
            flag = "true" if is_text else "false"
            start = f'<{DSML} parameter name="{key}" string="{flag}">'
            lines.append(f"{start}{shown}</{DSML} parameter>")
        lines.append(f"</{DSML} invoke>")
    lines.append(f"</{DSML} calls>")
    return "\n".join(lines)


def document(text: str) -> list[Segment]:
    """Plain text, learnt from its first token to its end."""
    return [Segment(BOS, False), Segment(text + EOS, True)]
