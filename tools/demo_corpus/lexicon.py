"""Words: names, kinds of characters, things, places, and lists that several tasks draw from.

Knows words and which of them go together; must not know sentences.
"""

from collections.abc import Iterable


def _list(text: str) -> tuple[str, ...]:
    """Entries of a table, separated by commas."""
    return tuple(" ".join(entry.split()) for entry in text.split(","))


GIRLS = _list("""Anna, Mia, Lily, Rosa, Ella, Nora, Clara, Ruby, Ivy, Sara, Emma, Lucy, Maya, Tess,
Zoe, Nina, Ada, Alice, Bella, Daisy, Eva, Flora, Grace, Hana, Iris, Jane, Kate, Lena, Molly, Olive,
Penny, Rose, Sophie, Tina, Vera, Wendy, Amy, Cora, Elsa, Greta""")
BOYS = _list("""Tom, Ben, Max, Sam, Leo, Finn, Jack, Noah, Oscar, Paul, Theo, Adam, Hugo, Luke,
Owen, Peter, Ravi, Simon, Toby, Victor, Felix, Eric, Dan, Carl, Bruno, Anton, Mark, Nick, Otto,
Jonas, Karl, Liam, Milo, Ned, Omar, Rob, Tim, Ralph, Henry, David""")
ANIMAL_NAMES = _list("""Pip, Bramble, Hazel, Patch, Clover, Dusty, Pepper, Biscuit, Mossy,
Whisker, Tumble, Willow, Rusty, Socks, Nutmeg, Pebble, Maple, Sunny, Bobo, Tiki, Misty, Button,
Fern, Ginger, Honey, Jasper, Kip, Lulu, Momo, Nibbles, Poppy, Quill, Ripple, Sandy, Twig, Velvet,
Waffle, Ziggy""")
MONSTER_NAMES = _list("Grumm, Borok, Thorn, Smoky, Ember, Rumble, Gruff, Boulder, Zorg, Cinder")
ROBOT_NAMES = _list("Bolt, Rusty, Gizmo, Tock, Beep, Zip, Copper, Sprocket, Dot, Pixel")

ANIMALS = _list("""fox, bear, mouse, rabbit, hedgehog, squirrel, badger, otter, turtle, cat, dog,
pony, donkey, goat, lamb, deer, beaver, mole, monkey, raccoon, hamster, kitten, puppy, pig, wolf,
tiger, lion, elephant, panda, koala""")
ADULTS = _list("""baker, farmer, sailor, tailor, gardener, shepherd, potter, teacher, painter,
miller, carpenter, blacksmith, librarian, doctor, beekeeper, clockmaker, cook, pilot, weaver,
ferryman""")
MONSTERS = _list("dragon, giant, troll, monster")
TRAITS = _list("""brave, kind, curious, clever, cheerful, gentle, funny, friendly, lively, polite,
playful, thoughtful, merry, bold, bright, good-natured, helpful, cautious, dreamy, patient, lucky,
wise, calm""")
PARENTS = _list("mother, father, grandmother, grandfather, aunt, uncle")
HOBBIES = _list("""collecting shells, climbing trees, reading books, telling jokes, watching the
stars, picking berries, singing songs, drawing pictures, baking bread, building towers, looking
for bugs, walking in the rain, making things from wood, solving riddles, flying kites, sleeping in
the sun, listening to old stories, playing in the mud, growing flowers, dancing""")

HOMES = {
    "child": _list("""in a small house near the forest, in a little cottage by the river, in a
quiet village, in a tall house at the end of the street, on a farm, in a town by the sea, in a
village between the hills, in an old mill, in a house with a red door, above a bakery, in a big
city"""),
    "animal": _list("""in a hole under an old oak, in a hollow tree, in a cozy den, at the edge of
the forest, by a clear stream, under a hedge, in an old barn, near a green pond, in a quiet
valley, between two big rocks"""),
    "robot": _list("in a workshop, in a big city, in a toy shop, on a farm, in an old factory"),
}  # fmt: skip

# Kind of thing: nouns; adjectives that fit all of them.
THINGS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "toy": (
        _list("kite, ball, doll, toy boat, toy train, puppet, teddy bear, top, yo-yo, toy horse"),
        _list("red, blue, green, yellow, new, old, small, big, wooden, striped, pretty, colorful"),
    ),
    "treasure": (
        _list(
            "ring, coin, crown, pearl, necklace, medal, bell, watch, mirror, cup, brooch, statue"
        ),
        _list("silver, shiny, old, small, beautiful, precious, strange, tiny, heavy, fine"),
    ),
    "small": (
        _list("shell, stone, feather, button, marble, coin, whistle, bracelet, key, bell, acorn"),
        _list("white, shiny, small, round, smooth, old, pretty, blue, silver, strange"),
    ),
    "clothing": (
        _list("hat, scarf, coat, sweater, jacket, cap, shawl, cloak, vest"),
        _list("red, blue, green, yellow, warm, woolen, new, soft, gray, striped, orange, purple"),
    ),
    "instrument": (
        _list("flute, drum, fiddle, horn, guitar, trumpet, harp, harmonica"),
        _list("small, old, wooden, shiny, new, fine, beautiful, black"),
    ),
    "tool": (
        _list("hammer, rope, ladder, bucket, basket, lantern, shovel, broom, net, saw, spade"),
        _list("old, new, strong, good, long, big, useful, sturdy"),
    ),
    "light": (
        _list("lantern, lamp, torch, candle"),
        _list("small, bright, old, little, tiny, big"),
    ),
    "breakable": (
        _list("vase, mirror, teapot, lamp, bowl, cup, plate, jug, clock"),
        _list("blue, white, old, precious, beautiful, painted, green, fine, big"),
    ),
    "vehicle": (
        _list("bicycle, scooter, sled, wagon, boat, skateboard"),
        _list("red, new, fast, shiny, blue, green, wooden, little"),
    ),
    "flying": (
        _list("kite, balloon, toy plane, hat, scarf, paper bird"),
        _list("red, blue, green, yellow, new, big, small, striped, white, orange"),
    ),
}
FOODS = _list("""apple, pear, pie, cake, pancake, cookie, bun, sandwich, melon, muffin, waffle,
peach, pretzel, tart, orange, honey cake, cherry pie, cheese roll, plum cake, nut bar""")
FOOD_ADJECTIVES = _list("big, fresh, tasty, sweet, small, delicious, good, huge, nice")
PLANTS = _list("""a tall sunflower, a young apple tree, a giant pumpkin, a red rose bush, an
orange tree, a bean plant as high as the house, a cherry tree, a beautiful lily, a field of
tulips, a plum tree, a blue flower that nobody knew, a lemon tree""")
PRIZES = _list("""a silver cup, a big cake, a gold medal, a basket of apples, a blue ribbon, a new
bicycle, a pot of honey, a wooden crown, a bag of nuts""")
GOALS = _list("""a picnic, a party, a big feast, a cup of tea, a pot of soup, a plate of pancakes,
a piece of cake""")
SKILLS = _list("""to do a handstand, to jump rope, to walk on stilts, to ride a bicycle,
to turn a cartwheel, to hop on one leg, to dance, to skate, to juggle, to walk on a rope,
to stand on a ball, to do a somersault""")
BIRDS = _list("an owl, a dove, a swallow, a crow, a robin, a white pigeon, a sparrow")
BEASTS = _list("wolf, bear, lion, tiger, wild boar")
STAR_ANIMALS = _list(
    "a bear, a swan, a horse, an eagle, a lion, a fish, a dog, an elephant, a snake"
)
FOUNDLINGS = _list("""kitten, puppy, lamb, calf, piglet, foal, rabbit""")
FOUNDLING_ADJECTIVES = _list("small gray, tiny white, little brown, wet black, thin little, young")

DAYS = _list("""one day, one morning, one afternoon, one fine day, one sunny morning,
on a bright spring day, on a quiet afternoon, early one morning, one summer day, one Saturday,
on a Monday morning, one Sunday""")
MORNINGS = _list("one morning, one cold morning, early one morning, one Sunday morning")
EVENINGS = _list("one evening, one warm evening, late one evening, one Friday evening")

_SPOTS = {
    "tree": _list("under an old log, behind a tall pine, between two roots, in a hollow tree"),
    "rock": _list("behind a big rock, under a flat stone, between two stones, behind a stone wall"),
    "green": _list("in the tall grass, under a bush, next to a fence, behind a hedge"),
    "water": _list("near an old boat, under a willow tree, between the reeds, under a bridge"),
    "farm": _list("behind a haystack, under a cart, next to a well, behind the barn"),
    "town": _list("under a bench, behind a barrel, next to a fountain, under a table"),
}
# noun, "at" phrase, groups, spots
PLACES: tuple[tuple[str, str, str, tuple[str, ...]], ...] = tuple(
    (noun, f"{preposition} the {noun}", groups, _SPOTS[spots])
    for noun, preposition, groups, spots in (
        row.split("/")
        for row in _list("""forest/in/outdoor wild/tree, beach/on/outdoor/rock,
        meadow/in/outdoor/green, hill/on/outdoor/rock, garden/in/outdoor/green,
        park/in/outdoor/green, farm/on/outdoor/farm, lake/at/outdoor/water,
        river/by/outdoor/water, mountain/on/outdoor wild cave_place/rock, field/in/outdoor/green,
        orchard/in/outdoor/tree, harbor/at/outdoor/water, island/on/outdoor wild/rock,
        swamp/in/wild cave_place/tree, valley/in/outdoor wild/rock, pond/at/outdoor/water,
        jungle/in/wild/tree, playground/on/outdoor/green, village square/in/outdoor/town,
        market square/in/town/town, station/at/town/town, town hall/at/town/town,
        school/at/town/town, castle/at/town outdoor/town, old mine/in/wild cave_place/rock,
        kitchen/in/room/town""")
    )
)

CITIES = _list("""Paris, London, Berlin, Rome, Madrid, Tokyo, Cairo, Lima, Oslo, Vienna, Athens,
Dublin, Boston, Chicago, Sydney, Toronto, Delhi, Lagos, Nairobi, Prague, Warsaw, Lisbon, Hamburg,
Milan, Kyoto, Havana, Quito, Geneva, Zurich, Munich""")
COLORS = _list("red, blue, green, yellow, black, white, brown, purple, orange, pink, gray, silver")
WEEKDAYS = _list("Monday, Tuesday, Wednesday, Thursday, Friday, Saturday, Sunday")
LANGUAGES = _list("French, German, Spanish, Italian, Latin, Dutch, Polish, Greek, Turkish, Danish")

# Common words for lists, phrases and keys. Each is one token, with and without a space before it.
WORDS = _list("""apple, arrow, autumn, bag, ball, bank, barn, basket, beach, bean, bear, bed,
bell, bird, boat, book, bottle, bowl, box, bread, bridge, broom, brush, bucket, butter, button,
cake, camel, candle, carpet, castle, cave, chair, cheese, cherry, chest, church, circle, clock,
cloud, coat, coffee, coin, comb, copper, corn, cotton, cow, crown, cup, curtain, desert, desk,
dish, dog, door, dragon, dream, drum, duck, eagle, earth, egg, engine, evening, face, farm,
feather, fence, field, finger, fire, fish, flag, flame, flower, flute, forest, fork, fox, frog,
garden, garlic, gate, ghost, giant, glass, glove, goat, grape, grass, hammer, harbor, hat, hill,
honey, horn, horse, house, ice, island, jacket, jar, jungle, key, king, kite, knife, ladder, lake,
lamp, leaf, lemon, letter, lion, mango, map, market, meadow, metal, milk, mill, mirror, money,
monkey, moon, morning, motor, mountain, mouse, music, nail, needle, nest, night, nose, ocean,
olive, onion, oven, owl, paper, park, pearl, pencil, pepper, piano, picture, pillow, pipe, planet,
plate, pocket, pond, pony, potato, queen, rabbit, rain, ribbon, rice, ring, river, road, robot,
rocket, roof, room, root, rope, rose, salt, sand, school, sea, seed, shadow, sheep, shell, ship,
shirt, shoe, silk, silver, sky, snail, snow, soap, sock, song, soup, spider, spoon, spring, star,
station, stone, storm, street, sugar, summer, sun, swan, table, tail, tea, tent, tiger, tower,
town, train, tree, tunnel, turtle, valley, village, violin, wagon, wall, water, wave, wheel,
whistle, wind, window, wing, winter, wolf, wood, wool, yard, zebra""")
_MASS = _list("""autumn, bread, butter, cheese, coffee, copper, corn, cotton, earth, evening, fire,
garlic, grass, honey, ice, metal, milk, money, moon, morning, music, night, rain, rice, salt, sand,
silk, silver, sky, snow, soap, soup, spring, sugar, summer, sun, tea, water, wave, wind, winter,
wood, wool, ocean, sea, shadow, pepper, dream, song, earth, storm, king, queen, jungle""")
# Words for things that one can see somewhere, and that take an article.
OBJECTS = tuple(word for word in WORDS if word not in _MASS)
# Parts of made-up names, which nothing can be known about.
SYLLABLES = _list("""bal, dor, fen, gim, hol, jar, kel, lum, mir, nov, pel, qua, rin, sol, tam,
ul, vex, wyn, yor, zan, bri, cal, dra, eph, fal, gor, hex, ith, jun, kor, lan, mel, nar, oth, pra,
ros, sky, tor, uma, vol""")


def unique(words: Iterable[str]) -> tuple[str, ...]:
    """The words without repetitions, in order."""
    return tuple(dict.fromkeys(words))


NAMES = unique(GIRLS + BOYS)
