"""Break one part of the demo model at a time and measure what falls.

`python tools/break_demo.py models/demo` prints a row for the intact model, one for each breakage of
deepinfer.testing.breakage, and one for each of two controls. Measured on the cached path:

- right answers of each task, as `deepinfer eval` counts them;
- changed: answers whose tokens are not those of the intact model's greedy answer;
- shift: how far log-probabilities move, in nats: the mean of |log p(token) - log p_intact(token)|
  over a kind of tokens, where it is largest. A kind is the prompts of a task, its answers, or the
  held-out texts. Every prompt is followed by the intact model's own answer, token for token, so
  that all runs are asked the same. Batches do not depend on what is generated here, so the same
  model twice gives exactly 0;
- text loss: nats per token of held-out texts; more is worse;
- drafts taken: accepted drafts per round of greedy speculation, after a few texts and questions.

A breakage shows when its shift is above SHIFT. One that breaks drafts only shows when drafts taken
differ by more than ACCEPTED, and shift and changed are exactly 0. To show, a breakage need not make
an answer wrong: a star marks what fell, and those under which no task fell are listed.

The controls must not show. `other_chunks` is the intact model with sums in another order, so it
differs by rounding alone. In float64, the default here, that is far below SHIFT: FP8 and FP4
roundings are those of the product, and nothing pushes values over their edges. In bfloat16, as
released, it was 0.06 nats over a few unsure answers, as much as a small breakage. `intact_again` is
the intact model after all of that and differs in nothing.
"""

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.progress import track
from rich.table import Table

from deepinfer import LLM, SamplingParams
from deepinfer.commands.evaluate import (
    draft_prompts,
    group,
    load_items,
    score_answers,
    score_drafter,
    text_loss,
)
from deepinfer.testing.breakage import BREAKAGES, DRAFTS_ONLY, Breakage, other_chunks

SHIFT = 0.005
ACCEPTED = 0.02
_MOST_DRAFTED = 32  # tokens of one prompt


@dataclass(frozen=True)
class Questions:
    """What every run is asked.

    Attributes:
        asked: items with a prompt, in file order; prompts: their ids.
        texts: items with a text; drafted: (prompt ids, most tokens) to be decoded speculatively.
    """

    asked: list[dict[str, Any]]
    prompts: list[list[int]]
    texts: list[dict[str, Any]]
    drafted: list[tuple[list[int], int]]


@dataclass(frozen=True)
class Run:
    """Raw results of one run.

    Attributes:
        answers: ids of each item's greedy answer; right: [right, total] of each group.
        logprobs: of each token of a prompt and its intact answer, by item, then of each text's.
    """

    answers: list[list[int]]
    right: dict[str, list[int]]
    logprobs: list[list[float]]
    text_loss: float | None
    accepted: float | None


@dataclass(frozen=True)
class Row:
    """One run against the intact one; see the module's docstring."""

    name: str
    right: dict[str, list[int]]
    changed: int
    shift: float
    shift_in: str
    text_loss: float | None
    accepted: float | None
    shows: bool
    fell: list[str]


def ask(llm: LLM, items: list[dict[str, Any]], draft_items: int) -> Questions:
    """Split items into what is answered, read and drafted; prompts become ids."""
    asked = [item for item in items if "text" not in item]
    has_drafter = draft_items and llm.model_config.has_drafter
    drafted = draft_prompts(llm, items, draft_items) if has_drafter else {}
    return Questions(
        asked,
        [llm.tokenizer.encode(item["prompt"], None) for item in asked],
        [item for item in items if "text" in item],
        [(ids, min(most, _MOST_DRAFTED)) for part in drafted.values() for ids, most in part],
    )


def token_logprobs(llm: LLM, sequences: list[list[int]]) -> list[list[float]]:
    """Log-probability of every token but the first of each sequence, after those before it."""
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
    found = []
    for reply in llm.generate(sequences, params):
        assert reply.prompt_logprobs is not None
        found.append([entry.logprob for entry in reply.prompt_logprobs if entry is not None])
    return found


def run(llm: LLM, questions: Questions, intact: Run | None) -> Run:
    """Measure the model as it is now; without `intact` it is the intact one itself."""
    params = [
        SamplingParams(max_tokens=item["max_tokens"], temperature=0.0) for item in questions.asked
    ]
    outputs = [reply.outputs[0] for reply in llm.generate(questions.prompts, params)]
    scores = score_answers(questions.asked, [output.text for output in outputs])
    answers = [list(output.token_ids) for output in outputs]
    followed = answers if intact is None else intact.answers
    sequences = [p + answer for p, answer in zip(questions.prompts, followed, strict=True)]
    sequences += [llm.tokenizer.encode(item["text"], None) for item in questions.texts]
    drafter = score_drafter(llm, questions.drafted) if questions.drafted else None
    return Run(
        answers,
        {name: [score.right, score.total] for name, score in scores.items()},
        token_logprobs(llm, sequences),
        text_loss(llm, questions.texts)[0],
        None if drafter is None else drafter.mean_accepted,
    )


def shifts(questions: Questions, run: Run, intact: Run) -> dict[str, float]:
    """Mean absolute difference of log-probabilities by kind of tokens, in nats."""
    differences = [
        [abs(a - b) for a, b in zip(mine, theirs, strict=True)]
        for mine, theirs in zip(run.logprobs, intact.logprobs, strict=True)
    ]
    kinds: dict[str, list[float]] = defaultdict(list)
    asked = len(questions.asked)
    for item, prompt, values in zip(
        questions.asked, questions.prompts, differences[:asked], strict=True
    ):
        kinds[f"{group(item)} prompt"] += values[: len(prompt) - 1]
        kinds[f"{group(item)} answer"] += values[len(prompt) - 1 :]
    for values in differences[asked:]:
        kinds["text"] += values
    return {kind: sum(values) / len(values) for kind, values in kinds.items() if values}


def compare(name: str, questions: Questions, run: Run, intact: Run) -> Row:
    """The row of one run."""
    by_kind = shifts(questions, run, intact)
    kind = max(by_kind, key=lambda kind: by_kind[kind])
    shift = by_kind[kind]
    if name in DRAFTS_ONLY:
        before, after = intact.accepted, run.accepted
        moved = before is not None and after is not None and abs(before - after) > ACCEPTED
        shows = moved and shift == 0 and run.answers == intact.answers
    else:
        shows = not shift <= SHIFT  # NaN shows
    return Row(
        name=name,
        right=run.right,
        changed=sum(a != b for a, b in zip(run.answers, intact.answers, strict=True)),
        shift=shift,
        shift_in=kind,
        text_loss=run.text_loss,
        accepted=run.accepted,
        shows=shows,
        fell=[group for group, right in run.right.items() if right < intact.right[group]],
    )


def run_all(llm: LLM, questions: Questions, names: Iterable[str]) -> list[Row]:
    """The intact model's row, those of the named breakages, and those of both controls."""
    breaks: dict[str, Breakage] = {name: BREAKAGES[name] for name in names}
    breaks |= {"other_chunks": other_chunks, "intact_again": lambda _: nullcontext()}
    console = Console(stderr=True)
    with console.status("intact"):
        intact = run(llm, questions, None)
    rows = [compare("intact", questions, intact, intact)]
    for name in track(breaks, "breaking", console=console, transient=True):
        with breaks[name](llm):
            rows.append(compare(name, questions, run(llm, questions, intact), intact))
    return rows


def _number(value: float | None, mark: bool) -> str:
    text = "" if value is None else f"{value:.3f}"
    return f"[bold red]{text}*[/]" if mark else text


def show(rows: list[Row]) -> None:
    """Print the table; a star and red mark what fell below the intact model's."""
    intact = rows[0]
    table = Table(box=box.SIMPLE, padding=(0, 0, 0, 1))
    table.add_column("broken", no_wrap=True)
    for name, (_, total) in intact.right.items():
        table.add_column(name.replace(" ", "\n") + f"\n/{total}", justify="right")
    for name in ("changed", "shift", "text\nloss", "drafts\ntaken"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("largest\nshift in", no_wrap=True)
    table.add_column("shows")
    for row in rows:
        right = [
            f"[bold red]{count}*[/]" if name in row.fell else str(count)
            for name, (count, _) in row.right.items()
        ]
        worse = None not in (row.text_loss, intact.text_loss) and row.text_loss > intact.text_loss
        fewer = None not in (row.accepted, intact.accepted) and row.accepted < intact.accepted
        table.add_row(
            row.name, *right, str(row.changed), f"{row.shift:.4f}",
            _number(row.text_loss, worse), _number(row.accepted, fewer),
            row.shift_in if row.shift else "", "yes" if row.shows else "no",
        )  # fmt: skip
    console = Console()
    Console(width=max(console.width, 150)).print(table)
    broken = [row for row in rows if row.name in BREAKAGES]
    hidden = [row.name for row in broken if not row.shows]
    kept = [row.name for row in broken if not row.fell and row.name not in DRAFTS_ONLY]
    console.print(f"{len(broken) - len(hidden)} of {len(broken)} breakages show (shift above"
                  f" {SHIFT} nats, or {ACCEPTED} drafts per round).")  # fmt: skip
    console.print("Do not show: " + (", ".join(hidden) or "none"))
    console.print("No task lost a right answer: " + (", ".join(kept) or "none"))


def main() -> int:
    """Parse the command line and run; exit status 1 when a breakage hides or a control shows."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("model", type=Path, help="checkpoint folder with eval.jsonl")
    parser.add_argument("--tasks", nargs="+", default=(), help="only these")
    parser.add_argument("--limit", type=int, default=5, help="most items of each group; default 5")
    parser.add_argument("--draft-items", type=int, default=6,
                        help="texts, and questions, that are also drafted; default 6")  # fmt: skip
    parser.add_argument("--only", nargs="+", choices=BREAKAGES, metavar="NAME",
                        help=f"only these breakages: {', '.join(BREAKAGES)}")  # fmt: skip
    parser.add_argument("--dtype", choices=("bfloat16", "float32", "float64"), default="float64",
                        help="default float64: see above")  # fmt: skip
    parser.add_argument("--threads", type=int, help="CPU threads; default one per core")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    items = load_items(arguments.model, arguments.tasks, arguments.limit)
    llm = LLM(arguments.model, dtype=arguments.dtype, threads=arguments.threads,
              prefix_checkpoints=0)  # fmt: skip
    rows = run_all(llm, ask(llm, items, arguments.draft_items), arguments.only or BREAKAGES)
    if arguments.json:
        thresholds = {"shift": SHIFT, "accepted": ACCEPTED}
        print(json.dumps({"thresholds": thresholds, "rows": [asdict(row) for row in rows]}))
    else:
        show(rows)
    return 0 if all(row.shows == (row.name in BREAKAGES) for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
