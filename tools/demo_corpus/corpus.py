"""Documents to tokens, tokens to batches, and the tokenizer that both need.

Knows the mixture and how documents are packed; must not know the model. Everything is a pure
function of seeds. Training draws from generators seeded with "train"; the evaluation's begin with
"eval".
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from deepinfer.checkpoint.tokenizer_training import train_tokenizer
from demo_corpus import lexicon, recall, runes
from demo_corpus.arithmetic import arithmetic
from demo_corpus.chat import BOS, Chat, Segment, tools_text
from demo_corpus.codec import Codec
from demo_corpus.dice import Dice, dice
from demo_corpus.identity import identity
from demo_corpus.records import json_task
from demo_corpus.story_tasks import facts_task, story_qa, story_task
from demo_corpus.text_tasks import UPPER_WORDS, text
from demo_corpus.tool_tasks import tools_chat
from demo_corpus.toolbox import TOOLS

VOCABULARY = 4096
PROMPT_WEIGHT = 0.1
# Of texts to look things up in: random codes and filler, from which nothing can be learned.
LOOKUP_WEIGHT = 0.01
# Share of the tokens of short batches.
MIX = {
    "story": 0.15, "story_qa": 0.07, "facts": 0.09, "identity": 0.04, "recall": 0.19, "copy": 0.06,
    "arithmetic": 0.19, "ngram": 0.05, "json": 0.08, "tools": 0.05, "text": 0.03,
}  # fmt: skip
_TASKS: dict[str, Callable[[Dice], Chat | list[Segment]]] = {
    "story": story_task, "story_qa": story_qa, "facts": facts_task, "identity": identity,
    "arithmetic": arithmetic, "ngram": runes.ngram, "json": json_task, "tools": tools_chat,
    "text": text,
}  # fmt: skip
_OF_LENGTH = {"recall": recall.recall, "copy": recall.copy}
# What fills the end of a row: documents that can be cut after any of their many short turns.
_FILLERS = ("facts", "arithmetic", "text", "ngram")
# Part of long rows that begin with codes to recall; the others have phrases and mottos to copy.
_RECALL_SHARE = {"long": 0.75, "lookup": 0.25}
_SHORTEST = 48  # tokens of the shortest document that is asked for
_LONGEST_SHORT = 900  # tokens of recall documents in short batches


@dataclass(slots=True)
class Document:
    """Tokens with the weight of each in the loss.

    Attributes:
        ends: lengths at which the document may be cut: after whole answers.
    """

    token_ids: list[int]
    weights: list[float]
    ends: list[int]

    def cut(self, room: int) -> "Document | None":
        """As many whole turns as fit, or None."""
        if len(self.token_ids) <= room:
            return self
        end = max((end for end in self.ends if end <= room), default=0)
        if end == 0:
            return None
        ends = [e for e in self.ends if e <= end]
        return Document(self.token_ids[:end], self.weights[:end], ends)


def tokenise(
    made: Chat | list[Segment], codec: Codec, prompt_weight: float = PROMPT_WEIGHT
) -> Document:
    """The tokens of a conversation or a plain document; what is read counts `prompt_weight`."""
    segments = made.segments() if isinstance(made, Chat) else made
    ids: list[int] = []
    weights: list[float] = []
    ends: list[int] = []
    for segment in segments:
        part = codec.encode(segment.text)
        ids += part
        weights += [1.0 if segment.is_answer else prompt_weight] * len(part)
        if segment.is_answer:
            ends.append(len(ids))
    # Plain text, and a conversation that ends in thinking or has tools, end nowhere else.
    if not isinstance(made, Chat) or made.thinking or made.tools:
        ends = ends[-1:]
    weights[0] = 0.0  # nothing comes before the first token that could predict it
    return Document(ids, weights, ends)


def sample_document(rng: Dice, task: str, codec: Codec, max_tokens: int) -> Document:
    """A document of a task. Recall and copy are of log-uniform length up to about `max_tokens`."""
    if task in _OF_LENGTH:
        longest = max(_SHORTEST, int(max_tokens * 0.95))
        tokens = int(_SHORTEST * math.exp(rng.random() * math.log(longest / _SHORTEST)))
        return tokenise(_OF_LENGTH[task](rng, tokens, codec.count), codec, LOOKUP_WEIGHT)
    return tokenise(_TASKS[task](rng), codec)


def _sample_texts() -> Iterator[str]:
    """What the tokenizer learns from."""
    rng = dice("tokenizer")
    counts = {"story": 1500, "story_qa": 300, "json": 1500, "tools": 300}
    for task, make in _TASKS.items():
        for _ in range(counts.get(task, 900)):
            made = make(rng)
            segments = made.segments() if isinstance(made, Chat) else made
            yield "".join(segment.text for segment in segments)
    for make_long in _OF_LENGTH.values():
        for _ in range(150):
            chat = make_long(rng, 400, lambda sentence: len(sentence) // 4)
            yield "".join(segment.text for segment in chat.segments())
    # Words that have to be single tokens, after a blank and at the start of an answer.
    words = (*runes.GLYPHS, *lexicon.WORDS, *lexicon.NAMES, *(w.upper() for w in UPPER_WORDS))
    for word in words:
        yield f"{word} {word}\n" * 60
    yield tools_text(tuple(TOOLS.values())) * 400


@cache
def build_tokenizer() -> Tokenizer:
    """The demo tokenizer: 4,096 ids, always the same ones."""
    tokenizer = train_tokenizer(_sample_texts(), VOCABULARY)
    tokenizer.no_padding()
    return tokenizer


@cache
def codec() -> Codec:
    """The demo tokenizer with its memory."""
    return Codec(build_tokenizer())


class _Shares:
    """Which task is next, so that the tokens of each keep to its share."""

    def __init__(self) -> None:
        self.tokens = dict.fromkeys(MIX, 0)
        self.total = 0

    def next(self, rng: Dice) -> str:
        total = self.total + 3000
        lacking = {t: max(0.0, part * total - self.tokens[t]) for t, part in MIX.items()}
        chosen = rng.random() * sum(lacking.values())
        for task, amount in lacking.items():
            chosen -= amount
            if chosen < 0:
                return task
        return "facts"

    def count(self, task: str, tokens: int) -> None:
        self.tokens[task] += tokens
        self.total += tokens


class _Packer:
    """Fills rows of one batch with whole documents."""

    def __init__(self, rng: Dice) -> None:
        self.rng = rng
        self.shares = _Shares()
        self.waiting: list[Document] = []  # documents that no row had room for yet

    def fill(self, room: int, longest: int) -> Iterator[Document]:
        """Documents of all tasks, of at most `longest` tokens, that fill `room` up to a few."""
        for document in tuple(self.waiting):
            if len(document.token_ids) <= room:
                self.waiting.remove(document)
                room -= len(document.token_ids)
                yield document
        misses = 0
        while room >= _SHORTEST // 2 and misses < 8:
            task = self.shares.next(self.rng) if misses < 3 else self.rng.pick(_FILLERS)
            document = sample_document(self.rng, task, codec(), longest)
            fitting = document if len(document.token_ids) <= room else None
            if fitting is None and task in _FILLERS:
                fitting = document.cut(room)
            if fitting is not None:
                room -= len(fitting.token_ids)
                self.shares.count(task, len(fitting.token_ids))
                yield fitting
                continue
            misses += 1
            if task not in _FILLERS:
                self.shares.count(task, len(document.token_ids))
                if len(document.token_ids) <= longest:
                    self.waiting.append(document)

    def row(self, length: int, kind: str) -> Iterator[Document]:
        """Documents that fill a row; in long rows the first is one to look things up in."""
        if kind == "short":
            yield from self.fill(length, min(length, _LONGEST_SHORT))
            return
        make = recall.recall if self.rng.chance(_RECALL_SHARE[kind]) else recall.copy
        tokens = length * (0.8 + 0.2 * self.rng.random())
        if kind == "long" and self.rng.chance(0.3):
            tokens = 300 * math.exp(self.rng.random() * math.log(max(length, 301) / 300))
        made = make(self.rng, int(tokens), codec().count, kind == "lookup")
        document = tokenise(made, codec(), LOOKUP_WEIGHT).cut(length)
        room = length
        if document is not None:
            room -= len(document.token_ids)
            yield document
        yield from self.fill(room, min(length, _LONGEST_SHORT))


Batch = tuple[NDArray[np.uint16], NDArray[np.float16]]


def fill_batch(seed: int, index: int, sequences: int, length: int, kind: str) -> Batch:
    """Batch `index` of a kind: tokens and loss weights, [sequences, length + 1] each.

    Documents lie back to back and begin with their BOS token, whose weight is 0. What stays free at
    the end of a row is BOS tokens, each a document of its own, of weight 0.

    Args:
        kind: "short" (all tasks), "long" (texts to look things up in, up to whole rows) or "lookup"
            (such texts that fill whole rows, most with words to copy).
    """
    assert kind == "short" or kind in _RECALL_SHARE, kind
    tokens = np.full((sequences, length + 1), codec().encode(BOS)[0], dtype=np.uint16)
    weights = np.zeros((sequences, length + 1), dtype=np.float16)
    packer = _Packer(dice("train", seed, kind, index))
    for row in range(sequences):
        place = 0
        for document in packer.row(length + 1, kind):
            end = place + len(document.token_ids)
            tokens[row, place:end] = document.token_ids
            weights[row, place:end] = document.weights
            place = end
    return tokens, weights
