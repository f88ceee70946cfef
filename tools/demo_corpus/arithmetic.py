"""Sums, differences and products of two whole numbers, with or without the columns written out.

Knows which pairs of operands are kept for the evaluation; must not know tokens.
"""

import zlib

from demo_corpus.chat import Chat, Turn
from demo_corpus.dice import Dice
from demo_corpus.style import chat

Problem = tuple[int, str, int]
MOST_FACTOR = 12
_KEPT_IN = 16  # one pair of this many is kept for the evaluation
_PHRASINGS = (
    "What is {0} {1} {2}?", "{0} {1} {2} = ?", "{0} {1} {2}", "Calculate {0} {1} {2}.",
    "How much is {0} {1} {2}?", "Please compute {0} {1} {2}.", "What does {0} {1} {2} equal?",
)  # fmt: skip
_WORDED = {
    "+": ("What is {0} plus {2}?", "Add {0} and {2}.", "What is the sum of {0} and {2}?"),
    "-": ("What is {0} minus {2}?", "Subtract {2} from {0}."),
    "*": ("What is {0} times {2}?", "Multiply {0} by {2}.",
          "What is the product of {0} and {2}?"),
}  # fmt: skip


def held_out(problem: Problem) -> bool:
    """Whether training never shows this problem; one-digit sums and products are all shown."""
    first, operator, second = problem
    if operator == "*" or max(first, second) < 10:
        return False
    return zlib.crc32(f"{first}{operator}{second}".encode()) % _KEPT_IN == 0


def result(problem: Problem) -> int:
    """The right answer."""
    first, operator, second = problem
    return first + second if operator == "+" else (
        first - second if operator == "-" else first * second
    )  # fmt: skip


def problem(rng: Dice, kept: bool = False) -> Problem:
    """A problem, from those kept for the evaluation or from all others.

    Digit counts are balanced, and each column carries or borrows about half of the time.
    """
    while True:
        kind = rng.random()
        if kind < 0.1:
            found = (rng.number(0, MOST_FACTOR), "*", rng.number(0, MOST_FACTOR))
        else:
            first, second = _operands(rng, "+" if kind < 0.55 else "-")
            found = (first, "+" if kind < 0.55 else "-", second)
        if held_out(found) == kept:
            return found


def _operands(rng: Dice, operator: str) -> tuple[int, int]:
    lengths = (1, 2, 2, 3, 3, 3)
    sizes = (rng.pick(lengths), rng.pick(lengths))
    first = second = 0
    for place in range(max(sizes)):
        a = rng.number(0, 9) if place < sizes[0] else 0
        b = rng.number(0, 9) if place < sizes[1] else 0
        # A uniform pair of digits carries less often than every other time; mend half of the gap.
        carries = a + b > 9 if operator == "+" else a < b
        if not carries and place < min(sizes) and rng.chance(0.2):
            a, b = (9 - a, 9 - b) if operator == "+" else (b, a)
        first += a * 10**place
        second += b * 10**place
    return first, second


def ask(rng: Dice, asked: Problem) -> str:
    """The question, in one of many phrasings."""
    worded = rng.chance(0.25)
    return rng.pick(_WORDED[asked[1]] if worded else _PHRASINGS).format(*asked)


def columns(asked: Problem) -> str:
    """The reasoning: column by column from the right."""
    first, operator, second = asked
    value = result(asked)
    if operator == "*":
        return f"I know that {first} * {second} = {value}."
    lines = []
    if operator == "-" and first < second:
        lines.append(f"{first} is less than {second}. I take {second} - {first} and put a minus.")
        first, second = second, first
    carry = 0
    for place in range(max(len(str(first)), len(str(second)))):
        a, b = first // 10**place % 10, second // 10**place % 10
        if operator == "+":
            total = a + b + carry
            carry, digit = divmod(total, 10)
            lines.append(f"{a} + {b} + {total - a - b} = {total}: write {digit}, carry {carry}.")
        else:
            total = a - b - carry
            borrow = int(total < 0)
            digit = total + 10 * borrow
            top = f"{a + 10 * borrow} - {b} - {carry} = {digit}"
            lines.append(f"{top}: write {digit}, borrow {borrow}.")
            carry = borrow
    return "\n".join([*lines, f"The result is {value}."])


def arithmetic(rng: Dice) -> Chat:
    """One to eight problems answered at once, or some and a last one that is thought about."""
    if rng.chance(0.35):
        problems = [problem(rng) for _ in range(rng.number(1, 3))]
        turns = [Turn(ask(rng, p), str(result(p)), columns(p)) for p in problems]
        return chat(rng, turns, thinking=1.0, system=0.05)
    problems = [problem(rng) for _ in range(rng.number(1, 8))]
    return chat(rng, [Turn(ask(rng, p), str(result(p))) for p in problems], system=0.05)
