"""One request: what was asked, and what has come of it so far.

Knows tokens, texts and finish reasons; must not know torch, pages or the model.
"""

from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from deepinfer.config import EngineConfig, ModelConfig
from deepinfer.engine.output import (
    CompletionOutput,
    FinishReason,
    OutputText,
    RequestOutput,
    StreamChunk,
    Usage,
)
from deepinfer.engine.sequence import Sequence
from deepinfer.errors import RequestError
from deepinfer.sampling.params import SamplingParams

if TYPE_CHECKING:
    from deepinfer.sampling.grammar import GrammarState
    from deepinfer.sampling.logprobs import TokenLogprobs


@dataclass(eq=False)
class Completion:
    """One of the replies that a request wants.

    Attributes:
        sequence: its tokens and its place in the cache.
        seed: key of its draws.
        grammar: what its text has to follow.
        error: what went wrong, with finish_reason error.
        sent: generated tokens already handed out in chunks; all of them between two steps.
        slot: where the sampler knows it, None while it does not.
        started, last_token_s: whether it was in a step, and clock time of its last token.
    """

    request: "Request"
    index: int
    seed: int
    text: OutputText
    sequence: Sequence
    grammar: "GrammarState | None" = None
    logprobs: "list[TokenLogprobs]" = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    error: str | None = None
    sent: int = 0
    slot: int | None = None
    started: bool = False
    last_token_s: float | None = None

    @property
    def generated(self) -> list[int]:
        """Ids generated so far."""
        return self.sequence.tokens[len(self.request.prompt_ids) :]

    def reports_prompt(self, start: int) -> bool:
        """Whether rows from position `start` on are reported: they predict tokens of the prompt,
        whose log-probabilities are wanted, once for all replies."""
        wanted = self.request.params.prompt_logprobs is not None and self.index == 0
        return wanted and start + 1 < len(self.request.prompt_ids)

    @property
    def count(self) -> int:
        """How many tokens were generated so far."""
        return len(self.sequence.tokens) - len(self.request.prompt_ids)

    def take(self, token: int, eos: int) -> None:
        """Look at a generated token, the last of `generated`; may set the finish reason.

        The end token and stop tokens count as generated and have no text.
        """
        params = self.request.params
        if token == eos and not params.ignore_eos:
            self.finish("stop")
        elif token in params.stop_token_ids:
            self.finish("stop", token)
        else:
            self.text.push(token, may_stop=self.count > params.min_tokens)
            if self.text.stop_reason is not None:
                self.finish("stop", self.text.stop_reason)
            elif self.count >= params.budget:
                self.finish("length")

    def finish(self, reason: FinishReason, stop: str | int | None = None) -> None:
        """End the reply; text that was held back is part of it.

        A stop string that only the last bytes complete still counts as one.
        """
        self.text.finish(may_stop=self.count > self.request.params.min_tokens)
        self.finish_reason, self.stop_reason = reason, stop
        if stop is None and self.text.stop_reason is not None:
            self.finish_reason, self.stop_reason = "stop", self.text.stop_reason

    def fail(self, error: str) -> None:
        """End the reply because it cannot go on."""
        with suppress(Exception):  # its text may be what failed
            self.finish("error")
        self.finish_reason, self.stop_reason, self.error = "error", None, error

    def chunk(self) -> StreamChunk:
        """What was added since the last `mark_sent`."""
        new = self.sequence.tokens[len(self.request.prompt_ids) + self.sent :]
        logprobs = None if self.request.params.logprobs is None else self.logprobs[self.sent :]
        return StreamChunk(
            self.request.request_id, self.index, self.text.unsent, new, logprobs,
            self.finish_reason, self.stop_reason, self.error,
        )  # fmt: skip

    def mark_sent(self) -> None:
        """Everything so far has been handed out."""
        self.text.mark_sent()
        self.sent = self.count

    def output(self) -> CompletionOutput:
        """The whole reply, once it has ended."""
        assert self.finish_reason is not None
        return CompletionOutput(
            index=self.index,
            text=self.text.text,
            token_ids=self.generated,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            logprobs=None if self.request.params.logprobs is None else self.logprobs,
            error=self.error,
        )


@dataclass(eq=False)
class Request:
    """A prompt being continued, once or several times.

    Attributes:
        params: their max_tokens is decided.
        completions: one for each reply that is wanted.
        arrival_s: clock time at which it was queued.
    """

    request_id: str
    prompt: str | None
    prompt_ids: list[int]
    params: SamplingParams
    completions: list[Completion] = field(default_factory=list)
    prompt_logprobs: "list[TokenLogprobs | None]" = field(default_factory=lambda: [None])
    arrival_s: float = 0.0

    @property
    def ended(self) -> bool:
        """Whether every reply has ended."""
        return all(completion.finish_reason is not None for completion in self.completions)

    def output(self) -> RequestOutput:
        """The complete answer, once every reply has ended."""
        generated = sum(completion.count for completion in self.completions)
        cached = self.completions[0].sequence.cached_tokens
        return RequestOutput(
            self.request_id,
            self.prompt,
            self.prompt_ids,
            [completion.output() for completion in self.completions],
            None if self.params.prompt_logprobs is None else self.prompt_logprobs,
            Usage(len(self.prompt_ids), generated, cached),
        )


def check_request(
    prompt_ids: list[int], params: SamplingParams, config: EngineConfig, model: ModelConfig
) -> None:
    """Refuse what cannot be run.

    Raises:
        RequestError: empty prompt, ids out of range, image tokens, too many tokens, or log
            probabilities of prompt rows that a truncated prefill leaves out.
    """
    if not prompt_ids:
        raise RequestError("the prompt is empty; expected at least one token")
    bad = [i for i in prompt_ids if type(i) is not int or not 0 <= i < model.vocab_size]
    if bad:
        raise RequestError(f"prompt token id {bad[0]!r}; expected 0 <= id < {model.vocab_size}")
    if model.vision.num_hidden_layers and model.image_token_id in prompt_ids:
        raise RequestError(
            f"prompt token id {model.image_token_id} stands for an image; only text is supported"
        )
    params.check_vocabulary(model.vocab_size, model.eos_token_id)
    params.for_prompt(len(prompt_ids), config.max_model_len)
    if params.prompt_logprobs is not None and config.yoco_prefill != "off":
        raise RequestError("prompt_logprobs needs every prompt row; set yoco_prefill to off")
