"""What a rank of `deepinfer report` does, in this process; and once the whole, in real ones."""

import inspect
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from deepinfer.cli import main
from deepinfer.commands.report import exercise, inspection, rank
from deepinfer.commands.report.configurations import Configuration, parse
from deepinfer.commands.report.explain import Explanation, explain
from deepinfer.commands.report.layers import first_over, layer_distances
from deepinfer.commands.report.plan import Machine, Plan, ReportOptions
from deepinfer.commands.report.questions import Question
from deepinfer.commands.report.records import Job, RankResult, set_fields
from deepinfer.commands.report.run import Report
from deepinfer.commands.report.show import markdown
from deepinfer.commands.report.supervise import Ended, Ending
from deepinfer.commands.report.verdict import Outcome, judge
from deepinfer.config import EngineOptions
from deepinfer.engine.loading import Loaded, load
from deepinfer.errors import ConfigError
from deepinfer.libraries import switch
from deepinfer.ops.select import Operator, Operators, references
from deepinfer.ops.spec import OpSpec

DEMO = Path(__file__).parents[2] / "models" / "demo"
PROMPTS = [("A window of tokens", 4), ("Experts are chosen", 3)]
IDS = [0, 7, 9, 7, 9, 30, 31, 32, 33, 34]


@pytest.fixture
def job(small_folder: Path, tmp_path: Path) -> Job:
    """Two short prompts for one rank alone."""
    options = set_fields(EngineOptions(str(small_folder), device="cpu", threads=1))
    return Job("answers", options, str(tmp_path), prompts=PROMPTS, speed_tokens=(8, 3))


# A rank.


def test_a_rank_answers_twice_with_the_same_bits_and_measures(job: Job) -> None:
    result = exercise.answers(job)
    first, second = result.runs
    assert first == second
    assert [len(answer.token_ids) for answer in first.answers] == [4, 3]
    assert len(first.steps) == 4, "a prefill of both, then the longer one's other tokens"
    assert all(margin >= 0 for answer in first.answers for margin in answer.margins)
    assert all(len(answer.margins) == len(answer.token_ids) for answer in first.answers)
    assert {"prefill", "decode", "questions"} <= result.rates.keys()
    assert result.memory["host_peak"] > 2**20
    assert sum(use.calls for use in result.operators) > 0
    assert RankResult.read(job) == result


def test_drafted_answers_have_the_tokens_of_plain_ones(job: Job) -> None:
    plain, drafted = exercise.answers(job), exercise.answers(replace(job, drafts=True))
    for mine, theirs in zip(plain.runs[0].answers, drafted.runs[0].answers, strict=True):
        assert mine.token_ids == theirs.token_ids
        assert mine.text == theirs.text
    assert drafted.rates["tokens_per_round"] >= 1
    assert drafted.runs[0].steps


def test_operators_that_a_library_replaced_are_listed_beside_the_engines(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    uses = {"mul.Tensor": SimpleNamespace(calls=5, kept=2)}
    enabled = SimpleNamespace(replacement=SimpleNamespace(uses=uses), line=lambda: "1 operator")
    monkeypatch.setattr(switch, "active", lambda: enabled)
    result = exercise.answers(job)
    (use,) = (use for use in result.operators if use.backend == "flaggems")
    assert (use.operator, use.calls, use.fallbacks) == ("aten::mul.Tensor", 5, 0)
    assert "PyTorch did 2 more" in use.reason
    assert result.notes == ["FlagGems: 1 operator"]


def test_digests_see_a_single_bit() -> None:
    values = torch.zeros(4)
    other = values.clone()
    other[2] = -0.0
    assert exercise._digest_of(values) == exercise._digest_of(torch.zeros(4))
    assert exercise._digest_of(values) != exercise._digest_of(other)


def test_the_device_is_set_before_anything_else(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    monkeypatch.setattr(torch.cuda, "set_device", lambda number: order.append(f"device {number}"))
    monkeypatch.setattr(rank, "_work", lambda job: order.append("work"))
    rank.run(replace(job, gpu=3))
    assert order == ["device 3", "work"]


def test_nothing_heavy_is_imported_before_the_device_is_set() -> None:
    code = "import sys, deepinfer.commands.report.rank; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("error", "may_lack", "status"),
    [
        (ConfigError("no allow-list"), True, "impossible"),
        (ConfigError("no allow-list"), False, "error"),
        (ValueError("odd"), True, "error"),
    ],
)
def test_what_goes_wrong_is_in_the_result(
    job: Job, error: Exception, may_lack: bool, status: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(job: Job) -> RankResult:
        raise error

    monkeypatch.setattr(exercise, "answers", fail)
    job = replace(job, may_lack=may_lack)
    job.write()
    assert rank.main([str(job.file)]) == (status == "error")
    result = RankResult.read(job)
    assert result is not None
    assert result.status == status
    assert str(error) in result.reason


# Operators side by side.


def planted(name: str, function: Any) -> Operators:
    """The references, but for one operator."""
    chosen = {o.spec.name: Operator(o.spec, "ref", o.spec.reference, "", False)
              for o in references().all()}  # fmt: skip
    chosen[name] = Operator(chosen[name].spec, "planted", function(chosen[name].spec), "", False)
    return Operators(chosen)


@pytest.fixture
def loaded(job: Job) -> Loaded:
    """A model of three layers whose operators are its own."""
    return load(EngineOptions(**job.options))


def wrong_from_call(number: int, change: Any) -> Any:
    """An implementation that is right until its call `number`."""

    def make(spec: OpSpec) -> Any:
        calls = 0

        def function(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            value = spec.reference(*args, **kwargs)
            return change(value) if calls >= number else value

        return function

    return make


def test_a_wrong_operator_is_named_with_its_layer_and_call(loaded: Loaded) -> None:
    places = []
    for number in (1, 4):
        others = planted("rms_norm", wrong_from_call(number, lambda y: y * 1.5))
        with inspection.watched(loaded.model, others) as found:
            inspection.states(loaded, IDS, len(IDS))
        first = next(entry for entry in found if entry.complaint)
        assert (first.operator, first.call, first.output) == ("rms_norm", number, "y")
        assert first.distance > 0.1
        places.append(first.place)
    assert places[0] == "layer 0"
    assert places[1] > places[0]


def test_an_equal_operator_is_not_mentioned(loaded: Loaded) -> None:
    with inspection.watched(
        loaded.model, planted("rms_norm", lambda spec: spec.reference)
    ) as found:
        inspection.states(loaded, IDS, len(IDS))
    assert found == []


def test_what_is_written_in_place_is_compared_and_stays_as_it_was(loaded: Loaded) -> None:
    calls = 0

    def scrambling(spec: OpSpec) -> Any:
        def function(*args: Any, **kwargs: Any) -> None:
            nonlocal calls
            calls += 1
            spec.reference(*args, **kwargs)
            bound = inspect.signature(spec.reference).bind(*args, **kwargs)
            bound.arguments["cache"].fill_(1)

        return function

    expected, _ = inspection.states(loaded, IDS, len(IDS))
    others = planted("store_compressed", scrambling)
    with inspection.watched(loaded.model, others) as found:
        actual, _ = inspection.states(loaded, IDS, len(IDS))
    assert calls == len(found) > 0
    assert {entry.output for entry in found} == {"cache"}
    assert torch.equal(actual, expected)


def test_an_operator_that_breaks_does_not_stop_the_forward(loaded: Loaded) -> None:
    def breaking(spec: OpSpec) -> Any:
        def function(*args: Any, **kwargs: Any) -> Tensor:
            raise ValueError("odd size")

        return function

    with inspection.watched(loaded.model, planted("collapse", breaking)) as found:
        inspection.states(loaded, IDS, len(IDS))
    assert found[0].complaint == "ValueError: odd size"


def test_operators_are_their_own_again_afterwards(loaded: Loaded) -> None:
    before = [operator.function for operator in loaded.model.precision.operators.all()]
    with inspection.watched(loaded.model, planted("rms_norm", lambda spec: spec.reference)):
        pass
    assert [o.function for o in loaded.model.precision.operators.all()] == before


# Layers.


def test_the_first_layer_over_the_tolerance_is_named(tmp_path: Path) -> None:
    torch.manual_seed(0)
    states = {f"streams.{n}": torch.randn(3, 4, 8) for n in range(11)}
    states["logits"] = torch.randn(3, 16)
    save_file(states, tmp_path / "a")
    other = {name: value.clone() for name, value in states.items()}
    other["streams.10"][1, 2] *= -1
    other["streams.2"][0] += 1e-4
    save_file(other, tmp_path / "b")
    found = layer_distances(tmp_path / "a", tmp_path / "b")
    assert [entry.state for entry in found][9:] == [
        "streams into layer 9", "streams into layer 10", "logits"
    ]  # fmt: skip
    first = first_over(found, 1e-3)
    assert first is not None
    assert (first.maker, first.token) == ("layer 9", 1)
    assert first.distance == pytest.approx(2)
    assert first_over(found, 3.0) is None


def test_states_that_are_no_numbers_are_over_any_tolerance(tmp_path: Path) -> None:
    save_file({"logits": torch.ones(2, 3)}, tmp_path / "a")
    save_file({"logits": torch.tensor([[1.0, 1, 1], [float("nan"), 1, 1]])}, tmp_path / "b")
    first = first_over(layer_distances(tmp_path / "a", tmp_path / "b"), 1e9)
    assert first is not None
    assert first.token == 1


# The explanation of a difference.


def in_process(jobs: list[Job]) -> list[Ended]:
    done = []
    for job in jobs:
        Path(job.folder).mkdir(parents=True, exist_ok=True)
        done.append(Ended(Ending(job.rank, "done", ""), rank.run(job), "", ""))
    return done


def outcome(plan: Plan, configuration: Configuration, folder: Path) -> Outcome:
    questions = [Question(text, text, max_tokens=most) for text, most in PROMPTS]
    jobs = plan.answers(configuration, questions, folder / configuration.name)
    return judge(configuration, questions, in_process(jobs))


def explained(model: Path, names: str, folder: Path) -> Explanation:
    options = EngineOptions(str(model), device="cpu")
    wanted = ReportOptions(ranks=1, prompt_tokens=8, output_tokens=2)
    plan = Plan.make(options, wanted, Machine(0, 1))
    one, other = (outcome(plan, configuration, folder) for configuration in parse(names))
    questions = [Question(text, text) for text, _ in PROMPTS]
    return explain(plan, one, other, questions, 1e-9, folder, in_process)


def test_settings_that_differ_are_found_by_layer(small_folder: Path, tmp_path: Path) -> None:
    found = explained(small_folder, "ref,ref+act_quant=false", tmp_path)
    assert found.failures == []
    assert found.first_layer is not None
    assert found.first_layer.maker == "layer 0"
    assert found.hosts is None, "the operators are the same"


def test_equal_configurations_have_equal_states(small_folder: Path, tmp_path: Path) -> None:
    found = explained(small_folder, "ref,strict", tmp_path)
    assert found.first_layer is None
    assert all(entry.difference == 0 for entry in found.layers)
    page = markdown(Report("m", "0", 1, None, [], [], found))
    assert "no state is farther apart than the tolerance" in page
    assert "both run the same operators" in page


# The whole, in processes.


def test_two_ranks_of_the_demo_model_agree(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["report", str(DEMO), "--device", "cpu", "--threads", "1", "--configs", "ref",
             "--ranks", "2", "--limit", "2", "--prompt-tokens", "8", "--output-tokens", "2",
             "--out", str(tmp_path)]  # fmt: skip
    with pytest.raises(SystemExit) as exit_:
        main(words)
    printed = capsys.readouterr().out
    (ref,) = json.loads((tmp_path / "report.json").read_text())["outcomes"]
    assert ref["failures"] == []
    assert (ref["status"], ref["ranks_agree"], ref["runs_equal"]) == ("right", True, True)
    assert [answer["found"] for answer in ref["answers"]] == ["Paris", "Tokyo"]
    assert [result["agreed"] for result in ref["results"]] == [True, True]
    assert (exit_.value.code, "exit status 0" in printed) == (0, True)
    assert (tmp_path / "report.md").read_text().startswith("# End-to-end report")


def test_a_checkpoint_without_questions_is_refused_in_one_line(
    small_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["report", str(small_folder), "--device", "cpu"])
    assert exit_.value.code == 2
    err = capsys.readouterr().err
    assert "questions.json: no such file; name a file of questions with --questions" in err
