"""Grammars that a text has to follow: compiled in the background, then walked token by token.

Knows tokens and the xgrammar library, which is imported when the first grammar is asked for; must
not know requests, logits or the model.
"""

import importlib.util
import json
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from deepinfer.checkpoint.tokenizer import Tokenizer
from deepinfer.errors import RequestError
from deepinfer.sampling.batch import Masks, allowed_bits
from deepinfer.sampling.params import SamplingParams
from deepinfer.sampling.patterns import whole_text
from deepinfer.sampling.structured import StructuredOutput

COMPILE_SECONDS = 10.0  # longest that one grammar may take
_QUEUE_SECONDS = 60.0  # longest that it may wait for its turn
_AT_A_TIME = 2  # grammars compiled at the same time
_CACHED = 256  # grammars that are kept
_MOST_BLANKS = 64  # between parts of JSON: a model must not write blanks for ever
_THINK_END = "</think>"
_CONTROL = re.compile(rb"[\x00-\x09\x0b\x0c\x0e-\x1f]")
_PLACE = re.compile(r"^\[[\d:]+\] \S+: (?:Check failed: )?")  # time and line of the library


class GrammarState:
    """How far one text has followed its grammar.

    While the model thinks any token is allowed but the end of the text. After the end of the
    grammar that end is all that is allowed.
    """

    def __init__(self, matcher: Any, vocabulary: "_Vocabulary", think_end: int | None) -> None:
        self._matcher = matcher
        self._vocabulary = vocabulary
        self._think_end = think_end
        self.thinking = think_end is not None
        self._thoughts = 0  # tokens accepted while thinking, the end of thinking included
        self._tokens = 0  # tokens accepted since

    @property
    def finished(self) -> bool:
        """Whether the end-of-sequence token was accepted."""
        return bool(self._matcher.is_terminated())

    def fill(self, bits: Tensor, row: int) -> None:
        """Set bit t % 32 of bits[row, t // 32] for each token t that may come next, and no other.

        Args:
            bits: [M, ceil(V / 32)] int32 on the host.
        """
        assert not self.finished, "nothing comes after the end"
        if self.thinking:
            bits[row] = self._vocabulary.all_but_end
        else:
            self._matcher.fill_next_token_bitmask(bits, row)

    def accept(self, token: int) -> bool:
        """Follow `token`; False if it may not come next, and nothing is changed then."""
        if self.finished or not 0 <= token < self._vocabulary.size:
            return False
        if not self.thinking:
            accepted = bool(self._matcher.accept_token(token))
            self._tokens += accepted
            return accepted
        if token == self._vocabulary.end:
            return False
        self._thoughts += 1
        self.thinking = token != self._think_end
        return True

    def rollback(self, count: int) -> None:
        """Take back the last `count` accepted tokens."""
        assert 0 <= count <= self._thoughts + self._tokens, (count, self._thoughts, self._tokens)
        inside = min(count, self._tokens)
        if inside:
            self._matcher.rollback(inside)
            self._tokens -= inside
        if count > inside:
            self._thoughts -= count - inside
            self.thinking = True

    def fork(self) -> "GrammarState":
        """A state of its own at the same place."""
        other = GrammarState(self._matcher.fork(), self._vocabulary, self._think_end)
        other.thinking, other._thoughts = self.thinking, self._thoughts
        other._tokens = self._tokens
        return other


@dataclass(frozen=True)
class _Vocabulary:
    """size: V; end: the end-of-sequence token; all_but_end: [ceil(V / 32)] int32 bits."""

    size: int
    end: int
    all_but_end: Tensor


class _Job:
    """One grammar, compiled once for all requests that ask for it."""

    def __init__(self, seconds: float, clock: Callable[[], float]) -> None:
        self._seconds = seconds
        self._clock = clock
        self._asked = clock()
        self._started: float | None = None
        self.done = threading.Event()
        self.grammar: Any = None
        self._error: str | None = None

    def run(self, set_up: Callable[[], None], compile_: Callable[[], Any]) -> None:
        """Compile it in this thread."""
        try:
            set_up()
            self._started = self._clock()
            self.grammar = compile_()
        except Exception as error:  # whatever it is concerns those who ask for this grammar alone
            self._error = _PLACE.sub("", " ".join(str(error).split())) or repr(error)
        self.done.set()

    @property
    def failure(self) -> str | None:
        """Why there is no grammar and will be none."""
        if self.done.is_set():
            return self._error
        if self._started is None:
            waited = self._clock() - self._asked > _QUEUE_SECONDS
            return "the compiler is busy with others; try again later" if waited else None
        if self._clock() - self._started > self._seconds:
            return f"it takes more than {self._seconds:g} s; make it simpler"
        return None


class Pending:
    """A request's grammar; once it is `ready`, `state` gives it or says why there is none."""

    def __init__(self, job: _Job, start: Callable[[Any], GrammarState]) -> None:
        self._job = job
        self._start = start

    @property
    def ready(self) -> bool:
        """Whether it is compiled, cannot be, or takes too long."""
        return self._job.done.is_set() or self._job.failure is not None

    def wait(self) -> None:
        """Until it is ready."""
        while not self.ready:
            self._job.done.wait(0.1)

    def state(self) -> GrammarState:
        """The beginning of a text that follows it.

        Raises:
            RequestError: the grammar cannot be compiled.
        """
        assert self.ready, "wait until it is ready"
        failure = self._job.failure
        if failure is not None:
            raise RequestError(f"structured: the grammar cannot be compiled: {failure}")
        return self._start(self._job.grammar)


class GrammarCompiler:
    """Compiles grammars for one vocabulary, in threads that do not keep the process alive.

    Several threads may ask it.

    Tokens that were added to the vocabulary structure a conversation: inside a grammar they are
    never allowed, even where their text would be.

    Args:
        tokenizer: gives tokens their text.
        vocab_size: V, the model's.
        eos_token_id: what ends a text.
        seconds: longest that a grammar may take.
        clock: seconds from any point in time.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        vocab_size: int,
        eos_token_id: int,
        *,
        seconds: float = COMPILE_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._tokenizer = tokenizer
        bits = allowed_bits(SamplingParams(banned_token_ids=(eos_token_id,)), vocab_size)
        self._vocabulary = _Vocabulary(vocab_size, eos_token_id, torch.from_numpy(bits))
        self._seconds = seconds
        self._clock = clock
        self._library: Any = None
        self._compilers: dict[str, Any] = {}
        self._many: Any = None
        self._jobs: OrderedDict[tuple[str, str], _Job] = OrderedDict()
        self._listing = threading.Lock()
        self._lock = threading.Lock()  # of what is set up once
        self._turn = threading.Semaphore(_AT_A_TIME)

    def compile(self, structured: StructuredOutput) -> Pending:
        """Begin to compile, or find what was compiled before; returns at once.

        Raises:
            RequestError: the library is not installed, or the vocabulary has no end of thinking.
        """
        if importlib.util.find_spec("xgrammar") is None:
            raise RequestError(
                "structured output needs the package xgrammar:"
                " pip install 'deepinfer-hopper[structured]'"
            )
        think_end = None
        if structured.after_thinking:
            think_end = self._tokenizer.inner.token_to_id(_THINK_END)
            if think_end is None:
                raise RequestError(
                    f"structured.after_thinking: the tokenizer has no token {_THINK_END}"
                )

        def start(grammar: Any) -> GrammarState:
            matcher = self._library.GrammarMatcher(grammar)
            return GrammarState(matcher, self._vocabulary, think_end)

        return Pending(self._job(structured), start)

    def masks(self, states: Mapping[int, GrammarState], pinned: bool = False) -> Masks:
        """What may come next in each row; several are filled by several threads.

        Args:
            states: by row.
            pinned: whether the bits will be copied to a GPU.
        """
        width = len(self._vocabulary.all_but_end)
        bits = torch.empty((len(states), width), dtype=torch.int32, pin_memory=pinned)
        matchers = {i: s._matcher for i, s in enumerate(states.values()) if not s.thinking}
        if len(matchers) > 1:
            self._many.batch_fill_next_token_bitmask([*matchers.values()], bits, [*matchers])
        for number, state in enumerate(states.values()):
            if state.thinking or len(matchers) == 1:
                state.fill(bits, number)
        return Masks(bits, list(states))

    def _job(self, structured: StructuredOutput) -> _Job:
        kind = structured.kind
        form = structured.schema if kind == "json_schema" else getattr(structured, kind)
        key = kind, json.dumps(form)
        with self._listing:
            if key not in self._jobs:
                job = self._jobs[key] = _Job(self._seconds, self._clock)
                threading.Thread(target=self._run, args=(job, kind, form), daemon=True).start()
            self._jobs.move_to_end(key)
            while len(self._jobs) > _CACHED:
                self._jobs.popitem(last=False)
            return self._jobs[key]

    def _run(self, job: _Job, kind: str, form: Any) -> None:
        with self._turn:
            job.run(self._set_up, lambda: self._compile(kind, form))

    def _set_up(self) -> None:
        """Import the library and tell it the vocabulary, once."""
        with self._lock:
            if self._compilers:
                return
            import xgrammar

            inner, size = self._tokenizer.inner, self._vocabulary.size
            added = inner.get_added_tokens_decoder()
            pieces = [""] * size  # no text: never allowed
            for piece, token in inner.get_vocab(with_added_tokens=False).items():
                if token < size and token not in added:
                    pieces[token] = piece
            decoder = json.dumps(json.loads(inner.to_str()).get("decoder"))
            kinds = xgrammar.VocabType
            kind = kinds.BYTE_LEVEL if '"ByteLevel"' in decoder else kinds.RAW
            kind = kinds.BYTE_FALLBACK if '"ByteFallback"' in decoder else kind

            def compiler(pieces: list[Any], kind: Any) -> Any:
                info = xgrammar.TokenizerInfo(
                    pieces, kind, vocab_size=size, stop_token_ids=[self._vocabulary.end]
                )
                return xgrammar.GrammarCompiler(info, cache_enabled=False), info

            text, info = compiler(pieces, kind)
            # Strings of JSON have no control characters. The library lets them through where a
            # string has a length, so tokens with any but line ends are left out.
            plain = [b"" if _CONTROL.search(piece) else piece for piece in info.decoded_vocab]
            self._library, self._many = xgrammar, xgrammar.BatchGrammarMatcher()
            self._compilers = {"text": text, "json": compiler(plain, kinds.RAW)[0]}

    def _compile(self, kind: str, form: Any) -> Any:
        compiler = self._compilers["json" if kind == "json_schema" else "text"]
        if kind == "json_schema":
            grammar = compiler.compile_json_schema(
                json.dumps(form), max_whitespace_cnt=_MOST_BLANKS
            )
        elif kind == "regex":
            grammar = compiler.compile_regex(whole_text(form, "structured.regex"))
        elif kind == "ebnf":
            grammar = compiler.compile_grammar(form)
        else:
            choices = " | ".join(json.dumps(text, ensure_ascii=False) for text in form)
            grammar = compiler.compile_grammar(f"root ::= {choices}")
        bits = torch.zeros((1, len(self._vocabulary.all_but_end)), dtype=torch.int32)
        self._library.GrammarMatcher(grammar).fill_next_token_bitmask(bits, 0)
        if not bool(bits.any()):
            raise ValueError("no text follows it")
        return grammar
