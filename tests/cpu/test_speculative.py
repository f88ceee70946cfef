"""Drafted equals undrafted: greedy speculation yields the tokens of plain greedy decoding."""

from pathlib import Path

import pytest
import torch

from deepinfer import LLM, SamplingParams
from deepinfer.errors import ConfigError, RequestError
from deepinfer.model import dspark


@pytest.fixture(scope="module")
def llm(tiny_folder: Path) -> LLM:
    return LLM(tiny_folder, dtype="float64", threads=1)


def _prompt(length: int) -> list[int]:
    return torch.randint(12, 500, (length,)).tolist()


def _plain(llm: LLM, prompt: list[int], tokens: int) -> list[int]:
    params = SamplingParams(max_tokens=tokens, temperature=0.0)
    return llm.generate(prompt, params)[0].outputs[0].token_ids


@pytest.mark.parametrize("length", [1, 2, 15, 70])
def test_drafted_equals_undrafted(llm: LLM, length: int) -> None:
    prompt = _prompt(length)
    rounds = list(llm.speculate(prompt, 24))
    assert [t for turn in rounds for t in turn.token_ids] == _plain(llm, prompt, 24)


@pytest.mark.parametrize("right", [0, 1, 3, 5])
def test_any_number_of_right_drafts(llm: LLM, right: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A drafter that is made to be right `right` times a round: so many drafts are accepted."""
    prompt = _prompt(20)
    expected = _plain(llm, prompt, 40)
    done: list[int] = []

    def choose(logits: torch.Tensor, slot: int) -> torch.Tensor:
        token = (expected + [0] * 8)[len(done) + slot]
        wrong = 3 if token != 3 else 4
        return torch.tensor([token if slot < right else wrong])

    monkeypatch.setattr("deepinfer.model.cached.greedy", choose)
    for turn in llm.speculate(prompt, 25):
        done += turn.token_ids
        if turn.drafted and len(done) < 25:
            assert turn.accepted == right
            assert turn.token_ids == expected[len(done) - right - 1 : len(done)]
    assert done == expected[:25]


def test_pages_come_back_when_a_speculation_is_left(llm: LLM) -> None:
    allocator = llm.engine.manager.allocator
    before = (allocator.free_pages, allocator.free_slots)
    rounds = llm.speculate(_prompt(30), 30)
    next(rounds)
    assert (allocator.free_pages, allocator.free_slots) != before
    rounds.close()
    assert (allocator.free_pages, allocator.free_slots) == before


def test_speculation_ends_with_the_sequence(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = _prompt(12)
    expected = _plain(llm, prompt, 30)
    ends_with = expected[9]
    config = llm.model_config
    object.__setattr__(config, "eos_token_id", ends_with)
    try:
        tokens = [t for turn in llm.speculate(prompt, 30) for t in turn.token_ids]
    finally:
        object.__setattr__(config, "eos_token_id", 1)
    assert tokens == expected[: expected.index(ends_with) + 1]


def test_bad_input(llm: LLM) -> None:
    with pytest.raises(RequestError, match="empty"):
        llm.speculate([], 5)
    with pytest.raises(RequestError, match="max_model_len"):
        llm.speculate(_prompt(1000), 100)


def test_no_drafter(tmp_path: Path) -> None:
    from deepinfer.testing.tiny import tiny_config, write_random_checkpoint

    config = tiny_config(num_nextn_predict_layers=0, compress_ratios=[0, 0, 2, 2, 2, 1, 1, 1, 1])
    write_random_checkpoint(tmp_path, config)
    with pytest.raises(ConfigError, match="no drafter"):
        LLM(tmp_path, threads=1).speculate([5], 3)


def test_greedy_takes_the_lowest_of_equals() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0]])
    assert dspark.greedy(logits, 0).tolist() == [1]
