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
from demo_corpus.english import with_article
from demo_corpus.stories import sentences
from demo_corpus.style import SYSTEM_PROMPTS

Count = Callable[[str], int]
_QUESTION_TOKENS = 24  # about what one more turn takes
_TOKENS_PER_QUESTION = 64
_MOST_QUESTIONS = 40
_TOKENS_PER_SENTENCE = 20
_DENSITIES = (0.08, 0.2, 0.4, 0.7, 0.95)  # shares of sentences that tell something


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
    "It was a {0} day.", "The {1} was {0}.", "Somebody had left {2} {3}.", "Nobody saw the {1}.",
    "The {1} stood {3}.", "There was {2} {3}.", "The sky was {0}.", "Everyone was tired.",
    "Nothing else happened.", "Then it was quiet again.", "The {1} was not there.",
    "They talked about the {1}.", "Was that {2}?", "The wind was {0}.", "Nobody said a word.",
)  # fmt: skip
_PLAIN_ADJECTIVES = ("cold", "warm", "gray", "quiet", "bright", "strange", "dark", "soft", "pale")


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


def keys(rng: Dice) -> Iterator[str]:
    """Different keys without end: common words, first names, and made-up names."""
    found: set[str] = set()
    while True:
        chance = rng.random()
        if chance < 0.35:
            key = rng.pick(lexicon.WORDS)
        elif chance < 0.5:
            key = rng.pick(lexicon.NAMES)
        else:
            key = "".join(rng.some(lexicon.SYLLABLES, rng.number(2, 3)))
            if rng.chance(0.3):
                key = key.capitalize()
        if key not in found:
            found.add(key)
            yield key


def filler(rng: Dice) -> str:
    """One to three sentences that tell nothing that is asked for."""
    if rng.chance(0.6):
        return sentences(rng, 1)
    noun = rng.pick(lexicon.OBJECTS)
    at = rng.pick(lexicon.PLACES)[1]
    return rng.pick(_PLAIN).format(rng.pick(_PLAIN_ADJECTIVES), noun, with_article(noun), at)


class _Passage:
    """Sentences, and where in them the things are that may be asked for."""

    def __init__(self, names: Iterator[str]) -> None:
        self.names = names
        self.sentences: list[str] = []
        self.told: list[Told] = []
        self.places: list[int] = []  # tokens before each told sentence
        self.tokens = 0
        self.asked: set[int] = set()  # places in `told`

    def add(self, sentence: str, told: Told | None, count: Count) -> None:
        if told is not None:
            self.told.append(told)
            self.places.append(self.tokens)
        self.sentences.append(sentence)
        self.tokens += count(" " + sentence)

    def choose(self, rng: Dice, far: bool) -> Told | None:
        """Something not asked for yet, at a distance up to the whole text.

        Distances are log-uniform; with `far`, half of them are uniform.
        """
        left = [place for place in range(len(self.told)) if place not in self.asked]
        if not left:
            return None
        distance = 12 * math.exp(rng.random() * math.log(max(self.tokens, 12) / 12))
        if far and rng.chance(0.5):
            distance = rng.random() * self.tokens
        chosen = min(bisect_left(self.places, self.tokens - distance), len(self.told) - 1)
        if chosen in self.asked:
            chosen = min(left, key=lambda place: abs(place - chosen))
        self.asked.add(chosen)
        return self.told[chosen]

    def choose_phrase(self) -> Told | None:
        """The phrase to remember, if the text has one."""
        for place, told in enumerate(self.told):
            if told.questions is _ASK_PHRASE:
                self.asked.add(place)
                return told
        return None


def _passage(rng: Dice, room: int, is_copy: bool, density: float, count: Count) -> _Passage:
    """Sentences of `room` tokens; the share `density` of them tells something."""
    mottos = rng.pick((0.0, 0.15)) if not is_copy else 0.6
    phrase_at = int(rng.random() * room * 0.9) if is_copy else room + 1
    passage = _Passage(keys(rng))
    while passage.tokens < room:
        told = None
        if passage.tokens >= phrase_at:
            told, phrase_at = phrase(rng), room + 1
        elif rng.chance(density):
            key = next(passage.names)
            told = motto(rng, key) if rng.chance(mottos) else code(rng, key)
        passage.add(filler(rng) if told is None else told.sentence, told, count)
    if is_copy and phrase_at <= room:
        told = phrase(rng)
        passage.add(told.sentence, told, count)
    if not passage.told:
        told = code(rng, next(passage.names))
        passage.add(told.sentence, told, count)
    return passage


def _document(rng: Dice, tokens: int, is_copy: bool, count: Count, far: bool) -> Chat:
    density = rng.pick(_DENSITIES)
    told_about = int(tokens * density / _TOKENS_PER_SENTENCE) + 1
    wanted = max(1, min(_MOST_QUESTIONS, tokens // _TOKENS_PER_QUESTION, told_about))
    room = max(20, tokens - wanted * _QUESTION_TOKENS - 8)
    passage = _passage(rng, room, is_copy, density, count)
    text = " ".join(passage.sentences) + rng.pick(("\n", "\n\n", " "))
    turns: list[Turn] = []
    grows = rng.chance(0.3)
    while len(turns) < wanted:
        if grows and turns and rng.chance(0.5):
            text = _more(rng, passage, count)
        told = passage.choose(rng, far) if turns or not is_copy else passage.choose_phrase()
        if told is None:
            break
        reasoning = "I look it up in the text."
        turns.append(Turn(text + rng.pick(told.questions), told.answer, reasoning))
        text = ""
    system = rng.pick(SYSTEM_PROMPTS) if rng.chance(0.06) else ""
    return Chat(tuple(turns), system, rng.chance(0.1))


def _more(rng: Dice, passage: _Passage, count: Count) -> str:
    """Further sentences that come with a later question."""
    start = len(passage.sentences)
    told = code(rng, next(passage.names))
    if rng.chance(0.5):
        passage.add(filler(rng), None, count)
    passage.add(told.sentence, told, count)
    return " ".join(passage.sentences[start:]) + "\n"


def recall(rng: Dice, tokens: int, count: Count, far: bool = False) -> Chat:
    """A text of about `tokens` tokens, questions included, with many codes that are asked for."""
    return _document(rng, tokens, False, count, far)


def copy(rng: Dice, tokens: int, count: Count, far: bool = False) -> Chat:
    """A text with a phrase to remember and mottos."""
    return _document(rng, tokens, True, count, far)


def at_distance(rng: Dice, kind: str, distance: int, count: Count) -> tuple[Chat, int]:
    """One question, and the tokens from the start of what is told to the answer: within 4 %.

    The plainest wordings are used. A third of the other sentences are codes of other keys.
    """
    names = keys(rng)
    if kind == "copy":
        told, ask = phrase(rng, 0), _ASK_PHRASE[0]
    else:
        key = next(names)
        told, ask = code(rng, key, 0), _ASK_CODE[0].format(key)
    before = [_other(rng, names) for _ in range(rng.number(1, 6))]
    while True:
        after: list[str] = []
        measured = count(f" {told.sentence}\n{ask}") + 2  # and the tokens that open the answer
        while measured < distance * 0.96:
            after.append(_other(rng, names))
            measured += count(" " + after[-1])
        if measured <= distance * 1.04:
            break
    text = " ".join([*before, told.sentence, *after]) + "\n" + ask
    return Chat((Turn(text, told.answer),)), measured


def _other(rng: Dice, names: Iterator[str]) -> str:
    return code(rng, next(names), 0).sentence if rng.chance(0.35) else filler(rng)
