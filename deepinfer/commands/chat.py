"""`deepinfer chat`: a conversation in the V4.1 prompt format.

Knows how messages are read and a reply is shown; must not know the prompt format.
"""

import io
import json
import sys
import time
from collections.abc import Generator, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any, TextIO

from deepinfer.config import EngineOptions
from deepinfer.engine.chat_format import recipe
from deepinfer.engine.llm import LLM
from deepinfer.engine.request import Request
from deepinfer.errors import RequestError
from deepinfer.sampling.params import SamplingParams

_DIM, _PLAIN = "\x1b[2m", "\x1b[0m"
_HELP = (
    "/new starts a new conversation, Ctrl-C stops a reply, /help shows this, /exit or Ctrl-D ends"
)


@dataclass
class Reply:
    """What came back, and how fast."""

    thinking: str = ""
    text: str = ""
    tool_calls: list[dict[str, str]] = field(default_factory=list)
    finish_reason: str | None = None
    tokens: int = 0
    seconds: float = 0.0

    def add(self, delta: dict[str, Any]) -> None:
        """Append one part."""
        self.thinking += delta.get("reasoning_content") or ""
        self.text += delta.get("content") or ""
        for call in delta.get("tool_calls") or ():
            while len(self.tool_calls) <= call["index"]:
                self.tool_calls.append({"name": "", "arguments": ""})
            for name in ("name", "arguments"):
                self.tool_calls[call["index"]][name] += call["function"].get(name) or ""


class Conversation:
    """Messages so far; every question is answered with all of them in the prompt.

    Attributes:
        refused: messages that could not be served.
    """

    def __init__(self, llm: LLM, sampling: SamplingParams, system: str | None, thinking: bool):
        self.llm, self.sampling, self.system, self.thinking = llm, sampling, system, thinking
        self.format = llm.chat_format()
        self.messages: list[dict[str, Any]] = []
        self.refused = 0
        self.restart()

    def restart(self) -> None:
        """Forget everything but the system message."""
        self.messages = [{"role": "system", "content": self.system}] if self.system else []

    def ask(self, message: str, out: TextIO | None, stoppable: bool = False) -> Reply:
        """Answer `message` and remember both; parts are written to `out` as they come.

        Args:
            stoppable: Ctrl-C ends the reply alone, and what came of it is remembered.

        Raises:
            RequestError: the prompt cannot be served; the conversation is as before then.
        """
        asked = [*self.messages, {"role": "user", "content": message}]
        converted = self.format.convert(asked, self.thinking)
        request = self.llm.request(self.format.encode(converted), self.sampling)
        reply, start = Reply(), time.perf_counter()
        shown = _Screen(out)
        pieces = self._pieces(request)
        try:
            for delta in self.format.deltas(converted, pieces):
                reply.add(delta)
                shown.show(delta)
        except KeyboardInterrupt:
            if not stoppable:
                raise
            pieces.close()  # which takes the request from the engine, wherever it was
        reply.finish_reason = "abort"
        if request.ended:  # an interrupt may have come before it was queued
            output = request.output()
            reply.finish_reason = output.outputs[0].finish_reason
            reply.tokens = output.usage.completion_tokens
        reply.seconds = time.perf_counter() - start
        shown.end(reply)
        self.messages = [*asked, {"role": "assistant", "content": reply.text}]
        return reply

    def _pieces(self, request: Request) -> Generator[list[int]]:
        # Tokens that end a reply are generated, but have no text.
        ends = {self.llm.model_config.eos_token_id, *(self.sampling.stop_token_ids or ())}
        with closing(self.llm.chunks(request)) as chunks:
            for chunk in chunks:
                if ids := [token for token in chunk.token_ids if token not in ends]:
                    yield ids


class _Screen:
    """Shows a reply on a terminal, thinking dimmed, or in a file."""

    def __init__(self, out: TextIO | None) -> None:
        self.out = out
        self.dim = ("", "") if out is None or not out.isatty() else (_DIM, _PLAIN)
        self.thought = False

    def show(self, delta: dict[str, Any]) -> None:
        if self.out is None:
            return
        if thinking := delta.get("reasoning_content"):
            self.thought = True
            self.out.write(self.dim[0] + thinking + self.dim[1])
        if text := delta.get("content"):
            self.out.write("\n" * self.thought + text)
            self.thought = False
        self.out.flush()

    def end(self, reply: Reply) -> None:
        if self.out is not None:
            for call in reply.tool_calls:
                self.out.write(f"\n{call['name']}({call['arguments']})")
            self.out.write("\n")
            self.out.flush()


def chat(
    options: EngineOptions, sampling: SamplingParams, *,
    messages: list[str], system: str | None, thinking: bool, as_json: bool,
) -> int:  # fmt: skip
    """Answer `messages`, each as a conversation of its own, or read them from standard input.

    Returns the exit status: 0, 1 when a reply broke off in an error, or 2 when a message that did
    not come from a terminal was refused.
    """
    recipe()  # what is missing shows before a long load
    if sampling.stop:
        raise RequestError("chat takes no --stop: a reply is shown token by token")
    if sampling.n > 1 or not sampling.skip_special_tokens:
        raise RequestError("chat shows one reply without special tokens; use generate")
    if sampling.logprobs is not None or sampling.prompt_logprobs is not None:
        raise RequestError("chat shows no log-probabilities; use generate")
    if not all(message.strip() for message in messages):
        raise RequestError("--message is empty; expected something to answer")
    llm = LLM.from_options(options, progress=sys.stderr.isatty() and not as_json)
    conversation = Conversation(llm, sampling, system, thinking)
    out = None if as_json else sys.stdout
    replies = _answer(conversation, messages, out) if messages else _talk(conversation, out)
    failed = False
    for message, reply in replies:
        failed |= reply.finish_reason == "error"
        if as_json:
            sys.stdout.write(json.dumps({"message": message, **reply.__dict__}) + "\n")
            sys.stdout.flush()
    return 1 if failed else 2 if conversation.refused and not sys.stdin.isatty() else 0


def _answer(
    conversation: Conversation, messages: list[str], out: TextIO | None
) -> Iterator[tuple[str, Reply]]:
    """Replies to given messages, a conversation each."""
    tokens, start = 0, time.perf_counter()
    for message in messages:
        conversation.restart()
        if out:
            out.write(f"> {message}\n")
        reply = conversation.ask(message, out)
        tokens += reply.tokens
        if out:
            out.write("\n")
        yield message, reply
    if out:
        seconds = time.perf_counter() - start
        sys.stderr.write(f"[{tokens} generated tokens in {seconds:.1f} s]\n")


def _talk(conversation: Conversation, out: TextIO | None) -> Iterator[tuple[str, Reply]]:
    """Replies to what is typed; a message that cannot be served changes nothing."""
    for message in _typed(conversation):
        try:
            yield message, conversation.ask(message, out, stoppable=sys.stdin.isatty())
        except RequestError as error:
            conversation.refused += 1
            sys.stderr.write(f"error: {error}\n")


def _typed(conversation: Conversation) -> Iterator[str]:
    """Messages from standard input; commands start with a slash."""
    terminal = sys.stdin.isatty()
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")  # a bad line is refused, not the rest
    if terminal:
        sys.stderr.write(f"{_HELP}\n")
    while True:
        if terminal:
            sys.stderr.write("> ")
            sys.stderr.flush()
        line = sys.stdin.readline()
        if terminal and not line:
            sys.stderr.write("\n")  # Ctrl-D leaves the cursor behind the prompt
        if not line or line.strip() == "/exit":
            return
        if line.strip() == "/new":
            conversation.restart()
        elif line.strip() == "/help":
            sys.stderr.write(f"{_HELP}\n")
        elif line.startswith("/"):
            sys.stderr.write(f"{line.strip()!r} is no command; {_HELP}\n")
        elif line.strip():
            yield line.strip()
