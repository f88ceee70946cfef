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

from deepinfer.commands.console import console
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
    """Greedy speculation over some prompts.

    Attributes:
        mean_accepted: accepted drafts per round, of block_size; a round that ends with its answer
            counts the drafts that were used.
        calibration_error: expected calibration error of the confidence, ten bins, over drafts that
            were judged: the accepted ones and the first wrong one, none past an answer's end.
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
    drafter: dict[str, DraftScore]
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        tasks = {
            name: {"right": s.right, "total": s.total, "accuracy": s.accuracy}
            for name, s in self.tasks.items()
        }
        drafter = {name: dict(score.__dict__) for name, score in self.drafter.items()}
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
    try:
        lines = file.read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file}: not UTF-8 text ({error})") from None
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            items.append(json.loads(line))
        except json.JSONDecodeError as error:
            raise ConfigError(f"{file}:{number}: not valid JSON ({error})") from None
        if wrong := _wrong_item(items[-1]):
            raise ConfigError(f"{file}:{number}: {wrong}")
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


def _wrong_item(item: Any) -> str | None:
    """What keeps `item` from being asked."""
    if not isinstance(item, dict):
        return "is no JSON object"
    names = ("name", "task", "text") if "text" in item else ("name", "task", "prompt", "answer")
    for name in names:
        if not isinstance(item.get(name), str) or (name != "answer" and not item[name]):
            return f"{name} = {item.get(name)!r}; expected a text"
    if "text" in item:
        return None
    if type(item.get("max_tokens")) is not int or item["max_tokens"] < 1:
        return f"max_tokens = {item.get('max_tokens')!r}; expected a whole number of at least 1"
    if item.get("check") not in ("exact", "json"):
        return f"check = {item.get('check')!r}; expected exact or json"
    if item["check"] == "json" and not isinstance(item.get("schema"), dict):
        return f"schema = {item.get('schema')!r}; expected an object"
    return None


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
    return (total / count if count else None), count


def draft_prompts(llm: LLM, items: list[Any], count: int) -> dict[str, list[tuple[list[int], int]]]:
    """(prompt ids, most tokens) for the drafter: `text` to be continued, and questions to answer.

    Texts are cut after a quarter and continued for as many tokens as they had; questions are
    `count` of them, spread over the tasks.
    """
    texts = [llm.tokenizer.encode(item["text"], None) for item in items if "text" in item]
    continued = [(ids[: len(ids) // 4], len(ids) - len(ids) // 4) for ids in texts if len(ids) > 7]
    questions = [item for item in items if "text" not in item]
    chosen = questions[:: max(1, len(questions) // count)][:count]
    answered = [(llm.tokenizer.encode(i["prompt"], None), i["max_tokens"]) for i in chosen]
    groups = {"text": continued[:count], "answers": answered}
    return {name: prompts for name, prompts in groups.items() if prompts}


def score_drafter(llm: LLM, prompts: list[tuple[list[int], int]]) -> DraftScore:
    """Greedy speculation after each prompt."""
    accepted = rounds = 0
    confidences: list[float] = []
    outcomes: list[bool] = []
    for prompt, most in prompts:
        for turn in llm.speculate(prompt, most):
            if not turn.drafted:
                continue
            accepted += turn.accepted
            rounds += 1
            ended = len(turn.token_ids) == turn.accepted
            judged = turn.accepted if ended else min(turn.accepted + 1, turn.drafted)
            confidences += turn.confidence[:judged]
            outcomes += [i < turn.accepted for i in range(judged)]
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
    draft_items: int = 40, progress: bool = False,
) -> Report:  # fmt: skip
    """Run a checkpoint's evaluation.

    Args:
        tasks: only these; default all. limit: most items of each group.
        draft_items: texts, and questions over all tasks, that are also decoded speculatively.
        progress: show on standard error how far it is and what is right so far.

    Raises:
        ConfigError: see `load_items`.
    """
    start = time.perf_counter()
    for name, value, least in (("limit", limit, 1), ("draft_items", draft_items, 0)):
        if value is not None and value < least:
            raise ConfigError(f"{name} = {value}; expected a whole number of at least {least}")
    items = load_items(Path(options.model), tasks, limit)
    if not items:
        raise ConfigError(f"{options.model}/{ITEMS_FILE}: no items")
    llm = LLM.from_options(options)
    texts = [item for item in items if "text" in item]
    questions = [item for item in items if "text" not in item]
    scores: dict[str, Score] = {}
    drafter = {}
    with _Bar(len(questions), progress) as bar:
        for name, members in _by_group(questions).items():
            bar.about(name)
            scores |= score_answers(members, answers(llm, members))
            bar.done(len(members), f"{name}: {scores[name].right} of {scores[name].total}")
        bar.about("held-out text")
        loss, tokens = text_loss(llm, texts)
        if draft_items and llm.model_config.has_drafter:
            for name, prompts in draft_prompts(llm, items, draft_items).items():
                bar.about(f"drafter, {name}")
                drafter[name] = score_drafter(llm, prompts)
    return Report(scores, loss, tokens, drafter, time.perf_counter() - start)


def _by_group(items: list[Any]) -> dict[str, list[Any]]:
    groups: dict[str, list[Any]] = defaultdict(list)
    for item in items:
        groups[group(item)].append(item)
    return groups


class _Bar:
    """A progress bar on standard error: questions answered, and each task's result as it comes."""

    def __init__(self, total: int, shown: bool) -> None:
        from rich.console import Console
        from rich.progress import Progress, SpinnerColumn, TimeElapsedColumn

        self._bar = Progress(
            SpinnerColumn(), *Progress.get_default_columns()[:2],
            "{task.completed}/{task.total}", TimeElapsedColumn(),
            console=Console(stderr=True), disable=not shown,
        )  # fmt: skip
        self._task = self._bar.add_task("", total=total)

    def __enter__(self) -> "_Bar":
        self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()

    def about(self, name: str) -> None:
        """What is being done now."""
        self._bar.update(self._task, description=name)

    def done(self, count: int, result: str) -> None:
        """Some more questions are answered."""
        self._bar.advance(self._task, count)
        if not self._bar.disable:
            self._bar.console.print(result)


def show(report: Report, wrong: bool) -> None:
    """Print a report as a table, with some wrong answers if wanted."""
    from rich import box
    from rich.table import Table

    screen = console()
    table = Table("task", "right", "of", "accuracy", box=box.SIMPLE)
    for name, score in report.tasks.items():
        table.add_row(name, str(score.right), str(score.total), f"{score.accuracy:.1%}")
    screen.print(table)
    if report.text_loss is not None:
        screen.print(f"held-out text: {report.text_loss:.4f} nats per token over"
                      f" {report.text_tokens:,} tokens")  # fmt: skip
    for name, d in report.drafter.items():
        screen.print(
            f"drafter, {name}: {d.mean_accepted:.2f} of {d.block_size} drafts accepted per round"
            f" ({d.rounds} rounds), calibration error {d.calibration_error:.3f}"
        )
    screen.print(f"{report.seconds:.0f} s")
    if wrong:
        for name, score in report.tasks.items():
            for item, expected, found in score.wrong:
                screen.print(f"{name} {item}: expected {expected!r}, found {found!r}", markup=False)
