"""Documents to tokens, tokens to batches, and the tokenizer that both need.

Knows the mixture; must not know the model.
"""

from functools import cache
from random import Random

import numpy as np
from tokenizers import Tokenizer

from deepinfer.checkpoint.tokenizer_training import train_tokenizer
from demo_text import tasks, words
from demo_text.chat import BOS, Segment
from demo_text.recall import copy_task, recall_task

VOCABULARY = 4096
# Share of documents' tokens in short batches; recall and copy take log-uniform lengths.
MIX = {
    "story": 0.14, "story_qa": 0.07, "facts": 0.08, "identity": 0.04, "recall": 0.20, "copy": 0.07,
    "arithmetic": 0.19, "ngram": 0.04, "json": 0.08, "tools": 0.06, "text": 0.03,
}  # fmt: skip
_TASKS = {
    "story": tasks.story_task, "story_qa": tasks.story_qa_task, "facts": tasks.facts_task,
    "identity": tasks.identity_task, "arithmetic": tasks.arithmetic_task,
    "ngram": tasks.ngram_task, "json": tasks.json_task, "tools": tasks.tools_task,
    "text": tasks.text_task,
}  # fmt: skip
# Mean tokens of a document of each task, to turn shares of tokens into chances of documents.
_LENGTH = {
    "story": 150, "story_qa": 200, "facts": 55, "identity": 60, "recall": 330, "copy": 250,
    "arithmetic": 75, "ngram": 80, "json": 150, "tools": 330, "text": 75,
}  # fmt: skip

Document = tuple[list[int], list[float]]


def _sample_texts() -> list[str]:
    rng = Random(7)
    texts = []
    for name, task in sorted(_TASKS.items()):
        texts += [
            "".join(text for text, _ in task(rng)) for _ in range(400 if name != "tools" else 60)
        ]
    texts += [text for _ in range(60) for text, _ in recall_task(rng, 300, len)]
    texts += ["Rune: " + " ".join(words.GLYPHS)] * 40
    return texts


@cache
def build_tokenizer() -> Tokenizer:
    """The demo tokenizer: 4,096 byte-pair ids; every glyph with a blank before it is one."""
    tokenizer = train_tokenizer(_sample_texts(), VOCABULARY)
    tokenizer.no_padding()
    return tokenizer


@cache
def _count(text: str) -> int:
    return len(build_tokenizer().encode(text, add_special_tokens=False).ids)


def count_tokens(text: str) -> int:
    """Tokens of a text; sentences are few, so most are counted once."""
    return _count(text)


def tokenise(segments: list[Segment]) -> Document:
    """Token ids and the weight of each. Segments meet at special tokens, so they split cleanly."""
    ids: list[int] = []
    weights: list[float] = []
    encoded = build_tokenizer().encode_batch(
        [text for text, _ in segments], add_special_tokens=False
    )
    for part, (_, weight) in zip(encoded, segments, strict=True):
        ids += part.ids
        weights += [weight] * len(part.ids)
    return ids, weights


def sample_document(rng: Random, task: str, most_tokens: int) -> Document:
    """A document of a task; recall and copy are of a length up to `most_tokens`, log-uniform."""
    if task in ("recall", "copy"):
        length = int(2 ** rng.uniform(6, np.log2(most_tokens * 0.92)))
        make = recall_task if task == "recall" else copy_task
        return tokenise(make(rng, length, count_tokens))
    return tokenise(_TASKS[task](rng))


def _chances() -> tuple[list[str], list[float]]:
    names = sorted(MIX)
    return names, [MIX[name] / _LENGTH[name] for name in names]


def _fill_short(rng: Random, length: int) -> Document:
    names, chances = _chances()
    ids: list[int] = []
    weights: list[float] = []
    misses = 0
    while len(ids) < length and misses < 6:
        task = rng.choices(names, chances)[0]
        document, weight = sample_document(rng, task, min(length, 900))
        if len(ids) + len(document) > length:
            misses += 1
            continue
        ids += document
        weights += weight
    return ids, weights


def _fill_long(rng: Random, length: int) -> Document:
    goal = (
        int(length * rng.uniform(0.75, 0.95))
        if rng.random() < 0.7
        else int(2 ** rng.uniform(9, np.log2(length * 0.95)))
    )
    make = recall_task if rng.random() < 0.75 else copy_task
    ids, weights = tokenise(make(rng, goal, count_tokens))
    if len(ids) > length:
        return _fill_long(rng, length)
    more, more_weights = _fill_short(rng, length - len(ids)) if length - len(ids) > 64 else ([], [])
    return ids + more, weights + more_weights


def fill_batch(
    seed: int, index: int, sequences: int, length: int, kind: str
) -> tuple[np.ndarray, np.ndarray]:
    """Packed documents of batch `index`: tokens uint16 and weights float16, [B, length + 1].

    What no document fits in is padding of weight 0 (begin-of-sentence tokens, one document each).
    The first token of a document carries weight 0: nothing before it can predict it.
    """
    bos = build_tokenizer().token_to_id(BOS)
    tokens = np.full((sequences, length + 1), bos, dtype=np.uint16)
    weights = np.zeros((sequences, length + 1), dtype=np.float16)
    for row in range(sequences):
        rng = Random(f"train {seed} {kind} {index} {row}")
        fill = _fill_long if kind == "long" else _fill_short
        ids, weight = fill(rng, length + 1)
        tokens[row, : len(ids)] = ids
        weights[row, : len(ids)] = weight
    weights[tokens == bos] = 0.0
    return tokens, weights
