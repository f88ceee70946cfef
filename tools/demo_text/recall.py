"""Long documents to look things up in: codes and phrases among other sentences.

Knows distances in tokens through a counting function; must not know batches.
"""

from collections.abc import Callable
from random import Random

from demo_text import words
from demo_text.chat import SKIM, Segment, conversation
from demo_text.stories import filler

Count = Callable[[str], int]


def _key(rng: Random) -> str:
    if rng.random() < 0.3:
        return rng.choice(words.PLAIN)
    return "".join(rng.sample(words.SYLLABLES, rng.randint(2, 3)))


def _keys(rng: Random, count: int) -> list[str]:
    keys: list[str] = []
    while len(keys) < count:
        key = _key(rng)
        if key not in keys:
            keys.append(key)
    return keys


def _said(key: str, code: str) -> str:
    return f"The code of {key} is {code}."


def _asked(key: str) -> str:
    return f"What is the code of {key}?"


def recall_task(rng: Random, tokens: int, count: Count) -> list[Segment]:
    """A document of about `tokens` tokens with many codes, and questions in further turns."""
    share = rng.choice([0.1, 0.3, 0.6, 0.9])
    keys = _keys(rng, max(2, tokens // 12))
    sentences: list[str] = []
    told: list[tuple[str, str]] = []
    questions = max(1, min(16, tokens // 60))
    room = tokens - 24 * questions
    used = 0
    while used < room and len(told) < len(keys):
        if rng.random() < share or not told:
            key, code = keys[len(told)], f"{rng.randrange(10000):04d}"
            told.append((key, code))
            sentences.append(_said(key, code))
        else:
            sentences.append(filler(rng))
        used += count(sentences[-1])
    asked = [rng.choice(told) for _ in range(questions)]
    turns = [(_asked(key), code) for key, code in asked]
    turns[0] = (" ".join(sentences) + "\n" + turns[0][0], turns[0][1])
    return conversation(turns, reading=SKIM)


def _phrase(rng: Random) -> str:
    return " ".join(rng.sample(words.PLAIN, rng.randint(4, 7)))


def copy_task(rng: Random, tokens: int, count: Count) -> list[Segment]:
    """A phrase to remember, other sentences, and the phrase asked for."""
    phrase = _phrase(rng)
    sentences = [f"Remember this phrase: {phrase}."]
    used = count(sentences[0]) + 40
    while used < tokens:
        sentences.append(filler(rng))
        used += count(sentences[-1])
    user = " ".join(sentences) + "\nWhat was the phrase?"
    return conversation([(user, phrase)], reading=SKIM)


def at_distance(rng: Random, kind: str, distance: int, count: Count) -> tuple[list[Segment], int]:
    """One question whose answer lies about `distance` tokens before it, and the true distance."""
    before = [filler(rng) for _ in range(2)]
    if kind == "copy":
        answer = _phrase(rng)
        fact, question = f"Remember this phrase: {answer}.", "What was the phrase?"
    else:
        keys = _keys(rng, 1 + distance // 30)
        answer = f"{rng.randrange(10000):04d}"
        fact, question = _said(keys[0], answer), _asked(keys[0])
    after: list[str] = []
    others = iter([] if kind == "copy" else keys[1:])
    used = 0
    while used < distance - 12:
        other = next(others, None) if rng.random() < 0.4 else None
        sentence = filler(rng) if other is None else _said(other, f"{rng.randrange(10000):04d}")
        after.append(sentence)
        used += count(" " + sentence)
    text = " ".join([*before, fact, *after]) + "\n" + question
    measured = count(" " + " ".join(after) + "\n" + question)
    return conversation([(text, answer)]), measured
