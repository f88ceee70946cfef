"""Small rules of English: articles, capitals, lists, numbers in words.

Knows spelling; must not know stories or tasks.
"""

from collections.abc import Sequence

_VOWELS = tuple("aeiouAEIOU")
_SPOKEN_VOWEL = ("honest", "hour", "heir")
_SPOKEN_CONSONANT = ("uni", "use", "usu", "one", "eu", "Uni", "Use", "One", "Eu")
NUMBER_WORDS = (
    "zero",
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
)


def article(phrase: str) -> str:
    """ "a" or "an", as the sound of the first word asks."""
    if phrase.startswith(_SPOKEN_VOWEL):
        return "an"
    if phrase.startswith(_SPOKEN_CONSONANT):
        return "a"
    return "an" if phrase.startswith(_VOWELS) else "a"


def with_article(phrase: str) -> str:
    """The phrase after a or an."""
    return f"{article(phrase)} {phrase}"


def capital(text: str) -> str:
    """The text with a capital first letter, also inside quotation marks."""
    if text.startswith('"'):
        return text[:1] + text[1:2].upper() + text[2:]
    return text[:1].upper() + text[1:]


def listed(items: Sequence[str], last: str = "and") -> str:
    """One, "one and two", or "one, two and three"."""
    if len(items) == 1:
        return items[0]
    return f"{', '.join(items[:-1])} {last} {items[-1]}"
