"""The loop: admit requests, plan a step, run it, sample, end sequences.

Knows requests, blocks and the cached forward; must not know prompts' text or the command line.
Requests are served in order; a request runs once its whole length fits the cache, so no running
request ever has to stop for another.
"""

from collections import deque

import torch
from torch import Tensor

from deepinfer.config import EngineConfig, max_rollback
from deepinfer.engine.output import StreamChunk
from deepinfer.engine.request import Request
from deepinfer.kv.blocks import BlockAllocator
from deepinfer.kv.geometry import cache_geometry
from deepinfer.kv.pool import CachePool
from deepinfer.model.cached import run
from deepinfer.model.step import SequenceRows, StepLayout
from deepinfer.model.transformer import Transformer
from deepinfer.sampling.logprobs import token_logprobs
from deepinfer.sampling.sampler import LogitsError, sample

# Multiply-adds of one square matrix product below which a second CPU thread costs more than it
# brings: handing out and joining the work of a few thousand tiny operations.
_PARALLEL_WORK = 2_000_000


class Engine:
    """Continuous batching of requests on one device.

    Args:
        model: loaded model; token_map: [V] int64 n-gram classes, None without n-gram layers.
    """

    def __init__(self, config: EngineConfig, model: Transformer, token_map: Tensor | None) -> None:
        self.config = config
        self.model = model
        self.token_map = token_map
        self.device = model.embed.weight.device
        rollback = max_rollback(model.config)
        self.geometry = cache_geometry(model.config, config.page_tokens, rollback)
        pages = self.geometry.pages_for(config.cache_tokens)
        slots = config.max_num_seqs
        self.pool = CachePool(self.geometry, pages, slots, self.device, model.precision.accumulate)
        self.allocator = BlockAllocator(pages, slots, config.page_tokens)
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []

    @property
    def has_work(self) -> bool:
        """Whether any request has not ended."""
        return bool(self.waiting or self.running)

    def add(self, request: Request) -> None:
        """Queue a checked request."""
        self.waiting.append(request)

    def abort(self, request_id: str) -> StreamChunk | None:
        """End a request now; its last chunk, or None when there is no such request."""
        for request in [*self.running, *self.waiting]:
            if request.request_id == request_id:
                text = request.finish("abort")
                if request in self.running:
                    self._release(request)
                else:
                    self.waiting.remove(request)
                return request.chunk(text)
        return None

    def step(self) -> list[StreamChunk]:
        """Run one forward; the chunks of all requests that got a token or ended."""
        self._admit()
        plan = self._plan()
        if not plan:
            return []
        if self.device.type == "cpu":
            self._set_threads(sum(count for _, count in plan))
        with torch.inference_mode():
            rows, logits = self._forward(plan)
            return self._advance(plan, rows, logits)

    def _set_threads(self, rows: int) -> None:
        work = rows * self.model.config.hidden_size**2
        torch.set_num_threads(self.config.threads if work >= _PARALLEL_WORK else 1)

    def _admit(self) -> None:
        while self.waiting and len(self.running) < self.config.max_num_seqs:
            request = self.waiting[0]
            tokens = len(request.prompt_ids) + request.params.budget
            if not self.allocator.can_open(tokens):
                return
            request.blocks = self.allocator.open()
            self.allocator.reserve(request.blocks, tokens)
            self.running.append(self.waiting.popleft())

    def _plan(self) -> list[tuple[Request, int]]:
        """Requests of the next step with their token counts: decodes first, then prompt chunks."""
        budget = self.config.max_num_batched_tokens
        plan = []
        by_size = sorted(self.running, key=lambda r: len(r.tokens) - r.computed > 1)
        for request in by_size:
            count = min(len(request.tokens) - request.computed, budget)
            if count > 0:
                plan.append((request, count))
                budget -= count
        return plan

    def _window_floor(self, request: Request) -> int:
        if self.config.yoco_prefill == "off":
            return 0
        return max(0, len(request.prompt_ids) - self.config.yoco_keep_tokens)

    def _forward(self, plan: list[tuple[Request, int]]) -> tuple[dict[str, list[int]], Tensor]:
        """Run the plan's rows; logits of the rows that are needed, and their places per request."""
        sequences, ids = [], []
        for request, count in plan:
            assert request.blocks is not None
            start = request.computed
            floor = self._window_floor(request)
            sequences.append(
                SequenceRows(request.blocks.slot, request.blocks.pages, start, count, floor)
            )
            ids += request.tokens[start : start + count]
        layout = StepLayout(sequences, self.geometry, self.device)
        compact = self.config.yoco_prefill == "compact"
        token_ids = torch.tensor(ids, dtype=torch.int64, device=self.device)
        output = run(self.model, self.pool, layout, token_ids, self.token_map, compact=compact)
        # Rows that went through all layers, by sequence; a truncated prefill may have dropped some.
        kept = {r.slot: s for r, s in zip(output.layout.rows, output.layout.sequence_slices(),
                                          strict=True)}  # fmt: skip
        places: dict[str, list[int]] = {}
        wanted: list[int] = []
        for request, count in plan:
            assert request.blocks is not None
            ends = request.computed + count == len(request.tokens)
            rows = kept.get(request.blocks.slot, slice(0, 0))
            prompt_rows = request.params.prompt_logprobs is not None
            prompt_rows &= request.computed < len(request.prompt_ids)
            first = rows.start if prompt_rows else rows.stop - 1
            chosen = list(range(first, rows.stop)) if prompt_rows or ends else []
            places[request.request_id] = list(range(len(wanted), len(wanted) + len(chosen)))
            wanted += chosen
        hidden = output.hidden.x[torch.tensor(wanted, dtype=torch.int64, device=self.device)]
        return places, self.model.logits(hidden).float()

    def _advance(
        self, plan: list[tuple[Request, int]], places: dict[str, list[int]], logits: Tensor
    ) -> list[StreamChunk]:
        sampled: list[tuple[Request, int]] = []
        for request, count in plan:
            rows = places[request.request_id]
            if request.params.prompt_logprobs is not None:
                self._record_prompt(request, rows, logits)
            request.computed += count
            if request.computed == len(request.tokens):
                sampled.append((request, rows[-1]))
        if not sampled:
            return []
        rows_tensor = torch.tensor([row for _, row in sampled], device=self.device)
        return self._sample([request for request, _ in sampled], logits[rows_tensor])

    def _record_prompt(self, request: Request, rows: list[int], logits: Tensor) -> None:
        """Log-probabilities of the prompt tokens that these rows predict."""
        k = request.params.prompt_logprobs
        following = request.prompt_ids[request.computed + 1 : request.computed + 1 + len(rows)]
        if k is not None and following:
            chosen = torch.tensor(following, device=self.device)
            entries = token_logprobs(logits[rows[0] : rows[0] + len(following)], chosen, k)
            request.prompt_logprobs.extend(entries)

    def _sample(self, requests: list[Request], logits: Tensor) -> list[StreamChunk]:
        """Draw the next token of each request [B, V]; rows that cannot be drawn end in an error."""
        chunks = []
        try:
            tokens = self._draw(requests, logits)
        except LogitsError as error:
            for row in error.rows:
                chunks.append(self._end(requests[row], requests[row].finish("error")))
            healthy = [i for i in range(len(requests)) if i not in error.rows]
            requests = [requests[i] for i in healthy]
            logits = logits[torch.tensor(healthy, dtype=torch.int64, device=self.device)]
            tokens = self._draw(requests, logits) if requests else []
        for row, (request, token) in enumerate(zip(requests, tokens, strict=True)):
            k = request.params.logprobs
            if k is not None:
                chosen = torch.tensor([token], device=self.device)
                request.logprobs.extend(token_logprobs(logits[row : row + 1], chosen, k))
            text = request.append(token, self.model.config.eos_token_id)
            if request.finish_reason is None:
                chunks.append(request.chunk(text))
            else:
                chunks.append(self._end(request, text))
        return chunks

    def _draw(self, requests: list[Request], logits: Tensor) -> list[int]:
        positions = [len(request.tokens) for request in requests]
        params = [request.params for request in requests]
        seeds = [request.seed for request in requests]
        tokens: list[int] = sample(
            logits, params, seeds, positions, self.model.precision.operators
        ).tolist()
        return tokens

    def _end(self, request: Request, text: str) -> StreamChunk:
        self._release(request)
        return request.chunk(text)

    def _release(self, request: Request) -> None:
        assert request.blocks is not None
        self.allocator.close(request.blocks)
        request.blocks = None
        self.running.remove(request)
