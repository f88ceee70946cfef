"""Every sampling parameter has its effect on what an engine gives back, whatever runs beside it.

Tokens are known from recomputing the sequence for each of them and from the definitions.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from deepinfer import LLM, SamplingParams
from deepinfer.engine.loading import Loaded
from deepinfer.engine.output import CompletionOutput
from deepinfer.errors import RequestError
from deepinfer.sampling.structured import StructuredOutput
from deepinfer.testing.draws import token_logprobs
from tests.cpu.engine_helpers import assert_idle, logits_after, small_llm
from tests.cpu.model_helpers import loaded
from tests.cpu.sampling_helpers import Told, expected_token

PROMPT = [0, 57, 91, 33, 57, 64, 31, 77, 250, 41, 98]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}, "b": {"enum": ["x", 1]}},
    "required": ["a", "b"],
}  # fmt: skip


@pytest.fixture(scope="module")
def model(small_folder: Path) -> Loaded:
    return loaded(small_folder)


@pytest.fixture(scope="module")
def shared_llm(small_folder: Path) -> LLM:
    return small_llm(small_folder)


@pytest.fixture
def llm(shared_llm: LLM) -> Iterator[LLM]:
    """The engine, which every test must leave idle."""
    yield shared_llm
    assert_idle(shared_llm)


def complete(llm: LLM, **params: Any) -> CompletionOutput:
    return llm.generate(PROMPT, SamplingParams(**params))[0].outputs[0]


def slow_ids(model: Loaded, params: SamplingParams, eos: int) -> list[int]:
    """The tokens after PROMPT, up to an end token."""
    one = Told(params, params.seed or 0, PROMPT, eos=eos)
    while len(one.output) < params.budget:
        one.output.append(expected_token(logits_after(model, PROMPT + one.output)[-1], one))
        if one.output[-1] in params.end_tokens(eos):
            break
    return one.output


CASES: list[dict[str, Any]] = [
    {"repetition_penalty": 1.8},
    {"presence_penalty": 0.5, "frequency_penalty": 0.25, "allowed_token_ids": [7, 9, 250, 300]},
    {"frequency_penalty": -2.0, "temperature": 0.0},
    {"logit_bias": {7: 9.0, 9: 9.5, 250: -100.0}, "temperature": 0.3},
    {"allowed_token_ids": [7, 250, 41, 300], "temperature": 2.0},
    {"allowed_token_ids": [7, 1], "min_tokens": 3, "temperature": 2.0, "stop_token_ids": [1]},
    {"banned_token_ids": [*range(400), 401], "top_k": 30, "top_p": 0.9, "min_p": 0.01},
]


def test_each_parameter_beside_all_others(llm: LLM, model: Loaded) -> None:
    """Three at a time, chunks of prompts between them, preemption included: the cache is small."""
    eos = llm.model_config.eos_token_id
    params = [SamplingParams(max_tokens=8, seed=number, **case)
              for number, case in enumerate(CASES)]  # fmt: skip
    expected = [slow_ids(model, one, eos) for one in params]
    replies = llm.generate([PROMPT] * len(params), params)
    assert [reply.outputs[0].token_ids for reply in replies] == expected
    for case, ids in zip(CASES, expected, strict=True):
        plain = SamplingParams(max_tokens=8, seed=expected.index(ids),
                               temperature=case.get("temperature", 1.0))  # fmt: skip
        assert ids != slow_ids(model, plain, eos), f"{case} has no effect: choose another value"


def test_log_probabilities_are_those_of_the_model(llm: LLM, model: Loaded) -> None:
    bent = {"repetition_penalty": 2.0, "logit_bias": {9: 5.0}, "banned_token_ids": [250], "seed": 3}
    output = complete(llm, max_tokens=6, logprobs=2, **bent)
    ids, logits = output.token_ids, logits_after(model, PROMPT + output.token_ids)
    assert output.logprobs is not None
    for place, (token, entry) in enumerate(zip(ids, output.logprobs, strict=True)):
        row = logits[len(PROMPT) - 1 + place]
        (expected,) = token_logprobs(row[None], row.new_tensor([token]).long(), 2)
        assert entry.logprob == pytest.approx(expected.logprob, abs=1e-5)
        assert (entry.token_id, entry.rank) == (token, expected.rank)
        assert [t for t, _ in entry.top] == [t for t, _ in expected.top]


def test_several_replies_are_requests_with_the_next_seeds(llm: LLM) -> None:
    several = llm.generate(PROMPT, SamplingParams(max_tokens=9, n=4, seed=2**64 - 2, logprobs=1))[0]
    assert [output.index for output in several.outputs] == [0, 1, 2, 3]
    for output, seed in zip(several.outputs, (2**64 - 2, 2**64 - 1, 0, 1), strict=True):
        alone = complete(llm, max_tokens=9, seed=seed, logprobs=1)
        assert (output.token_ids, output.text) == (alone.token_ids, alone.text)
        assert output.logprobs == alone.logprobs
    assert len({tuple(output.token_ids) for output in several.outputs}) == 4
    assert several.usage.completion_tokens == sum(len(x.token_ids) for x in several.outputs)


def test_without_max_tokens_all_that_fits(llm: LLM) -> None:
    output = complete(llm, max_tokens=None, temperature=0.0, ignore_eos=True)
    assert len(PROMPT) + len(output.token_ids) == llm.config.max_model_len
    assert output.finish_reason == "length"


def test_stop_strings_and_min_tokens(llm: LLM) -> None:
    """A stop string that the first tokens complete is none; it may stay in the text."""
    whole = complete(llm, max_tokens=12, seed=9, ignore_eos=True)
    pieces = [llm.tokenizer.decode([token]) for token in whole.token_ids]
    place = next(i for i in range(2, 12) if pieces[i].strip() and pieces[i].isascii())
    stop = pieces[place]
    assert whole.text.count(stop) == 1, "choose another seed"
    base: dict[str, Any] = {"max_tokens": 12, "seed": 9, "ignore_eos": True, "stop": stop}
    before = whole.text[: whole.text.index(stop)]
    assert complete(llm, **base).text == before
    assert complete(llm, **base, min_tokens=place).text == before
    assert complete(llm, **base, include_stop_str_in_output=True).text == before + stop
    late = complete(llm, **base, min_tokens=place + 1)
    assert (late.text, late.finish_reason, late.stop_reason) == (whole.text, "length", None)


def test_special_tokens_in_the_text(llm: LLM) -> None:
    special = llm.model_config.bos_token_id
    name = llm.tokenizer.token_text(special)
    base: dict[str, Any] = {"max_tokens": 3, "temperature": 0.0, "allowed_token_ids": [special]}
    assert complete(llm, **base).text == ""
    assert complete(llm, **base, skip_special_tokens=False).text == name * 3


# Structured output


def test_forms_beside_free_texts(llm: LLM) -> None:
    """Each text has its form, several replies too, and the others are what they are alone."""
    free = SamplingParams(max_tokens=20, seed=4, ignore_eos=True)
    forms = [
        StructuredOutput(json_schema=SCHEMA),
        StructuredOutput(regex="[ab]{2,6}c"),
        StructuredOutput(ebnf='root ::= "(" root ")" | "x"'),
    ]
    bound = [SamplingParams(max_tokens=60, n=2, seed=i, structured=x) for i, x in enumerate(forms)]
    alone = [complete(llm, max_tokens=20, seed=4, ignore_eos=True).token_ids]
    replies = llm.generate([PROMPT] * 4, [bound[0], free, bound[1], bound[2]])
    assert [output.token_ids for output in replies[1].outputs] == alone
    for reply, kind in ((replies[0], "json"), (replies[2], "[ab]{2,6}c"), (replies[3], r"\(*x\)*")):
        for output in reply.outputs:
            assert output.finish_reason == "stop", output
            if kind == "json":
                jsonschema.validate(json.loads(output.text), SCHEMA)
            else:
                assert re.fullmatch(kind, output.text)


def test_thinking_then_a_form(llm: LLM) -> None:
    """Before the end of thinking anything but the end of the text, after it the form."""
    end = llm.tokenizer.inner.token_to_id("</think>")
    form = StructuredOutput(choice=["yes", "no"], after_thinking=True)
    biases = {end: 5.0, llm.model_config.eos_token_id: 100.0}
    output = complete(llm, max_tokens=80, seed=1, structured=form, logit_bias=biases)
    assert output.token_ids.count(end) >= 1
    place = output.token_ids.index(end)
    assert place > 0
    assert llm.tokenizer.decode(output.token_ids[place + 1 :]) in ("yes", "no")
    assert output.finish_reason == "stop"


def test_a_form_that_cannot_be_compiled_refuses_its_own_request(llm: LLM) -> None:
    fine = llm.stream(PROMPT, SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True))
    first = next(fine)
    bad = SamplingParams(structured=StructuredOutput(ebnf="root ::= nothing"))
    with pytest.raises(RequestError, match="cannot be compiled"):
        llm.generate(PROMPT, bad)
    assert len([first, *fine]) == 4


def test_a_form_and_bans_that_leave_nothing_end_in_an_error(llm: LLM) -> None:
    form = StructuredOutput(choice=["a"])
    token = llm.tokenizer.encode("a", None)
    output = complete(llm, structured=form, banned_token_ids=token)
    assert (output.finish_reason, output.token_ids) == ("error", [])
    assert output.error is not None
    assert "nothing may be drawn" in output.error
