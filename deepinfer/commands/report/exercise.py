"""What one rank does with a model: answers everything twice, then measures.

Knows LLM and a job; must not know processes, right answers or other ranks' results.
"""

import hashlib
import json
import logging
import math
import platform
import resource
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from deepinfer import __version__
from deepinfer.commands.report.exchange import Exchange
from deepinfer.commands.report.records import (
    Answer,
    Job,
    OperatorUse,
    RankResult,
    Run,
    engine_options,
)
from deepinfer.engine.llm import LLM
from deepinfer.libraries import switch
from deepinfer.libraries.flaggems import NAME as FLAGGEMS
from deepinfer.log import logger
from deepinfer.sampling.logprobs import TokenLogprobs
from deepinfer.sampling.params import SamplingParams

RUNS = 2
_TIMED_ALONE = 5  # questions whose first token is timed

Prompts = Sequence[tuple[list[int], int]]


def at(job: Job, what: str) -> None:
    """Say what this rank is doing."""
    job.progress.write_text(what, encoding="utf-8")


def answers(job: Job) -> RankResult:
    """Load the model, answer all prompts twice, measure, and compare with the other ranks."""
    at(job, "meeting the other ranks")
    exchange = Exchange(job)
    with _notes() as notes:
        at(job, "loading")
        start = time.perf_counter()
        llm = LLM.from_options(engine_options(job.options))
        loading = time.perf_counter() - start
        prompts = [(llm.tokenizer.encode(text, None), most) for text, most in job.prompts]
        ask = _drafted if job.drafts else _plain
        runs = []
        for number in range(RUNS):
            at(job, f"answering, run {number + 1} of {RUNS}")
            llm.reset_prefix_cache()
            runs.append(ask(llm, prompts))
        at(job, "measuring")
        exchange.wait()
        seconds, rates = _measure(llm, prompts, job)
        if (enabled := switch.active()) is not None:
            notes.append(f"FlagGems: {enabled.line()}")
    result = RankResult(
        job.rank, "done", host=_host(llm), runs=runs, operators=_operators(llm), notes=notes,
        seconds={"loading": loading, **seconds}, rates=rates, memory=_memory(),
    )  # fmt: skip
    result.write(job)  # it stands also if the others never come
    at(job, "comparing with the other ranks")
    agreed = exchange.agreed(json.dumps([_digest(run) for run in runs]))
    exchange.close()
    return replace(result, agreed=agreed)


def _digest(run: Run) -> list[Any]:
    return [[answer.token_ids for answer in run.answers], run.steps]


def _plain(llm: LLM, prompts: Prompts) -> Run:
    """Greedy answers, all in one run of the engine; a digest of each forward's logits."""
    params = [SamplingParams(max_tokens=m, temperature=0.0, logprobs=2) for _, m in prompts]
    with _digests(llm) as steps:
        replies = llm.generate([ids for ids, _ in prompts], params)
    found = []
    for reply in replies:
        (output,) = reply.outputs
        entries = output.logprobs or []
        found.append(
            Answer(output.token_ids, output.text, output.finish_reason, output.error,
                   [entry.logprob for entry in entries], [_margin(entry) for entry in entries])
        )  # fmt: skip
    return Run(found, steps)


def _margin(entry: TokenLogprobs) -> float:
    (_, first), *others = entry.top
    return first - others[0][1] if others else math.inf


@contextmanager
def _digests(llm: LLM) -> Iterator[list[str]]:
    """Digests of the logits of every forward while it is open, in their order."""
    runner, found = llm.engine.runner, []
    forward = runner.forward

    def recorded(*args: Any) -> Any:
        logits, places = forward(*args)
        found.append(_digest_of(logits))
        return logits, places

    with patch.object(runner, "forward", recorded):
        yield found


def _digest_of(values: Tensor) -> str:
    data = values.detach().to("cpu").contiguous().view(torch.uint8).numpy()
    return hashlib.blake2b(data.tobytes(), digest_size=8).hexdigest()


def _drafted(llm: LLM, prompts: Prompts) -> Run:
    """The same by greedy speculation, one after the other; a digest of each round's confidence."""
    found, steps = [], []
    eos = llm.model_config.eos_token_id
    for ids, most in prompts:
        token_ids: list[int] = []
        for turn in llm.speculate(ids, most):
            token_ids += turn.token_ids
            steps.append(_digest_of(torch.tensor(turn.confidence, dtype=torch.float64)))
        ended = token_ids[-1] == eos
        text = llm.tokenizer.decode(token_ids[:-1] if ended else token_ids)
        found.append(Answer(token_ids, text, "stop" if ended else "length"))
    return Run(found, steps)


def _measure(
    llm: LLM, prompts: Prompts, job: Job
) -> tuple[dict[str, float], dict[str, float]]:  # fmt: skip
    """Seconds to the first token, and tokens per second of prefill, decode and all questions."""
    stream = _draft_counts if job.drafts else _counts
    firsts = [_timed(llm, stream, ids, 1)[0][0] for ids, _ in prompts[:_TIMED_ALONE]]
    length, output = job.speed_tokens
    long = _cycled([token for ids, _ in prompts for token in ids], length)
    times, counts = _timed(llm, stream, long, output)
    rates = {"prefill": length / times[0]}
    seconds = {"first_token": statistics.median(firsts)}
    if sum(counts[1:]):
        rates["decode"] = sum(counts[1:]) / sum(times[1:])
    if job.drafts:
        rounds = counts[1:]
        rates["tokens_per_round"] = sum(rounds) / max(1, len(rounds))
        return seconds, rates
    llm.reset_prefix_cache()
    start = time.perf_counter()
    params = [SamplingParams(max_tokens=most, temperature=0.0) for _, most in prompts]
    replies = llm.generate([ids for ids, _ in prompts], params)
    spent = time.perf_counter() - start
    rates["questions"] = sum(reply.usage.completion_tokens for reply in replies) / spent
    return seconds, rates


Counts = Callable[[LLM, list[int], int], Iterator[int]]


def _timed(
    llm: LLM, stream: Counts, ids: list[int], output: int
) -> tuple[list[float], list[int]]:  # fmt: skip
    """Seconds and number of tokens of each chunk; the first holds the prefill."""
    llm.reset_prefix_cache()
    times, counts = [], []
    before = time.perf_counter()
    for count in stream(llm, ids, output):
        now = time.perf_counter()
        times.append(now - before)
        counts.append(count)
        before = now
    return times, counts


def _counts(llm: LLM, ids: list[int], output: int) -> Iterator[int]:
    params = SamplingParams(max_tokens=output, temperature=0.0, ignore_eos=True)
    for chunk in llm.stream(ids, params):
        yield len(chunk.token_ids)


def _draft_counts(llm: LLM, ids: list[int], output: int) -> Iterator[int]:
    for turn in llm.speculate(ids, output):
        yield len(turn.token_ids)


def _cycled(ids: list[int], length: int) -> list[int]:
    """The first `length` of `ids`, begun anew as often as it takes."""
    return (ids * -(-length // len(ids)))[:length]


def _operators(llm: LLM) -> list[OperatorUse]:
    """The engine's operators, then PyTorch's that a library has replaced."""
    own = [
        OperatorUse(o.spec.name, o.backend, o.reason, o.calls, o.fallbacks)
        for o in llm.model.precision.operators.all()
    ]
    enabled = switch.active()
    replaced = {} if enabled is None else enabled.replacement.uses
    return own + [
        OperatorUse(
            f"aten::{name}", FLAGGEMS, f"allowed; PyTorch did {use.kept} more", use.calls, 0
        )
        for name, use in replaced.items()
    ]


def _memory() -> dict[str, int]:
    """Bytes: the process's peak on the host; of the GPU the peaks and what is free."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found = {"host_peak": peak if sys.platform == "darwin" else peak * 1024}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        free, total = torch.cuda.mem_get_info()
        found |= {
            "gpu_allocated_peak": torch.cuda.max_memory_allocated(),
            "gpu_reserved_peak": torch.cuda.max_memory_reserved(),
            "gpu_free": free, "gpu_total": total,
        }  # fmt: skip
    return found


def _host(llm: LLM) -> dict[str, str]:
    device = platform.processor() or platform.machine()
    if llm.config.device == "cuda":
        device = f"{torch.cuda.get_device_name()} ({torch.cuda.current_device()})"
    return {
        "deepinfer": __version__, "python": platform.python_version(),
        "torch": str(torch.__version__), "device": device,
    }  # fmt: skip


@contextmanager
def _notes() -> Iterator[list[str]]:
    """Warnings of the package while it is open."""
    found: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append(record.getMessage())

    handler = Keep(logging.WARNING)
    logger.addHandler(handler)
    try:
        yield found
    finally:
        logger.removeHandler(handler)
