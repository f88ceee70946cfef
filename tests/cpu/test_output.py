"""Stop strings over any split into tokens, and the shape of replies."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer.engine.output import (
    CompletionOutput,
    OutputText,
    RequestOutput,
    StreamChunk,
    Usage,
)
from deepinfer.sampling.logprobs import TokenLogprobs

ROOT = Path(__file__).parents[2]


class Pieces:
    """A fake decoder: token i is the i-th piece; the last `late` pieces come with the flush."""

    def __init__(self, pieces: list[str], late: int = 0) -> None:
        self._pieces = pieces
        self._early = len(pieces) - late

    def push(self, token_id: int) -> str:
        return self._pieces[token_id] if token_id < self._early else ""

    def flush(self) -> str:
        return "".join(self._pieces[self._early :])


def first_stop(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The text before the first stop string and that string, one character at a time."""
    for end in range(1, len(text) + 1):
        met = [stop for stop in stops if text[:end].endswith(stop)]
        if met:
            stop = max(met, key=len)
            return text[: end - len(stop)], stop
    return text, None


def run(pieces: list[str], stops: list[str], late: int = 0) -> tuple[list[str], OutputText]:
    output = OutputText(Pieces(pieces, late), stops)
    shown = []
    for token_id in range(len(pieces)):
        shown.append(output.push(token_id))
        if output.stop_reason is not None:
            break
    shown.append(output.finish())
    return shown, output


@settings(max_examples=500)
@given(
    st.lists(st.text("ab\u6f22", max_size=4), max_size=10),
    st.lists(st.text("ab\u6f22", min_size=1, max_size=4), max_size=4),
    st.integers(0, 10),
)
def test_shown_text_is_the_text_before_the_first_stop(
    pieces: list[str], stops: list[str], late: int
) -> None:
    shown, output = run(pieces, stops, min(late, len(pieces)))
    expected, stop = first_stop("".join(pieces), stops)
    assert "".join(shown) == expected == output.text
    assert output.stop_reason == stop


@settings(max_examples=300)
@given(
    st.lists(st.text("ab", max_size=3), max_size=8),
    st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
    st.integers(0, 8),
    st.booleans(),
)
def test_stop_strings_that_end_too_early_are_none(
    pieces: list[str], stops: list[str], early: int, include: bool
) -> None:
    """Those that end within the first `early` pieces; a later one may begin there."""
    output, shown = OutputText(Pieces(pieces), stops, include), []
    for token_id in range(len(pieces)):
        shown.append(output.push(token_id, may_stop=token_id >= early))
        if output.stop_reason is not None:
            break
    shown.append(output.finish(may_stop=False))
    text, border = "".join(pieces), len("".join(pieces[:early]))
    expected: tuple[str, str | None] = text, None
    for end in range(len(text), border, -1):
        met = [stop for stop in stops if text[:end].endswith(stop)]
        if met:
            stop = max(met, key=len)
            expected = text[: end if include else end - len(stop)], stop
    assert ("".join(shown), output.stop_reason) == expected


@given(
    st.lists(st.text("ab", max_size=3), max_size=8),
    st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
)
def test_nothing_is_held_that_cannot_begin_a_stop(pieces: list[str], stops: list[str]) -> None:
    output = OutputText(Pieces(pieces), stops)
    for token_id in range(len(pieces)):
        output.push(token_id)
        if output.stop_reason is not None:
            return
        so_far = "".join(pieces[: token_id + 1])
        held = so_far[len(output.text) :]
        assert so_far.startswith(output.text)
        assert not held or any(stop.startswith(held) for stop in stops)


def test_text_flows_and_only_a_possible_stop_waits() -> None:
    shown, output = run(["Hello", " <", "en", "tr", "y> <e", "nd", "> more"], ["<end>"])
    assert shown == ["Hello", " ", "", "<entr", "y> ", "", "", ""]
    assert output.stop_reason == "<end>"
    assert output.finish() == ""


@pytest.mark.parametrize(
    ("pieces", "stops", "text", "reason"),
    [
        (["abcd"], ["abcd", "bc"], "a", "bc"),  # bc ends first
        (["a", "b", "c", "d"], ["abcd", "bc"], "a", "bc"),
        (["xabc"], ["bc", "abc"], "x", "abc"),  # both end at once: the longest
        (["abab"], ["ab"], "", "ab"),
        (["a\nb"], ["\n"], "a", "\n"),
        (["ab"], [], "ab", None),
        (["a<e"], ["<end>"], "a<e", None),
    ],
)
def test_which_stop_wins(
    pieces: list[str], stops: list[str], text: str, reason: str | None
) -> None:
    shown, output = run(pieces, stops)
    assert ("".join(shown), output.stop_reason) == (text, reason)


def test_a_stop_in_the_flushed_text_counts() -> None:
    shown, output = run(["a", "b\ufffd"], ["b\ufffd"], late=1)
    assert ("".join(shown), output.stop_reason) == ("a", "b\ufffd")


def test_reply_as_json() -> None:
    logprobs = [TokenLogprobs(7, -0.5, 1, ((7, -0.5), (9, float("-inf"))))]
    output = RequestOutput(
        request_id="r1",
        prompt="hi",
        prompt_token_ids=[0, 5],
        outputs=[CompletionOutput(0, "yo", [7], "stop", "\n", logprobs)],
        prompt_logprobs=[None, TokenLogprobs(5, -1.0, 2, ())],
        usage=Usage(prompt_tokens=2, completion_tokens=1),
    )
    assert json.loads(json.dumps(output.to_dict(), allow_nan=False)) == {
        "request_id": "r1",
        "prompt": "hi",
        "prompt_token_ids": [0, 5],
        "index": 0,
        "text": "yo",
        "token_ids": [7],
        "finish_reason": "stop",
        "stop_reason": "\n",
        "error": None,
        "logprobs": [{"token_id": 7, "logprob": -0.5, "rank": 1, "top": [[7, -0.5], [9, None]]}],
        "prompt_logprobs": [None, {"token_id": 5, "logprob": -1.0, "rank": 2, "top": []}],
        "usage": {"prompt_tokens": 2, "completion_tokens": 1, "cached_tokens": 0},
    }


def test_reply_without_logprobs() -> None:
    completion = CompletionOutput(0, "", [], "abort", None, None)
    reply = RequestOutput("r", None, [1], [completion], None, Usage(1, 0, 1)).to_dict()
    assert (reply["logprobs"], reply["prompt_logprobs"], reply["prompt"]) == (None, None, None)
    assert reply["usage"]["cached_tokens"] == 1


def test_chunk_carries_its_fields() -> None:
    chunk = StreamChunk("r", 0, "a", [3], None, "stop", 3)
    assert (chunk.token_ids, chunk.finish_reason, chunk.stop_reason) == ([3], "stop", 3)


def test_output_needs_no_torch() -> None:
    program = "import sys, deepinfer.engine.output; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=False).returncode == 0
