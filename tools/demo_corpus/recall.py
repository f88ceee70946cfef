"""Long texts to look things up in: codes, mottos and a phrase to remember, among other sentences.

Knows distances in tokens through a counting function; must not know batches. Keys and values are
random, so that nothing helps but looking.
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator
from typing import NamedTuple

from demo_corpus import lexicon
from demo_corpus.chat import Chat, Turn
from demo_corpus.dice import Dice
from demo_corpus.stories import sentences
from demo_corpus.style import SYSTEM_PROMPTS

Count = Callable[[str], int]
_QUESTION_TOKENS = 24  # about what one more turn takes
_TOKENS_PER_QUESTION = 64
_MOST_QUESTIONS = 40


class Told(NamedTuple):
    """A sentence that tells something, ways to ask for it, and the answer."""

    sentence: str
    questions: tuple[str, ...]
    answer: str


_CODE = (
    "The code of {0} is {1}.", "The code of {0} is {1}.", "The code of {0} is {1}.",
    "The code for {0} is {1}.", "Remember that the code of {0} is {1}.",
    "Note that the code of {0} is {1}.", "By the way, the code of {0} is {1}.",
    "Code of {0}: {1}.",
)  # fmt: skip
_ASK_CODE = (
    "What is the code of {0}?", "What is the code of {0}?", "What is the code of {0}?",
    "What is the code for {0}?", "Tell me the code of {0}.", "Which code belongs to {0}?",
)  # fmt: skip
_MOTTO = ('The motto of {0} is "{1}".', 'The motto of {0} is "{1}".',
          'Remember the motto of {0}: "{1}".')  # fmt: skip
_ASK_MOTTO = ("What is the motto of {0}?", "Tell me the motto of {0}.")
_PHRASE = ('Remember this phrase: "{0}".', 'Remember this phrase: "{0}".',
           "Remember this phrase: {0}.", 'Keep this phrase in mind: "{0}".')  # fmt: skip
_ASK_PHRASE = ("What was the phrase?", "What was the phrase?", "Repeat the phrase.",
               "Which phrase should you remember?")  # fmt: skip
_PLAIN = (
    "It was a {0} day.", "The {1} was {0}.", "Somebody had left a {1} {2}.", "Nobody saw the {1}.",
    "The {1} stood {2}.", "There was a {1} {2}.", "The sky was {0}.", "Everyone was tired.",
    "Nothing else happened.", "Then it was quiet again.", "The {1} was not there.",
)  # fmt: skip
_PLAIN_ADJECTIVES = ("cold", "warm", "gray", "quiet", "bright", "long", "strange", "blue", "dark")


def code(rng: Dice, key: str, form: int | None = None) -> Told:
    """A key and its four digits; `form` picks the wording."""
    value = f"{rng.number(0, 9999):04d}"
    template = rng.pick(_CODE) if form is None else _CODE[form]
    return Told(template.format(key, value), tuple(q.format(key) for q in _ASK_CODE), value)


def motto(rng: Dice, key: str) -> Told:
    """A key and a few words."""
    words = " ".join(rng.some(lexicon.WORDS, rng.number(3, 5)))
    questions = tuple(q.format(key) for q in _ASK_MOTTO)
    return Told(rng.pick(_MOTTO).format(key, words), questions, words)


def phrase(rng: Dice, form: int | None = None) -> Told:
    """The phrase to remember, of five to eight words; one per text."""
    words = " ".join(rng.some(lexicon.WORDS, rng.number(5, 8)))
    template = rng.pick(_PHRASE) if form is None else _PHRASE[form]
    return Told(template.format(words), _ASK_PHRASE, words)


def keys(rng: Dice, count: int) -> list[str]:
    """Different keys: common words, first names, and made-up names."""
    found: dict[str, None] = {}
    while len(found) < count:
        chance = rng.random()
        if chance < 0.35:
            key = rng.pick(lexicon.WORDS)
        elif chance < 0.5:
            key = rng.pick(lexicon.NAMES)
        else:
            key = "".join(rng.some(lexicon.SYLLABLES, rng.number(2, 3)))
            if rng.chance(0.3):
                key = key.capitalize()
        found[key] = None
    return list(found)


def filler(rng: Dice) -> str:
    """One to three sentences that tell nothing that is asked for."""
    if rng.chance(0.6):
        return sentences(rng, 1)
    return rng.pick(_PLAIN).format(
        rng.pick(_PLAIN_ADJECTIVES), rng.pick(lexicon.WORDS), rng.pick(lexicon.PLACES)[1]
    )


class _Passage:
    """Sentences, and where in them the things are that may be asked for."""

    def __init__(self) -> None:
        self.sentences: list[str] = []
        self.told: list[Told] = []
        self.places: list[int] = []  # tokens before each told sentence
        self.tokens = 0

    def add(self, sentence: str, told: Told | None, count: Count) -> None:
        if told is not None:
            self.told.append(told)
            self.places.append(self.tokens)
        self.sentences.append(sentence)
        self.tokens += count(" " + sentence)

    def at(self, rng: Dice, asked: set[int]) -> int:
        """Something not asked for yet, at a distance that is log-uniform up to the whole text."""
        for _ in range(4):
            distance = math.exp(rng.random() * math.log(max(self.tokens, 2) / 12)) * 12
            chosen = bisect_left(self.places, self.tokens - distance)
            chosen = min(chosen, len(self.told) - 1)
            if chosen not in asked:
                break
        asked.add(chosen)
        return chosen


def _passage(rng: Dice, room: int, is_copy: bool, count: Count) -> _Passage:
    density = rng.pick((0.08, 0.2, 0.4, 0.7, 0.95))
    mottos = rng.pick((0.0, 0.15)) if not is_copy else 0.6
    names = iter(keys(rng, 3 + room // 12))
    phrase_at = int(rng.random() * room * 0.9) if is_copy else room + 1
    passage = _Passage()
    while passage.tokens < room:
        told = None
        if passage.tokens >= phrase_at:
            told, phrase_at = phrase(rng), room + 1
        elif rng.chance(density) or not (passage.told or is_copy):
            key = next(names)
            told = motto(rng, key) if rng.chance(mottos) else code(rng, key)
        passage.add(filler(rng) if told is None else told.sentence, told, count)
    if is_copy and phrase_at <= room:
        told = phrase(rng)
        passage.add(told.sentence, told, count)
    return passage


def _document(rng: Dice, tokens: int, is_copy: bool, count: Count) -> Chat:
    wanted = max(1, min(_MOST_QUESTIONS, tokens // _TOKENS_PER_QUESTION))
    passage = _passage(rng, max(20, tokens - wanted * _QUESTION_TOKENS - 8), is_copy, count)
    text = " ".join(passage.sentences)
    asked: set[int] = set()
    turns: list[Turn] = []
    more = iter(keys(rng, wanted)) if rng.chance(0.3) else iter(())
    for _ in range(wanted):
        added = _more(rng, more, passage, count) if turns and rng.chance(0.5) else ""
        told = passage.told[passage.at(rng, asked)]
        if is_copy and not turns:
            told = next((t for t in passage.told if t.questions is _ASK_PHRASE), told)
        reasoning = "I look it up in the text."
        turns.append(Turn(added + rng.pick(told.questions), told.answer, reasoning))
    first = turns[0]
    turns[0] = first._replace(user=text + rng.pick(("\n", "\n\n", " ")) + first.user)
    system = rng.pick(SYSTEM_PROMPTS) if rng.chance(0.06) else ""
    return Chat(tuple(turns), system, rng.chance(0.1))


def _more(rng: Dice, names: Iterator[str], passage: _Passage, count: Count) -> str:
    """Further sentences that come with a later question."""
    key = next(names, None)
    if key is None:
        return ""
    start = len(passage.sentences)
    told = code(rng, key)
    if rng.chance(0.5):
        passage.add(filler(rng), None, count)
    passage.add(told.sentence, told, count)
    return " ".join(passage.sentences[start:]) + "\n"


def recall(rng: Dice, tokens: int, count: Count) -> Chat:
    """A text of about `tokens` tokens, questions included, with many codes that are asked for."""
    return _document(rng, tokens, False, count)


def copy(rng: Dice, tokens: int, count: Count) -> Chat:
    """A text with a phrase to remember and mottos."""
    return _document(rng, tokens, True, count)


def at_distance(rng: Dice, kind: str, distance: int, count: Count) -> tuple[Chat, int]:
    """One question, and the tokens from the start of what is told to the answer: within 4 %.

    The plainest wordings are used. A third of the other sentences are codes of other keys.
    """
    if kind == "copy":
        told, ask = phrase(rng, 0), _ASK_PHRASE[0]
        names: Iterator[str] = iter(())
    else:
        chosen = keys(rng, 2 + distance // 12)
        told, ask = code(rng, chosen[0], 0), _ASK_CODE[0].format(chosen[0])
        names = iter(chosen[1:])
    before = [_other(rng, names) for _ in range(rng.number(1, 6))]
    while True:
        after: list[str] = []
        measured = 0
        while measured < distance * 0.96:
            after.append(_other(rng, names))
            part = " ".join([told.sentence, *after]) + "\n" + ask
            measured = count(" " + part) + 2  # the tokens that open the answer
        if measured <= distance * 1.04:
            break
    text = " ".join([*before, told.sentence, *after]) + "\n" + ask
    return Chat((Turn(text, told.answer),)), measured


def _other(rng: Dice, names: Iterator[str]) -> str:
    key = next(names, None) if rng.chance(0.35) else None
    return filler(rng) if key is None else code(rng, key, 0).sentence
