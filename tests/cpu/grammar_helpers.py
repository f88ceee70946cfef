"""Walking through grammars at random, and what a mask allows."""

import random
from pathlib import Path

import numpy as np
import torch

from deepinfer.checkpoint.tokenizer import Tokenizer
from deepinfer.sampling.grammar import GrammarCompiler, GrammarState
from deepinfer.sampling.structured import StructuredOutput

DEMO = Path(__file__).parents[2] / "models" / "demo"
V, EOS = 4096, 1
WORDS = V // 32


def begin(compiler: GrammarCompiler, structured: StructuredOutput) -> GrammarState:
    """The beginning of a text that follows it."""
    pending = compiler.compile(structured)
    pending.wait()
    return pending.state()


def allowed(state: GrammarState) -> set[int]:
    """Tokens that may come next."""
    bits = torch.zeros((1, WORDS), dtype=torch.int32)
    state.fill(bits, 0)
    return set(np.flatnonzero(np.unpackbits(bits.numpy().view(np.uint8), bitorder="little")))


class Walker:
    """Random texts that follow grammars; after a while they prefer tokens that end something."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.texts = [tokenizer.token_text(token) for token in range(V)]
        ends = '"]}0123,:etrufalsn'
        self._ends = {i for i, text in enumerate(self.texts) if text and set(text) <= set(ends)}
        self._escapes = {i for i, text in enumerate(self.texts) if "\\" in text}

    def walk(self, state: GrammarState, rng: random.Random, limit: int = 120) -> list[int] | None:
        """The tokens of a complete text, None if it did not end in time."""
        ids: list[int] = []
        while len(ids) < limit:
            choice = allowed(state)
            assert choice, f"nothing may follow {self.tokenizer.decode(ids)!r}"
            if EOS in choice and (len(choice) == 1 or rng.random() < 0.4):
                assert state.accept(EOS)
                assert state.finished
                return ids
            choice.discard(EOS)
            liked = self._ends if len(ids) > 20 else self._escapes
            if choice & liked and rng.random() < (0.9 if len(ids) > 20 else 0.15):
                choice &= liked
            ids.append(int(rng.choice(sorted(choice))))
            assert state.accept(ids[-1])
        return None
