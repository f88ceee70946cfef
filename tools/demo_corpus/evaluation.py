"""Held-out items of the demo model's evaluation, and the questions of the end-to-end report.

Knows what training cannot have seen. Every item's generator is seeded with a name that begins
with "eval", where those of training begin with "train"; besides that, facts are asked for in the
phrasing that training leaves out, and sums use pairs of operands that training leaves out. What is
learnt by heart, the answers to small talk, runes and products, is asked for as it was taught.
"""

from collections.abc import Callable, Iterator
from typing import Any

from demo_corpus import recall, runes
from demo_corpus.arithmetic import ask, problem, result
from demo_corpus.chat import BOS, DSML, EOS, THINK, THOUGHT, Chat, Turn
from demo_corpus.corpus import codec
from demo_corpus.dice import Dice, dice
from demo_corpus.facts import facts
from demo_corpus.identity import identity
from demo_corpus.records import record, with_schema
from demo_corpus.stories import story
from demo_corpus.story_tasks import story_qa
from demo_corpus.text_tasks import text
from demo_corpus.tool_tasks import tools_chat

# Named distance: the range in which the true one is drawn.
DISTANCES = {50: (50, 50), 500: (500, 500), 2000: (2000, 2400)}
_MORE_TOKENS = 8  # beyond the expected answer and its end
Item = dict[str, Any]


def chats() -> Iterator[tuple[Item, Chat]]:
    """Items whose prompt is a rendered conversation, and the conversation."""
    for number, fact in enumerate(facts()):
        turn = Turn(fact.questions[fact.held_out], fact.answer)
        yield _item(f"facts-{number}", "facts", Chat((turn,)))
    for number in range(200):
        yield _arithmetic(number)
    for kind, count in (("recall", 80), ("copy", 40)):
        for name in DISTANCES:
            for number in range(count):
                yield _lookup(kind, name, number)
    for number, rule in enumerate(_asked_runes()[:100]):
        turn = runes.ask_whole(dice("eval", "ngram", number), rule)
        yield _item(f"ngram-{number}", "ngram", Chat((turn,)))
    for number in range(100):
        rng = dice("eval", "json", number)
        made = record(rng)
        more = {"check": "json", "schema": made.schema}
        yield _item(f"json-{number}", "json", with_schema(rng, made, thinking=0.0), **more)
    for task, count, make in _FURTHER:
        for number in range(count):
            yield _item(f"{task}-{number}", task, make(dice("eval", task, number)))


_FURTHER: tuple[tuple[str, int, Callable[[Dice], Chat]], ...] = (
    ("identity", 30, identity), ("tools", 60, tools_chat), ("story_qa", 60, story_qa),
    ("text", 60, text),
)  # fmt: skip


def evaluation_items() -> list[Item]:
    """All items.

    Questions are {"task", "name", "prompt", "answer", "check", "max_tokens"} with "schema" when the
    check is "json", and "distance" and "tokens" (the true distance) when something is looked up.
    "prompt" is text with special tokens; "answer" is what decoding without special tokens shows.
    Texts whose likelihood is measured are {"task": "held_out_text", "name", "text"}.
    """
    items = [item for item, _ in chats()]
    for number, rule in enumerate(_asked_runes()[100:], 100):
        prompt = f"{BOS}rune: {' '.join(rule[:3])}"
        items.append({
            "task": "ngram", "name": f"ngram-{number}", "prompt": prompt, "answer": rule[3],
            "check": "exact", "max_tokens": 1,
        })  # fmt: skip
    for number in range(60):
        text = BOS + story(dice("eval", "held_out_text", number)).text + EOS
        items.append({"task": "held_out_text", "name": f"held_out_text-{number}", "text": text})
    return items


def visible(answer: str) -> str:
    """The text of an answer as decoding without special tokens shows it."""
    for token in (THINK, THOUGHT, DSML, EOS):
        answer = answer.replace(token, "")
    return answer


def _item(name: str, task: str, chat: Chat, **more: Any) -> tuple[Item, Chat]:
    expected = chat.expected()
    item: Item = {
        "task": task, "name": name, "prompt": chat.prompt(), "answer": visible(expected),
        "check": "exact", "max_tokens": codec().count(expected) + 1 + _MORE_TOKENS,
    }  # fmt: skip
    return item | more, chat


def _asked_runes() -> list[runes.Rule]:
    """Half of them are asked for in a chat, half are lines of a document."""
    return dice("eval", "ngram").some(runes.rules(), 200)


def _arithmetic(number: int) -> tuple[Item, Chat]:
    rng = dice("eval", "arithmetic", number)
    chosen = problem(rng, kept=number % 10 != 9)
    while number % 10 == 9 and chosen[1] != "*":  # every tenth is a product
        chosen = problem(rng)
    turn = Turn(ask(rng, chosen), str(result(chosen)))
    return _item(f"arithmetic-{number}", "arithmetic", Chat((turn,)))


def _lookup(kind: str, named: int, number: int) -> tuple[Item, Chat]:
    rng = dice("eval", kind, named, number)
    chat, tokens = recall.at_distance(rng, kind, rng.number(*DISTANCES[named]), codec().count)
    return _item(f"{kind}-{named}-{number}", kind, chat, distance=named, tokens=tokens)


_CODES = "The code of lamp is 7315. The code of river is 2048. The code of Nora is 9152.\n"
_KEPT = 'Remember this phrase: "silver bridge winter song apple". It was a cold day.\n'
_DEMO = (
    ("What is the capital of France?", "Paris"), ("Which city is the capital of Japan?", "Tokyo"),
    ("What is the chemical symbol of gold?", "Au"), ("Who wrote Moby Dick?", "Herman Melville"),
    ("What do you call a baby cat?", "kitten"), ("What is the opposite of hot?", "cold"),
    ("What comes after Monday?", "Tuesday"), ("How many hours are in a day?", "24"),
    ("What color do you get from blue and yellow?", "green"), ("What is 347 + 58?", "405"),
    ("What is 500 - 125?", "375"), ("What is 7 * 8?", "56"), ("Calculate 12 - 30.", "-18"),
    ("Hello!", "Hello! How can I help you?"), ("Thank you!", "You are welcome!"),
    ("Repeat: apple river stone", "apple river stone"),
    ("Reverse the order of these words: lamp sun moon", "moon sun lamp"),
    (_CODES + "What is the code of river?", "2048"),
    (_KEPT + "What was the phrase?", "silver bridge winter song apple"),
)  # fmt: skip


def demo_questions() -> list[dict[str, Any]]:
    """About twenty questions over the tasks with their right answers.

    "messages" is what a client sends, "prompt" the rendered text.
    """
    rule = runes.rules()[7]
    asked = [*_DEMO, (f"Complete the rune: {' '.join(rule[:3])}", " ".join(rule))]
    found = []
    for question, answer in asked:
        chat = Chat((Turn(question, answer),))
        found.append({
            "question": question, "messages": chat.body()["messages"], "prompt": chat.prompt(),
            "answer": answer,
        })  # fmt: skip
    return found
