"""Arbitrary rules that have to be learnt by heart: three glyphs, and the fourth that follows them.

Knows the rules, a pure function of one seed; must not know tokens.
"""

from functools import cache

from demo_corpus.chat import BOS, EOS, Chat, Segment, Turn
from demo_corpus.dice import Dice, dice
from demo_corpus.style import chat

# Each is one token, with and without a space before it; none is an English word.
_GLYPHS = """
    ba bo bu ce ci cu da de di du fe fo fu ga ge gi gu ja je ji jo ju ka ke ki ko ku le li lo lu
    mo mu na ne ni po pu ra ri ro ru sa se si su ta te tu va ve vi vo vu wa wi xa xo ya yu za zi zo
    zu"""
GLYPHS = tuple(_GLYPHS.split())
RULES = 2000
Rule = tuple[str, str, str, str]
_ASKED = ("Complete the rune: {}", "Complete this rune: {}", "Finish the rune: {}")
_ASKED_LAST = ("Which glyph follows {}?", "What comes after the glyphs {}?")


@cache
def rules() -> tuple[Rule, ...]:
    """All rules; no two begin with the same three glyphs."""
    rng = dice("runes", 41)
    found: dict[tuple[str, ...], Rule] = {}
    while len(found) < RULES:
        rule = (rng.pick(GLYPHS), rng.pick(GLYPHS), rng.pick(GLYPHS), rng.pick(GLYPHS))
        found.setdefault(rule[:3], rule)
    return tuple(found.values())


def ask_whole(rng: Dice, rule: Rule) -> Turn:
    """The answer repeats the glyphs, so that the last one follows the three that decide it."""
    shown = " ".join(rule[:3])
    return Turn(rng.pick(_ASKED).format(shown), " ".join(rule), f"The rune begins with {shown}.")


def ask_last(rng: Dice, rule: Rule) -> Turn:
    """Only the last glyph is the answer."""
    return Turn(rng.pick(_ASKED_LAST).format(" ".join(rule[:3])), rule[3],
                f"The rune is {' '.join(rule)}.")  # fmt: skip


def listing(chosen: list[Rule]) -> list[Segment]:
    """A document of rules, one a line. Only the last glyph of each can be known."""
    found = [Segment(BOS, False)]
    for rule in chosen:
        found += [Segment(f"rune: {' '.join(rule[:3])}", False), Segment(f" {rule[3]}\n", True)]
    return [*found, Segment(EOS, True)]


def ngram(rng: Dice) -> Chat | list[Segment]:
    """Rules as a document, or questions about them."""
    chosen = rng.some(rules(), rng.number(3, 20))
    if rng.chance(0.6):
        return listing(chosen)
    make = ask_whole if rng.chance(0.7) else ask_last
    return chat(rng, [make(rng, rule) for rule in chosen[:10]], system=0.05)
