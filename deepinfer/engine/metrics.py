"""What the engine has done: counters, and distributions of times and sizes.

Knows what to count; must not know torch or how a step works. Counters only grow: two readings give
a rate.
"""

import bisect
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deepinfer.engine.request import Completion
    from deepinfer.engine.scheduler import Scheduler

_SECONDS = tuple(m * 10.0**e for e in range(-4, 3) for m in (1, 2, 5))
_SIZES = tuple(float(2**n) for n in range(13))


@dataclass
class Distribution:
    """How often values fell between bounds, in constant memory.

    Attributes:
        bounds: upper bounds, inclusive; one more bucket holds what is larger.
        counts: values in each bucket; total: their sum; largest: of all.
    """

    bounds: tuple[float, ...]
    counts: list[int] = field(init=False)
    total: float = 0.0
    largest: float = 0.0

    def __post_init__(self) -> None:
        self.counts = [0] * (len(self.bounds) + 1)

    def add(self, value: float) -> None:
        """Count one value."""
        self.counts[bisect.bisect_left(self.bounds, value)] += 1
        self.total += value
        self.largest = max(self.largest, value)

    @property
    def count(self) -> int:
        """How many values there were."""
        return sum(self.counts)

    @property
    def mean(self) -> float:
        """Their mean, 0 without any."""
        return self.total / self.count if self.count else 0.0

    def quantile(self, part: float) -> float:
        """A value that `part` of all do not exceed: the upper bound of its bucket."""
        wanted, seen = part * self.count, 0
        for bound, count in zip((*self.bounds, self.largest), self.counts, strict=True):
            seen += count
            if seen >= wanted and seen:
                return min(bound, self.largest)
        return 0.0

    def summary(self) -> dict[str, float]:
        """Count, mean, median, 90th and 99th percentile and the largest."""
        return {
            "count": self.count, "mean": self.mean, "p50": self.quantile(0.5),
            "p90": self.quantile(0.9), "p99": self.quantile(0.99), "largest": self.largest,
        }  # fmt: skip


@dataclass
class Metrics:
    """Everything since the start.

    Attributes:
        requests: ended ones by finish reason of their replies.
        prompt_tokens, generated_tokens: computed and generated, recomputed ones included.
        steps, decode_steps: forwards, and those with one row per sequence.
        first_token_s: from a request's arrival to its first token; token_s: from one token of a
            sequence to the next; queue_s: from arrival to the first step.
        rows, sequences: of each step.
        running, waiting: sequences now; cache_use: part of all pages that is held, now.
        prefix: hits, misses by reason, tokens reused, evictions.
        preemptions: sequences that had to make way.
    """

    requests: dict[str, int] = field(default_factory=dict)
    prompt_tokens: int = 0
    generated_tokens: int = 0
    steps: int = 0
    decode_steps: int = 0
    first_token_s: Distribution = field(default_factory=lambda: Distribution(_SECONDS))
    token_s: Distribution = field(default_factory=lambda: Distribution(_SECONDS))
    queue_s: Distribution = field(default_factory=lambda: Distribution(_SECONDS))
    rows: Distribution = field(default_factory=lambda: Distribution(_SIZES))
    sequences: Distribution = field(default_factory=lambda: Distribution(_SIZES))
    running: int = 0
    waiting: int = 0
    cache_use: float = 0.0
    prefix: dict[str, Any] = field(default_factory=dict)
    preemptions: int = 0

    def ended(self, reason: str) -> None:
        """Count a reply that has ended."""
        self.requests[reason] = self.requests.get(reason, 0) + 1

    def count_token(self, completion: "Completion", now: float) -> None:
        """Count a token that has just arrived."""
        if completion.last_token_s is None:
            self.first_token_s.add(now - completion.request.arrival_s)
        else:
            self.token_s.add(now - completion.last_token_s)
        completion.last_token_s = now
        self.generated_tokens += 1

    def count_step(self, rows: int, decodes: int, sequences: int) -> None:
        """Count a step of so many rows, `decodes` of which are single ones of a sequence."""
        if rows:
            self.steps += 1
            self.decode_steps += rows == decodes
            self.prompt_tokens += rows - decodes
            self.rows.add(rows)
            self.sequences.add(sequences)

    def look(self, scheduler: "Scheduler") -> None:
        """Note how things stand now."""
        allocator, tree = scheduler.manager.allocator, scheduler.manager.tree
        self.running, self.waiting = len(scheduler.running), len(scheduler.waiting)
        self.preemptions = scheduler.counters.preempted
        self.cache_use = 1 - allocator.free_pages / max(1, allocator.pages)
        self.prefix = asdict(tree.counters)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON, distributions as summaries."""
        plain = asdict(self)
        for name, value in vars(self).items():
            if isinstance(value, Distribution):
                plain[name] = value.summary()
        return plain


class StepLog:
    """A line about what happened since the last one, every `interval` seconds.

    Args:
        interval: seconds, 0 = never; now: clock time of the start.
    """

    def __init__(self, interval: float, now: float) -> None:
        self._interval, self._last = interval, now
        self._before = (0, 0)

    def line(self, metrics: Metrics, now: float) -> str | None:
        """The line that is due now, or None."""
        spent = now - self._last
        if not self._interval or spent < self._interval:
            return None
        counted = (metrics.prompt_tokens, metrics.generated_tokens)
        prompt, generated = (
            (new - old) / spent for new, old in zip(counted, self._before, strict=True)
        )
        self._last, self._before = now, counted
        hits = metrics.prefix.get("hits", 0)
        asked = hits + sum(metrics.prefix.get("misses", {}).values())
        share = f", prefix hits {hits}/{asked}" if asked else ""
        return (
            f"{metrics.running} running, {metrics.waiting} waiting, {prompt:,.0f} prompt and"
            f" {generated:,.0f} generated tokens/s, cache {metrics.cache_use:.0%}{share},"
            f" {metrics.preemptions} preemptions"
        )
