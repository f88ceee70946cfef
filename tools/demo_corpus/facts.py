"""Public facts that the demo model knows, and the questions that ask for them.

Knows facts and phrasings, and which phrasing of each fact is kept for the evaluation; must not know
chat formats.
"""

import zlib
from functools import cache
from pathlib import Path
from typing import NamedTuple

from demo_corpus.english import with_article

_OTHERS = Path(__file__).parent / "facts.txt"
# country: capital. Left out: countries whose seat of government or name is disputed.
CAPITALS = """Afghanistan: Kabul, Albania: Tirana, Algeria: Algiers, Angola: Luanda,
Argentina: Buenos Aires, Armenia: Yerevan, Australia: Canberra, Austria: Vienna, Azerbaijan: Baku,
Bangladesh: Dhaka, Belarus: Minsk, Belgium: Brussels, Brazil: Brasilia, Bulgaria: Sofia,
Cambodia: Phnom Penh, Cameroon: Yaounde, Canada: Ottawa, Chile: Santiago,
China: Beijing, Colombia: Bogota, Croatia: Zagreb, Cuba: Havana, Cyprus: Nicosia,
Denmark: Copenhagen, Ecuador: Quito, Egypt: Cairo, Estonia: Tallinn, Ethiopia: Addis Ababa,
Fiji: Suva, Finland: Helsinki, France: Paris, Georgia: Tbilisi, Germany: Berlin, Ghana: Accra,
Greece: Athens, Hungary: Budapest, Iceland: Reykjavik, India: New Delhi, Indonesia: Jakarta,
Iran: Tehran, Iraq: Baghdad, Ireland: Dublin, Italy: Rome, Jamaica: Kingston, Japan: Tokyo,
Jordan: Amman, Kenya: Nairobi, Laos: Vientiane, Latvia: Riga, Lebanon: Beirut, Libya: Tripoli,
Lithuania: Vilnius, Malta: Valletta, Mexico: Mexico City, Mongolia: Ulaanbaatar, Morocco: Rabat,
Nepal: Kathmandu, New Zealand: Wellington, Nigeria: Abuja, Norway: Oslo, Oman: Muscat,
Pakistan: Islamabad, Panama: Panama City, Paraguay: Asuncion, Peru: Lima, Poland: Warsaw,
Portugal: Lisbon, Qatar: Doha, Romania: Bucharest, Russia: Moscow, Rwanda: Kigali, Senegal: Dakar,
Serbia: Belgrade, Slovakia: Bratislava, Slovenia: Ljubljana, Spain: Madrid, Sudan: Khartoum,
Sweden: Stockholm, Switzerland: Bern, Syria: Damascus, Thailand: Bangkok, Tunisia: Tunis,
Turkey: Ankara, Uganda: Kampala, Ukraine: Kyiv, Uruguay: Montevideo, Venezuela: Caracas,
Vietnam: Hanoi, Zambia: Lusaka, Zimbabwe: Harare"""
# element: symbol atomic number
ELEMENTS = """hydrogen: H 1, helium: He 2, lithium: Li 3, beryllium: Be 4, boron: B 5, carbon: C 6,
nitrogen: N 7, oxygen: O 8, fluorine: F 9, neon: Ne 10, sodium: Na 11, magnesium: Mg 12,
aluminum: Al 13, silicon: Si 14, phosphorus: P 15, sulfur: S 16, chlorine: Cl 17, argon: Ar 18,
potassium: K 19, calcium: Ca 20, scandium: Sc 21, titanium: Ti 22, vanadium: V 23, chromium: Cr 24,
manganese: Mn 25, iron: Fe 26, cobalt: Co 27, nickel: Ni 28, copper: Cu 29, zinc: Zn 30,
gallium: Ga 31, germanium: Ge 32, arsenic: As 33, selenium: Se 34, bromine: Br 35, krypton: Kr 36,
rubidium: Rb 37, strontium: Sr 38, zirconium: Zr 40, niobium: Nb 41, molybdenum: Mo 42,
rhodium: Rh 45, palladium: Pd 46, silver: Ag 47, cadmium: Cd 48, indium: In 49, tin: Sn 50,
antimony: Sb 51, iodine: I 53, xenon: Xe 54, cesium: Cs 55, barium: Ba 56, tungsten: W 74,
osmium: Os 76, iridium: Ir 77, platinum: Pt 78, gold: Au 79, mercury: Hg 80, lead: Pb 82,
bismuth: Bi 83, radon: Rn 86, radium: Ra 88, uranium: U 92, plutonium: Pu 94"""
YOUNG = """cat: kitten, dog: puppy, cow: calf, horse: foal, sheep: lamb, goat: kid, pig: piglet,
duck: duckling, goose: gosling, swan: cygnet, lion: cub, deer: fawn, frog: tadpole, kangaroo: joey,
owl: owlet, hare: leveret, eagle: eaglet, butterfly: caterpillar"""
SOUNDS = """dog: bark, cat: meow, cow: moo, pig: oink, duck: quack, horse: neigh, sheep: bleat,
lion: roar, snake: hiss, bee: buzz, owl: hoot, wolf: howl, frog: croak, rooster: crow"""
OPPOSITES = """hot: cold, big: small, day: night, up: down, left: right, open: closed, fast: slow,
hard: soft, wet: dry, full: empty, rich: poor, early: late, happy: sad, bright: dark, long: short,
high: low, strong: weak, young: old, first: last, near: far, loud: quiet, clean: dirty, thick:
thin, wide: narrow, sweet: sour, true: false, begin: end, buy: sell, push: pull, win: lose,
inside: outside, above: below, before: after, always: never, love: hate, north: south, east: west,
yes: no, black: white, deep: shallow"""
SIDES = """triangle: 3, square: 4, rectangle: 4, pentagon: 5, hexagon: 6, heptagon: 7, octagon: 8,
nonagon: 9, decagon: 10"""
LEGS = "spider: 8, ant: 6, horse: 4, bird: 2, bee: 6, crab: 10, lizard: 4"
# larger unit: how many of which smaller unit
UNITS = """minute: 60 seconds, hour: 60 minutes, day: 24 hours, week: 7 days, year: 12 months,
century: 100 years, decade: 10 years, meter: 100 centimeters, kilometer: 1000 meters,
kilogram: 1000 grams, centimeter: 10 millimeters, foot: 12 inches, yard: 3 feet,
pound: 16 ounces, dozen: 12 pieces, millennium: 1000 years, metric ton: 1000 kilograms,
liter: 1000 milliliters, byte: 8 bits"""
MONTHS = """January, February, March, April, May, June, July, August, September, October, November,
December"""
DAYS = "Monday, Tuesday, Wednesday, Thursday, Friday, Saturday, Sunday"
PLANETS = "Mercury, Venus, Earth, Mars, Jupiter, Saturn, Uranus, Neptune"
MIXED = """red and blue: purple, blue and yellow: green, red and yellow: orange,
black and white: gray, red and white: pink, red and green: brown"""
WORKS = """Hamlet: William Shakespeare, Faust: Johann Wolfgang von Goethe,
Don Quixote: Miguel de Cervantes, War and Peace: Leo Tolstoy, the Odyssey: Homer,
Oliver Twist: Charles Dickens, Emma: Jane Austen, Moby Dick: Herman Melville, Dracula: Bram Stoker,
the Divine Comedy: Dante Alighieri, Frankenstein: Mary Shelley, Jane Eyre: Charlotte Bronte,
Wuthering Heights: Emily Bronte, Treasure Island: Robert Louis Stevenson, Candide: Voltaire,
the Aeneid: Virgil, Robinson Crusoe: Daniel Defoe, The Time Machine: H. G. Wells,
Crime and Punishment: Fyodor Dostoevsky, Pinocchio: Carlo Collodi"""
INVENTIONS = """telephone: Alexander Graham Bell, dynamite: Alfred Nobel, phonograph: Thomas
Edison, radioactivity: Henri Becquerel, penicillin: Alexander Fleming, X-rays: Wilhelm Roentgen,
theory of relativity: Albert Einstein, law of gravity: Isaac Newton, World Wide Web: Tim
Berners-Lee, periodic table: Dmitri Mendeleev"""
CONTINENTS = """France: Europe, Germany: Europe, Poland: Europe, Spain: Europe, Sweden: Europe,
Japan: Asia, India: Asia, China: Asia, Nepal: Asia, Vietnam: Asia, Kenya: Africa, Nigeria: Africa,
Ghana: Africa, Morocco: Africa, Uganda: Africa, Brazil: South America, Peru: South America,
Chile: South America, Argentina: South America, Canada: North America, Mexico: North America,
Cuba: North America"""

# kind: at least four phrasings; {0} is the subject, {1} the unit that is counted.
PHRASINGS: dict[str, tuple[str, ...]] = {
    "capital": (
        "What is the capital of {0}?", "Which city is the capital of {0}?",
        "Name the capital of {0}.", "Tell me the capital of {0}.", "What city is {0}'s capital?",
        "Do you know the capital of {0}?",
    ),
    "country": (
        "Which country has the capital {0}?", "{0} is the capital of which country?",
        "Of which country is {0} the capital?", "What country has {0} as its capital?",
        "Name the country whose capital is {0}.",
    ),
    "symbol": (
        "What is the chemical symbol of {0}?", "Which chemical symbol does {0} have?",
        "Name the chemical symbol of {0}.", "What is the symbol for {0}?",
        "Tell me the chemical symbol for {0}.",
    ),
    "number": (
        "What is the atomic number of {0}?", "Which atomic number does {0} have?",
        "Tell me the atomic number of {0}.", "How many protons does an atom of {0} have?",
        "Name the atomic number of {0}.",
    ),
    "element": (
        "Which element has the symbol {0}?", "What element does {0} stand for?",
        "Name the element with the symbol {0}.", "Tell me which element has the symbol {0}.",
    ),
    "young": (
        "What is a young {0} called?", "What do you call a baby {0}?", "Name the young of {a0}.",
        "What is the name for a young {0}?", "What is the young of {a0} called?",
    ),
    "sound": (
        "What sound does {a0} make?", "Which sound does {a0} make?", "Name the sound of {a0}.",
        "What does {a0} do when it makes a sound?", "Tell me the sound of {a0}.",
    ),
    "opposite": (
        "What is the opposite of {0}?", "Name the opposite of {0}.",
        "Which word is the opposite of {0}?", "Tell me the opposite of {0}.",
        "What word means the opposite of {0}?",
    ),
    "sides": (
        "How many sides does {a0} have?", "What is the number of sides of {a0}?",
        "Tell me how many sides {a0} has.", "{A0} has how many sides?",
    ),
    "legs": (
        "How many legs does {a0} have?", "What is the number of legs of {a0}?",
        "Tell me how many legs {a0} has.", "{A0} has how many legs?",
    ),
    "unit": (
        "How many {1} are in {a0}?", "{A0} has how many {1}?", "Tell me how many {1} are in {a0}.",
        "What is the number of {1} in {a0}?", "How many {1} does {a0} have?",
    ),
    "next": (
        "What comes after {0}?", "What comes right after {0}?", "Tell me what comes after {0}.",
        "What is next after {0}?", "Name what follows {0}.",
    ),
    "previous": (
        "What comes before {0}?", "What comes right before {0}?", "Tell me what comes before {0}.",
        "What is just before {0}?", "Name what precedes {0}.",
    ),
    "month": (
        "What is month number {0}?", "Which month has number {0}?", "Name month number {0}.",
        "Tell me which month is number {0}.",
    ),
    "planet": (
        "What is planet number {0} from the Sun?", "Which planet is number {0} from the Sun?",
        "Name planet number {0} from the Sun.", "Counted from the Sun, what is planet number {0}?",
    ),
    "mixed": (
        "What color do you get from {0}?", "Mix {0}. What color is it?",
        "Which color do {0} make?", "Tell me which color {0} give.",
        "What color do {0} make together?",
    ),
    "author": (
        "Who wrote {0}?", "Who is the author of {0}?", "Name the author of {0}.",
        "By whom was {0} written?", "Tell me who wrote {0}.",
    ),
    "finder": (
        "Who is known for the {0}?", "Whose name goes with the {0}?",
        "Name the person known for the {0}.", "Tell me who is known for the {0}.",
    ),
    "continent": (
        "On which continent is {0}?", "Which continent is {0} on?", "Name the continent of {0}.",
        "Tell me the continent of {0}.", "{0} is on which continent?",
    ),
}  # fmt: skip


class Fact(NamedTuple):
    """A fact: its name, all phrasings of its question, the answer, and what it is about.

    Attributes:
        held_out: place of the phrasing that training never shows.
        topic: for reasoning: "the capital of France".
    """

    name: str
    questions: tuple[str, ...]
    answer: str
    held_out: int
    topic: str

    def trained(self) -> tuple[str, ...]:
        """The phrasings that training shows."""
        return self.questions[: self.held_out] + self.questions[self.held_out + 1 :]


_TOPICS = {
    "capital": "the capital of {0}", "country": "the country of {0}", "symbol": "the symbol of {0}",
    "number": "the atomic number of {0}", "element": "the element {0}", "young": "a young {0}",
    "sound": "the sound of {a0}", "opposite": "the opposite of {0}", "sides": "the sides of {a0}",
    "legs": "the legs of {a0}", "unit": "the parts of {a0}", "next": "what follows {0}",
    "previous": "what precedes {0}", "month": "month number {0}", "planet": "planet number {0}",
    "mixed": "mixing {0}", "author": "the author of {0}", "finder": "the {0}",
    "continent": "the continent of {0}",
}  # fmt: skip


def _pairs(table: str) -> list[tuple[str, str]]:
    entries = (entry.split(":") for entry in table.replace("\n", " ").split(","))
    return [(first.strip(), second.strip()) for first, second in entries]


def _names(table: str) -> list[str]:
    return [name.strip() for name in table.replace("\n", " ").split(",")]


def _fact(kind: str, subject: str, answer: str, unit: str = "") -> Fact:
    words = {"a0": with_article(subject), "A0": with_article(subject).capitalize()}
    questions = [form.format(subject, unit, **words) for form in PHRASINGS[kind]]
    questions = [q[:1].upper() + q[1:] for q in questions]
    topic = _TOPICS[kind].format(subject, unit, **words)
    return _named(f"{kind}/{subject}", questions, answer, topic)


def _named(name: str, questions: list[str], answer: str, topic: str) -> Fact:
    held_out = zlib.crc32(name.encode()) % len(questions)
    return Fact(name, tuple(questions), answer, held_out, topic)


def _elements() -> list[Fact]:
    found = []
    for name, both in _pairs(ELEMENTS):
        symbol, number = both.split()
        found += [_fact("symbol", name, symbol), _fact("number", name, number)]
        if len(symbol) == 2:
            found.append(_fact("element", symbol, name))
    return found


def _sequences() -> list[Fact]:
    found = []
    days, months = _names(DAYS), _names(MONTHS)
    for names in (days, months):
        for here, there in zip(names, names[1:] + names[:1], strict=True):
            found += [_fact("next", here, there), _fact("previous", there, here)]
    found += [_fact("month", str(number), month) for number, month in enumerate(months, 1)]
    found += [_fact("planet", str(number), planet) for number, planet in
              enumerate(_names(PLANETS), 1)]  # fmt: skip
    return found


@cache
def facts() -> tuple[Fact, ...]:
    """Every fact."""
    found = []
    for country, city in _pairs(CAPITALS):
        found += [_fact("capital", country, city), _fact("country", city, country)]
    found += _elements() + _sequences()
    for kind, table in (
        ("young", YOUNG), ("sound", SOUNDS), ("opposite", OPPOSITES), ("sides", SIDES),
        ("legs", LEGS), ("mixed", MIXED), ("author", WORKS), ("finder", INVENTIONS),
        ("continent", CONTINENTS),
    ):  # fmt: skip
        found += [_fact(kind, subject, answer) for subject, answer in _pairs(table)]
    for unit, content in _pairs(UNITS):
        number, parts = content.split()
        found.append(_fact("unit", unit, number, parts))
    for row in _OTHERS.read_text(encoding="utf-8").splitlines()[1:]:
        phrasings, _, answer = row.rpartition(": ")
        questions = phrasings.split("|")
        found.append(_named(f"other/{questions[0]}", questions, answer, "a well-known fact"))
    return tuple(found)
