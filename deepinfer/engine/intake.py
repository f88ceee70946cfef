"""From a prompt and parameters to a request that can be queued.

Knows tokenizer, limits and grammars; must not know the loop.
"""

import random
import sys
from collections.abc import Sequence
from itertools import count
from typing import cast

from deepinfer.engine.loading import Loaded
from deepinfer.engine.output import OutputText
from deepinfer.engine.request import Completion, Request, check_request
from deepinfer.engine.sequence import Sequence as TokenSequence
from deepinfer.errors import RequestError
from deepinfer.sampling.grammar import GrammarCompiler
from deepinfer.sampling.params import SamplingParams, sequence_seed

Prompt = str | Sequence[int]


class Intake:
    """Makes the requests of one engine; may be used by several threads."""

    def __init__(self, loaded: Loaded, grammars: GrammarCompiler) -> None:
        self._grammars = grammars
        self._config = loaded.config
        self._model = loaded.model_config
        self._tokenizer = loaded.tokenizer
        self._numbers = count(1)

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`, with the begin-of-sentence token in front."""
        return self._tokenizer.encode(text, self._model.bos_token_id)

    def request(
        self, prompt: Prompt, params: SamplingParams, priority: int = 0,
        timeout: float | None = None,
    ) -> Request:  # fmt: skip
        """A checked request with an id of its own.

        Args:
            priority: lower numbers are served first.
            timeout: seconds from its queueing in which it has to end.

        Raises:
            RequestError: the prompt or a parameter cannot be served, or its grammar not compiled.
        """
        if not isinstance(params, SamplingParams):
            raise RequestError(f"sampling parameters {params!r}; expected SamplingParams")
        if type(priority) is not int:
            raise RequestError(f"priority {priority!r}; expected a whole number")
        if timeout is not None and not _is_seconds(timeout):
            raise RequestError(f"timeout {timeout!r:.60}; expected seconds, more than 0")
        text = prompt if isinstance(prompt, str) else None
        if text == "":
            raise RequestError("the prompt is empty; expected at least one character")
        ids = self.encode(prompt) if isinstance(prompt, str) else as_ids(prompt)
        check_request(ids, params, self._config, self._model)
        params = params.for_prompt(len(ids), self._config.max_model_len)
        grammar = None
        if params.structured is not None:
            grammar = self._grammars.compile(params.structured)
            grammar.wait()
        seed = random.getrandbits(64) if params.seed is None else params.seed
        request = Request(str(next(self._numbers)), text, ids, params)
        for index in range(params.n):
            decoder = self._tokenizer.stream(params.skip_special_tokens)
            output = OutputText(decoder, list(params.stop), params.include_stop_str_in_output)
            sequence = TokenSequence(
                request.request_id, list(ids), len(ids) + params.budget, index, priority, timeout,
                reuse=params.prompt_logprobs is None,
            )  # fmt: skip
            state = None if grammar is None else grammar.state()
            completion = Completion(request, index, sequence_seed(seed, index), output, sequence,
                                    state)  # fmt: skip
            request.completions.append(completion)
        return request


def _is_seconds(timeout: object) -> bool:
    """Whether this is a number above 0 that a clock can count to."""
    return type(timeout) in (int, float) and 0 < cast("float", timeout) <= sys.float_info.max


def as_ids(prompt: Sequence[int]) -> list[int]:
    """A prompt of token ids as a list.

    Raises:
        RequestError: it is no sequence, or one of bytes or characters.
    """
    if not _is_list(prompt):
        raise RequestError(f"prompt {prompt!r:.60}; expected a text or a list of ids")
    return list(prompt)


def _is_list(given: object) -> bool:
    """Whether this is a sequence, but not of characters or bytes."""
    return isinstance(given, Sequence) and not isinstance(given, str | bytes | bytearray)


def as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or several as a list of them."""
    if isinstance(prompts, str):
        return [prompts]
    several = as_ids(cast("Sequence[int]", prompts))
    if several and not any(isinstance(item, Sequence) for item in several):
        return [several]  # token ids, or what will be refused as such
    return cast("list[Prompt]", several)


def is_conversation(messages: Sequence[object]) -> bool:
    """Whether these are the messages of one conversation, not several conversations.

    Raises:
        RequestError: they are neither.
    """
    if not _is_list(messages):
        raise RequestError(f"messages {messages!r:.60}; expected a list of messages")
    return all(isinstance(item, dict) for item in messages)


def params_for(
    prompts: list[Prompt], params: SamplingParams | Sequence[SamplingParams] | None
) -> list[SamplingParams]:
    """Parameters of each prompt: the same for all, one for each, or defaults.

    Raises:
        RequestError: there are others than one for each.
    """
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
