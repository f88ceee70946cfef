"""Short tasks on a few words: repeat, reverse, capitals, counting, picking, sorting.

Knows the tasks; must not know tokens.
"""

from demo_corpus import lexicon
from demo_corpus.chat import Chat, Turn
from demo_corpus.dice import Dice
from demo_corpus.english import listed
from demo_corpus.style import chat

_REPEAT = ("Repeat: {}", "Copy these words: {}", "Say this again: {}", "Repeat after me: {}")
_REVERSE = ("Reverse the order of these words: {}", "Write these words in reverse order: {}")
_UPPER = ("Write this in capital letters: {}", "Make this uppercase: {}", "In capitals: {}")
_COUNT = ("How many words are there: {}", "Count the words: {}", "How many words is this: {}")
_FIRST = ("What is the first word: {}", "Give me the first word: {}")
_LAST = ("What is the last word: {}", "Give me the last word: {}")
_SORT = ("Sort these words by the alphabet: {}", "Put these words in alphabetical order: {}")
_LIST = ("Join these words with commas: {}", "Make a list with commas: {}")
# Words that are written in capital letters: few, since each is a word of its own to a tokenizer.
UPPER_WORDS = lexicon.WORDS[::4]


def text_turn(rng: Dice) -> Turn:
    """One task with its answer."""
    words = rng.some(lexicon.WORDS, rng.number(3, 6))
    line = " ".join(words)
    kind = rng.number(0, 7)
    if kind == 0:
        return Turn(rng.pick(_REPEAT).format(line), line, "I write the same words again.")
    if kind == 1:
        return Turn(rng.pick(_REVERSE).format(line), " ".join(reversed(words)),
                    f"The last word is {words[-1]}, so I begin with it.")  # fmt: skip
    if kind == 2:
        word = " ".join(rng.some(UPPER_WORDS, rng.number(1, 2)))
        return Turn(rng.pick(_UPPER).format(word), word.upper(), "I write capital letters.")
    if kind == 3:
        counted = ", ".join(f"{i} {word}" for i, word in enumerate(words, 1))
        return Turn(rng.pick(_COUNT).format(line), str(len(words)), f"I count: {counted}.")
    if kind == 4:
        return Turn(rng.pick(_FIRST).format(line), words[0], f"It begins with {words[0]}.")
    if kind == 5:
        return Turn(rng.pick(_LAST).format(line), words[-1], f"It ends with {words[-1]}.")
    if kind == 6:
        three = words[:3]
        ordered = sorted(three)
        return Turn(rng.pick(_SORT).format(" ".join(three)), " ".join(ordered),
                    f"They begin with {listed([word[0] for word in three])}.")  # fmt: skip
    return Turn(rng.pick(_LIST).format(line), ", ".join(words), "I put commas between them.")


def text(rng: Dice) -> Chat:
    """One to five tasks."""
    return chat(rng, [text_turn(rng) for _ in range(rng.number(1, 5))])
