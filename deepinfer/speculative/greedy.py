"""Greedy speculative decoding of one sequence: draft, verify, accept, roll back.

Knows one sequence at a time and the cached forward; must not know requests. What it yields equals
plain greedy decoding token for token.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer.kv.blocks import SequenceBlocks
from deepinfer.kv.pool import CachePool
from deepinfer.model.cached import draft, observe, run
from deepinfer.model.step import SequenceRows, StepLayout
from deepinfer.model.transformer import Transformer


@dataclass(frozen=True)
class Round:
    """One verification.

    Attributes:
        token_ids: accepted drafts, then the target's own next token.
        drafted: drafts that were verified; accepted of them were right, the first ones.
        confidence: the drafter's estimate for each draft.
    """

    token_ids: list[int]
    drafted: int
    accepted: int
    confidence: list[float]


class GreedySpeculation:
    """State of one sequence in its slot and pages.

    Args:
        blocks: pages for everything that will be generated, and block_size + 1 tokens more.
        token_map: [V] n-gram classes, None without n-gram layers.
    """

    def __init__(
        self,
        model: Transformer,
        pool: CachePool,
        blocks: SequenceBlocks,
        token_map: Tensor | None,
        chunk: int = 512,
    ) -> None:
        self.model, self.pool, self.blocks, self.token_map = model, pool, blocks, token_map
        self.chunk = chunk
        self.device = model.embed.weight.device
        self.committed = 0

    def _forward(self, tokens: list[int]) -> tuple[Tensor, Tensor, StepLayout]:
        """Rows after the committed ones: collapsed streams, taps and layout."""
        rows = SequenceRows(self.blocks.slot, self.blocks.pages, self.committed, len(tokens))
        layout = StepLayout([rows], self.pool.geometry, self.device)
        ids = torch.tensor(tokens, dtype=torch.int64, device=self.device)
        output = run(self.model, self.pool, layout, ids, self.token_map)
        assert output.hidden.taps is not None, "the checkpoint has no drafter"
        return output.hidden.x, output.hidden.taps, layout

    def _commit(self, taps: Tensor, count: int) -> None:
        """Keep the first `count` rows of the last forward; the rest was never there."""
        rows = SequenceRows(self.blocks.slot, self.blocks.pages, self.committed, count)
        layout = StepLayout([rows], self.pool.geometry, self.device)
        observe(self.model, self.pool, layout, taps[:count])
        self.committed += count

    def prefill(self, prompt: list[int]) -> int:
        """Process the prompt; returns the first generated token."""
        x = torch.empty(0)
        for start in range(0, len(prompt), self.chunk):
            part = prompt[start : start + self.chunk]
            x, taps, _ = self._forward(part)
            self._commit(taps, len(part))
        return int(self.model.logits(x[-1]).argmax())

    def rounds(self, token: int) -> Iterator[Round]:
        """Endless rounds after the sampled but not yet processed `token`."""
        while True:
            last = SequenceRows(self.blocks.slot, self.blocks.pages, self.committed - 1, 1)
            layout = StepLayout([last], self.pool.geometry, self.device)
            guess = draft(self.model, self.pool, layout, torch.tensor([token], device=self.device))
            drafts: list[int] = guess.token_ids[0].tolist()
            x, taps, _ = self._forward([token, *drafts])
            choices: list[int] = self.model.logits(x).argmax(-1).tolist()
            accepted = 0
            while accepted < len(drafts) and drafts[accepted] == choices[accepted]:
                accepted += 1
            self._commit(taps, accepted + 1)
            token = choices[accepted]
            yield Round(
                choices[: accepted + 1], len(drafts), accepted, guess.confidence[0].tolist()
            )
