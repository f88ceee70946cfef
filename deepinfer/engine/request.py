"""One request: what was asked, and what has come of it so far.

Knows tokens and finish reasons; must not know torch, pages or the model.
"""

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
from deepinfer.errors import RequestError
from deepinfer.sampling.params import SamplingParams

if TYPE_CHECKING:
    from deepinfer.kv.blocks import SequenceBlocks
    from deepinfer.sampling.logprobs import TokenLogprobs


@dataclass
class Request:
    """A prompt being continued.

    Attributes:
        tokens: prompt and generated ids; computed: how many of them the cache holds.
        seed: key of this request's draws.
        blocks: pages and slot while it runs, None before and after.
        sent: generated tokens already handed out in chunks.
    """

    request_id: str
    prompt: str | None
    prompt_ids: list[int]
    params: SamplingParams
    seed: int
    text: OutputText
    tokens: list[int] = field(init=False)
    computed: int = 0
    blocks: "SequenceBlocks | None" = None
    logprobs: "list[TokenLogprobs]" = field(default_factory=list)
    prompt_logprobs: "list[TokenLogprobs | None]" = field(default_factory=lambda: [None])
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    sent: int = 0

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt_ids)

    @property
    def generated(self) -> list[int]:
        """Ids generated so far."""
        return self.tokens[len(self.prompt_ids) :]

    def append(self, token: int, eos: int) -> str:
        """Take one generated token; returns text that may be shown, sets the finish reason.

        The end token and stop tokens count as generated and have no text.
        """
        self.tokens.append(token)
        params = self.params
        if token == eos and not params.ignore_eos:
            return self.finish("stop")
        if token in params.stop_token_ids:
            return self.finish("stop", token)
        shown = self.text.push(token, may_stop=len(self.generated) > params.min_tokens)
        if self.text.stop_reason is not None:
            return shown + self.finish("stop", self.text.stop_reason)
        if len(self.generated) >= params.budget:
            shown += self.finish("length")
        return shown

    def finish(self, reason: FinishReason, stop: str | int | None = None) -> str:
        """End the request; returns the text that was held back.

        A stop string that only the last bytes complete still counts as one.
        """
        rest = self.text.finish(may_stop=len(self.generated) > self.params.min_tokens)
        self.finish_reason, self.stop_reason = reason, stop
        if stop is None and self.text.stop_reason is not None:
            self.finish_reason, self.stop_reason = "stop", self.text.stop_reason
        return rest

    def chunk(self, text: str) -> StreamChunk:
        """What was added since the last chunk."""
        new = self.generated[self.sent :]
        logprobs = None if self.params.logprobs is None else self.logprobs[self.sent :]
        self.sent += len(new)
        return StreamChunk(
            self.request_id, 0, text, new, logprobs, self.finish_reason, self.stop_reason
        )

    def output(self) -> RequestOutput:
        """The complete reply of an ended request."""
        assert self.finish_reason is not None
        wanted = self.params
        completion = CompletionOutput(
            index=0,
            text=self.text.text,
            token_ids=self.generated,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            logprobs=None if wanted.logprobs is None else self.logprobs,
        )
        return RequestOutput(
            self.request_id,
            self.prompt,
            self.prompt_ids,
            [completion],
            None if wanted.prompt_logprobs is None else self.prompt_logprobs,
            Usage(len(self.prompt_ids), len(self.generated)),
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
