"""Why two configurations give different tokens: the first layer, and the operators, that differ.

Knows which tokens to look at and which jobs tell more; must not know how answers came about.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from deepinfer.commands.report.layers import LayerDistance, first_over, layer_distances
from deepinfer.commands.report.plan import Plan
from deepinfer.commands.report.questions import Question
from deepinfer.commands.report.records import Difference, Job
from deepinfer.commands.report.supervise import Ended
from deepinfer.commands.report.verdict import Failure, Outcome, broken, distance
from deepinfer.config import EngineOptions

Work = Callable[[list[Job]], list[Ended]]


@dataclass(frozen=True)
class Explanation:
    """What is behind the difference of two configurations.

    Attributes:
        tokens: how many were looked at; about: which they are.
        layers: distances of states, from the first layer on; first_layer: the first over tolerance.
        hosts: of these two, the first ran and the other's operators were tried beside; None where
            both have the same.
        operators: outputs that are not equal, in the order of the calls; first_operator: the first
            over its tolerance.
        failures: of the processes that had to look.
        lacking: why there is nothing to look at.
    """

    names: tuple[str, str]
    about: str = ""
    tokens: int = 0
    layers: list[LayerDistance] = field(default_factory=list)
    first_layer: LayerDistance | None = None
    hosts: tuple[str, str] | None = None
    operators: list[Difference] = field(default_factory=list)
    first_operator: Difference | None = None
    failures: list[Failure] = field(default_factory=list)
    lacking: str = ""


def explain(
    plan: Plan, one: Outcome, other: Outcome, questions: list[Question], tolerance: float,
    folder: Path, work: Work,
) -> Explanation:  # fmt: skip
    """Look at the tokens before the first difference, or at the first question without one.

    Args:
        work: does jobs, one after the other.
    """
    names = (one.configuration.name, other.configuration.name)
    for outcome in (one, other):
        if outcome.first is None:
            why = outcome.reason or "it gave no answers"
            return Explanation(names, lacking=f"{outcome.configuration.name}: {why}")
    about, ids = _tokens(plan.options, one, other, questions)
    jobs = [
        plan.states(outcome.configuration, ids, folder / name)
        for outcome, name in ((one, "states-1"), (other, "states-2"))
    ]
    done = [ended for job in jobs for ended in work([job])]
    failures = broken(done)
    layers = [] if failures else layer_distances(jobs[0].tensors, jobs[1].tensors)
    first = first_over(layers, tolerance)
    found = Explanation(names, about, len(ids), layers, first, failures=failures)
    if _backends(one) == _backends(other):
        return found
    host, guest = sorted((one, other), key=_kernels, reverse=True)
    job = plan.operators(host.configuration, guest.configuration, ids, folder / "operators")
    (ended,) = work([job])
    operators = ended.result.differences if ended.result is not None else []
    return replace(
        found, hosts=(host.configuration.name, guest.configuration.name), operators=operators,
        first_operator=next((entry for entry in operators if entry.complaint), None),
        failures=[*failures, *broken([ended])],
    )  # fmt: skip


def _backends(outcome: Outcome) -> list[str]:
    """Of the engine's operators, without those of PyTorch that a library has replaced."""
    assert outcome.first is not None
    operators = outcome.first.operators
    return [use.backend for use in operators if not use.operator.startswith("aten::")]


def _kernels(outcome: Outcome) -> int:
    """Operators that do not run by their reference: a model that has kernels calls more of them."""
    return sum(backend != "ref" for backend in _backends(outcome))


def _tokens(
    options: EngineOptions, one: Outcome, other: Outcome, questions: list[Question]
) -> tuple[str, list[int]]:
    """Tokens up to the first that differs, or of the first question with its answer."""
    from deepinfer.checkpoint.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(Path(options.tokenizer or options.model))
    apart = distance(one, other)
    assert apart is not None
    assert one.first is not None
    answers = one.first.runs[0].answers
    if apart.partings:
        number, count = apart.partings[0].question, apart.partings[0].position
        about = f"question {number} up to token {count} of the answer, which is the first to differ"
    else:
        number, count = 0, len(answers[0].token_ids)
        about = "question 0 with its answer; no token differs"
    prompt = tokenizer.encode(questions[number].prompt, None)
    return about, [*prompt, *answers[number].token_ids[:count]]
