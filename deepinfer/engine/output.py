"""What a request gives back: text that is safe to show, stop strings, and the reply's records.

Knows text, token ids and finish reasons; must not know torch, the scheduler or the tokenizer.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    from deepinfer.sampling.logprobs import TokenLogprobs

FinishReason = Literal["stop", "length", "abort", "deadline", "error"]


class TextStream(Protocol):
    """Decodes one sequence token by token."""

    def push(self, token_id: int) -> str:
        """The text that `token_id` completes."""

    def flush(self) -> str:
        """What is left at the end."""


class OutputText:
    """The text of one sequence, up to its first stop string.

    The first stop string is the one whose last character comes first; of several that end there,
    the longest. So the text does not depend on how it was split into tokens, and a stop string
    ends it at once. Text that may be the beginning of a stop string is held back.

    Args:
        stream: decodes the sequence.
        stop: stop strings, none of them empty.
        include_stop: the text ends after the stop string instead of before it.

    Attributes:
        stop_reason: the stop string that was met, or None.
    """

    def __init__(self, stream: TextStream, stop: Sequence[str], include_stop: bool = False) -> None:
        assert all(stop), "an empty stop string would end every text"
        self.stop_reason: str | None = None
        self._stream = stream
        self._stop = tuple(stop)
        self._include_stop = include_stop
        self._held = ""
        self._unstopped = 0  # characters of what is held in which no stop string may end
        self._shown: list[str] = []
        self._sent = 0  # of them

    @property
    def text(self) -> str:
        """All text handed out so far."""
        return "".join(self._shown)

    @property
    def unsent(self) -> str:
        """What has come since the last `mark_sent`."""
        return "".join(self._shown[self._sent :])

    def mark_sent(self) -> None:
        """All text so far has been handed on."""
        self._sent = len(self._shown)

    def push(self, token_id: int, may_stop: bool = True) -> str:
        """The text that may be shown now, often ""; sets `stop_reason` when a stop string ends.

        Unless `may_stop`, a stop string that ends in this text is none.
        """
        assert self.stop_reason is None, "push after a stop string"
        return self._show(self._take(self._stream.push(token_id), may_stop))

    def finish(self, may_stop: bool = True) -> str:
        """The text still held back; call once, when no token follows. `may_stop` as in push.

        The last bytes of a sequence may complete a stop string: look at `stop_reason` after it.
        """
        if self.stop_reason is not None:
            return ""
        text = self._take(self._stream.flush(), may_stop)
        rest, self._held = self._held, ""
        return self._show(text + rest)

    def _take(self, new: str, may_stop: bool) -> str:
        """Adds `new` to what is held and returns the part that no stop string can reach."""
        text = self._held + new
        if not may_stop:
            self._unstopped = len(text)
        ends = []
        for stop in self._stop:
            start = text.find(stop, max(self._unstopped - len(stop) + 1, 0))
            if start >= 0:
                ends.append((start + len(stop), start, stop))
        if ends:
            end, start, self.stop_reason = min(ends)
            self._held = ""
            return text[: end if self._include_stop else start]
        # A stop string that is complete in the held text is none, so one character less than the
        # longest is the most that can be held.
        longest = max(map(len, self._stop), default=1) - 1
        start = max(len(text) - longest, 0)
        while not any(stop.startswith(text[start:]) for stop in self._stop) and start < len(text):
            start += 1
        self._held = text[start:]
        self._unstopped = max(self._unstopped - start, 0)
        return text[:start]

    def _show(self, text: str) -> str:
        self._shown.append(text)
        return text


@dataclass(frozen=True)
class CompletionOutput:
    """One generated sequence.

    Attributes:
        index: its number within the request.
        text: the text, cut right before the stop string that ended it.
        token_ids: every generated token, those past the cut included.
        finish_reason: stop = end token, stop token or stop string; length = budget spent;
            abort = cancelled; deadline = out of time; error = it could not go on.
        stop_reason: the stop string or stop token id that ended it, None for anything else.
        logprobs: one entry per token when asked for.
        error: what went wrong, with finish_reason error.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    stop_reason: str | int | None
    logprobs: "list[TokenLogprobs] | None"
    error: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON, see RequestOutput."""
        return {
            "index": self.index,
            "text": self.text,
            "token_ids": list(self.token_ids),
            "finish_reason": self.finish_reason,
            "stop_reason": self.stop_reason,
            "error": self.error,
            "logprobs": _plain(self.logprobs),
        }


@dataclass(frozen=True)
class Usage:
    """Tokens that a request took; cached_tokens of the prompt came from the prefix cache."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0


@dataclass(frozen=True)
class RequestOutput:
    """The complete reply to one request.

    Attributes:
        request_id: the request.
        prompt: its text, None when it came as token ids.
        prompt_token_ids: its tokens.
        outputs: the generated sequences.
        prompt_logprobs: one entry per prompt token when asked for, None for the first.
        usage: token counts.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: "list[TokenLogprobs | None] | None"
    usage: Usage

    def to_dict(self) -> dict[str, Any]:
        """The reply as plain values for JSON.

        Keys: request_id, prompt, prompt_token_ids, prompt_logprobs, usage {prompt_tokens,
        completion_tokens, cached_tokens}, and those of the completion: index, text, token_ids,
        finish_reason, stop_reason, error, logprobs; of several completions `outputs`, a list of
        these. A log-probability entry is {token_id, logprob, rank, top: [[token id, logprob],
        ...]}; JSON has no infinity, so a logprob of -inf is None.
        """
        outputs = [completion.to_dict() for completion in self.outputs]
        return {
            "request_id": self.request_id,
            "prompt": self.prompt,
            "prompt_token_ids": list(self.prompt_token_ids),
            **(outputs[0] if len(outputs) == 1 else {"outputs": outputs}),
            "prompt_logprobs": _plain(self.prompt_logprobs),
            "usage": asdict(self.usage),
        }


@dataclass(frozen=True)
class StreamChunk:
    """What one step added to one sequence of a request.

    Attributes:
        request_id: the request.
        index: the sequence's number within it.
        text: new text, perhaps "": text may lag behind the tokens.
        token_ids: new tokens.
        logprobs: one entry per new token when asked for.
        finish_reason: set on the last chunk, None before.
        stop_reason, error: as in CompletionOutput.
    """

    request_id: str
    index: int
    text: str
    token_ids: list[int]
    logprobs: "list[TokenLogprobs] | None"
    finish_reason: FinishReason | None
    stop_reason: str | int | None
    error: str | None = None


def _plain(entries: "Sequence[TokenLogprobs | None] | None") -> list[dict[str, Any] | None] | None:
    if entries is None:
        return None
    return [None if entry is None else _plain_entry(entry) for entry in entries]


def _plain_entry(entry: "TokenLogprobs") -> dict[str, Any]:
    return {
        "token_id": entry.token_id,
        "logprob": _finite(entry.logprob),
        "rank": entry.rank,
        "top": [[token_id, _finite(logprob)] for token_id, logprob in entry.top],
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
