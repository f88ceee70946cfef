"""Conversations as people have them: with and without a system prompt, with and without thinking.

Knows how turns become a chat; must not know tasks.
"""

from collections.abc import Sequence

from demo_corpus.chat import Chat, Turn
from demo_corpus.dice import Dice

SYSTEM_PROMPTS = (
    "You are a helpful assistant.", "You are a helpful assistant. Answer briefly.",
    "Answer in one short phrase.", "Be brief and exact.", "You are a friendly assistant.",
)  # fmt: skip


def chat(rng: Dice, turns: Sequence[Turn], thinking: float = 0.2, system: float = 0.1) -> Chat:
    """A chat of these turns, in thinking mode sometimes if the last turn has reasoning."""
    thinks = bool(turns[-1].reasoning) and rng.chance(thinking)
    prompt = rng.pick(SYSTEM_PROMPTS) if rng.chance(system) else ""
    return Chat(tuple(turns), prompt, thinks)
