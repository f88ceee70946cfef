"""Generation without an engine, and what must hold of an engine that has nothing to do."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from deepinfer import LLM, SamplingParams
from deepinfer.engine.engine import Engine
from deepinfer.engine.loading import Loaded
from deepinfer.engine.output import CompletionOutput, RequestOutput, StreamChunk
from deepinfer.engine.request import Request
from deepinfer.engine.rows import ForwardRows
from deepinfer.engine.sequence import Sequence as TokenSequence
from deepinfer.kv.audit import audit
from deepinfer.testing.compare import largest_difference
from deepinfer.testing.draws import sample
from tests.cpu.model_helpers import EXACT, recomputed

GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}


def small_llm(folder: Path, **settings: Any) -> LLM:
    """An engine in which everything is scarce: 3 sequences, 16 tokens a step, 160 in the cache."""
    scarce: dict[str, Any] = {
        "dtype": "float64", "threads": 1, "max_num_seqs": 3, "max_num_batched_tokens": 16,
        "max_model_len": 160, "cache_tokens": 160, "page_tokens": 16,
    }  # fmt: skip
    return LLM(folder, **{**scarce, **settings})


def logits_after(model: Loaded, ids: list[int]) -> Tensor:
    """Recomputed logits [T, V] float32 of every token."""
    return recomputed(model, torch.tensor(ids)).logits.float()


def slow_ids(model: Loaded, prompt: list[int], params: SamplingParams) -> list[int]:
    """max_tokens tokens after `prompt`, the whole sequence recomputed for each of them."""
    assert params.seed is not None or params.temperature == 0
    ids = list(prompt)
    for _ in range(params.budget):
        last = logits_after(model, ids)[-1:]
        ids.append(sample(last, [params], [params.seed or 0], [len(ids)]).item())
    return ids[len(prompt) :]


def ids_of(replies: list[RequestOutput]) -> list[list[int]]:
    """Generated ids of each reply."""
    return [reply.outputs[0].token_ids for reply in replies]


def poison(llm: LLM) -> None:
    """Fill the cache of an idle engine with NaN."""
    llm.reset_prefix_cache()
    llm.engine.runner.pool.poison()


def assert_idle(llm: LLM) -> None:
    """Nothing runs or waits, the books add up without any sequence, no chunk lies about."""
    engine = llm.engine
    assert not engine.has_work
    assert not llm._inbox
    assert not engine._completions
    assert not engine.drawing._open
    audit(engine.manager, [])


def audit_running(engine: Engine) -> None:
    """The books of an engine add up between two steps."""
    live = [(s.blocks, s.computed) for s in engine.scheduler.running if s.blocks is not None]
    audit(engine.manager, live)


@dataclass(frozen=True)
class Asked:
    """A request of a test.

    Attributes:
        at: the step before which it comes.
    """

    prompt: Sequence[int]
    params: SamplingParams
    at: int = 0
    priority: int = 0
    timeout: float | None = None


@dataclass(frozen=True)
class Reply:
    """What a request got, without its id and what it cost."""

    outputs: list[CompletionOutput]
    prompt_logprobs: Any


def reply(output: RequestOutput) -> Reply:
    """The part of an output that batches, caches and loops must not change."""
    return Reply(output.outputs, output.prompt_logprobs)


class Play:
    """Requests on their way through an engine: the books are audited after every step, and what
    was streamed is compared with the whole replies."""

    def __init__(self, llm: LLM) -> None:
        self.llm = llm
        self.requests: list[Request] = []
        self.steps = 0
        self._chunks: dict[tuple[str, int], list[StreamChunk]] = {}

    def add(self, asked: Asked) -> Request:
        request = self.llm.request(
            asked.prompt, asked.params, priority=asked.priority, timeout=asked.timeout
        )
        self.queue(request)
        self.requests.append(request)
        return request

    def queue(self, request: Request) -> None:
        self.llm.engine.add(request)

    def abort(self, number: int) -> None:
        """End the request that was added as number `number`, if it has been."""
        if number < len(self.requests):
            self._keep(self.llm.engine.abort(self.requests[number].request_id))

    def step(self) -> None:
        self._keep(self.llm.engine.step())
        self.steps += 1
        audit_running(self.llm.engine)

    def run(
        self, asked: Sequence[Asked], between: Callable[[int], None] | None = None, most: int = 3000
    ) -> list[RequestOutput]:
        """Everything to its end; `between` is called before every step with its number."""
        coming = sorted(asked, key=lambda one: one.at)
        for number in range(most):
            while coming and coming[0].at <= number:
                self.add(coming.pop(0))
            if not coming and not self.llm.engine.has_work:
                break
            if between is not None:
                between(number)
            self.step()
        assert not self.llm.engine.has_work, f"not done after {most} steps"
        return self.outputs()

    def outputs(self) -> list[RequestOutput]:
        """The replies of all requests, which must have ended."""
        assert_idle(self.llm)
        found = [request.output() for request in self.requests]
        for output in found:
            for completion in output.outputs:
                self._compare(completion, self._chunks[output.request_id, completion.index])
        return found

    def _keep(self, chunks: Sequence[StreamChunk]) -> None:
        for chunk in chunks:
            self._chunks.setdefault((chunk.request_id, chunk.index), []).append(chunk)

    def _compare(self, whole: CompletionOutput, chunks: Sequence[StreamChunk]) -> None:
        assert "".join(chunk.text for chunk in chunks) == whole.text
        assert [token for chunk in chunks for token in chunk.token_ids] == whole.token_ids
        reasons = [chunk.finish_reason for chunk in chunks]
        assert reasons == [None] * (len(chunks) - 1) + [whole.finish_reason]
        assert (chunks[-1].stop_reason, chunks[-1].error) == (whole.stop_reason, whole.error)
        if whole.logprobs is not None:
            assert [p for chunk in chunks for p in chunk.logprobs or ()] == whole.logprobs


def played(llm: LLM, asked: Sequence[Asked], **kwargs: Any) -> list[Reply]:
    """What everybody of `asked` gets."""
    return [reply(output) for output in Play(llm).run(asked, **kwargs)]


class Witness:
    """Watches an engine's forwards: the raw logits of every row that gets any are kept in full
    precision, and after each forward everything that nobody owns is filled with NaN.

    Attributes:
        forwards: (start, count) of the rows of each forward.
    """

    def __init__(self, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
        self.engine = llm.engine
        self.forwards: list[list[tuple[int, int]]] = []
        self._seen: list[tuple[TokenSequence, int, Tensor]] = []
        self._raw = torch.empty(0)
        logits, forward = llm.model.logits, llm.engine.runner.forward

        def keep(x: Tensor) -> Tensor:
            self._raw = logits(x)
            return self._raw

        def watch(rows: list[ForwardRows]) -> Any:
            result, places = forward(rows)
            owner = {s.blocks.slot: s for s in self.engine.scheduler.running if s.blocks}
            for row, place in zip(rows, places, strict=True):
                first = row.start + row.count - row.wanted
                for position, raw in enumerate(self._raw[place].clone(), first):
                    self._seen.append((owner[row.blocks.slot], position, raw))
            self.forwards.append([(row.start, row.count) for row in rows])
            poison_free(self.engine)
            return result, places

        monkeypatch.setattr(llm.model, "logits", keep)
        monkeypatch.setattr(llm.engine.runner, "forward", watch)

    def check(self, model: Loaded, most: float = EXACT) -> int:
        """All rows seen so far equal those of recomputing their sequences without any cache; how
        many there were."""
        whole: dict[tuple[int, ...], Tensor] = {}
        for sequence, position, raw in self._seen:
            ids = tuple(sequence.tokens)
            if ids not in whole:
                whole[ids] = recomputed(model, torch.tensor(ids)).logits
            assert largest_difference(raw, whole[ids][position]) < most, (len(ids), position)
        count = len(self._seen)
        self._seen.clear()
        return count


def poison_free(engine: Engine) -> None:
    """Fill free pages and slots with what decodes to NaN."""
    pool = engine.runner.pool
    pages, slots = map(torch.tensor, engine.manager.allocator.free_numbers())
    for table in (pool.window, pool.draft_window):
        table.index_fill_(1, slots.long(), 0xFF)
    for group in pool.groups.values():
        group.index_fill_(0, slots.long(), float("nan"))
    pool.history.index_fill_(0, slots.long(), -(2**62))
    for tables in (pool.compressed, pool.index_codes, pool.index_scales):
        for table in tables.values():
            table.index_fill_(0, pages.long(), 0xFF)
