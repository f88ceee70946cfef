"""The Python entry point: every parameter of a request has its effect, every mistake its message.

What tokens are right is known from recomputing the sequence; the engine is as scarce as in
test_engine.py, so prompts run in chunks of 16 and at most three requests at a time.
"""

import dataclasses
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import deepinfer
from deepinfer import LLM, SamplingParams, create_llm
from deepinfer.config import EngineOptions, VisionConfig
from deepinfer.engine.loading import Loaded
from deepinfer.engine.output import CompletionOutput
from deepinfer.errors import CheckpointError, ConfigError, RequestError, TokenizerError
from deepinfer.sampling.logprobs import TokenLogprobs
from deepinfer.testing.draws import token_logprobs
from tests.cpu.engine_helpers import (
    GREEDY,
    assert_idle,
    ids_of,
    logits_after,
    slow_ids,
    small_llm,
)
from tests.cpu.model_helpers import loaded, random_ids

PROMPT = [0, 57, 91, 33, 120, 64, 31, 77, 250, 41, 98]


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


@pytest.fixture(scope="module")
def greedy(model: Loaded) -> list[int]:
    """The 16 most likely tokens after PROMPT."""
    return slow_ids(model, PROMPT, SamplingParams(max_tokens=16, **GREEDY))


def complete(llm: LLM, **params: Any) -> CompletionOutput:
    """The reply to PROMPT, whose stream must say the same."""
    sampling = SamplingParams(**params)
    reply = llm.generate(PROMPT, sampling)[0]
    output = reply.outputs[0]
    assert reply.usage.completion_tokens == len(output.token_ids)
    if sampling.seed is not None or sampling.temperature == 0:
        chunks = list(llm.stream(PROMPT, sampling))
        assert "".join(chunk.text for chunk in chunks) == output.text
        assert [token for chunk in chunks for token in chunk.token_ids] == output.token_ids
        assert [chunk.finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
        assert (chunks[-1].finish_reason, chunks[-1].stop_reason) == (
            output.finish_reason, output.stop_reason
        )  # fmt: skip
        if output.logprobs is not None:
            streamed = [entry for chunk in chunks for entry in chunk.logprobs or ()]
            assert streamed == output.logprobs
    return output


# What ends a request


@pytest.mark.parametrize("count", [1, 2, 16])
def test_max_tokens(llm: LLM, greedy: list[int], count: int) -> None:
    output = complete(llm, max_tokens=count, **GREEDY)
    assert output.token_ids == greedy[:count]
    assert (output.finish_reason, output.stop_reason) == ("length", None)
    assert output.text == llm.tokenizer.decode(greedy[:count])


def first_new(ids: list[int], start: int) -> int:
    """The place of the first token from `start` on that has not come before."""
    return next(i for i in range(start, len(ids)) if ids[i] not in ids[:i])


@pytest.fixture
def ending(llm: LLM, greedy: list[int], monkeypatch: pytest.MonkeyPatch) -> int:
    """Makes a token with text in the middle of the greedy reply the end token; its place."""
    place = first_new(greedy, 1)
    while llm.tokenizer.decode([greedy[place]]) == "":
        place = first_new(greedy, place + 1)
    monkeypatch.setattr(llm.engine, "_eos", greedy[place])
    return place


def test_the_end_token_ends(llm: LLM, greedy: list[int], ending: int) -> None:
    """It counts as generated and has no text."""
    output = complete(llm, max_tokens=16, temperature=0.0)
    assert output.token_ids == greedy[: ending + 1]
    assert (output.finish_reason, output.stop_reason) == ("stop", None)
    assert output.text == llm.tokenizer.decode(greedy[:ending])


def test_the_end_token_as_the_last_allowed_one(llm: LLM, greedy: list[int], ending: int) -> None:
    assert complete(llm, max_tokens=ending + 1, temperature=0.0).finish_reason == "stop"
    assert complete(llm, max_tokens=ending, temperature=0.0).finish_reason == "length"


def test_ignore_eos(llm: LLM, greedy: list[int], ending: int) -> None:
    output = complete(llm, max_tokens=16, temperature=0.0, ignore_eos=True)
    assert (output.token_ids, output.finish_reason) == (greedy, "length")


def test_stop_token_ids(llm: LLM, greedy: list[int]) -> None:
    """The first that comes ends the reply, and is named."""
    early, late = first_new(greedy, 2), first_new(greedy, first_new(greedy, 2) + 1)
    stops = [greedy[late], greedy[early]]
    output = complete(llm, max_tokens=16, stop_token_ids=stops, **GREEDY)
    assert output.token_ids == greedy[: early + 1]
    assert (output.finish_reason, output.stop_reason) == ("stop", greedy[early])
    assert output.text == llm.tokenizer.decode(greedy[:early])


@pytest.fixture(scope="module")
def readable(shared_llm: LLM, model: Loaded) -> tuple[int, list[str]]:
    """A seed whose 16 drawn tokens are all text, and their texts."""
    for seed in range(100):
        ids = slow_ids(model, PROMPT, SamplingParams(max_tokens=16, seed=seed))
        pieces = [shared_llm.tokenizer.decode([token]) for token in ids]
        if all(piece and "\ufffd" not in piece for piece in pieces[4:8]) and len(
            shared_llm.tokenizer.decode(ids[4:8])
        ) == sum(map(len, pieces[4:8])):
            return seed, pieces
    raise AssertionError("no seed draws four tokens of text")


def test_stop_across_tokens(llm: LLM, model: Loaded, readable: tuple[int, list[str]]) -> None:
    """A stop string that begins in one token and ends in the next but one."""
    seed, pieces = readable
    stop = pieces[4][-1] + pieces[5] + pieces[6][:1]
    whole = complete(llm, max_tokens=16, seed=seed, ignore_eos=True)
    output = complete(llm, max_tokens=16, seed=seed, ignore_eos=True, stop=[stop, "never this"])
    assert stop in whole.text
    assert output.text == whole.text[: whole.text.index(stop)]
    assert (output.finish_reason, output.stop_reason) == ("stop", stop)
    assert output.token_ids == whole.token_ids[: len(output.token_ids)]
    assert stop in llm.tokenizer.decode(output.token_ids)
    assert stop not in llm.tokenizer.decode(output.token_ids[:-1])


# How tokens are chosen


def test_seeds(llm: LLM, model: Loaded) -> None:
    """A fixed seed repeats itself in any company, other seeds and no seed do not."""
    fixed = SamplingParams(max_tokens=12, seed=5, ignore_eos=True)
    other = SamplingParams(max_tokens=12, seed=6, ignore_eos=True)
    free = SamplingParams(max_tokens=12, ignore_eos=True)
    first, again, differs, one, two = ids_of(
        llm.generate([PROMPT] * 5, [fixed, fixed, other, free, free])
    )
    assert first == again == slow_ids(model, PROMPT, fixed)
    assert len({tuple(ids) for ids in (first, differs, one, two)}) == 4


def test_temperature(llm: LLM, model: Loaded, greedy: list[int]) -> None:
    """0 is the most likely token, a little above it hardly ever another, 5 nearly always."""
    assert complete(llm, max_tokens=16, **GREEDY).token_ids == greedy
    cold = complete(llm, max_tokens=16, temperature=1e-4, seed=1, ignore_eos=True)
    assert cold.token_ids == greedy
    hot = SamplingParams(max_tokens=16, temperature=5.0, seed=1, ignore_eos=True)
    assert ids_of(llm.generate(PROMPT, hot))[0] == slow_ids(model, PROMPT, hot) != greedy


@pytest.mark.parametrize("change", [{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}])
def test_filters_that_leave_one_token(llm: LLM, greedy: list[int], change: dict[str, Any]) -> None:
    output = complete(llm, max_tokens=16, temperature=3.0, seed=2, ignore_eos=True, **change)
    assert output.token_ids == greedy


def kept_by(name: str, value: float, logits: Tensor, token: int) -> bool:
    """Whether `token` is among those that a filter keeps of a row of logits [V]."""
    p = torch.softmax(logits.double(), -1)
    ahead = logits > logits[token]
    if name == "top_k":
        return ahead.sum().item() < value
    if name == "min_p":
        return p[token].item() >= value * p.max().item()
    return p[ahead].sum().item() < value


@pytest.mark.parametrize(("name", "value"), [("top_k", 3), ("top_p", 0.3), ("min_p", 0.3)])
def test_filters(llm: LLM, model: Loaded, name: str, value: float) -> None:
    """Every drawn token is one that the filter keeps; without it some are not."""
    base: dict[str, Any] = {"max_tokens": 30, "seed": 4, "ignore_eos": True}
    params = [SamplingParams(**base, **{name: value}), SamplingParams(**base)]
    kept = []
    for ids in ids_of(llm.generate([PROMPT] * 2, params)):
        rows = logits_after(model, PROMPT + ids)[len(PROMPT) - 1 : -1]
        kept.append([kept_by(name, value, *pair) for pair in zip(rows, ids, strict=True)])
    filtered, free = kept
    assert all(filtered)
    assert not all(free)


# Log-probabilities


def assert_reported(entries: list[TokenLogprobs], model: Loaded, ids: list[int], k: int) -> None:
    """Entries are those of the last len(entries) tokens of `ids` under recomputed logits."""
    logits = logits_after(model, ids)[-len(entries) - 1 : -1]
    chosen = torch.tensor(ids[-len(entries) :])
    exact = torch.log_softmax(logits, -1)[torch.arange(len(entries)), chosen].tolist()
    expected = token_logprobs(logits, chosen, k)
    for entry, wanted, value in zip(entries, expected, exact, strict=True):
        assert entry.token_id == wanted.token_id
        assert entry.rank == wanted.rank
        assert entry.logprob == pytest.approx(value, abs=1e-5)
        assert [token for token, _ in entry.top] == [token for token, _ in wanted.top]
        assert [p for _, p in entry.top] == pytest.approx([p for _, p in wanted.top], abs=1e-5)
        assert len(entry.top) == k


@pytest.mark.parametrize("k", [0, 1, 20])
def test_logprobs(llm: LLM, model: Loaded, k: int) -> None:
    """Of the model's own distribution: temperature and filters have no part in them."""
    output = complete(
        llm, max_tokens=8, seed=3, temperature=2.0, top_k=5, ignore_eos=True, logprobs=k
    )
    assert output.logprobs is not None
    assert_reported(output.logprobs, model, PROMPT + output.token_ids, k)
    assert complete(llm, max_tokens=2, **GREEDY).logprobs is None


@pytest.mark.parametrize("length", [1, 2, 16, 17, 40])
def test_prompt_logprobs(llm: LLM, model: Loaded, length: int) -> None:
    """Of a prompt in chunks of 16, with another request in the batch."""
    prompt = random_ids(model, length).tolist()
    asked = SamplingParams(max_tokens=3, prompt_logprobs=2, logprobs=1, **GREEDY)
    plain = SamplingParams(max_tokens=3, **GREEDY)
    other, reply = llm.generate([PROMPT, prompt], [plain, asked])
    assert other.prompt_logprobs is None
    assert reply.prompt_logprobs is not None
    first, *entries = reply.prompt_logprobs
    assert first is None
    assert len(entries) == length - 1
    found = [entry for entry in entries if entry is not None]
    if length > 1:
        assert_reported(found, model, prompt, 2)
    output = reply.outputs[0]
    assert output.logprobs is not None
    assert_reported(output.logprobs, model, prompt + output.token_ids, 1)


# Prompts, replies and streams


def test_prompts_of_every_kind(llm: LLM, greedy: list[int]) -> None:
    params = SamplingParams(max_tokens=2, **GREEDY)
    text = "A window of tokens"
    ids = llm.encode(text)
    assert ids[0] == llm.model_config.bos_token_id
    one = llm.generate(text, params)
    assert (one[0].prompt, one[0].prompt_token_ids) == (text, ids)
    several = llm.generate([text, PROMPT, tuple(PROMPT), range(20, 24)], params)
    assert [reply.prompt for reply in several] == [text, None, None, None]
    assert several[0].outputs[0].token_ids == one[0].outputs[0].token_ids
    assert ids_of(several)[1] == ids_of(several)[2] == greedy[:2]
    assert several[3].prompt_token_ids == [20, 21, 22, 23]
    assert (several[1].usage.prompt_tokens, several[1].usage.completion_tokens) == (11, 2)
    assert len({reply.request_id for reply in several}) == 4
    assert llm.generate([], params) == []
    assert llm.generate(PROMPT)[0].usage.completion_tokens <= SamplingParams().max_tokens


def test_interleaved_streams(llm: LLM, model: Loaded) -> None:
    """Two streams and a blocking call by turns: each gets what it would alone."""
    prompts = [PROMPT, random_ids(model, 40).tolist()]
    params = [SamplingParams(max_tokens=6, seed=seed, ignore_eos=True) for seed in (1, 2)]
    streams = [llm.stream(*pair) for pair in zip(prompts, params, strict=True)]
    tokens: list[list[int]] = [[], []]
    for turn in (0, 1, 1, 0, 0, 1):
        tokens[turn] += next(streams[turn]).token_ids
    third = llm.generate([5, 6, 7], SamplingParams(max_tokens=4, **GREEDY))
    for turn in (1, 0):
        for chunk in streams[turn]:
            tokens[turn] += chunk.token_ids
    assert tokens == [slow_ids(model, *pair) for pair in zip(prompts, params, strict=True)]
    assert ids_of(third)[0] == slow_ids(model, [5, 6, 7], SamplingParams(max_tokens=4, **GREEDY))


def test_closing_a_stream(llm: LLM) -> None:
    """Before its first chunk, after it, and by forgetting it."""
    params = SamplingParams(max_tokens=50, **GREEDY)
    unstarted = llm.stream(PROMPT, params)
    unstarted.close()  # type: ignore[attr-defined]
    del unstarted
    assert_idle(llm)
    started = llm.stream(PROMPT, params)
    next(started)
    assert llm.engine.has_work
    started.close()  # type: ignore[attr-defined]
    assert_idle(llm)
    forgotten = llm.stream(PROMPT, params)
    next(forgotten)
    del forgotten
    assert_idle(llm)


# Mistakes


@pytest.mark.parametrize(
    ("prompts", "params", "message"),
    [
        ("", None, "the prompt is empty"),
        ([[]], None, "the prompt is empty"),
        ([PROMPT, ""], None, "the prompt is empty"),
        ([512], None, "token id 512; expected 0 <= id < 512"),
        ([5, -1], None, "token id -1"),
        ([5, True], None, "token id True"),
        ([5, 6.0], None, "token id 6.0"),
        (torch.tensor([5, 6]), None, "prompt tensor"),
        ({5, 6}, None, r"prompt \{5, 6\}"),
        ({"a": 1}, None, "prompt {'a': 1}"),
        (b"abc", None, "prompt b'abc'"),
        ([PROMPT, b"abc"], None, "prompt b'abc'"),
        (5, None, "prompt 5; expected a text or a list of ids"),
        (None, None, "prompt None"),
        ([PROMPT, 5], None, "prompt 5"),
        (["ok", "half a pair \ud800"], None, "cannot be tokenized"),
        (PROMPT, SamplingParams(max_tokens=150), "11 prompt tokens .* make 161"),
        ([5] * 160, SamplingParams(max_tokens=1), "make 161; .* at most max_model_len = 160"),
        (PROMPT, SamplingParams(stop_token_ids=[5, 512]), "stop_token_ids has 512"),
        (PROMPT, {"max_tokens": 3}, "expected SamplingParams"),
        (PROMPT, 5, "expected SamplingParams"),
        (PROMPT, [SamplingParams(), SamplingParams()], "2 sampling parameters for 1 prompts"),
        ([PROMPT, PROMPT], [SamplingParams()], "1 sampling parameters for 2 prompts"),
        ([PROMPT], [None], "expected SamplingParams"),
    ],
)
def test_bad_requests(llm: LLM, greedy: list[int], prompts: Any, params: Any, message: str) -> None:
    """One line that says what is wrong; nothing has run, and the engine goes on."""
    with pytest.raises(RequestError, match=message) as error:
        llm.generate(prompts, params)
    assert "\n" not in str(error.value)
    assert_idle(llm)
    assert ids_of(llm.generate(PROMPT, SamplingParams(max_tokens=1, **GREEDY)))[0] == greedy[:1]


@pytest.mark.parametrize("timeout", [0, -1, True, "5", float("nan"), 10**400])
def test_bad_timeouts(llm: LLM, timeout: Any) -> None:
    with pytest.raises(RequestError, match="timeout"):
        llm.generate(PROMPT, timeout=timeout)
    assert_idle(llm)


@pytest.mark.parametrize("messages", [None, 5, "Hello", {"role": "user", "content": "Hello"}])
def test_what_is_no_conversation_is_refused(llm: LLM, messages: Any) -> None:
    with pytest.raises(RequestError, match="expected a list of messages"):
        llm.chat(messages)


def test_a_request_is_served_once(llm: LLM, greedy: list[int]) -> None:
    """Whoever asks for it again is refused, and disturbs nobody."""
    request = llm.request(PROMPT, SamplingParams(max_tokens=4, **GREEDY))
    chunks = llm.chunks(request)
    tokens = list(next(chunks).token_ids)
    with pytest.raises(RequestError, match="is being served already"):
        next(llm.chunks(request))
    tokens += [token for chunk in chunks for token in chunk.token_ids]
    assert tokens == greedy[:4]
    with pytest.raises(RequestError, match="or has been"):
        next(llm.chunks(request))
    assert_idle(llm)


def test_several_threads_share_the_steps(llm: LLM, model: Loaded) -> None:
    prompts = [random_ids(model, 9 + number).tolist() for number in range(6)]
    params = [SamplingParams(max_tokens=5 + number, **GREEDY) for number in range(6)]
    with ThreadPoolExecutor(6) as threads:
        replies = list(threads.map(llm.generate, prompts, params))
    assert [ids_of(reply)[0] for reply in replies] == [
        slow_ids(model, *pair) for pair in zip(prompts, params, strict=True)
    ]
    assert_idle(llm)


def test_a_closed_llm_says_so(tiny_folder: Path) -> None:
    llm = LLM(tiny_folder, device="cpu", threads=1)
    llm.close()
    for ask in (
        lambda: llm.generate(PROMPT), lambda: next(llm.stream(PROMPT)), lambda: llm.metrics,
        lambda: llm.profile("x", 1), lambda: llm.model,
    ):  # fmt: skip
        with pytest.raises(RequestError, match="was closed"):
            ask()
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        llm.nothing  # type: ignore[attr-defined]  # noqa: B018


def test_images_are_refused(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """By checkpoints that know them; for others the token is one like any other."""
    image = llm.model_config.image_token_id
    assert image is not None
    one = SamplingParams(max_tokens=1)
    assert llm.generate([5, image], one)[0].usage.completion_tokens == 1
    config = dataclasses.replace(llm.model_config, vision=VisionConfig(num_hidden_layers=1))
    monkeypatch.setattr(llm._intake, "_model", config)
    with pytest.raises(RequestError, match="stands for an image"):
        llm.generate([5, image], one)


def test_bad_stream_requests(llm: LLM) -> None:
    """At the call, not at the first chunk."""
    with pytest.raises(RequestError, match="empty"):
        llm.stream([])
    with pytest.raises(RequestError, match="expected SamplingParams"):
        llm.stream(PROMPT, {"max_tokens": 1})  # type: ignore[arg-type]


def test_the_longest_request_fits(llm: LLM, model: Loaded) -> None:
    prompt = random_ids(model, 157).tolist()
    params = SamplingParams(max_tokens=3, **GREEDY)
    assert ids_of(llm.generate(prompt, params)) == [slow_ids(model, prompt, params)]


def test_prompt_logprobs_need_every_row(tiny_folder: Path) -> None:
    llm = small_llm(tiny_folder, yoco_prefill="compact")
    with pytest.raises(RequestError, match="prompt_logprobs"):
        llm.generate(PROMPT, SamplingParams(prompt_logprobs=1))


def test_unknown_settings_name_the_nearest(tiny_folder: Path) -> None:
    with pytest.raises(ConfigError, match="'max_num_seq'; did you mean 'max_num_seqs'"):
        LLM(tiny_folder, max_num_seq=3)
    with pytest.raises(ConfigError, match="'dtpye'; did you mean 'dtype'"):
        create_llm(tiny_folder, dtpye="float32")


def test_missing_parts(tiny_folder: Path, tmp_path: Path) -> None:
    with pytest.raises((CheckpointError, ConfigError)):
        LLM(tmp_path / "nowhere")
    with pytest.raises(TokenizerError, match="missing"):
        LLM(tiny_folder, tokenizer=str(tmp_path))


# Loading


def test_settings_come_from_the_user_then_the_environment(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DEEPINFER_YOCO_PREFILL_TRUNCATION_MODE", "compact")
    monkeypatch.setenv("DEEPINFER_YOCO_PREFILL_KEEP_TOKENS", "40")
    options = EngineOptions(model=str(tiny_folder), threads=1, yoco_keep_tokens=50)
    llm = LLM.from_options(options)
    assert (llm.config.yoco_prefill, llm.config.yoco_keep_tokens) == ("compact", 50)
    decided = {decision.name: decision.decided_by for decision in llm.decisions}
    assert decided["yoco_prefill"] == "environment"
    assert decided["yoco_keep_tokens"] == decided["threads"] == "user"
    assert decided["dtype"] == "default"
    assert llm.config.dtype == "bfloat16"


def test_names_of_the_package() -> None:
    assert deepinfer.LLM is LLM
    assert set(deepinfer.__all__) >= {"LLM", "SamplingParams", "create_llm"}
    with pytest.raises(AttributeError, match="no attribute 'llm_'"):
        deepinfer.llm_  # noqa: B018
