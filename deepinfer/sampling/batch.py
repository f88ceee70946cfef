"""Sampling of the sequences that run together, where their logits are.

Knows parameters, seeds and tokens of sequences by their slots; must not know requests, text, caches
or the model. Nothing here waits for the device. What a sequence needs besides a few numbers lies in
tables on the device, which grow with the sequences that need them: how often its tokens occurred,
and which tokens it may not draw.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from deepinfer.ops.select import Operators, references
from deepinfer.sampling.logprobs import LogprobRows, TokenLogprobs
from deepinfer.sampling.params import SamplingParams

Integers = np.ndarray[tuple[int, ...], np.dtype[np.int64]]
Integers32 = np.ndarray[tuple[int, ...], np.dtype[np.int32]]
Floats = np.ndarray[tuple[int, ...], np.dtype[np.float32]]

NO_TOKEN = -1  # in rows that are no distribution
_PROMPT, _OUTPUT = 0, 1  # whose tokens a table counts


@dataclass(frozen=True)
class Masks:
    """Tokens that grammars allow in some rows of a step.

    Attributes:
        bits: [M, ceil(V / 32)] int32, token t is bit t % 32 of word t // 32; pinned, or on the
            device.
        rows: row of each mask, none twice.
    """

    bits: Tensor
    rows: Sequence[int]


@dataclass(frozen=True)
class Drawn:
    """What was drawn, on the host.

    Attributes:
        tokens: one per row, NO_TOKEN in faulty ones.
        faulty: rows whose logits are no distribution: NaN, +inf, or nothing that may be drawn.
        logprobs: by row, of those whose parameters ask for it.
    """

    tokens: list[int]
    faulty: list[int]
    logprobs: dict[int, TokenLogprobs]


@dataclass(frozen=True)
class Sampled:
    """What was drawn, on the device.

    Attributes:
        tokens: [B] int64, NO_TOKEN in rows that are no distribution.
        status: [B] int32, 0 = drawn, 1 = no distribution.
        logprobs: of the rows `reported`, None where there are none.
    """

    tokens: Tensor
    status: Tensor
    reported: Sequence[int] = ()
    logprobs: LogprobRows | None = None

    def pack(self) -> Tensor:
        """Everything in one tensor for one copy to the host: [N] int64."""
        parts = [self.tokens, self.status.long()]
        if self.logprobs is not None:
            parts.append(self.logprobs.pack().flatten())
        return torch.cat(parts)

    def read(self, packed: Tensor) -> Drawn:
        """What `pack` gave, once it is on the host."""
        rows = len(self.tokens)
        status = packed[rows : 2 * rows].tolist()
        entries: dict[int, TokenLogprobs] = {}
        if self.logprobs is not None:
            table = packed[2 * rows :].view(len(self.reported), -1)
            entries = dict(zip(self.reported, self.logprobs.read(table), strict=True))
        faulty = [row for row, bad in enumerate(status) if bad]
        return Drawn(packed[:rows].tolist(), faulty, entries)


@dataclass
class _Slot:
    """The sequence in a slot.

    Attributes:
        early: until this position the tokens `ends` may not be drawn.
        counts, mask: its rows of the tables, None where it needs none.
        bias: token ids and what is added to their logits.
    """

    params: SamplingParams
    early: int
    ends: list[int]
    counts: int | None = None
    mask: int | None = None
    bias: tuple[Integers, Floats] | None = None

    @property
    def is_plain(self) -> bool:
        """Whether its logits are taken as they are, past `early`."""
        return self.counts is None and self.mask is None and self.bias is None


class SamplingBatch:
    """Draws tokens for the sequences in its slots.

    `open` a slot for a sequence, `sample` at every step, `close` at its end. A sequence that stops
    and comes back is opened anew, with the tokens that it has. Its tokens depend on nothing else:
    draws are keyed by seed and position.

    Args:
        slots: most sequences at a time.
        vocab_size: V.
        eos_token_id: what ends a text.
        device: where logits will be.
        operators: default their references.
    """

    def __init__(
        self,
        slots: int,
        vocab_size: int,
        eos_token_id: int,
        device: torch.device,
        operators: Operators | None = None,
    ) -> None:
        self._vocabulary = vocab_size
        self._eos = eos_token_id
        self._device = device
        self._operators = operators or references()
        self._open: dict[int, _Slot] = {}
        self._changing: set[int] = set()  # slots whose logits are changed before a draw
        self._reporting: set[int] = set()  # slots that want log-probabilities
        # Temperature, top-k, top-p and min-p as float64, and the seed, of every slot.
        self._rules = np.zeros((5, slots), dtype=np.int64)
        self._counts = _Table(2, vocab_size, device, slots)
        self._masks = _Table(1, (vocab_size + 31) // 32, device, slots)

    @staticmethod
    def bytes_for(slots: int, vocab_size: int) -> int:
        """Most bytes of the tables: every sequence has penalties and forbidden tokens."""
        return 4 * slots * (2 * vocab_size + (vocab_size + 31) // 32)

    @torch.inference_mode()
    def open(
        self,
        slot: int,
        params: SamplingParams,
        seed: int,
        prompt_ids: Sequence[int],
        output_ids: Sequence[int] = (),
    ) -> None:
        """Begin with the sequence in `slot`, which must be closed.

        Args:
            params: checked against the vocabulary.
            seed: key of its draws, in [0, 2^64).
            prompt_ids, output_ids: its tokens so far.
        """
        assert slot not in self._open, f"slot {slot} is open"
        # Too small for float32, a temperature would become 0, which means something else.
        ends = torch.finfo(torch.float32)
        heat = params.temperature and min(max(params.temperature, ends.tiny), ends.max)
        # More than there are tokens is no limit, however many digits it has.
        top_k = min(params.top_k, self._vocabulary)
        self._rules.view(np.float64)[:4, slot] = heat, top_k, params.top_p, params.min_p
        self._rules.view(np.uint64)[4, slot] = seed
        state = _Slot(params, len(prompt_ids) + params.min_tokens, [])
        if params.min_tokens:
            state.ends = sorted(params.end_tokens(self._eos))
        if params.has_penalties:
            state.counts = self._counts.take()
            for part, ids in ((_PROMPT, prompt_ids), (_OUTPUT, output_ids)):
                row = self._counts.data[part, state.counts].zero_().unsqueeze(0)
                listed = self._upload(np.array([ids], dtype=np.int64))
                self._operators.count_tokens(listed, row)
        if params.allowed_token_ids is not None or params.banned_token_ids:
            state.mask = self._masks.take()
            bits = self._upload(allowed_bits(params, self._vocabulary))
            self._masks.data[0, state.mask] = bits
        if params.bias_pairs:
            ids, values = zip(*params.bias_pairs, strict=True)
            state.bias = np.array(ids, dtype=np.int64), np.array(values, dtype=np.float32)
        self._open[slot] = state
        if state.ends or not state.is_plain:
            self._changing.add(slot)
        if params.logprobs is not None:
            self._reporting.add(slot)

    def close(self, slot: int) -> None:
        """End with the sequence in `slot`; a step under way may still have a row of it."""
        state = self._open.pop(slot)
        self._changing.discard(slot)
        self._reporting.discard(slot)
        if state.counts is not None:
            self._counts.give(state.counts)
        if state.mask is not None:
            self._masks.give(state.mask)

    @torch.inference_mode()
    def sample(
        self,
        logits: Tensor,
        slots: Sequence[int],
        positions: Sequence[int],
        masks: Masks | None = None,
    ) -> Sampled:
        """Draw one token for each row, and count it where penalties need that.

        Args:
            logits: [B, V] float32 of the model. Rows that penalties, biases or masks change are
                overwritten.
            slots: open slot of each row, none twice.
            positions: position of the token to be drawn: how many tokens the sequence has before.
            masks: what grammars allow.
        """
        assert logits.shape == (len(slots), self._vocabulary), (logits.shape, len(slots))
        assert logits.dtype == torch.float32 and len(positions) == len(slots)
        reported = [i for i, s in enumerate(slots) if s in self._reporting]
        changed = self._changed(slots, positions, masks)
        raw = logits
        if reported and (changed or len(reported) < len(slots)):
            raw = logits.index_select(0, self._indices(reported))
        faulty = None
        if changed:
            rows = self._indices(changed)
            # What is forbidden may hide a NaN, which says that the model failed.
            bad = ~logits.index_select(0, rows).amax(-1).isfinite()
            faulty = torch.zeros(len(slots), dtype=torch.int32, device=self._device)
            faulty.index_copy_(0, rows, bad.to(torch.int32))
            self._change(logits, slots, positions, masks)
        tokens, status = self._draw(logits, slots, positions)
        if faulty is not None:
            status = status | faulty
            tokens = torch.where(status == 0, tokens, NO_TOKEN)
            self._count(tokens, slots)
        if not reported:
            return Sampled(tokens, status)
        wanted = [self._open[slots[i]].params.logprobs or 0 for i in reported]
        chosen = tokens if raw is logits else tokens.index_select(0, self._indices(reported))
        return Sampled(
            tokens, status, reported, LogprobRows.of(raw, chosen, wanted, self._operators)
        )

    def _changed(
        self, slots: Sequence[int], positions: Sequence[int], masks: Masks | None
    ) -> list[int]:
        """Rows whose logits are not taken as they are."""
        rows = set(() if masks is None else masks.rows)
        if self._changing:
            for row, slot in enumerate(slots):
                if slot in self._changing:
                    state = self._open[slot]
                    if not state.is_plain or positions[row] < state.early:
                        rows.add(row)
        return sorted(rows)

    def _change(
        self,
        logits: Tensor,
        slots: Sequence[int],
        positions: Sequence[int],
        masks: Masks | None,
    ) -> None:
        """Penalties, then biases, then what forbids tokens, in place."""
        states = [(row, self._open[slot]) for row, slot in enumerate(slots)
                  if slot in self._changing]  # fmt: skip
        self._penalise(logits, [(row, s) for row, s in states if s.counts is not None])
        biases = [(row, *s.bias) for row, s in states if s.bias is not None]
        if biases:
            places = self._places([(row, ids) for row, ids, _ in biases])
            values = self._upload(np.concatenate([values for *_, values in biases]))
            logits.index_put_(places, logits[places] + values)
        early = [(row, s.ends) for row, s in states if s.ends and positions[row] < s.early]
        if early:
            nothing = torch.full((), -torch.inf, device=self._device)
            logits.index_put_(self._places(early), nothing)
        listed = [(row, s.mask) for row, s in states if s.mask is not None]
        if listed:
            rows, numbers = (self._indices(part) for part in zip(*listed, strict=True))
            bits = self._masks.data[0].index_select(0, numbers)
            self._operators.apply_bitmask(logits, bits, rows)
        if masks is not None and masks.rows:
            bits = masks.bits.to(self._device, non_blocking=True)
            self._operators.apply_bitmask(logits, bits, self._indices(masks.rows))

    def _penalise(self, logits: Tensor, states: Sequence[tuple[int, _Slot]]) -> None:
        if not states:
            return
        numbers = self._indices([s.counts for _, s in states if s.counts is not None])
        counts = [part.index_select(0, numbers) for part in self._counts.data]
        asked = [s.params for _, s in states]
        rules = self._upload(np.array(
            [[p.repetition_penalty, p.presence_penalty, p.frequency_penalty] for p in asked],
            dtype=np.float32,
        ).T.copy())  # fmt: skip
        no_ids = torch.empty((len(asked), 0), dtype=torch.int64, device=self._device)
        no_values = torch.empty((len(asked), 0), dtype=torch.float32, device=self._device)
        if len(asked) == len(logits):
            self._operators.penalise(logits, *counts, *rules, no_ids, no_values)
            return
        rows = self._indices([row for row, _ in states])
        part = logits.index_select(0, rows)
        self._operators.penalise(part, *counts, *rules, no_ids, no_values)
        logits.index_copy_(0, rows, part)

    def _draw(
        self, logits: Tensor, slots: Sequence[int], positions: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        rules = np.empty((6, len(slots)), dtype=np.int64)
        rules[:5] = self._rules[:, list(slots)]
        rules[5] = positions
        if not rules[0].any():
            largest, tokens = logits.max(-1)  # the first of equals
            usable = largest.isfinite()
            return torch.where(usable, tokens, NO_TOKEN), (~usable).to(torch.int32)
        keys = self._upload(rules)
        heat, top_k, top_p, min_p = keys[:4].view(torch.float64)
        tokens, status = self._operators.sample_tokens(
            logits, heat.float(), top_k.long(), top_p, min_p, keys[4], keys[5]
        )
        return tokens, status

    def _count(self, tokens: Tensor, slots: Sequence[int]) -> None:
        """Add what was drawn to the counts of the output."""
        counted = [(row, self._open[slot].counts) for row, slot in enumerate(slots)
                   if slot in self._changing]  # fmt: skip
        pairs = [(row, number) for row, number in counted if number is not None]
        if pairs:
            rows, numbers = (self._indices(part) for part in zip(*pairs, strict=True))
            drawn = tokens.index_select(0, rows)
            counts = self._counts.data[_OUTPUT]
            places = numbers * self._vocabulary + drawn.clamp_min(0)
            counts.view(-1).index_add_(0, places, (drawn >= 0).to(torch.int32))

    def _places(
        self, entries: Sequence[tuple[int, Sequence[int] | Integers]]
    ) -> tuple[Tensor, ...]:
        """Rows and columns of the token ids of several rows."""
        columns = np.concatenate([np.asarray(ids, dtype=np.int64) for _, ids in entries])
        rows = np.repeat([row for row, _ in entries], [len(ids) for _, ids in entries])
        return tuple(self._upload(np.stack([rows, columns])))

    def _indices(self, numbers: Sequence[int]) -> Tensor:
        return self._upload(np.array(numbers, dtype=np.int64))

    def _upload(self, values: "np.ndarray[Any, np.dtype[Any]]") -> Tensor:
        """On the device, without waiting for it."""
        tensor = torch.from_numpy(values)
        if self._device.type == "cpu":
            return tensor
        return tensor.pin_memory().to(self._device, non_blocking=True)


def allowed_bits(params: SamplingParams, vocab_size: int) -> Integers32:
    """allowed_token_ids without banned_token_ids as bits: [ceil(V / 32)] int32."""
    words = (vocab_size + 31) // 32
    allowed = np.zeros(words * 32, dtype=np.uint8)
    if params.allowed_token_ids is None:
        allowed[:] = 1
    else:
        allowed[list(params.allowed_token_ids)] = 1
    allowed[list(params.banned_token_ids)] = 0
    return np.packbits(allowed, bitorder="little").view("<i4")


class _Table:
    """Rows of int32 on the device, [parts, rows, width]; there are more once all are taken.

    Growing, too, happens in the order of the device's work.
    """

    def __init__(self, parts: int, width: int, device: torch.device, most: int) -> None:
        self._most = most
        self.data = torch.zeros((parts, 0, width), dtype=torch.int32, device=device)
        self._free: list[int] = []

    def take(self) -> int:
        """Number of a row that nobody has; what stands in it is left over."""
        if not self._free:
            old = self.data
            parts, rows, width = old.shape
            more = min(max(2 * rows, 4), self._most)
            assert more > rows, "more sequences than slots"
            self.data = torch.zeros((parts, more, width), dtype=old.dtype, device=old.device)
            self.data[:, :rows] = old
            self._free = list(range(rows, more))
        return self._free.pop()

    def give(self, row: int) -> None:
        """Nobody has the row any more."""
        self._free.append(row)
