"""Index tensors of one step, made where the step runs."""

from deepinfer.ops.step_metadata.reference import (
    fix_lengths,
    fix_token_ids,
    ring_targets,
    window_index,
)

__all__ = ["fix_lengths", "fix_token_ids", "ring_targets", "window_index"]
