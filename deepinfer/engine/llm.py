"""The Python entry point: load a checkpoint, generate, stream.

Knows how the parts are put together; must not know how a step works.
"""

import dataclasses
import difflib
import os
import random
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from rich.progress import track

from deepinfer.checkpoint.hf_config import load_model_config
from deepinfer.checkpoint.loader import load_model
from deepinfer.checkpoint.names import TensorSpec
from deepinfer.checkpoint.token_map import checked_token_map
from deepinfer.checkpoint.tokenizer import Tokenizer
from deepinfer.config import Decision, EngineConfig, EngineOptions, Host, resolve
from deepinfer.engine.engine import Engine
from deepinfer.engine.output import OutputText, RequestOutput, StreamChunk
from deepinfer.engine.request import Request, check_request
from deepinfer.env import read_environment
from deepinfer.errors import ConfigError, RequestError
from deepinfer.model.linear import Precision
from deepinfer.sampling.params import SamplingParams

Prompt = str | Sequence[int]


def _options(model: str | Path, settings: dict[str, Any]) -> EngineOptions:
    known = [field.name for field in dataclasses.fields(EngineOptions)]
    for name in settings:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.0)[0]
            raise ConfigError(f"unknown setting {name!r}; did you mean {near!r}?")
    return EngineOptions(model=str(model), **settings)


def _precision(config: EngineConfig) -> Precision:
    """Matrices are kept in float32 on CPUs, few of which multiply bfloat16 (same values)."""
    dtype: torch.dtype = getattr(torch, config.dtype)
    narrow = config.device == "cuda" and dtype == torch.bfloat16
    matrix = dtype if narrow or dtype == torch.float64 else torch.float32
    return Precision(dtype, matrix, config.act_quant)


def _with_bar(specs: Iterable[TensorSpec], count: int) -> Iterable[TensorSpec]:
    return track(specs, description="loading", total=count, transient=True)


class LLM:
    """A checkpoint ready to generate.

    Args:
        model: folder with config.json, tokenizer.json and safetensors.
        progress: show a bar while loading.
        settings: fields of EngineOptions by name.

    Attributes:
        config: every setting, decided; decisions: who decided it.

    Raises:
        ConfigError, CheckpointError, TokenizerError: see each; nothing is loaded by halves.
    """

    def __init__(self, model: str | Path, *, progress: bool = False, **settings: Any) -> None:
        options = _options(model, settings)
        folder = Path(options.model)
        self.model_config = load_model_config(folder)
        host = Host(cuda=torch.cuda.is_available(), cores=os.cpu_count() or 1)
        self.config: EngineConfig
        self.decisions: list[Decision]
        self.config, self.decisions = resolve(options, read_environment(), self.model_config, host)
        torch.set_num_threads(self.config.threads)
        self.tokenizer = Tokenizer.load(Path(self.config.tokenizer))
        device = torch.device(self.config.device)
        token_map = None
        if self.model_config.engram_layer_ids:
            classes = self.model_config.engram_compressed_vocab_size
            token_map = torch.tensor(checked_token_map(self.tokenizer.inner, classes)).to(device)
        loaded = load_model(
            folder, self.model_config, _precision(self.config), device,
            progress=_with_bar if progress else None,
        )  # fmt: skip
        self._engine = Engine(self.config, loaded, token_map)
        self._count = 0
        self._inbox: dict[str, deque[StreamChunk]] = {}

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
        requests = [self._request(*pair) for pair in zip(several, params, strict=True)]
        for request in requests:
            self._engine.add(request)
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

        Raises:
            RequestError: the prompt or a parameter cannot be served.
        """
        request = self._request(prompt, sampling_params or SamplingParams())
        self._engine.add(request)
        return self._chunks(request)

    def _chunks(self, request: Request) -> Iterator[StreamChunk]:
        inbox = self._inbox[request.request_id]
        try:
            while request.finish_reason is None or inbox:
                if inbox:
                    yield inbox.popleft()
                else:
                    self._step()
        finally:
            self._engine.abort(request.request_id)
            del self._inbox[request.request_id]

    def _step(self) -> None:
        """One step; its chunks go to the requests' inboxes, whoever drives the engine."""
        for chunk in self._engine.step():
            self._inbox[chunk.request_id].append(chunk)

    def _request(self, prompt: Prompt, params: SamplingParams) -> Request:
        if not isinstance(params, SamplingParams):
            raise RequestError(f"sampling parameters {params!r}; expected SamplingParams")
        text = prompt if isinstance(prompt, str) else None
        if text == "":
            raise RequestError("the prompt is empty; expected at least one character")
        ids = self.encode(prompt) if isinstance(prompt, str) else list(prompt)
        check_request(ids, params, self.config, self.model_config)
        self._count += 1
        seed = random.getrandbits(64) if params.seed is None else params.seed
        output = OutputText(self.tokenizer.stream(), list(params.stop))
        request = Request(str(self._count), text, ids, params, seed, output)
        self._inbox[request.request_id] = deque()
        return request


def create_llm(model: str | Path, **settings: Any) -> LLM:
    """`LLM(model, **settings)`; the name that engines of this family share."""
    return LLM(model, **settings)


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    several = list(prompts)
    if several and all(type(item) is int for item in several):
        return [cast("list[int]", several)]
    return cast("list[Prompt]", several)


def _params_for(
    prompts: list[Prompt], params: SamplingParams | Sequence[SamplingParams] | None
) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * len(prompts)
    if len(params) != len(prompts):
        raise RequestError(
            f"{len(params)} sampling parameters for {len(prompts)} prompts; expected one for all"
            " or one for each"
        )
    return list(params)
