"""What one request asks of sampling, checked when it is made.

Knows names, defaults and legal values; must not know torch, tokenizers or the engine.
"""

import dataclasses
import difflib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, Self

from deepinfer.errors import RequestError
from deepinfer.sampling.structured import StructuredOutput

# Most alternatives per token that a reply may carry, and most sequences of one request.
MAX_LOGPROBS = 20
MAX_N = 128

# Legal values: whole numbers from - to (None: no end), and numbers with the test that they pass.
_WHOLE: dict[str, tuple[int, int | None]] = {
    "max_tokens": (1, None), "n": (1, MAX_N), "min_tokens": (0, None), "top_k": (-1, None),
    "seed": (0, 2**64 - 1), "logprobs": (0, MAX_LOGPROBS), "prompt_logprobs": (0, MAX_LOGPROBS),
}  # fmt: skip
_MAY_BE_NONE = ("max_tokens", "seed", "logprobs", "prompt_logprobs")
_NUMBERS: dict[str, tuple[Callable[[float], bool], str]] = {
    "temperature": (lambda x: x >= 0, "a finite number >= 0"),
    "top_p": (lambda x: 0 < x <= 1, "a number in (0, 1]; 1 turns it off"),
    "min_p": (lambda x: 0 <= x <= 1, "a number in [0, 1]; 0 turns it off"),
    "repetition_penalty": (lambda x: 0.01 <= x <= 100, "a number in [0.01, 100]; 1 turns it off"),
    "presence_penalty": (lambda x: -2 <= x <= 2, "a number in [-2, 2]; 0 turns it off"),
    "frequency_penalty": (lambda x: -2 <= x <= 2, "a number in [-2, 2]; 0 turns it off"),
}
_SWITCHES = ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens")

LogitBias = Mapping[int, float] | Sequence[tuple[int, float]]


@dataclass(frozen=True)
class SamplingParams:
    """How the tokens of one request are chosen, and when it ends.

    Logits pass through penalties, then biases, then what forbids tokens, then temperature, then
    top_k, top_p and min_p, in this order; log-probabilities are of the logits before all of it.

    Attributes:
        max_tokens: most tokens to generate, >= 1; None = as many as max_model_len leaves.
        n: sequences to generate, 1..128; sequence i draws as a request of its own with seed + i.
        min_tokens: until so many tokens are there, nothing ends the text: end tokens cannot be
            drawn, stop strings that end before are none.
        temperature: logits are divided by it, >= 0; 0 = always the most likely token.
        top_k: only the k most likely tokens may be drawn; 0 or -1 = no limit.
        top_p: only the smallest set of most likely tokens whose mass reaches it; in (0, 1].
        min_p: tokens below min_p times the largest probability are dropped; in [0, 1].
        repetition_penalty: logits of tokens of prompt or text are divided by it where positive,
            multiplied where not; > 0, 1 = off.
        presence_penalty: taken from the logits of tokens of the text; in [-2, 2].
        frequency_penalty: the same, times how often the token is there; in [-2, 2].
        logit_bias: added to logits, {token id: -100..100}; pairs afterwards.
        allowed_token_ids: only these may be drawn, end tokens included; None = all.
        banned_token_ids: these are never drawn.
        structured: the form that the text must have; None = any.
        seed: key of the random draws, in [0, 2^64); None = the engine picks one.
        stop: a string or several that end the text, cut right before; a tuple afterwards.
        stop_token_ids: tokens that end the request besides the end-of-sequence token.
        ignore_eos: the end-of-sequence token does not end the request.
        include_stop_str_in_output: the text is cut right after the stop string instead.
        skip_special_tokens: special tokens leave no trace in the text.
        logprobs: alternatives reported with every generated token, 0..20; None = no report.
        prompt_logprobs: the same for the tokens of the prompt.

    Raises:
        RequestError: a value has the wrong type or is out of range, or two exclude each other.
    """

    max_tokens: int | None = 16
    n: int = 1
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: LogitBias = ()
    allowed_token_ids: Sequence[int] | None = None
    banned_token_ids: Sequence[int] = ()
    structured: StructuredOutput | None = None
    seed: int | None = None
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    def __post_init__(self) -> None:
        for name, (low, high) in _WHOLE.items():
            if not (getattr(self, name) is None and name in _MAY_BE_NONE):
                _check_whole(name, getattr(self, name), low, high)
        for name, (legal, expected) in _NUMBERS.items():
            _check_number(name, getattr(self, name), expected)
            if not legal(getattr(self, name)):
                _refuse(name, getattr(self, name), expected)
        for name in _SWITCHES:
            if not isinstance(getattr(self, name), bool):
                _refuse(name, getattr(self, name), "true or false")
        normal: dict[str, Any] = {
            "stop": _stop_strings(self.stop),
            "stop_token_ids": _token_ids("stop_token_ids", self.stop_token_ids),
            "banned_token_ids": _token_ids("banned_token_ids", self.banned_token_ids),
            "logit_bias": _biases(self.logit_bias),
            "structured": _structured(self.structured),
        }
        if self.allowed_token_ids is not None:
            normal["allowed_token_ids"] = _token_ids("allowed_token_ids", self.allowed_token_ids)
        for name, value in normal.items():
            object.__setattr__(self, name, value)
        self._check_together()

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """The parameters that `values` names, defaults elsewhere.

        `structured` may be a mapping of the fields of StructuredOutput.

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

    @property
    def budget(self) -> int:
        """max_tokens of parameters that `for_prompt` made."""
        assert self.max_tokens is not None, "for_prompt says how many tokens there may be"
        return self.max_tokens

    @property
    def has_penalties(self) -> bool:
        """Whether logits depend on which tokens were seen."""
        neutral = (self.repetition_penalty, self.presence_penalty, self.frequency_penalty)
        return neutral != (1, 0, 0)

    def end_tokens(self, eos_token_id: int) -> frozenset[int]:
        """Tokens that end the request when they are drawn."""
        return frozenset(self.stop_token_ids) | (frozenset() if self.ignore_eos else {eos_token_id})

    def for_prompt(self, prompt_tokens: int, max_model_len: int) -> Self:
        """The same with max_tokens decided.

        Raises:
            RequestError: the prompt and max_tokens, or one token, are longer than max_model_len.
        """
        wanted = 1 if self.max_tokens is None else self.max_tokens
        if prompt_tokens + wanted > max_model_len:
            what = f"max_tokens = {wanted}" if self.max_tokens is not None else "1"
            raise RequestError(
                f"{prompt_tokens} prompt tokens + {what} make {prompt_tokens + wanted};"
                f" expected at most max_model_len = {max_model_len}"
            )
        if self.max_tokens is not None:
            return self
        return dataclasses.replace(self, max_tokens=max_model_len - prompt_tokens)

    def check_vocabulary(self, vocab_size: int, eos_token_id: int) -> None:
        """Refuse token ids that the model does not have, and what leaves no token to draw.

        Raises:
            RequestError: an id is not below vocab_size; or every token is forbidden, always or
                until min_tokens are there.
        """
        listed = {
            "stop_token_ids": self.stop_token_ids,
            "banned_token_ids": self.banned_token_ids,
            "allowed_token_ids": self.allowed_token_ids or (),
            "logit_bias": [token for token, _ in self.bias_pairs],
        }
        for name, ids in listed.items():
            wrong = [token for token in ids if token >= vocab_size]
            if wrong:
                raise RequestError(f"{name} has {wrong[0]}; expected ids < {vocab_size}")
        forbidden = set(self.banned_token_ids)
        if self.min_tokens:
            forbidden |= self.end_tokens(eos_token_id)
        allowed = self.allowed_token_ids
        left = vocab_size - len(forbidden) if allowed is None else len(set(allowed) - forbidden)
        if left < 1:
            early = f" before min_tokens = {self.min_tokens} are there" if self.min_tokens else ""
            raise RequestError(
                f"allowed_token_ids and banned_token_ids leave no token to draw{early}; allow more"
            )

    @property
    def bias_pairs(self) -> tuple[tuple[int, float], ...]:
        """logit_bias as it is kept: (token id, bias)."""
        assert isinstance(self.logit_bias, tuple)
        return self.logit_bias

    def _check_together(self) -> None:
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            _refuse("min_tokens", self.min_tokens, f"at most max_tokens = {self.max_tokens}")
        if self.allowed_token_ids == ():
            _refuse("allowed_token_ids", [], "at least one token id, or null for all")
        if self.structured is None:
            return
        if self.min_tokens:
            _refuse("min_tokens", self.min_tokens, "0 where structured decides when the text ends")
        if self.ignore_eos:
            _refuse("ignore_eos", True, "false where structured decides when the text ends")


def sequence_seed(seed: int, index: int) -> int:
    """The key of the draws of sequence `index` of a request: seed + index, modulo 2^64."""
    return (seed + index) % 2**64


def _refuse(name: str, value: object, expected: str) -> NoReturn:
    raise RequestError(f"sampling parameter {name} = {value!r:.200}: expected {expected}")


def _is_whole(value: object) -> bool:
    """Whether `value` is a whole number; bool is not, though Python derives it from int."""
    return isinstance(value, int) and not isinstance(value, bool)


def _check_whole(name: str, value: int, low: int, high: int | None) -> None:
    expected = f"a whole number >= {low}" if high is None else f"a whole number in {low}..{high}"
    if not _is_whole(value) or value < low or (high is not None and value > high):
        _refuse(name, value, expected)


def _check_number(name: str, value: float, expected: str) -> None:
    if not (_is_whole(value) or isinstance(value, float)):
        _refuse(name, value, expected)
    try:
        finite = math.isfinite(value)
    except OverflowError:  # a whole number past the largest float
        finite = False
    if not finite:
        _refuse(name, value, expected)


def _stop_strings(stop: str | Sequence[str]) -> tuple[str, ...]:
    expected = "a string or a list of strings, none of them empty, of valid Unicode"
    strings = [stop] if isinstance(stop, str) else stop
    if not isinstance(strings, list | tuple):
        _refuse("stop", stop, expected)
    for string in strings:
        if not isinstance(string, str) or not string or not _is_text(string):
            _refuse("stop", stop, expected)
    return tuple(strings)


def _is_text(string: str) -> bool:
    """Whether a decoder can give this string: it has no half of a surrogate pair."""
    return not any("\ud800" <= character <= "\udfff" for character in string)


def _token_ids(name: str, ids: Sequence[int]) -> tuple[int, ...]:
    expected = "a list of token ids >= 0"
    if not isinstance(ids, list | tuple):
        _refuse(name, ids, expected)
    for token_id in ids:
        if not _is_whole(token_id) or token_id < 0:
            _refuse(name, ids, expected)
    return tuple(ids)


def _biases(bias: LogitBias) -> tuple[tuple[int, float], ...]:
    expected = "{token id: number in [-100, 100]}, no id twice"
    pairs = list(bias.items()) if isinstance(bias, Mapping) else bias
    if not isinstance(pairs, list | tuple):
        _refuse("logit_bias", bias, expected)
    for pair in pairs:
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            _refuse("logit_bias", bias, expected)
        token, value = pair
        if not _is_whole(token) or token < 0:
            _refuse("logit_bias", bias, expected)
        _check_number("logit_bias", value, expected)
        if not -100 <= value <= 100:
            _refuse("logit_bias", bias, expected)
    if len({token for token, _ in pairs}) < len(pairs):
        _refuse("logit_bias", bias, expected)
    return tuple((token, float(value)) for token, value in pairs)


def _structured(value: object) -> StructuredOutput | None:
    if value is None or isinstance(value, StructuredOutput):
        return value
    if isinstance(value, Mapping):
        return StructuredOutput.from_dict(value)
    _refuse("structured", value, "one of json_schema, regex, ebnf and choice")
