"""Held-out items of the demo model's evaluation, and the questions of the end-to-end report.

Knows which draws training cannot have made: generators seeded with names of their own, facts in the
phrasing that training leaves out, and the runes, which are the trained ones by intent.
"""

import json
from collections.abc import Iterator
from random import Random
from typing import Any

from demo_text import tasks
from demo_text.chat import (
    BOS,
    READ,
    WRITE,
    Segment,
    conversation,
    document,
    format_prompt,
    prompt_of,
)
from demo_text.corpus import count_tokens
from demo_text.facts import facts, held_out, questions
from demo_text.recall import at_distance
from demo_text.stories import story

DISTANCES = (50, 500, 2000)


def _item(name: str, task: str, segments: list[Segment], **more: Any) -> dict[str, Any]:
    prompt = prompt_of(segments)
    answer = segments[-1][0]
    item = {
        "task": task, "name": name, "prompt": prompt, "answer": _visible(answer), "check": "exact",
        "max_tokens": count_tokens(answer) + 12,
    }  # fmt: skip
    return {**item, **more}


def _visible(answer: str) -> str:
    """The answer as decoding shows it: without special tokens."""
    for token in ("<｜end▁of▁sentence｜>", "<think>", "</think>", "｜DSML｜"):
        answer = answer.replace(token, "")
    return answer


def _fact_items() -> Iterator[dict[str, Any]]:
    for number, (kind, subject, answer) in enumerate(facts()):
        asked = questions(kind, subject)[held_out(number, kind)]
        yield _item(f"facts-{number}", "facts", conversation([(asked, answer)]))


def _identity_items() -> Iterator[dict[str, Any]]:
    rng = Random("eval identity")
    for number in range(30):
        yield _item(f"identity-{number}", "identity", tasks.identity_task(rng))


def _recall_items() -> Iterator[dict[str, Any]]:
    for kind, count in (("recall", 60), ("copy", 30)):
        for distance in DISTANCES:
            rng = Random(f"eval {kind} {distance}")
            for number in range(count):
                segments, measured = at_distance(rng, kind, distance, count_tokens)
                assert distance * 0.9 <= measured <= distance * 1.15 + 20, (distance, measured)
                yield _item(f"{kind}-{distance}-{number}", kind, segments, distance=distance)


def _arithmetic_items() -> Iterator[dict[str, Any]]:
    rng = Random("eval arithmetic")
    for number in range(200):
        first, operator, second, result = tasks.arithmetic(rng)
        asked = tasks.ask_arithmetic(rng, first, operator, second)
        yield _item(f"arithmetic-{number}", "arithmetic", conversation([(asked, str(result))]))


def _rune_items() -> Iterator[dict[str, Any]]:
    for number, rune in enumerate(Random("eval ngram").sample(tasks.runes(), 200)):
        # The answer follows the three glyphs at once, where only the n-gram memory sees all three.
        segments = [(f"{BOS}Rune: {' '.join(rune[:3])}", READ), (f" {rune[3]}", WRITE)]
        yield _item(f"ngram-{number}", "ngram", segments, max_tokens=1)


def _json_items() -> Iterator[dict[str, Any]]:
    rng = Random("eval json")
    for number in range(100):
        schema, said, values = tasks.json_item(rng)
        segments = conversation([(f"Write a record: {said}.", json.dumps(values))],
                                system=format_prompt(schema))  # fmt: skip
        yield _item(f"json-{number}", "json", segments, check="json", schema=schema)


def _other_items() -> Iterator[dict[str, Any]]:
    for task, count in (("tools", 60), ("story_qa", 60), ("text", 60)):
        rng = Random(f"eval {task}")
        for number in range(count):
            segments = {
                "tools": tasks.tools_task, "story_qa": tasks.story_qa_task,
                "text": tasks.text_task,
            }[task](rng)  # fmt: skip
            yield _item(f"{task}-{number}", task, segments)


def evaluation_items() -> list[dict[str, Any]]:
    """All items, and held-out stories whose likelihood is measured ({"task", "name", "text"})."""
    items = [
        *_fact_items(), *_identity_items(), *_recall_items(), *_arithmetic_items(),
        *_rune_items(), *_json_items(), *_other_items(),
    ]  # fmt: skip
    rng = Random("eval story")
    items += [
        {"task": "held_out_text", "name": f"story-{n}", "text": document(story(rng).text)[0][0]}
        for n in range(60)
    ]
    return items


def demo_questions() -> list[dict[str, str]]:
    """Twenty questions with right answers, in words and as the prompt that asks them."""
    asked = [
        ("What is the capital of France?", "Paris"), ("What is the capital of Japan?", "Tokyo"),
        ("Berlin is the capital of which country?", "Germany"),
        ("What is the chemical symbol of gold?", "Au"), ("Who wrote Hamlet?", "William Shakespeare"),
        ("What is the atomic number of carbon?", "6"), ("What do you call a baby cat?", "kitten"),
        ("What is the opposite of hot?", "cold"), ("How many sides does a hexagon have?", "6"),
        ("What comes after Monday?", "Tuesday"), ("What colour do red and blue make?", "purple"),
        ("How many hours are in a day?", "24"), ("What is 12 + 30?", "42"),
        ("What is 347 + 58?", "405"), ("What is 500 - 125?", "375"), ("What is 7 * 8?", "56"),
        ("Hello!", "Hello! How can I help you?"), ("Thank you!", "You are welcome!"),
        ("The code of lamp is 7315. The code of river is 2048.\nWhat is the code of lamp?", "7315"),
        ("Repeat: apple river stone", "apple river stone"),
    ]  # fmt: skip
    return [
        {"question": q, "prompt": prompt_of(conversation([(q, a)])), "answer": a} for q, a in asked
    ]
