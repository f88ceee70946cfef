"""Every breakage changes what the cached path computes, and nothing is left of it afterwards."""

import json
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import break_demo
import pytest
import torch

from deepinfer import LLM, SamplingParams
from deepinfer.model.cached import draft as greedy_draft
from deepinfer.model.dspark import Draft
from deepinfer.speculative import greedy
from deepinfer.testing.breakage import BREAKAGES, DRAFTS_ONLY, Breakage, other_chunks
from tests.cpu.engine_helpers import poison

DEMO = Path(__file__).parents[2] / "models" / "demo"

# The first is longer than everything that is taken whole: 128 entries of ratio 1, of which 64 are
# candidates and 16 are selected.
LENGTHS = (120, 9)


@pytest.fixture(scope="module")
def llm(tiny_folder: Path) -> LLM:
    """Prompts run in chunks, so that rows read what an earlier forward has written."""
    return LLM(tiny_folder, dtype="float64", threads=1, max_num_batched_tokens=48,
               prefix_checkpoints=0)  # fmt: skip


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Few tokens, so that n-grams repeat."""
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(20, 60, (n,), generator=generator).tolist() for n in LENGTHS]


@pytest.fixture(scope="module")
def intact(llm: LLM, prompts: list[list[int]]) -> list[list[float]]:
    return logprobs(llm, prompts)


def logprobs(llm: LLM, prompts: list[list[int]]) -> list[list[float]]:
    """Of each prompt token, and of tokens decoded after it."""
    params = SamplingParams(
        max_tokens=4, temperature=0.0, ignore_eos=True, prompt_logprobs=0, logprobs=0
    )
    found = []
    for reply in llm.generate(prompts, params):
        assert reply.prompt_logprobs is not None
        entries = [*reply.prompt_logprobs, *(reply.outputs[0].logprobs or [])]
        found.append([entry.logprob for entry in entries if entry is not None])
    return found


def largest_shift(actual: list[list[float]], expected: list[list[float]]) -> float:
    pairs = zip(actual, expected, strict=True)
    return max(abs(a - b) for mine, theirs in pairs for a, b in zip(mine, theirs, strict=True))


def drafts(llm: LLM, prompt: list[int]) -> tuple[list[int], list[Draft]]:
    """Tokens of a speculative continuation, and the draft of each round."""
    found = []

    def recorded(*arguments: Any) -> Draft:
        found.append(greedy_draft(*arguments))
        return found[-1]

    with patch.object(greedy, "draft", recorded):
        tokens = [token for turn in llm.speculate(prompt, 6) for token in turn.token_ids]
    return tokens, found


def state_of(llm: LLM) -> dict[str, Any]:
    """Everything a breakage may exchange: attributes of modules, classes and module instances."""
    found: dict[str, Any] = {}
    for name, module in list(sys.modules.items()):
        if name == "deepinfer" or name.startswith("deepinfer."):
            for key, value in vars(module).items():
                found[f"{name}.{key}"] = value
                if isinstance(value, type) and value.__module__.startswith("deepinfer."):
                    found |= {f"{name}.{key}.{k}": v for k, v in vars(value).items()}
    for name, module in llm.model.named_modules():
        found |= {f"model.{name}.{key}": value for key, value in vars(module).items()}
    # Chunks that are handed out make room for a new list.
    kept = {key: value for key, value in vars(llm.engine).items() if key != "_outbox"}
    found |= {f"engine.{key}": value for key, value in kept.items()}
    return found


def parameter_bytes(llm: LLM) -> list[tuple[str, int, bytes]]:
    """Name, address and bytes of every parameter, in order."""
    return [
        (name, p.data_ptr(), p.detach().contiguous().view(torch.uint8).numpy().tobytes())
        for name, p in llm.model.named_parameters()
    ]


def assert_same_state(before: dict[str, Any], after: dict[str, Any]) -> None:
    assert before.keys() == after.keys()
    assert [name for name in before if before[name] is not after[name]] == []


@pytest.mark.parametrize("name", BREAKAGES)
def test_breakage_changes_results_and_leaves_nothing(
    name: str, llm: LLM, prompts: list[list[int]], intact: list[list[float]]
) -> None:
    state, parameters = state_of(llm), parameter_bytes(llm)
    with BREAKAGES[name](llm):
        broken = logprobs(llm, prompts)
    assert_same_state(state, state_of(llm))
    assert parameter_bytes(llm) == parameters
    if name in DRAFTS_ONLY:
        assert broken == intact
    else:
        assert largest_shift(broken, intact) > 1e-3


def test_no_markov_bias_changes_drafts_alone(llm: LLM, prompts: list[list[int]]) -> None:
    with BREAKAGES["no_markov_bias"](llm):
        broken_tokens, broken = drafts(llm, prompts[1])
    tokens, whole = drafts(llm, prompts[1])
    assert broken_tokens == tokens
    assert all(torch.equal(draft.logits, draft.base_logits) for draft in broken)
    assert not any(torch.equal(draft.logits, draft.base_logits) for draft in whole)
    assert torch.equal(broken[0].base_logits, whole[0].base_logits)


def test_results_are_the_same_bits_afterwards(
    llm: LLM, prompts: list[list[int]], intact: list[list[float]]
) -> None:
    for breakage in BREAKAGES.values():
        with breakage(llm):
            logprobs(llm, prompts[1:])
    assert logprobs(llm, prompts) == intact


def test_breakages_are_repeatable(llm: LLM, prompts: list[list[int]]) -> None:
    """Pages and slots hold what other requests left there, and nothing of it may be read."""
    for name in ("random_selection", "late_index_keys"):
        with BREAKAGES[name](llm):
            first = logprobs(llm, prompts)
        poison(llm)
        with BREAKAGES[name](llm):
            assert logprobs(llm, prompts) == first


@pytest.mark.parametrize("name", BREAKAGES)
def test_an_error_inside_leaves_nothing_either(name: str, llm: LLM) -> None:
    state, parameters = state_of(llm), parameter_bytes(llm)
    with pytest.raises(ZeroDivisionError), BREAKAGES[name](llm):
        raise ZeroDivisionError
    assert_same_state(state, state_of(llm))
    assert parameter_bytes(llm) == parameters


def test_other_chunks_only_move_rounding(
    llm: LLM, prompts: list[list[int]], intact: list[list[float]]
) -> None:
    with other_chunks(llm):
        assert llm.engine.scheduler.limits.max_num_batched_tokens < 48
        assert largest_shift(logprobs(llm, prompts), intact) < 1e-6
    assert llm.engine.scheduler.limits.max_num_batched_tokens == 48


def test_short_sequences_do_not_depend_on_what_they_have_not(
    llm: LLM, prompts: list[list[int]], intact: list[list[float]]
) -> None:
    """9 + 4 tokens fill no window of 16 and are selected whole: these breakages act elsewhere."""
    for name in ("window_one_short", "random_selection", "late_index_keys", "wrong_candidates"):
        with BREAKAGES[name](llm):
            assert largest_shift(logprobs(llm, prompts[1:]), intact[1:]) < 1e-9


def test_breakages_say_what_they_break() -> None:
    for name, breakage in BREAKAGES.items():
        assert "\n\n    Imitates " in (breakage.__doc__ or ""), name
    assert set(BREAKAGES) > DRAFTS_ONLY


def _nothing(llm: LLM) -> Any:
    return nullcontext()


@pytest.fixture
def questions_folder(tiny_folder: Path, tmp_path: Path) -> Path:
    """The tiny checkpoint with a few questions, which it cannot answer."""
    for file in tiny_folder.iterdir():
        (tmp_path / file.name).symlink_to(file)
    asked = [("facts", "The engine runs one model"), ("copy", "A window of recent tokens. " * 8)]
    items: list[dict[str, Any]] = [
        {"task": task, "name": task, "prompt": prompt, "answer": "x", "check": "exact",
         "max_tokens": 4} for task, prompt in asked
    ]  # fmt: skip
    items.append({"task": "held_out_text", "name": "t", "text": "Experts are chosen by a router."})
    lines = "".join(json.dumps(item) + "\n" for item in items)
    (tmp_path / "eval.jsonl").write_text(lines, encoding="utf-8")
    return tmp_path


def test_table(
    questions_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A breakage that shows and one that does nothing; the intact model twice gives exactly 0."""
    names = ["no_engram", "nothing"]
    table: dict[str, Breakage] = {"no_engram": BREAKAGES["no_engram"], "nothing": _nothing}
    monkeypatch.setattr(break_demo, "BREAKAGES", table)
    arguments = ["break_demo", str(questions_folder), "--draft-items", "1", "--json"]
    monkeypatch.setattr(sys, "argv", arguments)
    assert break_demo.main() == 1
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)["rows"]}
    assert list(rows) == ["intact", *names, "other_chunks", "intact_again"]
    assert [name for name, row in rows.items() if row["shows"]] == ["no_engram"]
    for name in ("nothing", "intact_again"):
        assert {**rows[name], "name": "intact"} == rows["intact"]
    assert rows["no_engram"]["text_loss"] != rows["intact"]["text_loss"]
    break_demo.show([break_demo.Row(**row) for row in rows.values()])
    out = capsys.readouterr().out
    assert "1 of 2 breakages show" in out
    assert "Do not show: nothing" in out


@pytest.fixture(scope="module")
def demo() -> tuple[LLM, break_demo.Questions, break_demo.Run]:
    """The demo model, what it is asked, and what it says while it is intact."""
    llm = LLM(DEMO, device="cpu", dtype="float64", threads=1, prefix_checkpoints=0)
    questions = break_demo.ask(llm, break_demo.load_items(DEMO, (), 2), 4)
    return llm, questions, break_demo.run(llm, questions, None)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", BREAKAGES)
def test_every_part_of_the_demo_model_is_needed(name: str, demo) -> None:  # type: ignore[no-untyped-def]
    llm, questions, intact = demo
    with BREAKAGES[name](llm):
        broken = break_demo.run(llm, questions, intact)
    row = break_demo.compare(name, questions, broken, intact)
    assert row.shows, row


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_intact_demo_model_shows_nothing(demo) -> None:  # type: ignore[no-untyped-def]
    llm, questions, intact = demo
    with other_chunks(llm):
        row = break_demo.compare(
            "other_chunks", questions, break_demo.run(llm, questions, intact), intact
        )
    assert not row.shows
    assert row.shift < 1e-6
    again = break_demo.run(llm, questions, intact)
    row = break_demo.compare("again", questions, again, intact)
    assert (row.shift, row.changed, row.right) == (0.0, 0, intact.right)
    assert (again.text_loss, again.accepted) == (intact.text_loss, intact.accepted)
