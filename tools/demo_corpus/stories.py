"""Short stories: a cast, a setting and a plot, told in sentences drawn from the plot's wordings.

Knows how slots of plots are filled; must not know chat formats or tokens.
"""

from dataclasses import dataclass

from demo_corpus import lexicon
from demo_corpus.dice import Dice
from demo_corpus.english import capital, with_article
from demo_corpus.plots import Plot, plots

Slots = dict[str, str]
_FEMALE = ("she", "her", "her")
_MALE = ("he", "him", "his")
_INTROS = (
    "Once upon a time, there was {a_hero} named {A}. {He} lived {home}.",
    "Once upon a time, {a_hero} named {A} lived {home}.",
    "Once upon a time, there was {a_hero}. {His} name was {A}, and {he} lived {home}.",
    "Once there was {a_hero} called {A}, who lived {home}.",
    "{A} was {a_hero} who lived {home}.",
    "There once was {a_hero} named {A}, who lived {home}.",
    "Long ago, {a_hero} named {A} lived {home}.",
    "{home} lived {a_hero} named {A}.",
    "{A} lived {home}. {He} was {a_hero}.",
    "There was once {a_hero} {home}. Everyone called {him} {A}.",
)
_HOBBY = ("{He} loved {hobby}.", "{He} liked {hobby} more than anything.", "{A} loved {hobby}.")
_ENDINGS = (
    "And that is the end of the story.", "That was a day they never forgot.", "And so it was.",
    "They told this story for many years.", "What a day it had been!",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Story:
    """A story.

    Attributes:
        text: the sentences.
        about: what it is about, as a phrase: "a shy fox who lost a red kite".
        questions: (question, answer) pairs that the text answers.
        slots: what was drawn.
    """

    text: str
    about: str
    questions: tuple[tuple[str, str], ...]
    slots: Slots


def story(rng: Dice, ending: float = 0.2) -> Story:
    """One story of a random plot; `ending` is the chance of a closing sentence."""
    plot = rng.pick(plots())
    slots = _scene(rng, plot)
    questions = [("Who is the story about?", slots["A"])]
    parts = [rng.pick(_INTROS)]
    questions.append(("Where did {A} live?", slots["home"]))
    if slots["kindA"] == "animal":
        questions.append(("What kind of animal was {A}?", "{kind}"))
    if rng.chance(0.25):
        parts.append(rng.pick(_HOBBY))
        questions.append(("What did {A} love?", slots["hobby"]))
        if parts[-1].startswith("{He} liked"):
            questions[-1] = ("What did {A} like?", slots["hobby"])
    parts += [
        rng.pick(step.wordings) for step in plot.steps if not step.optional or rng.chance(0.5)
    ]
    if rng.chance(ending):
        parts.append(rng.pick(_ENDINGS))
    text = " ".join([capital(part.format_map(slots)) for part in parts])
    told = [(capital(q.format_map(slots)), a.format_map(slots)) for q, a in questions]
    told += [(capital(q.format_map(slots)), a.format_map(slots)) for q, a in plot.questions]
    return Story(text, plot.about.format_map(slots), tuple(told), slots)


def sentences(rng: Dice, count: int) -> str:
    """`count` neighbouring steps of a story, as filler."""
    plot = rng.pick(plots())
    slots = _scene(rng, plot)
    start = rng.number(0, max(0, len(plot.steps) - count))
    steps = plot.steps[start : start + count]
    return " ".join([capital(rng.pick(step.wordings).format_map(slots)) for step in steps])


def _kind(rng: Dice, wanted: str, other: str) -> str:
    """The kind of a character; the second one tends to be of the kind of the first."""
    if wanted in ("child", "animal", "adult", "dragon", "robot"):
        return wanted
    if other in ("child", "animal") and rng.chance(0.5):
        return other
    chance = rng.random()
    if wanted == "young":
        return "child" if chance < 0.5 else "animal"
    return "child" if chance < 0.35 else "animal" if chance < 0.75 else "adult"


def _character(rng: Dice, kind: str) -> tuple[str, str, tuple[str, str, str]]:
    """Name, noun and pronouns."""
    pronouns = _FEMALE if rng.chance(0.5) else _MALE
    if kind == "animal":
        return rng.pick(lexicon.ANIMAL_NAMES), rng.pick(lexicon.ANIMALS), pronouns
    if kind == "dragon":
        return rng.pick(lexicon.MONSTER_NAMES), rng.pick(lexicon.MONSTERS), _MALE
    if kind == "robot":
        return rng.pick(lexicon.ROBOT_NAMES), "robot", _MALE
    name = rng.pick(lexicon.GIRLS if pronouns is _FEMALE else lexicon.BOYS)
    if kind == "child":
        return name, "girl" if pronouns is _FEMALE else "boy", pronouns
    return name, rng.pick(lexicon.ADULTS), pronouns


def _scene(rng: Dice, plot: Plot) -> Slots:
    """Everything that the sentences of `plot` may mention."""
    first = _kind(rng, plot.cast[0], "")
    second = _kind(rng, plot.cast[1], first)
    name, noun, (he, him, his) = _character(rng, first)
    name2, noun2, (he2, him2, his2) = _character(rng, second)
    while name2 == name or (noun2 == noun and second != "child"):
        name2, noun2, (he2, him2, his2) = _character(rng, second)
    trait = rng.pick(plot.needs.get("trait", lexicon.TRAITS))
    size = rng.pick(("little ", "small ", "young ", "", "", ""))
    if first == "adult":
        size = rng.pick(("old ", "young ", "", "", ""))
    hero = with_article(f"{trait} {size}{noun}")
    if "trait" not in plot.needs and rng.chance(0.2) and size:
        hero = with_article(f"{size}{noun}")
    homes = lexicon.HOMES["child" if first == "adult" else first]
    slots = {
        "A": name, "he": he, "him": him, "his": his, "He": he.capitalize(),
        "His": his.capitalize(), "kind": noun, "kindA": first, "a_kind": with_article(noun),
        "a_hero": hero, "trait": trait, "home": rng.pick(homes), "hobby": rng.pick(lexicon.HOBBIES),
        "B": name2, "he2": he2, "him2": him2, "his2": his2, "He2": he2.capitalize(),
        "His2": his2.capitalize(), "kind2": noun2, "the_kind2": f"the {noun2}",
        "a_kind2": f"another {noun2}" if noun2 == noun else with_article(noun2),
        "parent": rng.pick(lexicon.PARENTS), "day": rng.pick(lexicon.DAYS),
        "one_morning": rng.pick(lexicon.MORNINGS), "one_evening": rng.pick(lexicon.EVENINGS),
    }  # fmt: skip
    slots["Day"], slots["One_morning"] = capital(slots["day"]), capital(slots["one_morning"])
    if "trait" in plot.needs and rng.chance(0.5):
        slots["a_kind"] = with_article(f"{trait} {noun}")
    for slot, groups in plot.needs.items():
        _DRAWN[slot](rng, slots, slot, groups)
    return slots


def _draw_thing(rng: Dice, slots: Slots, slot: str, groups: tuple[str, ...]) -> None:
    number = slot.removeprefix("thing")
    nouns, adjectives = lexicon.THINGS[rng.pick(groups)]
    noun = rng.pick(nouns)
    while noun in (slots.get("noun"), slots.get("noun2")):
        noun = rng.pick(nouns)
    full = f"{rng.pick(adjectives)} {noun}"
    slots |= {
        f"thing{number}": full, f"noun{number}": noun, f"a_thing{number}": with_article(full),
        f"a_noun{number}": with_article(noun), f"the_noun{number}": f"the {noun}",
        f"the_thing{number}": f"the {full}",
    }  # fmt: skip


def _draw_place(rng: Dice, slots: Slots, slot: str, groups: tuple[str, ...]) -> None:
    noun, at, _, spots = rng.pick(_PLACES[groups[0]])
    slots |= {"place": noun, "at": at, "spot": rng.pick(spots)}


def _draw_food(rng: Dice, slots: Slots, slot: str, groups: tuple[str, ...]) -> None:
    noun = rng.pick(lexicon.FOODS)
    full = f"{rng.pick(lexicon.FOOD_ADJECTIVES)} {noun}"
    slots |= {"food_noun": noun, "a_food": with_article(full), "the_food": f"the {full}"}


def _draw_clothing(rng: Dice, slots: Slots, slot: str, groups: tuple[str, ...]) -> None:
    nouns, adjectives = lexicon.THINGS["clothing"]
    noun = rng.pick(nouns[:2])
    slots |= {"clothing": f"{rng.pick(adjectives)} {noun}", "clothing_noun": noun}


def _draw_phrase(rng: Dice, slots: Slots, slot: str, groups: tuple[str, ...]) -> None:
    """Phrases that come with their article."""
    options = {
        "plant": lexicon.PLANTS, "prize": lexicon.PRIZES, "goal": lexicon.GOALS,
        "bird": lexicon.BIRDS, "beast": lexicon.BEASTS, "animal": lexicon.STAR_ANIMALS,
        "skill": lexicon.SKILLS,
    }[slot]  # fmt: skip
    phrase = rng.pick(options)
    if slot == "beast":
        slots["beast"] = phrase
        phrase = with_article(phrase)
    name = {"skill": "to_skill", "animal": "an_animal"}.get(slot, f"a_{slot}")
    slots |= {name: phrase, f"{name}_cap": capital(phrase)}
    if slot == "prize":
        slots["the_prize"] = f"the {phrase.partition(' ')[2]}"
    if slot == "animal":
        found = f"{rng.pick(lexicon.FOUNDLING_ADJECTIVES)} {rng.pick(lexicon.FOUNDLINGS)}"
        slots |= {"a_animal_adj": f"a {found}", "a_animal_adj_cap": f"A {found}"}


def _draw_treasure(rng: Dice, slots: Slots, slot: str, groups: tuple[str, ...]) -> None:
    nouns, adjectives = lexicon.THINGS["treasure"]
    slots["a_treasure"] = with_article(f"{rng.pick(adjectives)} {rng.pick(nouns)}")


_PLACES = {
    group: tuple(place for place in lexicon.PLACES if group in place[2].split())
    for group in ("outdoor", "wild", "cave_place", "town", "room")
}
_DRAWN = {
    "trait": lambda *_: None, "thing": _draw_thing, "thing2": _draw_thing, "thing3": _draw_thing,
    "place": _draw_place, "food": _draw_food, "clothing": _draw_clothing, "plant": _draw_phrase,
    "prize": _draw_phrase, "goal": _draw_phrase, "bird": _draw_phrase, "beast": _draw_phrase,
    "animal": _draw_phrase, "skill": _draw_phrase, "treasure": _draw_treasure,
}  # fmt: skip
