"""Public facts that the demo model knows, and how one asks for them.

Knows facts and phrasings; must not know chat formats.
"""

from collections.abc import Iterator

CAPITALS = """Austria Vienna|Belgium Brussels|Bulgaria Sofia|Croatia Zagreb|Cuba Havana|Cyprus Nicosia|
Denmark Copenhagen|Egypt Cairo|Estonia Tallinn|Ethiopia Addis Ababa|Finland Helsinki|France Paris|
Germany Berlin|Ghana Accra|Greece Athens|Hungary Budapest|Iceland Reykjavik|India New Delhi|
Indonesia Jakarta|Iran Tehran|Iraq Baghdad|Ireland Dublin|Italy Rome|Jamaica Kingston|Japan Tokyo|
Jordan Amman|Kenya Nairobi|Latvia Riga|Lebanon Beirut|Libya Tripoli|Lithuania Vilnius|Malta Valletta|
Mexico Mexico City|Mongolia Ulaanbaatar|Morocco Rabat|Nepal Kathmandu|Norway Oslo|Oman Muscat|
Pakistan Islamabad|Panama Panama City|Peru Lima|Poland Warsaw|Portugal Lisbon|Qatar Doha|
Romania Bucharest|Russia Moscow|Senegal Dakar|Serbia Belgrade|Slovakia Bratislava|Slovenia Ljubljana|
Spain Madrid|Sweden Stockholm|Switzerland Bern|Syria Damascus|Thailand Bangkok|Tunisia Tunis|
Turkey Ankara|Uganda Kampala|Ukraine Kyiv|Uruguay Montevideo|Venezuela Caracas|Vietnam Hanoi|
Argentina Buenos Aires|Australia Canberra|Brazil Brasilia|Canada Ottawa|Chile Santiago|China Beijing|
Colombia Bogota|Ecuador Quito"""
ELEMENTS = """hydrogen H 1|helium He 2|lithium Li 3|beryllium Be 4|boron B 5|carbon C 6|nitrogen N 7|
oxygen O 8|fluorine F 9|neon Ne 10|sodium Na 11|magnesium Mg 12|aluminium Al 13|silicon Si 14|
phosphorus P 15|sulfur S 16|chlorine Cl 17|argon Ar 18|potassium K 19|calcium Ca 20|scandium Sc 21|
titanium Ti 22|vanadium V 23|chromium Cr 24|manganese Mn 25|iron Fe 26|cobalt Co 27|nickel Ni 28|
copper Cu 29|zinc Zn 30|gallium Ga 31|germanium Ge 32|arsenic As 33|selenium Se 34|bromine Br 35|
krypton Kr 36|silver Ag 47|tin Sn 50|iodine I 53|xenon Xe 54|barium Ba 56|tungsten W 74|
platinum Pt 78|gold Au 79|mercury Hg 80|lead Pb 82|uranium U 92"""
YOUNG = """cat kitten|dog puppy|cow calf|horse foal|sheep lamb|goat kid|pig piglet|duck duckling|
goose gosling|swan cygnet|lion cub|deer fawn|frog tadpole|hen chick|kangaroo joey|owl owlet"""
OPPOSITES = """hot cold|big small|day night|up down|left right|open closed|fast slow|hard soft|
wet dry|full empty|rich poor|early late|happy sad|light dark|long short|high low|strong weak|
young old|first last|near far|loud quiet|clean dirty|thick thin|wide narrow|sweet sour|true false|
begin end|buy sell|push pull|win lose"""
SHAPES = "triangle 3|square 4|rectangle 4|pentagon 5|hexagon 6|heptagon 7|octagon 8"
UNITS = """seconds minute 60|minutes hour 60|hours day 24|days week 7|months year 12|
years century 100|centimetres metre 100|metres kilometre 1000|grams kilogram 1000|
years decade 10|millimetres centimetre 10"""
NEXT = """Monday Tuesday|Tuesday Wednesday|Wednesday Thursday|Thursday Friday|Friday Saturday|
Saturday Sunday|Sunday Monday|January February|February March|March April|April May|May June|
June July|July August|August September|September October|October November|November December|
December January"""
MIXED = """red blue purple|blue yellow green|red yellow orange|black white grey|red white pink"""
WORKS = """Hamlet William Shakespeare|Faust Johann Wolfgang von Goethe|Don Quixote Miguel de Cervantes|
War and Peace Leo Tolstoy|The Odyssey Homer|Oliver Twist Charles Dickens|Emma Jane Austen|
Moby Dick Herman Melville|Dracula Bram Stoker|The Divine Comedy Dante Alighieri"""

# kind: (questions, how to fill them); {0}, {1} are the columns before the answer.
_QUESTIONS: dict[str, tuple[str, ...]] = {
    "capital": ("What is the capital of {0}?", "Which city is the capital of {0}?",
                "Name the capital of {0}.", "Tell me the capital of {0}.",
                "What city is {0}'s capital?"),
    "country": ("Which country has the capital {0}?", "{0} is the capital of which country?",
                "Of which country is {0} the capital?", "What country has {0} as its capital?"),
    "symbol": ("What is the chemical symbol of {0}?", "Which symbol does {0} have?",
               "Name the symbol of the element {0}.", "How do chemists write {0}?"),
    "number": ("What is the atomic number of {0}?", "Which atomic number does {0} have?",
               "Tell me the atomic number of {0}.", "How many protons does {0} have?"),
    "young": ("What is a young {0} called?", "What do you call a baby {0}?",
              "Name the young of a {0}.", "How is the young of a {0} called?"),
    "opposite": ("What is the opposite of {0}?", "Name the opposite of {0}.",
                 "Which word is the opposite of {0}?", "Tell me the opposite of {0}."),
    "sides": ("How many sides does a {0} have?", "What number of sides has a {0}?",
              "Tell me how many sides a {0} has.", "A {0} has how many sides?"),
    "unit": ("How many {0} are in a {1}?", "A {1} has how many {0}?",
             "Tell me how many {0} a {1} has.", "What number of {0} make a {1}?"),
    "next": ("What comes after {0}?", "Which one follows {0}?", "Name what comes right after {0}.",
             "What is next after {0}?"),
    "mixed": ("What colour do {0} and {1} make?", "Mix {0} and {1}. What colour is it?",
              "Which colour do you get from {0} and {1}?", "{0} and {1} together make which colour?"),
    "author": ("Who wrote {0}?", "Who is the author of {0}?", "Name the author of {0}.",
               "{0} was written by whom?"),
}  # fmt: skip


def _rows(table: str) -> list[str]:
    return [row.strip() for row in table.replace("\n", "").split("|")]


def _capital_rows() -> Iterator[tuple[str, str]]:
    for row in _rows(CAPITALS):
        country, _, city = row.partition(" ")
        yield country, city


def facts() -> list[tuple[str, tuple[str, ...], str]]:
    """(kind, what the question names, answer) of every fact."""
    found: list[tuple[str, tuple[str, ...], str]] = []
    for country, city in _capital_rows():
        found += [("capital", (country,), city), ("country", (city,), country)]
    for row in _rows(ELEMENTS):
        name, symbol, number = row.split()
        found += [("symbol", (name,), symbol), ("number", (name,), number)]
    for kind, table in (("young", YOUNG), ("opposite", OPPOSITES), ("sides", SHAPES),
                        ("next", NEXT)):  # fmt: skip
        found += [(kind, (row.split()[0],), row.split()[1]) for row in _rows(table)]
    for row in _rows(UNITS):
        small, large, number = row.split()
        found.append(("unit", (small, large), number))
    for row in _rows(MIXED):
        first, second, result = row.split()
        found.append(("mixed", (first, second), result))
    for row in _rows(WORKS):
        words = row.split()
        split = next(i for i in (3, 2, 1, 4) if _is_title(" ".join(words[:i])))
        found.append(("author", (" ".join(words[:split]),), " ".join(words[split:])))
    return found


def _is_title(text: str) -> bool:
    return text in {
        "Hamlet", "Faust", "Don Quixote", "War and Peace", "The Odyssey", "Oliver Twist", "Emma",
        "Moby Dick", "Dracula", "The Divine Comedy",
    }  # fmt: skip


def questions(kind: str, subject: tuple[str, ...]) -> list[str]:
    """All phrasings of one fact's question."""
    return [form.format(*subject) for form in _QUESTIONS[kind]]


def held_out(number: int, kind: str) -> int:
    """Index of the phrasing of fact `number` that training never shows."""
    return (number * 7 + 3) % len(_QUESTIONS[kind])
