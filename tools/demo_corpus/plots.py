"""Plots of stories, read from plots_*.txt: what they need and the sentences they choose from.

    plot NAME            begins a plot
    cast KIND KIND       who {A} and {B} are: child, animal, young, adult, any, dragon, robot
    use SLOT=GROUP,...   what has to be drawn for it
    about PHRASE         how one asks for the story: "a story about ..."
    - SENTENCES          a step, which every story of the plot has; `~` in place of `-`: some have
    | SENTENCES          another wording of the step
    ? QUESTION = ANSWER  true of every story of the plot

[one|two] stands for either wording; names in braces are slots.
Knows the format; must not know how slots are filled.
"""

import re
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

_CHOICE = re.compile(r"\[([^\[\]]*)\]")
_MOST_WORDINGS = 36


@dataclass
class Step:
    """One step of a plot; each wording is a format string."""

    wordings: list[str]
    optional: bool


@dataclass
class Plot:
    """One scheme of a story."""

    name: str
    cast: tuple[str, str] = ("any", "any")
    needs: dict[str, tuple[str, ...]] = field(default_factory=dict)
    about: str = ""
    steps: list[Step] = field(default_factory=list)
    questions: list[tuple[str, str]] = field(default_factory=list)


def wordings(template: str) -> list[str]:
    """All texts that the choices of `template` stand for."""
    match = _CHOICE.search(template)
    if match is None:
        return [template]
    before, after = template[: match.start()], wordings(template[match.end() :])
    found = [before + option + rest for option in match.group(1).split("|") for rest in after]
    assert len(found) <= _MOST_WORDINGS, template
    return found


@cache
def plots() -> tuple[Plot, ...]:
    """All plots, in the order of the files."""
    found: list[Plot] = []
    for file in sorted(Path(__file__).parent.glob("plots_*.txt")):
        for line in file.read_text(encoding="utf-8").splitlines():
            if line and not line.startswith("#"):
                _read(line, found)
    return tuple(found)


def _read(line: str, found: list[Plot]) -> None:
    mark, _, rest = line.partition(" ")
    if mark == "plot":
        found.append(Plot(rest))
        return
    plot = found[-1]
    if mark == "cast":
        first, second = rest.split()
        plot.cast = (first, second)
    elif mark == "use":
        for need in rest.split():
            slot, _, groups = need.partition("=")
            plot.needs[slot] = tuple(groups.split(","))
    elif mark == "about":
        plot.about = rest
    elif mark in "-~":
        plot.steps.append(Step(wordings(rest), mark == "~"))
    elif mark == "|":
        plot.steps[-1].wordings += wordings(rest)
    elif mark == "?":
        for text in wordings(rest):
            question, _, answer = text.partition(" = ")
            plot.questions.append((question, answer))
    else:
        raise ValueError(f"plot {plot.name}: cannot read {line!r}")
