"""One token sequence on its way through the scheduler.

Knows its tokens, its place in the queue and what it holds of the cache; must not know torch,
sampling or text. Only the scheduler changes it.
"""

from collections.abc import Hashable
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Literal

from deepinfer.kv.blocks import SequenceBlocks


class State(Enum):
    """Where a sequence is.

    HELD: it continues the same prompt as the first sequence of its request, which computes it.
    """

    NEW = auto()
    HELD = auto()
    WAITING = auto()
    RUNNING = auto()
    ENDED = auto()


# Smaller is served first: priority, number of arrival, index within the request.
Rank = tuple[int, int, int]


@dataclass(eq=False, slots=True)
class Sequence:
    """A prompt being continued once; a request has n of them.

    Attributes:
        request_id: its request; index: its number there.
        tokens: prompt and generated ids, as far as they are known to the host.
        most_tokens: the length at which it ends: prompt and max_tokens.
        priority: lower numbers are served first, then earlier arrivals.
        deadline_s: seconds from its arrival in which it has to end, None = no limit.
        extra_keys: what tells its pages from others with the same tokens, see `KVManager.open`.
        reuse: whether cached prefixes may be used; not for prompt log-probabilities.
        state, rank: set by the scheduler.
        expires: clock time at which it is ended, None = never.
        computed: tokens that the cache holds once all launched steps have run.
        pending: tokens that launched steps will bring, which the host does not know yet.
        blocks: pages and slot while it runs.
        prompt_end: tokens that it had when it began to run; the rows before are prefill.
        cut: a place where a prefill chunk has to end, because others branch off there; 0 = none.
        kept: depth of its last checkpoint.
        most_rows: longest of its prefill chunks, None = as long as the step allows.
        cached_tokens: how many tokens of its prompt it did not have to compute at first.
        preemptions: how often it had to make way.
        ended_by: why the scheduler ended it, None when somebody else did.
    """

    request_id: str
    tokens: list[int]
    most_tokens: int
    index: int = 0
    priority: int = 0
    deadline_s: float | None = None
    extra_keys: tuple[Hashable, ...] = ()
    reuse: bool = True
    state: State = field(default=State.NEW, init=False)
    rank: Rank = field(default=(0, 0, 0), init=False)
    expires: float | None = field(default=None, init=False)
    computed: int = field(default=0, init=False)
    pending: int = field(default=0, init=False)
    blocks: SequenceBlocks | None = field(default=None, init=False)
    prompt_end: int = field(default=0, init=False)
    cut: int = field(default=0, init=False)
    kept: int = field(default=0, init=False)
    most_rows: int | None = field(default=None, init=False)
    cached_tokens: int = field(default=0, init=False)
    preemptions: int = field(default=0, init=False)
    ended_by: Literal["abort", "deadline"] | None = field(default=None, init=False)
