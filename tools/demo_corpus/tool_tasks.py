"""Conversations with tools: calls, replies to results, and requests that need no tool.

Knows how they go; must not know tokens.
"""

from demo_corpus.chat import Call, Chat, Turn
from demo_corpus.dice import Dice
from demo_corpus.facts import facts
from demo_corpus.identity import INTENTS, small_talk
from demo_corpus.story_tasks import fact_turn
from demo_corpus.style import SYSTEM_PROMPTS
from demo_corpus.toolbox import SPECS, TOOLS, request


def tools_chat(rng: Dice, thinking: float = 0.15) -> Chat:
    """A conversation that ends in a call, in a reply to a result, or in an answer without tool."""
    chosen = rng.some(SPECS, rng.number(1, 3))
    tools = tuple(TOOLS[spec.name] for spec in chosen)
    system = rng.pick(SYSTEM_PROMPTS) if rng.chance(0.15) else ""
    thinks = rng.chance(thinking)
    turns: list[Turn] = []
    for _ in range(rng.pick((1, 1, 1, 2, 2, 3))):
        if rng.chance(0.15):
            turns.append(_without_tool(rng))
            continue
        specs = [rng.pick(chosen)]
        if rng.chance(0.12):
            specs.append(rng.pick(chosen))
        made = [request(rng, spec) for spec in specs]
        calls = tuple(Call(s.name, r.arguments) for s, r in zip(specs, made, strict=True))
        reasoning = f"I need {' and '.join(spec.name for spec in specs)}."
        asked = " ".join(r.asked for r in made)
        turns.append(Turn(asked, "", reasoning, calls))
        results = tuple(r.result for r in made)
        reply = " ".join(r.reply for r in made)
        turns.append(Turn("", reply, "I have the result.", results=results))
    if turns[-1].results and rng.chance(0.4):
        turns.pop()  # the call is what the model is asked for
    return Chat(tuple(turns), system, thinks, tools)


def _without_tool(rng: Dice) -> Turn:
    if rng.chance(0.5):
        return small_talk(rng, rng.pick(tuple(INTENTS)))
    return fact_turn(rng, rng.pick(facts()))
