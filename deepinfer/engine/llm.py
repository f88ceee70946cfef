"""The Python entry point: load a checkpoint, generate, stream.

Knows how the parts are put together; must not know how a step works.
"""

import dataclasses
import difflib
import random
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Self, cast

import torch

from deepinfer.config import EngineOptions
from deepinfer.engine.engine import Engine
from deepinfer.engine.loading import Loaded, load
from deepinfer.engine.output import OutputText, RequestOutput, StreamChunk
from deepinfer.engine.request import Request, check_request
from deepinfer.engine.warmup import warm_up
from deepinfer.errors import ConfigError, RequestError
from deepinfer.sampling.params import SamplingParams
from deepinfer.speculative.greedy import GreedySpeculation, Round

Prompt = str | Sequence[int]


def _options(model: str | Path, settings: dict[str, Any]) -> EngineOptions:
    known = [field.name for field in dataclasses.fields(EngineOptions)]
    for name in settings:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.0)[0]
            raise ConfigError(f"unknown setting {name!r}; did you mean {near!r}?")
    return EngineOptions(model=str(model), **settings)


class LLM:
    """A checkpoint ready to generate.

    Args:
        model: folder with config.json, tokenizer.json and safetensors.
        progress: show a bar while loading.
        settings: fields of EngineOptions by name.

    Attributes:
        config: every setting, decided; decisions: who decided it.
        model_config, tokenizer, model: what was loaded.

    Raises:
        ConfigError, CheckpointError, TokenizerError: see each; nothing is loaded by halves.
    """

    def __init__(self, model: str | Path, *, progress: bool = False, **settings: Any) -> None:
        self._start(load(_options(model, settings), progress))

    @classmethod
    def from_options(cls, options: EngineOptions, *, progress: bool = False) -> Self:
        """The same from an options object."""
        llm = cls.__new__(cls)
        llm._start(load(options, progress))
        return llm

    def _start(self, loaded: Loaded) -> None:
        self.config = loaded.config
        self.decisions = loaded.decisions
        self.model_config = loaded.model_config
        self.tokenizer = loaded.tokenizer
        self.model = loaded.model
        self._engine = Engine(loaded.config, loaded.model, loaded.token_map)
        self._count = 0
        self._inbox: dict[str, deque[StreamChunk]] = {}

    def warm_up(self) -> int:
        """Compile and load every kernel now, so that no request has to wait for one.

        Returns:
            How many kernels there are; 0 without a GPU.
        """
        return warm_up(self._engine)

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`, with the begin-of-sentence token in front."""
        return self.tokenizer.encode(text, self.model_config.bos_token_id)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Continue every prompt; replies in the order of the prompts.

        Args:
            prompts: a text, a list of token ids, or a list of either.
            sampling_params: one for all prompts, or one for each. Default: SamplingParams().

        Raises:
            RequestError: a prompt or parameter cannot be served; nothing is run then.
        """
        several = _as_list(prompts)
        params = _params_for(several, sampling_params)
        requests = [self.request(*pair) for pair in zip(several, params, strict=True)]
        for request in requests:
            self._queue(request)
        try:
            while any(request.finish_reason is None for request in requests):
                self._step()
        finally:
            for request in requests:
                self._engine.abort(request.request_id)
                self._inbox.pop(request.request_id)
        return [request.output() for request in requests]

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None
    ) -> Iterator[StreamChunk]:
        """Continue one prompt, a chunk for every token; closing the iterator aborts the request.

        The request queues up when the first chunk is asked for.

        Raises:
            RequestError: the prompt or a parameter cannot be served.
        """
        params = SamplingParams() if sampling_params is None else sampling_params
        return self.chunks(self.request(prompt, params))

    def chunks(self, request: Request) -> Iterator[StreamChunk]:
        """Queue a new request at the first `next` and run it; closing the iterator aborts it.

        A generator that was never started does not see that it is closed, so it must not have
        queued anything.
        """
        inbox = self._queue(request)
        try:
            while request.finish_reason is None or inbox:
                if inbox:
                    yield inbox.popleft()
                else:
                    self._step()
        finally:
            self._engine.abort(request.request_id)
            del self._inbox[request.request_id]

    def speculate(self, prompt_ids: list[int], max_tokens: int) -> Iterator[Round]:
        """Greedy continuation of one prompt with the checkpoint's drafter, a round at a time.

        The tokens equal those of plain greedy decoding; the last round is cut at `max_tokens` or
        after the end-of-sequence token.

        Raises:
            RequestError: the prompt cannot be served; ConfigError: the checkpoint has no drafter.
        """
        if not self.model_config.has_drafter:
            raise ConfigError("num_nextn_predict_layers = 0: the checkpoint has no drafter")
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
        check_request(prompt_ids, params, self.config, self.model_config)
        return self._rounds(prompt_ids, max_tokens)

    @torch.inference_mode()
    def _rounds(self, prompt_ids: list[int], max_tokens: int) -> Iterator[Round]:
        engine = self._engine
        blocks = engine.allocator.open()
        try:
            slack = self.model_config.dspark_block_size + 1
            engine.allocator.reserve(blocks, len(prompt_ids) + max_tokens + slack)
            one = GreedySpeculation(engine.model, engine.pool, blocks, engine.token_map,
                                    self.config.max_num_batched_tokens)  # fmt: skip
            token = one.prefill(prompt_ids)
            eos, left = self.model_config.eos_token_id, max_tokens
            yield Round([token], 0, 0, [])
            left -= 1
            for turn in one.rounds(token) if token != eos and left else ():
                ids = turn.token_ids[:left]
                if eos in ids:
                    ids = ids[: ids.index(eos) + 1]
                yield replace(turn, token_ids=ids, accepted=min(turn.accepted, len(ids)))
                left -= len(ids)
                if not left or ids[-1] == eos:
                    return
        finally:
            engine.allocator.close(blocks)

    def _step(self) -> None:
        """One step; its chunks go to the requests' inboxes, whoever drives the engine."""
        for chunk in self._engine.step():
            self._inbox[chunk.request_id].append(chunk)

    def _queue(self, request: Request) -> deque[StreamChunk]:
        self._engine.add(request)
        return self._inbox.setdefault(request.request_id, deque())

    def request(self, prompt: Prompt, params: SamplingParams) -> Request:
        """A checked request, not queued yet: `chunks` runs it, `Request.output` is its reply.

        Raises:
            RequestError: the prompt or a parameter cannot be served.
        """
        if not isinstance(params, SamplingParams):
            raise RequestError(f"sampling parameters {params!r}; expected SamplingParams")
        text = prompt if isinstance(prompt, str) else None
        if text == "":
            raise RequestError("the prompt is empty; expected at least one character")
        ids = self.encode(prompt) if isinstance(prompt, str) else _as_ids(prompt)
        check_request(ids, params, self.config, self.model_config)
        _refuse_unserved(params)
        params = params.for_prompt(len(ids), self.config.max_model_len)
        self._count += 1
        seed = random.getrandbits(64) if params.seed is None else params.seed
        decoder = self.tokenizer.stream(params.skip_special_tokens)
        output = OutputText(decoder, list(params.stop), params.include_stop_str_in_output)
        return Request(str(self._count), text, ids, params, seed, output)


def create_llm(model: str | Path, **settings: Any) -> LLM:
    """`LLM(model, **settings)`; the name that engines of this family share."""
    return LLM(model, **settings)


def _refuse_unserved(params: SamplingParams) -> None:
    """What this loop does not do: `SamplingBatch` and grammars do it."""
    changed = (
        params.n > 1, params.min_tokens, params.has_penalties, params.logit_bias,
        params.allowed_token_ids is not None, params.banned_token_ids, params.structured,
    )  # fmt: skip
    if any(changed):
        raise RequestError(
            "n, min_tokens, penalties, logit_bias, allowed_token_ids, banned_token_ids and"
            " structured are not served yet; leave them at their defaults"
        )


def _as_ids(prompt: Sequence[int]) -> list[int]:
    try:
        return list(prompt)
    except TypeError:
        raise RequestError(f"prompt {prompt!r:.60}; expected a text or a list of ids") from None


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    several = _as_ids(cast("Sequence[int]", prompts))
    if several and not any(isinstance(item, Sequence) for item in several):
        return [several]  # token ids, or what will be refused as such
    return cast("list[Prompt]", several)


def _params_for(
    prompts: list[Prompt], params: SamplingParams | Sequence[SamplingParams] | None
) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * len(prompts)
    if not isinstance(params, Sequence):
        raise RequestError(f"sampling parameters {params!r:.60}; expected SamplingParams")
    if len(params) != len(prompts):
        raise RequestError(
            f"{len(params)} sampling parameters for {len(prompts)} prompts; expected one for all"
            " or one for each"
        )
    return list(params)
