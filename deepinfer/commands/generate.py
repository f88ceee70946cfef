"""`deepinfer generate`: continue one prompt, streaming.

Knows how a reply is shown; must not know how it is computed.
"""

import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from deepinfer.config import EngineOptions
from deepinfer.engine.llm import LLM
from deepinfer.engine.output import RequestOutput
from deepinfer.errors import RequestError
from deepinfer.sampling.params import SamplingParams


def parse_token_ids(text: str) -> list[int]:
    """Ids from "0,5,9" (commas or blanks) or from the file that "@file" names.

    Raises:
        RequestError: something is no whole number, or the file cannot be read.
    """
    if text.startswith("@"):
        try:
            text = Path(text[1:]).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise RequestError(f"token id file {text[1:]!r} cannot be read ({error})") from None
    ids = []
    for part in text.replace(",", " ").split():
        try:
            ids.append(int(part))
        except ValueError:
            raise RequestError(f"token id {part!r}; expected whole numbers like 0,5,9") from None
    return ids


@dataclass(frozen=True)
class Speed:
    """Timing of one reply: seconds to the first token, tokens per second after it."""

    first_token_s: float
    decode_tokens_per_s: float | None


def _read_prompt(prompt: str | None, token_ids: str | None, file: str | None) -> str | list[int]:
    given = [name for name, value in (("--prompt", prompt), ("--prompt-token-ids", token_ids),
                                      ("--prompt-file", file)) if value is not None]  # fmt: skip
    if len(given) != 1:
        what = " and ".join(given) if given else "none"
        raise RequestError(
            f"{what} given; expected one of --prompt, --prompt-token-ids and --prompt-file"
        )
    if token_ids is not None:
        return parse_token_ids(token_ids)
    if file is not None:
        try:
            source = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
            return source.decode("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise RequestError(f"prompt file {file!r} cannot be read ({error})") from None
    assert prompt is not None
    return prompt


def _summary(reply: RequestOutput, speed: Speed) -> str:
    usage = reply.usage
    rate = speed.decode_tokens_per_s
    shown = "" if rate is None else f", then {rate:.1f} tokens/s"
    reasons = ", ".join(dict.fromkeys(output.finish_reason for output in reply.outputs))
    return (
        f"[{usage.prompt_tokens} prompt + {usage.completion_tokens} generated tokens, "
        f"{reasons}; first token after {speed.first_token_s:.2f} s{shown}]"
    )


def generate(
    options: EngineOptions,
    sampling: SamplingParams,
    *,
    prompt: str | None,
    prompt_token_ids: str | None,
    prompt_file: str | None,
    echo: bool,
    as_json: bool,
) -> int:
    """Run the command; returns the exit status: 0, or 1 when generation broke off in an error."""
    what = _read_prompt(prompt, prompt_token_ids, prompt_file)
    if not as_json and (sampling.logprobs is not None or sampling.prompt_logprobs is not None):
        raise RequestError("--logprobs and --prompt-logprobs are shown by --json alone; add it")
    llm = LLM.from_options(options, progress=sys.stderr.isatty() and not as_json)
    out = sys.stdout
    start = time.perf_counter()
    request = llm.request(what, sampling)
    if echo and not as_json:
        out.write(what if isinstance(what, str) else llm.tokenizer.decode(what))
        out.flush()
    first = start
    for number, chunk in enumerate(llm.chunks(request)):
        if number == 0:
            first = time.perf_counter()
        if not as_json and sampling.n == 1:
            _show(out, chunk.text)
    spent = time.perf_counter() - first
    reply = request.output()
    count = reply.usage.completion_tokens
    speed = Speed(first - start, (count - 1) / spent if count > 1 else None)
    if as_json:
        out.write(json.dumps({**reply.to_dict(), "speed": speed.__dict__}) + "\n")
    else:
        # Several texts at once would be mixed up, so they are shown one after the other.
        texts = [f"[{x.index}] {x.text}" for x in reply.outputs] if sampling.n > 1 else [""]
        out.write("\n".join(texts) + "\n")
        out.flush()
        sys.stderr.write(_summary(reply, speed) + "\n")
    return 1 if any(x.finish_reason == "error" for x in reply.outputs) else 0


def _show(out: TextIO, text: str) -> None:
    if text:
        out.write(text)
        out.flush()
