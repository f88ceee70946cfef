"""`deepinfer chat` with the demo model: prompts as deepseek-recipe renders them, and replies."""

import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from deepinfer import LLM, SamplingParams
from deepinfer.cli import main
from deepinfer.commands.chat import Conversation
from deepinfer.errors import RequestError

DEMO = Path(__file__).parents[2] / "models" / "demo"
QUESTIONS: list[dict[str, Any]] = json.loads((DEMO / "questions.json").read_text(encoding="utf-8"))
GREEDY = SamplingParams(max_tokens=60, temperature=0.0)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(DEMO, threads=1)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    def command(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as exit_:
            main(["chat", str(DEMO), "--threads", "1", "--temperature", "0", *arguments])
        assert isinstance(exit_.value.code, int)
        return exit_.value.code, *capsys.readouterr()

    return command


def test_demo_questions_are_answered(llm: LLM) -> None:
    """Prompts equal the file's, and every answer is right."""
    for question in QUESTIONS:
        conversation = Conversation(llm, GREEDY, None, thinking=False)
        messages = question["messages"]
        if [m["role"] for m in messages] != ["user"]:
            continue
        converted = conversation.format.convert(messages, thinking=False)
        assert conversation.format.encode(converted) == llm.tokenizer.encode(
            question["prompt"], None
        )
        reply = conversation.ask(messages[0]["content"], None)
        assert (reply.text, reply.finish_reason) == (question["answer"], "stop")


def test_a_conversation_remembers(llm: LLM) -> None:
    conversation = Conversation(llm, GREEDY, "You are helpful.", thinking=False)
    conversation.ask("What is the capital of France?", None)
    assert [m["role"] for m in conversation.messages] == ["system", "user", "assistant"]
    assert conversation.messages[-1]["content"] == "Paris"
    conversation.restart()
    assert [m["role"] for m in conversation.messages] == ["system"]


def test_thinking_is_told_apart(llm: LLM) -> None:
    out = io.StringIO()
    reply = Conversation(llm, GREEDY, None, thinking=True).ask("What is 12 + 30?", out)
    assert reply.text == "42"
    assert "42" in reply.thinking
    assert out.getvalue() == f"{reply.thinking}\n{reply.text}\n"


def test_a_refused_message_changes_nothing(llm: LLM) -> None:
    conversation = Conversation(llm, GREEDY, None, thinking=False)
    with pytest.raises(RequestError):
        conversation.ask("word " * 9000, None)
    assert conversation.messages == []


def test_messages_on_the_command_line(run: Callable[..., tuple[int, str, str]]) -> None:
    status, out, err = run("--message", "What is 347 + 58?", "--message", "Hello!")
    assert status == 0
    assert out.startswith("> What is 347 + 58?\n405\n\n> Hello!\n")
    assert "generated tokens" in err


def test_json(run: Callable[..., tuple[int, str, str]]) -> None:
    status, out, err = run("--json", "--message", "What is 347 + 58?")
    reply = json.loads(out)
    assert (status, err) == (0, "")
    assert (reply["message"], reply["text"], reply["finish_reason"]) == (
        "What is 347 + 58?", "405", "stop",
    )  # fmt: skip


def test_typed_messages(
    run: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = "What is 347 + 58?\n\n/nonsense\n/new\nHello!\n/exit\nWhat is 1 + 1?\n"
    monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
    status, out, err = run()
    assert status == 0
    assert out.startswith("405\nHello!")
    assert "2\n" not in out
    assert "'/nonsense' is no command" in err


def test_control_c_before_a_request_is_queued(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(request: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(llm, "chunks", interrupted)
    reply = Conversation(llm, GREEDY, None, thinking=False).ask("A", None, stoppable=True)
    assert (reply.finish_reason, reply.text, reply.tokens) == ("abort", "", 0)


@pytest.mark.parametrize("step", [1, 4, 7])
def test_control_c_stops_a_reply_and_not_the_conversation(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    """Wherever it comes: before the first token, or with some shown."""
    steps = 0
    plain = llm.engine.step

    def interrupted() -> Any:
        nonlocal steps
        steps += 1
        if steps == step:
            raise KeyboardInterrupt
        return plain()

    whole = Conversation(llm, GREEDY, None, thinking=False).ask("Who are you?", None)
    conversation = Conversation(llm, GREEDY, None, thinking=False)
    monkeypatch.setattr(llm.engine, "step", interrupted)
    out = io.StringIO()
    reply = conversation.ask("Who are you?", out, stoppable=True)
    assert reply.finish_reason == "abort"
    assert out.getvalue() == reply.text + "\n"
    assert whole.text.startswith(reply.text)
    assert len(reply.text) < len(whole.text)
    assert conversation.messages[-1] == {"role": "assistant", "content": reply.text}
    assert not llm.engine.has_work
    assert conversation.ask("What is 2 + 3?", None).finish_reason == "stop"
    steps = step - 1
    with pytest.raises(KeyboardInterrupt):
        conversation.ask("Who are you?", None)
    assert not llm.engine.has_work


def test_stop_strings_are_refused(run: Callable[..., tuple[int, str, str]]) -> None:
    status, _, err = run("--stop", "x", "--message", "Hello!")
    assert status == 2
    assert "--stop" in err


def test_tokens_that_stop_have_no_text(llm: LLM) -> None:
    """The same reply as `generate` gives, whatever the stop token is."""
    whole = Conversation(llm, GREEDY, None, thinking=False)
    converted = whole.format.convert([{"role": "user", "content": "What is 2+2?"}], thinking=False)
    prompt = whole.format.encode(converted)
    for stop in llm.generate(prompt, GREEDY)[0].outputs[0].token_ids:
        params = SamplingParams(max_tokens=60, temperature=0.0, stop_token_ids=[stop])
        expected = llm.generate(prompt, params)[0].outputs[0].text
        reply = Conversation(llm, params, None, thinking=False).ask("What is 2+2?", None)
        assert reply.text == expected


@pytest.mark.parametrize("option", ["--logprobs", "--prompt-logprobs"])
def test_log_probabilities_are_refused(
    option: str, run: Callable[..., tuple[int, str, str]]
) -> None:
    status, _, err = run(option, "1", "--message", "Hello!")
    assert status == 2
    assert "log-probabilities" in err


def test_text_that_is_no_utf8_is_refused_alone(
    run: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    status, _, err = run("--message", " ")
    assert (status, err) == (2, "error: --message is empty; expected something to answer\n")
    status, _, err = run("--message", "a\udcffb")
    assert (status, err) == (2, "error: a message is not valid UTF-8 text\n")
    stdin = io.TextIOWrapper(io.BytesIO(b"a\xffb\nWhat is 347 + 58?\n"), encoding="utf-8")
    monkeypatch.setattr(sys, "stdin", stdin)
    status, out, err = run()
    assert (status, out) == (2, "405\n")
    assert "not valid UTF-8" in err
