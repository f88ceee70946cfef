"""The Python entry point: load a checkpoint, generate, stream.

Knows how the parts are put together; must not know how a step works.
"""

import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from typing import Any, Self, cast

from deepinfer.config import EngineOptions
from deepinfer.engine.chat_format import ChatFormat, Message
from deepinfer.engine.engine import Engine
from deepinfer.engine.intake import Intake, Prompt, as_list, is_conversation, params_for
from deepinfer.engine.loading import Loaded, load, options_from
from deepinfer.engine.metrics import Metrics
from deepinfer.engine.output import RequestOutput, StreamChunk
from deepinfer.engine.request import Request, check_request
from deepinfer.engine.speculation import rounds
from deepinfer.engine.warmup import capture, warm_up
from deepinfer.errors import ConfigError, RequestError
from deepinfer.sampling.grammar import GrammarCompiler
from deepinfer.sampling.params import SamplingParams
from deepinfer.speculative.greedy import Round

Conversation = Sequence[Message]


class LLM:
    """A checkpoint ready to generate.

    On a GPU every kernel is compiled or found on disk, and small steps are captured as CUDA
    graphs, before the constructor returns; enforce_eager leaves both out. Several threads may use
    one: they share its steps, whoever runs them.

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
        self._start(load(options_from(model, settings), progress), progress)

    @classmethod
    def from_options(cls, options: EngineOptions, *, progress: bool = False) -> Self:
        """The same from an options object."""
        llm = cls.__new__(cls)
        llm._start(load(options, progress), progress)
        return llm

    def _start(self, loaded: Loaded, progress: bool) -> None:
        self.config = loaded.config
        self.decisions = loaded.decisions
        self.model_config = loaded.model_config
        self.tokenizer = loaded.tokenizer
        self.model = loaded.model
        model = loaded.model_config
        grammars = GrammarCompiler(loaded.tokenizer, model.vocab_size, model.eos_token_id)
        self.engine = Engine(loaded.config, loaded.model, loaded.token_map, grammars)
        self._intake = Intake(loaded, grammars)
        self._inbox: dict[str, deque[StreamChunk]] = {}
        self._lock = threading.RLock()
        if not self.config.enforce_eager:
            self.warm_up()
            capture(self.engine, progress)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End all requests and give the memory of model and cache back; nothing runs after it.

        Streams that are open end with finish_reason abort. A second call does nothing.
        """
        with self._lock:
            for request_id, inbox in self._inbox.items():
                inbox.extend(self.engine.abort(request_id))
            self._inbox.clear()
            for part in ("engine", "model"):
                vars(self).pop(part, None)

    def __getattr__(self, name: str) -> Any:
        if name in ("engine", "model") and "config" in vars(self):
            raise RequestError("this LLM was closed; make another one")
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")

    @property
    def metrics(self) -> Metrics:
        """What was done so far."""
        return self.engine.metrics

    def warm_up(self) -> int:
        """Compile and load every kernel now, so that no request has to wait for one.

        Returns:
            How many kernels there are; 0 without a GPU.
        """
        return warm_up(self.engine)

    def reset_prefix_cache(self) -> None:
        """Forget what was kept for prompts that begin alike; running requests are not affected."""
        self.engine.manager.tree.clear()

    def profile(self, file: str | Path, steps: int) -> None:
        """Record the next `steps` steps with PyTorch's profiler: a trace for chrome://tracing.

        Raises:
            ConfigError: steps < 1, no such folder, or a recording is under way.
        """
        self.engine.profile(Path(file), steps)

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`, with the begin-of-sentence token in front."""
        return self._intake.encode(text)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int = 0,
        timeout: float | None = None,
    ) -> list[RequestOutput]:
        """Continue every prompt; replies in the order of the prompts.

        Args:
            prompts: a text, a list of token ids, or a list of either.
            sampling_params: one for all prompts, or one for each. Default: SamplingParams().
            priority: lower numbers are served first.
            timeout: seconds after which a reply that has not ended ends with deadline.

        Raises:
            RequestError: a prompt or parameter cannot be served; nothing is run then.
        """
        several = as_list(prompts)
        params = params_for(several, sampling_params)
        requests = [
            self.request(*pair, priority=priority, timeout=timeout)
            for pair in zip(several, params, strict=True)
        ]
        return self._run(requests)

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        thinking: bool = False,
        tools: Sequence[Message] = (),
    ) -> list[RequestOutput]:
        """Answer one conversation, or several, in the V4.1 prompt format.

        Args:
            messages: {"role", "content"} of every message, or a list of such lists.
            thinking: the model thinks before it answers.
            tools: definitions of functions that the model may call, as OpenAI writes them.

        Raises:
            RequestError: a message, prompt or parameter cannot be served; nothing is run then.
            ConfigError: the package deepseek-recipe is missing.
        """
        several = cast("Sequence[Conversation]", [messages] if is_conversation(messages)
                       else messages)  # fmt: skip
        chat_format = self.chat_format()
        prompts: list[Prompt] = []
        for conversation in several:
            converted = chat_format.convert(conversation, thinking, tools)
            prompts.append(chat_format.encode(converted))
        params = params_for(prompts, sampling_params)
        return self._run([self.request(*pair) for pair in zip(prompts, params, strict=True)])

    def chat_format(self) -> ChatFormat:
        """The checkpoint's prompt format."""
        return ChatFormat(self.tokenizer)

    def _run(self, requests: list[Request]) -> list[RequestOutput]:
        try:
            for request in requests:
                self._queue(request)
            while self._step(lambda: all(request.ended for request in requests)):
                pass
        finally:
            for request in requests:
                self._leave(request)
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

    def chunks(self, request: Request) -> Generator[StreamChunk]:
        """Queue a new request at the first `next` and run it; closing the iterator aborts it.

        A generator that was never started does not see that it is closed, so it must not have
        queued anything.

        Raises:
            RequestError: the request is being served already, or has been.
        """
        inbox = self._queue(request)
        try:
            while not request.ended or inbox:
                if inbox:
                    yield inbox.popleft()
                else:
                    self._step(lambda: request.ended or bool(inbox))
        finally:
            self._leave(request)

    def speculate(self, prompt_ids: list[int], max_tokens: int) -> Iterator[Round]:
        """Greedy continuation of one prompt with the checkpoint's drafter, a round at a time.

        The tokens equal those of plain greedy decoding; the last round is cut at `max_tokens` or
        after the end-of-sequence token. Nothing else may run meanwhile.

        Raises:
            RequestError: the prompt cannot be served, or others are being served; ConfigError: the
                checkpoint has no drafter.
        """
        if not self.model_config.has_drafter:
            raise ConfigError("num_nextn_predict_layers = 0: the checkpoint has no drafter")
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
        check_request(prompt_ids, params, self.config, self.model_config)
        if self.engine.has_work:
            raise RequestError("speculate runs alone; wait until other requests have ended")
        return rounds(self.engine, prompt_ids, max_tokens)

    def _step(self, enough: Callable[[], bool]) -> bool:
        """One step; its chunks go to the requests' inboxes, whoever drives the engine.

        Args:
            enough: whether all that is wanted is there, perhaps by another thread's steps.

        Returns:
            False if it is: nothing was run then.
        """
        with self._lock:
            if enough():
                return False
            for chunk in self.engine.step():
                inbox = self._inbox.get(chunk.request_id)
                if inbox is not None:  # a request may have been given to the engine itself
                    inbox.append(chunk)
            return True

    def _queue(self, request: Request) -> deque[StreamChunk]:
        with self._lock:
            if request.request_id in self._inbox or request.ended:
                raise RequestError(
                    f"request {request.request_id} is being served already, or has been; make"
                    " another one"
                )
            inbox = self._inbox[request.request_id] = deque()
            try:
                self.engine.add(request)
            except BaseException:
                self._leave(request)
                raise
            return inbox

    def _leave(self, request: Request) -> None:
        """Nobody wants the rest of a request; one that has left already, or is none, is ignored."""
        with self._lock:
            if self._inbox.pop(request.request_id, None) is not None:
                self.engine.abort(request.request_id)

    def request(
        self, prompt: Prompt, params: SamplingParams, *, priority: int = 0,
        timeout: float | None = None,
    ) -> Request:  # fmt: skip
        """A checked request, not queued yet: `chunks` runs it, `Request.output` is its reply.

        Raises:
            RequestError: the prompt or a parameter cannot be served.
        """
        return self._intake.request(prompt, params, priority, timeout)


def create_llm(model: str | Path, **settings: Any) -> LLM:
    """`LLM(model, **settings)`; the name that engines of this family share."""
    return LLM(model, **settings)
