"""Short stories from plots, a cast and a setting, and questions about them.

Knows English sentences; must not know chat formats.
"""

from dataclasses import dataclass
from random import Random

from demo_text import words


def article(word: str) -> str:
    """The word with a or an."""
    return f"{'an' if word[0] in 'aeiou' else 'a'} {word}"


@dataclass(frozen=True)
class Hero:
    """Somebody in a story; `he`, `him`, `his` are the pronouns."""

    name: str
    kind: str
    he: str
    him: str
    his: str


@dataclass(frozen=True)
class Story:
    """A text and what one can ask about it: (question, answer)."""

    text: str
    title: str
    questions: tuple[tuple[str, str], ...]


def hero(rng: Random) -> Hero:
    """A girl, a boy or an animal with a name."""
    female = rng.random() < 0.5
    name = rng.choice(words.GIRLS if female else words.BOYS)
    if rng.random() < 0.45:
        kind = rng.choice(words.ANIMALS)
    else:
        kind = "girl" if female else "boy"
    return Hero(name, kind, *(("she", "her", "her") if female else ("he", "him", "his")))


@dataclass(frozen=True)
class Scene:
    """The drawn ingredients of a story."""

    a: Hero
    b: Hero
    thing: str
    look: str
    place: str
    other_place: str
    trait: str
    food: str
    time: str
    weather: str


def _place(rng: Random) -> str:
    place, preposition = rng.choice(words.PLACES).split("|")
    return f"{preposition} the {place}"


def scene(rng: Random) -> Scene:
    """Draw a cast and a setting."""
    a, b = hero(rng), hero(rng)
    while b.name == a.name or b.kind == a.kind:
        b = hero(rng)
    place = _place(rng)
    other = _place(rng)
    while other == place:
        other = _place(rng)
    look = rng.choice(words.COLOURS if rng.random() < 0.6 else words.SIZES)
    return Scene(
        a, b, rng.choice(words.OBJECTS), look, place, other,
        rng.choice(words.TRAITS).split("|")[0], rng.choice(words.FOODS), rng.choice(words.TIMES),
        rng.choice(words.WEATHER),
    )  # fmt: skip


def _one(rng: Random, *forms: str) -> str:
    return rng.choice(forms)


def _opening(rng: Random, s: Scene) -> str:
    a = s.a
    who = article(f"{s.trait} {a.kind}")
    return _one(
        rng,
        f"Once upon a time there was {who} named {a.name}.",
        f"There once was {who} called {a.name}.",
        f"{a.name} was {who} who lived {s.place}.",
        f"{s.time}, {who} named {a.name} was walking {s.place}.",
    ) + _one(
        rng,
        f" {a.name} loved to play {s.place}.",
        f" Every day {a.he} went for a walk {s.place}.",
        f" {a.he.capitalize()} liked {s.food} more than anything.",
        f" That day {s.weather}.",
    )  # fmt: skip


def _lost(rng: Random, s: Scene) -> list[str]:
    a, b, t = s.a, s.b, f"{s.look} {s.thing}"
    return [
        _one(rng, f"{a.name} had {article(t)} and took it everywhere.",
             f"{a.name}'s favourite thing was {article(t)}."),
        _one(rng, f"{s.time} the {s.thing} was gone.", f"But {s.time.lower()} {a.he} lost the {s.thing}."),
        _one(rng, f"{a.name} looked {s.place}, but it was not there.",
             f"{a.he.capitalize()} searched {s.place} and found nothing."),
        _one(rng, f'"Why are you sad?" asked {b.name} the {b.kind}.',
             f'{b.name} the {b.kind} saw {a.him} and asked, "What is wrong?"'),
        _one(rng, f'"I lost my {s.thing}," said {a.name}.', f'"My {s.thing} is gone," {a.name} answered.'),
        _one(rng, f'"I saw it {s.other_place}," said {b.name}.',
             f'"Let us look {s.other_place}," said {b.name}.'),
        _one(rng, f"They went together, and there was the {t}.",
             f"They ran there, and the {t} was lying on the ground."),
        _one(rng, f'"Thank you!" said {a.name}, and gave {b.name} some {s.food}.',
             f"{a.name} was so happy that {a.he} hugged {b.name}."),
    ]  # fmt: skip


def _share(rng: Random, s: Scene) -> list[str]:
    a, b = s.a, s.b
    return [
        _one(rng, f"{s.time} {a.name} found some {s.food} {s.place}.",
             f"{s.time} {a.name} carried a basket of {s.food} home."),
        _one(rng, f"Then {a.he} met {b.name}, {article(b.kind)} who was very hungry.",
             f"On the way sat {b.name} the {b.kind}, who had nothing to eat."),
        _one(rng, f'"May I have some {s.food}?" asked {b.name}.', f'"I am so hungry," said {b.name}.'),
        _one(rng, f"At first {a.name} wanted to keep everything.",
             f"{a.name} thought about it for a while."),
        _one(rng, f"But {b.name} looked so sad that {a.name} shared the {s.food}.",
             f'Then {a.he} said, "We can share."'),
        _one(rng, f"They sat down {s.other_place} and ate together.",
             f"They ate the {s.food} {s.other_place} and laughed a lot."),
        _one(rng, f"From that day on {a.name} and {b.name} were friends.",
             f"{a.name} learned that food tastes better with a friend."),
    ]  # fmt: skip


def _rescue(rng: Random, s: Scene) -> list[str]:
    a, b, t = s.a, s.b, f"{s.look} {s.thing}"
    return [
        _one(rng, f"{s.time} {a.name} heard a cry {s.other_place}.",
             f'{s.time} somebody shouted "Help!" {s.other_place}.'),
        _one(rng, f"It was {b.name}, {article(b.kind)} who had fallen into a hole.",
             f"{b.name} the {b.kind} was stuck in the mud."),
        _one(rng, f'"Do not worry," said {a.name}. "I will help you."',
             f'"Hold on!" called {a.name}.'),
        _one(rng, f"{a.name} was not strong, but {a.he} was {s.trait}.",
             f"{a.he.capitalize()} thought hard, for {a.he} was {s.trait}."),
        _one(rng, f"{a.he.capitalize()} took a rope and pulled with all {a.his} might.",
             f"{a.he.capitalize()} found a long stick and held it out."),
        _one(rng, f"At last {b.name} was free.", f"Slowly {b.name} came out."),
        _one(rng, f'"You saved me," said {b.name}, and gave {a.him} {article(t)}.',
             f"To say thank you, {b.name} gave {a.name} {article(t)}."),
        _one(rng, f"{a.name} kept the {s.thing} for ever.", f"They walked home {s.place} as friends."),
    ]  # fmt: skip


def _contest(rng: Random, s: Scene) -> list[str]:
    a, b, t = s.a, s.b, f"{s.look} {s.thing}"
    return [
        _one(rng, f"{s.time} there was a race {s.place}.", f"{s.time} they held a contest {s.place}."),
        _one(rng, f"The prize was {article(t)}.", f"The winner would get {article(t)}."),
        _one(rng, f'"I will win," said {b.name} the {b.kind}.',
             f"{b.name} the {b.kind} was very fast and very proud."),
        _one(rng, f"{a.name} said nothing and started to run.", f"{a.name} only smiled."),
        _one(rng, f"{b.name} was far ahead and stopped to eat some {s.food}.",
             f"Soon {b.name} was tired and sat down {s.other_place}."),
        _one(rng, f"{a.name} went on, step by step.", f"{a.name} did not stop once."),
        _one(rng, f"In the end {a.name} was first.", f"So it was {a.name} who won."),
        _one(rng, f"{a.he.capitalize()} took the {s.thing} home and was proud.",
             f'"Well done," said {b.name}, and they both laughed.'),
    ]  # fmt: skip


def _gift(rng: Random, s: Scene) -> list[str]:
    a, b, t = s.a, s.b, f"{s.look} {s.thing}"
    return [
        _one(rng, f"{s.time} was the birthday of {b.name} the {b.kind}.",
             f"{b.name} the {b.kind} had a birthday soon."),
        _one(rng, f"{a.name} wanted to give {b.him} something nice.", f"{a.name} had no money for a gift."),
        _one(rng, f"So {a.he} went to look {s.other_place}.", f"{a.he.capitalize()} searched {s.other_place}."),
        _one(rng, f"There {a.he} found {article(t)}.", f"Under a tree lay {article(t)}."),
        _one(rng, f"{a.name} cleaned the {s.thing} and put it into a box.",
             f"{a.he.capitalize()} tied a ribbon around the {s.thing}."),
        _one(rng, f'"For me?" asked {b.name}. "It is wonderful!"',
             f"{b.name} opened it and jumped for joy."),
        _one(rng, f"Then everybody ate {s.food} and danced {s.place}.",
             f"They played {s.place} until it was dark."),
    ]  # fmt: skip


def _fear(rng: Random, s: Scene) -> list[str]:
    a, b, t = s.a, s.b, f"{s.look} {s.thing}"
    return [
        _one(rng, f"But {a.name} was afraid of the dark.", f"Only at night {a.he} could not sleep."),
        _one(rng, f"{s.time} {a.he} heard a strange noise {s.other_place}.",
             f"{s.time} something went bump {s.other_place}."),
        _one(rng, f"{a.name} took {article(t)} and went to look.",
             f"With {article(t)} in {a.his} hand {a.he} went outside."),
        _one(rng, f'"Who is there?" {a.he} asked.', f'"Hello?" {a.he} whispered.'),
        _one(rng, f"It was only {b.name}, {article(b.kind)} who was looking for {s.food}.",
             f"Out came {b.name} the {b.kind}, who was just as scared."),
        _one(rng, "They looked at each other and began to laugh.", f'"You frightened me!" said {b.name}.'),
        _one(rng, f"After that {a.name} was not afraid any more.",
             f"Since then {a.name} likes the night."),
    ]  # fmt: skip


_PLOTS = {
    "lost": _lost, "share": _share, "rescue": _rescue, "contest": _contest, "gift": _gift,
    "fear": _fear,
}  # fmt: skip


def story(rng: Random) -> Story:
    """A story of six to ten sentences with questions that its text answers."""
    s = scene(rng)
    name = rng.choice(sorted(_PLOTS))
    body = _PLOTS[name](rng, s)
    ending = _one(rng, "", " The end.", " And that was a good day.", " Everyone was happy.")
    text = _opening(rng, s) + " " + " ".join(body) + ending
    asked = [
        (f"What kind of animal is {s.b.name}?" if s.b.kind not in ("girl", "boy") else
         f"Is {s.b.name} a girl or a boy?", s.b.kind),
        ("Who is the story about?", s.a.name),
        (f"Who met {s.a.name}?", s.b.name),
    ]  # fmt: skip
    if s.food in text:
        asked.append(("What food is in the story?", s.food))
    if f"{s.look} {s.thing}" in text:
        asked.append(("What object is in the story?", s.thing))
        asked.append((f"What is the {s.thing} like?", s.look))
    asked = [pair for pair in asked if pair[1] in text]
    return Story(text, f"{s.trait} {s.a.kind}", tuple(asked))


def filler(rng: Random) -> str:
    """One sentence that says nothing of importance."""
    s = scene(rng)
    return _one(
        rng,
        f"{s.a.name} the {s.a.kind} walked {s.place} and thought about {s.food}.",
        f"{s.time} {s.weather}, and {s.a.name} stayed {s.other_place}.",
        f"There was {article(s.look + ' ' + s.thing)} {s.place}.",
        f"{s.b.name} gave the {s.thing} to {s.a.name}.",
        f"Nobody knew why the {s.thing} was {s.look}.",
        f"{s.a.name} likes {s.food}, but {s.b.name} does not.",
        f"The {s.b.kind} sat {s.other_place} while {s.weather}.",
        f'"I am {s.trait}," said {s.a.name}.',
    )
