"""`deepinfer eval`: answer a checkpoint's own questions and count what is right.

Knows item files, checks and counts; must not know how an answer is computed.
"""

import json
import math
import time
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from deepinfer.config import EngineOptions
from deepinfer.engine.llm import LLM
from deepinfer.errors import ConfigError
from deepinfer.sampling.params import SamplingParams

ITEMS_FILE = "eval.jsonl"
_BINS = 10


@dataclass
class Score:
    """Right answers of one task; wrong keeps a few (name, expected, found) to look at."""

    right: int = 0
    total: int = 0
    wrong: list[tuple[str, str, str]] = field(default_factory=list)

    @property
    def accuracy(self) -> float:
        """Share of right answers."""
        return self.right / self.total


@dataclass(frozen=True)
class DraftScore:
    """Greedy speculation over the items' prompts.

    Attributes:
        mean_accepted: accepted drafts per round, block_size a round.
        calibration_error: expected calibration error of the confidence, ten bins, over drafts that
            were reached.
    """

    mean_accepted: float
    block_size: int
    rounds: int
    calibration_error: float


@dataclass(frozen=True)
class Report:
    """Everything that one run measured."""

    tasks: dict[str, Score]
    text_loss: float | None
    text_tokens: int
    drafter: DraftScore | None
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        tasks = {
            name: {"right": s.right, "total": s.total, "accuracy": s.accuracy}
            for name, s in self.tasks.items()
        }
        drafter = None if self.drafter is None else dict(self.drafter.__dict__)
        return {
            "tasks": tasks,
            "text_loss": self.text_loss,
            "text_tokens": self.text_tokens,
            "drafter": drafter,
            "seconds": self.seconds,
        }


def load_items(model: Path, tasks: Iterable[str] = (), limit: int | None = None) -> list[Any]:
    """Items of `model`/eval.jsonl, of some tasks and at most `limit` of each, in file order.

    Raises:
        ConfigError: no such file, a malformed line, or a task that the file does not have.
    """
    file = model / ITEMS_FILE
    if not file.is_file():
        raise ConfigError(f"{file}: no such file; eval needs a checkpoint that ships its questions")
    items = []
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            items.append(json.loads(line))
        except json.JSONDecodeError as error:
            raise ConfigError(f"{file}:{number}: not valid JSON ({error})") from None
    known = {item["task"] for item in items}
    unknown = [task for task in tasks if task not in known]
    if unknown:
        raise ConfigError(f"task {unknown[0]!r}; expected one of {', '.join(sorted(known))}")
    counts: dict[str, int] = defaultdict(int)
    chosen = []
    for item in items:
        counts[group(item)] += 1
        wanted = not tasks or item["task"] in set(tasks)
        if wanted and (limit is None or counts[group(item)] <= limit):
            chosen.append(item)
    return chosen


def group(item: dict[str, Any]) -> str:
    """What an item is counted under: its task, with the distance where it has one."""
    distance = item.get("distance")
    return item["task"] if distance is None else f"{item['task']} {distance}"


def is_right(item: dict[str, Any], text: str) -> bool:
    """Whether `text` is the answer: equal to it, or JSON of its schema and values."""
    if item["check"] == "exact":
        return text.strip() == item["answer"].strip()
    import jsonschema

    try:
        value = json.loads(text)
        jsonschema.validate(value, item["schema"])
    except (json.JSONDecodeError, jsonschema.ValidationError):
        return False
    return bool(value == json.loads(item["answer"]))


def answers(llm: LLM, items: list[Any]) -> list[str]:
    """Greedy answers to the items' prompts, all of them in one run of the engine."""
    params = [SamplingParams(max_tokens=i["max_tokens"], temperature=0.0) for i in items]
    prompts = [llm.tokenizer.encode(item["prompt"], None) for item in items]
    return [reply.outputs[0].text for reply in llm.generate(prompts, params)]


def score_answers(items: list[Any], texts: list[str]) -> dict[str, Score]:
    """Scores by group."""
    scores: dict[str, Score] = defaultdict(Score)
    for item, text in zip(items, texts, strict=True):
        score = scores[group(item)]
        score.total += 1
        if is_right(item, text):
            score.right += 1
        elif len(score.wrong) < 5:
            score.wrong.append((item["name"], item["answer"], text))
    return dict(scores)


def text_loss(llm: LLM, items: list[Any]) -> tuple[float | None, int]:
    """Mean negative log-likelihood per token, in nats, of whole texts, and how many tokens."""
    if not items:
        return None, 0
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
    prompts = [llm.tokenizer.encode(item["text"], None) for item in items]
    total, count = 0.0, 0
    for reply in llm.generate(prompts, params):
        assert reply.prompt_logprobs is not None
        values = [entry.logprob for entry in reply.prompt_logprobs if entry is not None]
        total -= math.fsum(values)
        count += len(values)
    return total / count, count


def score_drafter(llm: LLM, items: list[Any]) -> DraftScore | None:
    """Greedy speculation through each item's answer, or None without a drafter."""
    if not llm.model_config.has_drafter:
        return None
    accepted = rounds = 0
    confidences: list[float] = []
    outcomes: list[bool] = []
    for item in items:
        prompt = llm.tokenizer.encode(item["prompt"], None)
        for turn in llm.speculate(prompt, item["max_tokens"]):
            if not turn.drafted:
                continue
            accepted += turn.accepted
            rounds += 1
            reached = min(turn.accepted + 1, turn.drafted)
            confidences += turn.confidence[:reached]
            outcomes += [i < turn.accepted for i in range(reached)]
    error = calibration_error(confidences, outcomes)
    block = llm.model_config.dspark_block_size
    return DraftScore(accepted / max(rounds, 1), block, rounds, error)


def calibration_error(confidences: list[float], outcomes: list[bool]) -> float:
    """Expected calibration error: mean gap of confidence and hit rate over equal-width bins."""
    if not confidences:
        return 0.0
    c = torch.tensor(confidences, dtype=torch.float64)
    hit = torch.tensor(outcomes, dtype=torch.float64)
    bins = (c * _BINS).long().clamp(0, _BINS - 1)
    gaps = torch.zeros(_BINS, dtype=torch.float64).index_add_(0, bins, c - hit)
    return float(gaps.abs().sum() / len(c))


def evaluate(
    options: EngineOptions, tasks: Iterable[str] = (), limit: int | None = None,
    draft_items: int = 40,
) -> Report:  # fmt: skip
    """Run a checkpoint's evaluation.

    Args:
        tasks: only these; default all. limit: most items of each group.
        draft_items: items whose answers are also decoded speculatively, spread over the tasks.

    Raises:
        ConfigError: see `load_items`.
    """
    start = time.perf_counter()
    items = load_items(Path(options.model), tasks, limit)
    llm = LLM.from_options(options)
    texts = [item for item in items if "text" in item]
    questions = [item for item in items if "text" not in item]
    scores = score_answers(questions, answers(llm, questions))
    loss, tokens = text_loss(llm, texts)
    stride = max(1, len(questions) // max(draft_items, 1))
    drafter = score_drafter(llm, questions[::stride][:draft_items]) if draft_items else None
    return Report(scores, loss, tokens, drafter, time.perf_counter() - start)


def show(report: Report, wrong: bool) -> None:
    """Print a report as a table, with some wrong answers if wanted."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console()
    table = Table("task", "right", "of", "accuracy", box=box.SIMPLE)
    for name, score in report.tasks.items():
        table.add_row(name, str(score.right), str(score.total), f"{score.accuracy:.1%}")
    console.print(table)
    if report.text_loss is not None:
        console.print(f"held-out text: {report.text_loss:.4f} nats per token over"
                      f" {report.text_tokens:,} tokens")  # fmt: skip
    if report.drafter is not None:
        d = report.drafter
        console.print(
            f"drafter: {d.mean_accepted:.2f} of {d.block_size} drafts accepted per round"
            f" ({d.rounds} rounds), calibration error {d.calibration_error:.3f}"
        )
    console.print(f"{report.seconds:.0f} s")
    if wrong:
        for name, score in report.tasks.items():
            for item, expected, found in score.wrong:
                console.print(
                    f"{name} {item}: expected {expected!r}, found {found!r}", markup=False
                )
