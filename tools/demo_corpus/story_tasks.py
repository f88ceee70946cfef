"""Stories as documents and as answers, questions about a story, and questions about facts.

Knows how they are asked for; must not know tokens.
"""

from demo_corpus.chat import Chat, Segment, Turn, document
from demo_corpus.dice import Dice
from demo_corpus.english import with_article
from demo_corpus.facts import Fact, facts
from demo_corpus.stories import Story, story
from demo_corpus.style import chat

_ASKED = (
    "Write a story about {}.", "Tell me a story about {}.", "Write a short story about {}.",
    "Please tell me a story about {}.", "I want to hear a story about {}.",
    "Can you tell me a story about {}?", "A story about {}, please.",
)  # fmt: skip
_ASKED_WITH = ("Tell me a story with {}.", "Write a story with {}.", "Write a short story with {}.")
_ASKED_ANY = ("Tell me a story.", "Write a story.", "Write a short story.", "A story, please.")
_SHAPES = ("{0}\n{1}", "{0}\n\n{1}", "{0}\n\nQuestion: {1}", "Read this story.\n{0}\n{1}")


def request(rng: Dice, told: Story) -> str:
    """A wish that the story fulfils."""
    slots = told.slots
    chance = rng.random()
    if chance < 0.1:
        return rng.pick(_ASKED_ANY)
    if chance < 0.3:
        parts = [slots["a_kind"], slots["a_kind2"].replace("another", "a")]
        if "a_noun" in slots:
            parts[1] = slots["a_noun"]
        if rng.chance(0.5):
            parts.reverse()
        return rng.pick(_ASKED_WITH).format(f"{parts[0]} and {parts[1]}")
    if chance < 0.5:
        about = slots["a_hero"]
    elif chance < 0.6:
        about = f"{with_article(slots['kind'])} named {slots['A']}"
    elif chance < 0.7:
        about = f"{slots['A']} and {slots['B']}"
    else:
        about = told.about
    return rng.pick(_ASKED).format(about)


def story_task(rng: Dice) -> Chat | list[Segment]:
    """A story, as plain text or on request."""
    told = story(rng)
    if rng.chance(0.5):
        return document(told.text)
    asked = request(rng, told)
    thought = f"The user wants a story. I write about {told.about}."
    return chat(rng, [Turn(asked, told.text, thought)], thinking=0.15)


def story_qa(rng: Dice) -> Chat:
    """A story and two to six questions about it."""
    told = story(rng)
    asked = rng.some(told.questions, min(len(told.questions), rng.number(2, 6)))
    turns = [Turn(question, answer, "I look it up in the story.") for question, answer in asked]
    first = turns[0]
    if rng.chance(0.15):
        request_turn = Turn(request(rng, told), told.text)
        return chat(rng, [request_turn, *turns], thinking=0.1)
    turns[0] = first._replace(user=rng.pick(_SHAPES).format(told.text, first.user))
    return chat(rng, turns)


def fact_turn(rng: Dice, fact: Fact) -> Turn:
    """A question about a fact, never in the phrasing that is kept for the evaluation."""
    return Turn(rng.pick(fact.trained()), fact.answer, f"The question is about {fact.topic}.")


def facts_task(rng: Dice) -> Chat:
    """One to six facts."""
    chosen = rng.some(facts(), rng.number(1, 6))
    return chat(rng, [fact_turn(rng, fact) for fact in chosen], thinking=0.15)
