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
_COUNTS, _MASKS = 0, 1  # tables
_PROMPT, _OUTPUT = 0, 1  # whose tokens are counted


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
        logprobs: by row, of those that are not faulty and whose parameters ask for it.
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
            found = zip(self.reported, self.logprobs.read(table), strict=True)
            entries = {row: entry for row, entry in found if not status[row]}
        faulty = [row for row, bad in enumerate(status) if bad]
        return Drawn(packed[:rows].tolist(), faulty, entries)


@dataclass
class _Slot:
    """The sequence in a slot.

    Attributes:
        ends: tokens that may not be drawn at first.
        bias: token ids and what is added to their logits.
    """

    params: SamplingParams
    ends: list[int]
    bias: tuple[Integers, Floats] | None


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
        # Of every slot: temperature, top-k, top-p and min-p as float64, and the seed; penalties;
        # until which position its end tokens may not be drawn; its rows of the tables, or -1;
        # whether it has biases, and whether it wants log-probabilities.
        self._rules = np.zeros((5, slots), dtype=np.int64)
        self._penalties = np.zeros((3, slots), dtype=np.float32)
        self._early = np.zeros(slots, dtype=np.int64)
        self._rows = np.full((2, slots), -1, dtype=np.int64)
        self._biased = np.zeros(slots, dtype=bool)
        self._reported = np.zeros(slots, dtype=bool)
        self._tables = (
            _Table(2, vocab_size, device, slots),
            _Table(1, (vocab_size + 31) // 32, device, slots),
        )

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
        end_tokens = sorted(params.end_tokens(self._eos)) if params.min_tokens else []
        self._early[slot] = len(prompt_ids) + params.min_tokens if end_tokens else 0
        bias = None
        if params.bias_pairs:
            ids, values = zip(*params.bias_pairs, strict=True)
            bias = np.array(ids, dtype=np.int64), np.array(values, dtype=np.float32)
        self._biased[slot] = bias is not None
        self._reported[slot] = params.logprobs is not None
        # Open before anything that may fail, so that `close` gives its rows back.
        self._open[slot] = _Slot(params, end_tokens, bias)
        if params.has_penalties:
            self._count_known(slot, params, prompt_ids, output_ids)
        if params.allowed_token_ids is not None or params.banned_token_ids:
            table = self._tables[_MASKS]
            self._rows[_MASKS, slot] = table.take()
            bits = self._upload(allowed_bits(params, self._vocabulary))
            table.data[0, int(self._rows[_MASKS, slot])] = bits

    def _count_known(
        self, slot: int, params: SamplingParams, prompt: Sequence[int], output: Sequence[int]
    ) -> None:
        self._penalties[:, slot] = (
            params.repetition_penalty, params.presence_penalty, params.frequency_penalty
        )  # fmt: skip
        table = self._tables[_COUNTS]
        row = self._rows[_COUNTS, slot] = table.take()
        for part, ids in ((_PROMPT, prompt), (_OUTPUT, output)):
            counts = table.data[part, int(row)].zero_().unsqueeze(0)
            if ids:
                listed = self._upload(np.array([ids], dtype=np.int64))
                self._operators.count_tokens(listed, counts)

    def close(self, slot: int) -> None:
        """End with the sequence in `slot`; a step under way may still have a row of it."""
        del self._open[slot]
        for number, table in enumerate(self._tables):
            if self._rows[number, slot] >= 0:
                table.give(int(self._rows[number, slot]))
        self._rows[:, slot] = -1

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
        at, where = np.array(slots, dtype=np.int64), np.array(positions, dtype=np.int64)
        reported = np.flatnonzero(self._reported[at])
        changed = np.flatnonzero(
            (self._rows[:, at] >= 0).any(0) | self._biased[at] | (where < self._early[at])
        )
        if masks is not None:
            changed = np.union1d(changed, np.array(masks.rows, dtype=np.int64))
        raw = logits
        if len(reported) and (len(changed) or len(reported) < len(slots)):
            raw = logits.index_select(0, self._upload(reported))
        faulty = None
        if len(changed):
            rows = self._upload(changed)
            # What is forbidden may hide a NaN, which says that the model failed.
            bad = ~logits.index_select(0, rows).amax(-1).isfinite()
            faulty = torch.zeros(len(slots), dtype=torch.int32, device=self._device)
            faulty.index_copy_(0, rows, bad.to(torch.int32))
            self._change(logits, at, where, masks)
        tokens, status = self._draw(logits, at, where)
        if faulty is not None:
            status = status | faulty
            tokens = torch.where(status == 0, tokens, NO_TOKEN)
            self._count(tokens, at)
        if not len(reported):
            return Sampled(tokens, status)
        wanted = [self._open[slot].params.logprobs or 0 for slot in at[reported].tolist()]
        chosen = tokens if raw is logits else tokens.index_select(0, self._upload(reported))
        entries = LogprobRows.of(raw, chosen, wanted, self._operators)
        return Sampled(tokens, status, reported.tolist(), entries)

    def _change(
        self, logits: Tensor, slots: Integers, positions: Integers, masks: Masks | None
    ) -> None:
        """Penalties, then biases, then what forbids tokens, in place."""
        self._penalise(logits, slots)
        biased = np.flatnonzero(self._biased[slots])
        if len(biased):
            found = [bias for row in biased if (bias := self._open[slots[row]].bias)]
            places = self._places(biased, [ids for ids, _ in found])
            values = self._upload(np.concatenate([values for _, values in found]))
            logits.index_put_(places, logits[places] + values)
        early = np.flatnonzero(positions < self._early[slots])
        if len(early):
            places = self._places(early, [self._open[slots[row]].ends for row in early])
            nothing = torch.full((), -torch.inf, device=self._device)
            logits.index_put_(places, nothing)
        numbers = self._rows[_MASKS, slots]
        listed = np.flatnonzero(numbers >= 0)
        if len(listed):
            bits = self._tables[_MASKS].data[0].index_select(0, self._upload(numbers[listed]))
            self._operators.apply_bitmask(logits, bits, self._upload(listed))
        if masks is not None and masks.rows:
            rows = self._upload(np.array(masks.rows, dtype=np.int64))
            bits = masks.bits.to(self._device, non_blocking=True)
            self._operators.apply_bitmask(logits, bits, rows)

    def _penalise(self, logits: Tensor, slots: Integers) -> None:
        numbers = self._rows[_COUNTS, slots]
        rows = np.flatnonzero(numbers >= 0)
        if not len(rows):
            return
        which = self._upload(numbers[rows])
        counts = [part.index_select(0, which) for part in self._tables[_COUNTS].data]
        penalties = self._upload(self._penalties[:, slots[rows]])
        no_ids = torch.empty((len(rows), 0), dtype=torch.int64, device=self._device)
        no_values = torch.empty((len(rows), 0), dtype=torch.float32, device=self._device)
        if len(rows) == len(logits):
            self._operators.penalise(logits, *counts, *penalties, no_ids, no_values)
            return
        index = self._upload(rows)
        part = logits.index_select(0, index)
        self._operators.penalise(part, *counts, *penalties, no_ids, no_values)
        logits.index_copy_(0, index, part)

    def _draw(self, logits: Tensor, slots: Integers, positions: Integers) -> tuple[Tensor, Tensor]:
        rules = np.concatenate([self._rules[:, slots], positions[None]])
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

    def _count(self, tokens: Tensor, slots: Integers) -> None:
        """Add what was drawn to the counts of the output."""
        numbers = self._rows[_COUNTS, slots]
        rows = np.flatnonzero(numbers >= 0)
        if len(rows):
            drawn = tokens.index_select(0, self._upload(rows))
            counts = self._tables[_COUNTS].data[_OUTPUT]
            places = self._upload(numbers[rows]) * self._vocabulary + drawn.clamp_min(0)
            counts.view(-1).index_add_(0, places, (drawn >= 0).to(torch.int32))

    def _places(
        self, rows: Integers, ids: Sequence[Sequence[int] | Integers]
    ) -> tuple[Tensor, ...]:
        """Rows and columns of the token ids of several rows."""
        columns = np.concatenate([np.asarray(some, dtype=np.int64) for some in ids])
        return tuple(self._upload(np.stack([np.repeat(rows, [len(x) for x in ids]), columns])))

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
