"""`deepinfer report` with ranks that need no model: whatever goes wrong is said, and ends."""

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from deepinfer.commands.report.configurations import NAMED, options_for, parse
from deepinfer.commands.report.plan import Machine, Plan, ReportOptions
from deepinfer.commands.report.questions import Question, is_right, load_questions
from deepinfer.commands.report.records import Job, OperatorUse, RankResult, Run
from deepinfer.commands.report.run import Report, report
from deepinfer.commands.report.show import markdown, show, write
from deepinfer.commands.report.supervise import LocalProcess, doing, log_tail, supervise
from deepinfer.commands.report.verdict import common_tokens, distance
from deepinfer.config import EngineOptions
from deepinfer.errors import ConfigError
from tests.cpu.report_helpers import (
    QUESTIONS,
    FakeProcess,
    FakeStart,
    Ranks,
    answer,
    good_result,
    good_run,
    write_questions,
)

CPU = Machine(gpus=0, cores=4)


@pytest.fixture
def model(tmp_path: Path, small_folder: Path) -> str:
    """A folder with a config.json and the two questions."""
    write_questions(tmp_path, QUESTIONS)
    (tmp_path / "config.json").write_bytes((small_folder / "config.json").read_bytes())
    return str(tmp_path)


def made(model: str, results: Ranks, **wanted: Any) -> Report:
    """A report on what fake ranks found out."""
    given = {"configs": "ref", "ranks": 2, **wanted}
    return report(
        EngineOptions(model), ReportOptions(**given), start=FakeStart(results), machine=CPU
    )


def well(job: Job) -> tuple[int, RankResult]:
    return 0, good_result(job.rank)


def failures(found: Report) -> list[str]:
    return [failure.what for outcome in found.outcomes for failure in outcome.failures]


# Everything right, and each thing that can be wrong.


def test_right_answers_on_equal_ranks_have_exit_status_0(model: str) -> None:
    found = made(model, well)
    (outcome,) = found.outcomes
    assert found.exit_status == 0
    assert (outcome.status, outcome.ranks_agree, outcome.runs_equal) == ("right", True, True)
    assert [judged.right for judged in outcome.answers] == [True, True]


def test_one_rank_alone_agrees_with_nobody(model: str) -> None:
    found = made(model, lambda job: (0, good_result(agreed=None)), ranks=1)
    assert found.exit_status == 0
    assert found.outcomes[0].ranks_agree is None
    assert found.transport is None


def test_a_wrong_answer_is_no_hard_failure_but_not_right(model: str) -> None:
    wrong = Run([answer("Rome", 4, 1), answer("56", 6, 7, 1)], ["aa"])
    found = made(model, lambda job: (0, good_result(job.rank, runs=[wrong, wrong])))
    assert found.exit_status == 1
    assert found.outcomes[0].status == "wrong"
    assert failures(found) == []


def other_tokens(run: Run) -> Run:
    return replace(run, answers=[run.answers[0], answer("57", 6, 8, 1)])


def other_logits(run: Run) -> Run:
    return replace(run, steps=["aa", "bx", "cc"])


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (other_tokens, "question 1, token 1: token id 7 and token id 8"),
        (other_logits, "the same tokens, but other logits in step 1 of 3"),
        (lambda run: replace(run, steps=["aa"]), "the same tokens in 3 and 1 steps"),
    ],
)
def test_ranks_that_differ_are_a_hard_failure(model: str, change: Any, says: str) -> None:
    run = change(good_run())
    found = made(
        model, lambda job: (0, good_result(job.rank, runs=[run if job.rank else good_run()] * 2))
    )
    assert found.exit_status == 1
    assert found.outcomes[0].ranks_agree is False
    assert failures(found) == [f"disagrees with rank 0: {says}"]


@pytest.mark.parametrize("change", [other_tokens, other_logits])
def test_runs_that_differ_are_a_hard_failure(model: str, change: Any) -> None:
    runs = [good_run(), change(good_run())]
    found = made(model, lambda job: (0, good_result(job.rank, runs=runs)))
    assert found.exit_status == 1
    assert (found.outcomes[0].ranks_agree, found.outcomes[0].runs_equal) == (True, False)
    assert all(what.startswith("run 2 is not run 1: ") for what in failures(found))


def test_digests_that_differ_on_the_way_are_a_hard_failure(model: str) -> None:
    found = made(model, lambda job: (0, good_result(job.rank, agreed=False)))
    assert failures(found) == ["the ranks told each other different digests"]


def test_a_reply_that_broke_off_is_a_hard_failure(model: str) -> None:
    broken = answer("", finish_reason="error", error="Unsupported: rope")
    run = Run([good_run().answers[0], broken], ["aa"])
    found = made(model, lambda job: (0, good_result(job.rank, runs=[run, run])), ranks=1)
    assert failures(found)[0] == "run 1, 'What is 7 * 8?' ended with error: Unsupported: rope"


@pytest.mark.parametrize(("configs", "status"), [("ref", 0), ("strict", 1)])
def test_fallbacks_are_shown_and_in_strict_mode_a_failure(
    model: str, configs: str, status: int
) -> None:
    uses = [OperatorUse("rope", "triton", "first", 4, 3)]
    found = made(
        model, lambda job: (0, good_result(operators=uses, agreed=None)), ranks=1, configs=configs
    )
    assert found.exit_status == status
    assert found.outcomes[0].fallbacks == 3
    assert "rope 3 times" in markdown(found)


# Ranks that do not come back.


def crash_of_rank_1(job: Job) -> tuple[int, RankResult | None]:
    return (-11, None) if job.rank else well(job)


def test_a_crashed_rank_is_a_hard_failure_with_the_end_of_its_log(model: str) -> None:
    found = made(model, crash_of_rank_1)
    (failure,) = found.outcomes[0].failures
    assert (failure.rank, failure.what) == (1, "crashed while starting: ended by SIGSEGV")
    assert failure.log_tail == "rank 1 says something"
    assert found.outcomes[0].ranks_agree is None


def test_other_configurations_run_after_one_that_crashed(model: str) -> None:
    def ranks(job: Job) -> tuple[int, RankResult | None]:
        return crash_of_rank_1(job) if job.options.get("ops_strict") else well(job)

    found = made(model, ranks, configs="strict,ref")
    assert [outcome.status for outcome in found.outcomes] == ["failed", "right"]
    assert found.exit_status == 1


def test_an_exception_is_told_as_the_rank_tells_it(model: str) -> None:
    found = made(model, lambda job: (1, RankResult(job.rank, "error", "ValueError: x")))
    assert failures(found) == ["error: ValueError: x"] * 2


def test_a_rank_without_a_result_is_a_hard_failure(model: str) -> None:
    assert failures(made(model, lambda job: (0, None), ranks=1)) == ["ended without a result"]


class Clock:
    """Time that passes by waiting alone."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def wait(self, seconds: float) -> None:
        self.now += seconds


def test_a_hanging_rank_is_ended_at_the_limit() -> None:
    clock = Clock()
    processes = [FakeProcess(0), FakeProcess(None)]
    endings = supervise(processes, 30, clock=clock, wait=clock.wait)
    assert [(e.kind, e.order) for e in endings] == [("done", 0), ("timeout", 1)]
    assert endings[1].text == "had not ended after 30 s"
    assert [process.stopped for process in processes] == [False, True]
    assert 30 <= clock.now < 31


def test_ranks_that_wait_for_a_crashed_one_are_stopped_soon() -> None:
    clock = Clock()
    processes = [FakeProcess(None), FakeProcess(7)]
    endings = supervise(processes, 1000, clock=clock, wait=clock.wait)
    assert [(e.kind, e.text) for e in endings] == [
        ("stopped", "because rank 1 had broken off"), ("crashed", "ended with exit status 7"),
    ]  # fmt: skip
    assert processes[0].stopped
    assert clock.now < 20


def test_the_first_to_break_off_is_told_first(model: str) -> None:
    clock = Clock()
    endings = supervise([FakeProcess(None), FakeProcess(7)], 5, clock=clock, wait=clock.wait)
    assert endings[1].order < endings[0].order


def test_nothing_runs_on_when_the_report_is_interrupted() -> None:
    processes = [FakeProcess(None), FakeProcess(None)]

    def interrupt() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        supervise(processes, 30, clock=Clock(), look=interrupt)
    assert all(process.stopped for process in processes)


def test_a_real_process_is_ended_and_its_log_kept(tmp_path: Path) -> None:
    log = tmp_path / "log"
    hang = "import signal; print('here', flush=True); signal.pause()"
    process = LocalProcess([sys.executable, "-S", "-c", hang], log)

    def look() -> None:
        clock.now += 1.0 if log.read_text() else 0.0

    clock = Clock()
    (ending,) = supervise([process], 1, clock=clock, wait=lambda seconds: None, look=look)
    assert ending.kind == "timeout"
    assert process.poll() is not None
    assert log_tail(log) == "here"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_ranks_end_with_whoever_started_them(tmp_path: Path, number: int) -> None:
    """However that went: a rank that is left behind would keep its GPU's memory."""
    alive = tmp_path / "alive"
    os.mkfifo(alive)
    rank = (
        "import signal; from deepinfer.commands.report.rank import end_with_parent;"
        f" end_with_parent(); kept = open({str(alive)!r}, 'w'); kept.write('x'); kept.flush();"
        " signal.pause()"
    )
    parent = (
        "import signal, sys; from pathlib import Path;"
        " from deepinfer.commands.report.supervise import LocalProcess;"
        f" log = Path({str(tmp_path / 'log')!r});"
        f" process = LocalProcess([sys.executable, '-c', {rank!r}], log);"
        " signal.pause()"
    )
    starter = subprocess.Popen([sys.executable, "-c", parent])
    with alive.open() as file:
        assert file.read(1) == "x"
        starter.send_signal(number)
        assert file.read() == ""  # only now: its last writer is gone
    assert starter.wait() == -number


def test_what_ranks_are_doing_is_told_in_one_line(tmp_path: Path) -> None:
    jobs = [Job("answers", {}, str(tmp_path), rank) for rank in range(3)]
    assert doing(jobs) == "starting"
    jobs[0].progress.write_text("measuring")
    assert doing(jobs) == "rank 0 measuring, ranks 1 2 starting"


# What is not possible here.


def test_impossible_configurations_do_not_fail_the_others(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deepinfer.ops.select._interpreted", lambda: False)
    found = made(model, well, configs="triton,tilelang,flaggems,ref")
    triton, tilelang, flaggems, ref = found.outcomes
    assert found.exit_status == 0
    assert (triton.status, triton.reason) == ("impossible", "triton needs a CUDA GPU")
    assert {tilelang.status, flaggems.status} == {"impossible"}
    assert ref.status == "right"
    assert "- triton: triton needs a CUDA GPU" in markdown(found)


def test_a_comparison_that_was_not_made_is_a_failure(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deepinfer.ops.select._interpreted", lambda: False)
    found = made(model, well, configs=None, compare=("triton", "ref"))
    assert [outcome.status for outcome in found.outcomes] == ["impossible", "right"]
    assert found.exit_status == 1
    assert "nothing to look at: triton: triton needs a CUDA GPU" in markdown(found)


def test_a_refused_setting_makes_only_some_configurations_impossible(model: str) -> None:
    optional = next(c for c in NAMED if c.may_lack)
    assert optional.name == "flaggems"
    assert not any(c.may_lack for c in NAMED if c.name != "flaggems")
    found = made(model, lambda job: (0, RankResult(job.rank, "impossible", "no allow-list")))
    assert found.outcomes[0].reason == "no allow-list"
    assert found.exit_status == 1, "nothing ran at all"


def test_a_setting_that_cannot_work_is_refused_before_anything_runs(model: str) -> None:
    start = FakeStart(well)
    wanted = ReportOptions(configs="ref,ref+max_num_seqs=0")
    with pytest.raises(ConfigError, match="max_num_seqs = 0"):
        report(EngineOptions(model), wanted, start=start, machine=CPU)
    assert start.jobs == []


# Distances.


def test_distance_names_the_first_differing_token_and_its_margins(model: str) -> None:
    def ranks(job: Job) -> tuple[int, RankResult]:
        second = answer("57", 6, 8, 1, margins=[1.0, 0.25, 1.0], logprobs=[-0.3, -2.0, 0.0])
        run = Run([answer("Paris", 5, 1), second], ["aa"])
        strict = job.options.get("ops_strict")
        return 0, good_result(job.rank, runs=[run, run]) if strict else good_result(job.rank)

    (apart,) = made(model, ranks, configs="ref,strict").distances
    assert (apart.same, apart.total) == (1, 2)
    (parting,) = apart.partings
    assert (parting.question, parting.position) == (1, 1)
    assert parting.tokens == ("token id 7", "token id 8")
    assert parting.margins == (1.0, 0.25)
    assert apart.logprob == pytest.approx(0.2)
    assert apart.steady == (True, True)


def test_an_end_that_comes_sooner_is_a_difference(model: str) -> None:
    def ranks(job: Job) -> tuple[int, RankResult]:
        run = Run([answer("Paris", 5), answer("56", 6, 7, 1)], [])
        return 0, good_result(runs=[run, run] if job.drafts else [good_run()] * 2, agreed=None)

    found = made(model, ranks, configs="ref,speculation", ranks=1)
    (parting,) = found.distances[0].partings
    assert parting.tokens == ("token id 1", "the end")
    assert parting.margins == (1.0, None)


def test_common_tokens_of_equal_replies_are_all() -> None:
    assert common_tokens(answer("a", 1, 2), answer("a", 1, 2)) == 2


def test_there_is_no_distance_to_what_did_not_run(model: str) -> None:
    found = made(model, lambda job: well(job) if not job.drafts else (3, None),
                 configs="ref,speculation")  # fmt: skip
    assert found.distances == []
    assert distance(found.outcomes[0], found.outcomes[1]) is None


# Questions, configurations, plan.


@pytest.mark.parametrize(
    ("text", "check", "right"),
    [(" Paris\n", "exact", True), ("Paris, of course", "exact", False),
     ("It is Paris.", "contains", True), ("Rome", "contains", False)],
)  # fmt: skip
def test_answers_are_judged_by_their_check(text: str, check: str, right: bool) -> None:
    assert is_right(Question("?", "?", "Paris", check), text) is right


def test_a_question_without_an_answer_is_not_judged(tmp_path: Path) -> None:
    (question,) = load_questions(write_questions(tmp_path, [Question("?", "?")]))
    assert is_right(question, "anything") is None


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("[", "not readable as JSON"),
        ("[]", "expected a list of questions"),
        ("[1]", "[0]: expected an object"),
        ('[{"prompt": ""}]', "[0]: prompt = ''"),
        ('[{"prompt": "a", "answer": " "}]', "[0]: answer = ' '"),
        ('[{"prompt": "a", "check": "near"}]', "check = 'near'; expected exact or contains"),
        ('[{"prompt": "a", "max_tokens": 0}]', "max_tokens = 0"),
    ],
)
def test_a_wrong_question_is_named(content: str, says: str, tmp_path: Path) -> None:
    file = tmp_path / "q.json"
    file.write_text(content, encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        load_questions(file)
    assert says in str(caught.value)


def test_a_configuration_can_be_changed_by_settings() -> None:
    text = "ref,triton+op=rope=ref+op=swiglu=ref+act_quant=false+max_num_seqs=4"
    plain, changed = parse(text)
    assert plain.settings == {"ops_backend": "ref"}
    options = options_for(EngineOptions("m", op=("rms_norm=ref",)), changed)
    assert options.ops_backend == "triton"
    assert options.op == ("rms_norm=ref", "rope=ref", "swiglu=ref")
    assert (options.act_quant, options.max_num_seqs) == (False, 4)


def test_an_allow_list_goes_to_configurations_that_use_one() -> None:
    base = EngineOptions("m", flaggems_allowlist="list.json")
    found = {c.name: options_for(base, c).flaggems_allowlist for c in parse("ref,flaggems")}
    assert found == {"ref": None, "flaggems": "list.json"}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("rf", "did you mean 'ref'?"),
        ("ref,ref", "named twice"),
        ("ref+act_qant=true", "did you mean 'act_quant'?"),
        ("ref+act_quant=maybe", "expected act_quant=VALUE with true or false"),
        ("ref+threads", "with a whole number"),
    ],
)
def test_a_wrong_configuration_is_named(text: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(text)
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("gpus", "ranks", "expected"),
    [(0, None, (2, "gloo", [None, None])), (0, 1, (1, None, [None])),
     (2, None, (2, "nccl", [0, 1])), (1, None, (1, None, [0])), (1, 2, (2, "gloo", [0, 0]))],
)  # fmt: skip
def test_ranks_are_spread_over_the_machine(
    gpus: int, ranks: int | None, expected: tuple[int, str | None, list[int | None]], tmp_path: Path
) -> None:
    plan = Plan.make(EngineOptions("m"), ReportOptions(ranks=ranks), Machine(gpus, 4))
    jobs = plan.answers(NAMED[0], QUESTIONS, tmp_path)
    assert (len(jobs), plan.transport, [job.gpu for job in jobs]) == expected
    assert [job.rank for job in jobs] == list(range(len(jobs)))
    assert plan.options.threads == (None if gpus else 4 // len(jobs))
    assert plan.options.gpu_memory == (0.45 if gpus and ranks == 2 else None)


def test_nccl_needs_a_gpu_for_each_rank() -> None:
    with pytest.raises(ConfigError, match="expected a GPU for each"):
        Plan.make(EngineOptions("m"), ReportOptions(ranks=2, transport="nccl"), Machine(1, 4))


def test_a_job_survives_its_file(tmp_path: Path) -> None:
    plan = Plan.make(EngineOptions("m", op=("rope=ref",)), ReportOptions(), CPU)
    (job, _) = plan.answers(NAMED[0], QUESTIONS, tmp_path)
    job.write()
    read = Job.read(job.file)
    assert read.prompts == job.prompts
    assert read.speed_tokens == job.speed_tokens
    assert list(read.options["op"]) == list(job.options["op"])


# What is shown.


def test_reports_are_written_and_say_the_same(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    odd = Run([answer("a | b\n[bold]", 5, 1), answer("56", 6, 7, 1, margins=[float("inf")] * 3)],
              [])  # fmt: skip
    found = made(model, lambda job: (0, good_result(job.rank, runs=[odd, odd])), out=out)
    write(found, out)
    show(found, out)
    data = json.loads((out / "report.json").read_text(), parse_constant=pytest.fail)
    assert data["exit_status"] == 1
    assert data["outcomes"][0]["status"] == "wrong"
    page = (out / "report.md").read_text()
    assert "| ref | What is the capital of France? | Paris | a \\| b [bold] |" in page
    printed = capsys.readouterr().out
    assert "[bold]" in printed
    for text in ("exit status 1", "Hard failures", "Wrong answers"):
        assert text in page
        assert text in printed


def test_logs_stay_where_they_are_wanted(model: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    made(model, well, out=out)
    assert (out / "ref" / "rank1.log").read_text() == "rank 1 says something\n"


SCRIPT = Path(__file__).parents[2] / "scripts" / "h20_e2e_report.sh"


@pytest.mark.parametrize(
    ("gpus", "given", "expected"),
    [
        (0, [], ["--configs ref,triton", "--out e2e-report"]),
        (2, ["--limit", "3"], ["--ranks 2", "--limit 3"]),
        (2, ["--out", "a b", "--ranks=1", "--compare", "ref", "strict"],
         ["report models --out a b --ranks=1 --compare ref strict"]),
        (0, ["--output-tokens", "4"], ["--out e2e-report", "--output-tokens 4"]),
    ],
)  # fmt: skip
def test_the_script_adds_what_was_not_given(
    gpus: int, given: list[str], expected: list[str], tmp_path: Path
) -> None:
    python = tmp_path / "python"
    python.write_text(
        f'#!/bin/sh\ncase "$2" in *device_count*) echo {gpus} ;; deepinfer) echo "$*" ;; esac\n'
    )
    python.chmod(0o755)
    environment = {"PYTHON": str(python), "MODEL": "models", "PATH": os.environ["PATH"]}
    done = subprocess.run(
        [str(SCRIPT), *given], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("-m deepinfer report models ")
    for text in expected:
        assert text in done.stdout


def test_old_results_do_not_stand_in_for_new_ones(model: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert made(model, well, out=out).exit_status == 0
    assert failures(made(model, lambda job: (0, None), out=out)) == ["ended without a result"] * 2
