"""The V4.1 chat format: what deepseek-recipe renders, as text with special tokens.

Knows the format; a test compares it with the library. Segments are (text, weight): 1 for what the
model has to write, 0.1 for what it reads.
"""

import json
from collections.abc import Sequence
from typing import Any

BOS, EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
SYSTEM, USER, ASSISTANT = "<｜System｜>", "<｜User｜>", "<｜Assistant｜>"
# SKIM: random codes and filler to search in, from which nothing can be learned.
READ, SKIM, WRITE = 0.1, 0.01, 1.0
Segment = tuple[str, float]

_EFFORT = (
    "Reasoning Effort: 75 (range 1-100, the higher the value, the more thorough the reasoning)\n\n"
)
_TOOLS = """

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

{schemas}

You MUST strictly follow the above defined tool name and parameter schemas to invoke tool calls.
"""
_FORMAT = "\n\n## Response Format:\n\nYou MUST strictly adhere to the following schema to reply:\n{schema}"


def tools_prompt(tools: Sequence[dict[str, Any]]) -> str:
    """System text of tool definitions ({"name", "description", "parameters"})."""
    return _TOOLS.replace("{schemas}", "\n".join(json.dumps(tool) for tool in tools))


def format_prompt(schema: dict[str, Any]) -> str:
    """System text of a response schema."""
    return _FORMAT.replace("{schema}", json.dumps(schema))


def tool_call(name: str, arguments: dict[str, Any]) -> str:
    """The text of one call, as the model writes it."""
    lines = [f'\n\n<｜DSML｜ calls>\n<｜DSML｜ invoke name="{name}">']
    for key, value in arguments.items():
        string = isinstance(value, str)
        shown = value if string else json.dumps(value)
        flag = "true" if string else "false"
        lines.append(
            f'<｜DSML｜ parameter name="{key}" string="{flag}">{shown}</｜DSML｜ parameter>'
        )
    return "\n".join([*lines, "</｜DSML｜ invoke>", "</｜DSML｜ calls>"])


def conversation(
    turns: Sequence[tuple[str, str]],
    system: str = "",
    reasoning: Sequence[str] | None = None,
    reading: float = READ,
) -> list[Segment]:
    """Segments of user and assistant turns.

    Args:
        system: system text as rendered (tools and formats included).
        reasoning: thinking before each answer turns thinking mode on; only the last one stays in
            the text, as at serving time.
        reading: weight of what the model reads.
    """
    head = BOS
    if reasoning is not None:
        head += SYSTEM + _EFFORT + system
    elif system:
        head += SYSTEM + system
    segments: list[Segment] = []
    for number, (user, answer) in enumerate(turns):
        last = number == len(turns) - 1
        think = reasoning is not None and last
        opening = f"{USER}{user}{ASSISTANT}{'<think>' if think else '</think>'}"
        segments.append(((head if number == 0 else "") + opening, reading))
        thought = f"{reasoning[number]}</think>" if think and reasoning is not None else ""
        segments.append((thought + answer + EOS, WRITE))
    return segments


def prompt_of(segments: Sequence[Segment]) -> str:
    """Everything up to the last answer."""
    return "".join(text for text, _ in segments[:-1])


def document(text: str) -> list[Segment]:
    """Plain text from its first token to its end."""
    return [(BOS + text + EOS, WRITE)]
