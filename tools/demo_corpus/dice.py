"""Seeded choices that are cheap and the same under every Python version.

Knows random numbers; must not know what is chosen.
"""

from collections.abc import Sequence
from random import Random
from typing import TypeVar

T = TypeVar("T")


class Dice(Random):
    """A generator whose choices are all made from `random()`.

    The library promises that the values of `random()` stay the same between versions, and it does
    not promise that of `choice` or `sample`.
    """

    def pick(self, options: Sequence[T]) -> T:
        """One of the options, each as likely as the others."""
        return options[int(self.random() * len(options))]

    def number(self, low: int, high: int) -> int:
        """An integer from `low` to `high`, both included."""
        return low + int(self.random() * (high - low + 1))

    def chance(self, probability: float) -> bool:
        """True with this probability."""
        return self.random() < probability

    def some(self, options: Sequence[T], count: int) -> list[T]:
        """`count` different places of `options`, in random order."""
        assert count <= len(options), (count, len(options))
        taken: dict[int, None] = {}
        while len(taken) < count:
            taken[int(self.random() * len(options))] = None
        return [options[place] for place in taken]


def dice(*parts: object) -> Dice:
    """A generator seeded with the text of `parts`, for example dice("train", 0, "short", 7)."""
    return Dice("/".join(map(str, parts)))
