"""Drawing the tokens of a step: what grammars allow, the draw, and its way to the host.

Knows whom the sampler knows by which slot; must not know the scheduler or what becomes of a token.
"""

from dataclasses import dataclass

from deepinfer.config import EngineConfig
from deepinfer.engine.flight import Flight, Launched, SampledRow
from deepinfer.engine.request import Completion
from deepinfer.engine.runner import Runner
from deepinfer.sampling.batch import Masks, SamplingBatch
from deepinfer.sampling.grammar import GrammarCompiler


@dataclass(frozen=True)
class PromptRows:
    """Rows whose logits are reported for the prompt: position of the first, and their place."""

    completion: Completion
    start: int
    place: slice


class Drawing:
    """Draws for the replies that run.

    Attributes:
        sampler: knows the sequences in their slots.
    """

    def __init__(self, config: EngineConfig, runner: Runner, grammars: GrammarCompiler) -> None:
        self._runner = runner
        self._grammars = grammars
        self._open: dict[int, Completion] = {}
        model = runner.model
        self.sampler = SamplingBatch(
            config.state_slots, model.config.vocab_size, model.config.eos_token_id,
            runner.device, model.precision.operators,
        )  # fmt: skip

    def draw(self, part: Launched, rows: list[SampledRow], prompts: list[PromptRows]) -> Flight:
        """Draw one token for each of the rows, and send everything to the host."""
        rows, masks, failed = self._masked(rows)
        flight = Flight(rows, failed)
        operators = self._runner.model.precision.operators
        for prompt in prompts:
            logits = part.logits[prompt.place]
            flight.report_prompt(prompt.completion, prompt.start, logits, operators)
        if rows:
            slots = [self._slot(row.completion) for row in rows]
            with self._runner.guarded():
                logits = part.select([row.place for row in rows])
                positions = [row.position for row in rows]
                sampled = self.sampler.sample(logits, slots, positions, masks)
                self._runner.keep_sampled(slots, sampled.tokens)
            flight.sampled = sampled
        flight.send()
        return flight

    def _masked(
        self, rows: list[SampledRow]
    ) -> tuple[list[SampledRow], Masks | None, list[tuple[Completion, Exception]]]:
        """What grammars allow in these rows; rows whose grammar fails are left out."""
        states = {i: row.completion.grammar for i, row in enumerate(rows) if row.completion.grammar}
        if not states:
            return rows, None, []
        pinned = self._runner.device.type == "cuda"
        try:
            return rows, self._grammars.masks(states, pinned), []
        except Exception as together:
            failed = []
            for number, state in states.items():
                try:
                    self._grammars.masks({number: state})
                except Exception as own:
                    failed.append((rows[number].completion, own))
            if not failed:
                raise RuntimeError("grammars fail together, though none does alone") from together
            gone = {completion for completion, _ in failed}
            left, masks, more = self._masked([row for row in rows if row.completion not in gone])
            return left, masks, failed + more

    def _slot(self, completion: Completion) -> int:
        """State slot of a running sequence, which the sampler knows from now on."""
        blocks = completion.sequence.blocks
        assert blocks is not None, "sampled without a slot"
        if self._open.get(blocks.slot) is not completion:
            request = completion.request
            self._open[blocks.slot], completion.slot = completion, blocks.slot
            self.sampler.open(blocks.slot, request.params, completion.seed, request.prompt_ids,
                              completion.generated)  # fmt: skip
        return blocks.slot

    def close(self, completion: Completion) -> None:
        """The sampler need not know it any more."""
        slot, completion.slot = completion.slot, None
        if slot is not None:
            del self._open[slot]
            self.sampler.close(slot)
