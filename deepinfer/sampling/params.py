"""What one request asks of sampling, checked when it is made.

Knows names, defaults and legal values; must not know torch, tokenizers or the engine.
"""

import dataclasses
import difflib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, Self

from deepinfer.errors import RequestError

# Most alternatives per token that a reply may carry.
MAX_LOGPROBS = 20


@dataclass(frozen=True)
class SamplingParams:
    """How the tokens of one request are chosen, and when it ends.

    Attributes:
        max_tokens: most tokens to generate, >= 1.
        temperature: logits are divided by it, >= 0; 0 = always the most likely token.
        top_k: only the k most likely tokens may be drawn; 0 or -1 = no limit.
        top_p: only the smallest set of most likely tokens whose mass reaches it; in (0, 1].
        min_p: tokens below min_p times the largest probability are dropped; in [0, 1].
        seed: key of the random draws, in [0, 2^64); None = the engine picks one.
        stop: a string or several that end the text, cut right before; a tuple afterwards.
        stop_token_ids: tokens that end the request besides the end-of-sequence token.
        ignore_eos: the end-of-sequence token does not end the request.
        logprobs: alternatives reported with every generated token, 0..20; None = no report.
        prompt_logprobs: the same for the tokens of the prompt.

    Raises:
        RequestError: a value has the wrong type or is out of range.
    """

    max_tokens: int = 16
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    def __post_init__(self) -> None:
        _check_int("max_tokens", self.max_tokens, low=1)
        _check_int("top_k", self.top_k, low=-1)
        _check_number("temperature", self.temperature, "a finite number >= 0")
        if self.temperature < 0:
            _refuse("temperature", self.temperature, "a finite number >= 0")
        _check_number("top_p", self.top_p, "a number in (0, 1]")
        if not 0 < self.top_p <= 1:
            _refuse("top_p", self.top_p, "a number in (0, 1]; 1 turns it off")
        _check_number("min_p", self.min_p, "a number in [0, 1]")
        if not 0 <= self.min_p <= 1:
            _refuse("min_p", self.min_p, "a number in [0, 1]; 0 turns it off")
        if self.seed is not None:
            _check_int("seed", self.seed, low=0, high=2**64 - 1)
        if not isinstance(self.ignore_eos, bool):
            _refuse("ignore_eos", self.ignore_eos, "true or false")
        if self.logprobs is not None:
            _check_int("logprobs", self.logprobs, low=0, high=MAX_LOGPROBS)
        if self.prompt_logprobs is not None:
            _check_int("prompt_logprobs", self.prompt_logprobs, low=0, high=MAX_LOGPROBS)
        object.__setattr__(self, "stop", _stop_strings(self.stop))
        object.__setattr__(self, "stop_token_ids", _stop_tokens(self.stop_token_ids))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """The parameters that `values` names, defaults elsewhere.

        Raises:
            RequestError: a name is unknown (the message names the nearest known one), or a value
                is out of range.
        """
        known = [field.name for field in dataclasses.fields(cls)]
        for name in values:
            if name not in known:
                near = difflib.get_close_matches(str(name), known, n=1, cutoff=0.0)[0]
                raise RequestError(
                    f"sampling parameter {name!r} is unknown; did you mean {near!r}? "
                    f"Known: {', '.join(known)}"
                )
        return cls(**values)


def _refuse(name: str, value: object, expected: str) -> NoReturn:
    raise RequestError(f"sampling parameter {name} = {value!r}: expected {expected}")


def _is_int(value: object) -> bool:
    """Whether `value` is a whole number; bool is not, though Python derives it from int."""
    return isinstance(value, int) and not isinstance(value, bool)


def _check_int(name: str, value: int, low: int, high: int | None = None) -> None:
    expected = f"a whole number >= {low}" if high is None else f"a whole number in {low}..{high}"
    if not _is_int(value) or value < low or (high is not None and value > high):
        _refuse(name, value, expected)


def _check_number(name: str, value: float, expected: str) -> None:
    if not (_is_int(value) or isinstance(value, float)):
        _refuse(name, value, expected)
    try:
        finite = math.isfinite(value)
    except OverflowError:  # a whole number past the largest float
        finite = False
    if not finite:
        _refuse(name, value, expected)


def _stop_strings(stop: str | Sequence[str]) -> tuple[str, ...]:
    expected = "a string or a list of strings, none of them empty"
    strings = [stop] if isinstance(stop, str) else stop
    if not isinstance(strings, list | tuple):
        _refuse("stop", stop, expected)
    for string in strings:
        if not isinstance(string, str) or not string:
            _refuse("stop", stop, expected)
    return tuple(strings)


def _stop_tokens(ids: Sequence[int]) -> tuple[int, ...]:
    expected = "a list of token ids >= 0"
    if not isinstance(ids, list | tuple):
        _refuse("stop_token_ids", ids, expected)
    for token_id in ids:
        if not _is_int(token_id) or token_id < 0:
            _refuse("stop_token_ids", ids, expected)
    return tuple(ids)
