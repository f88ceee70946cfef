"""How many drafts of each sequence are worth a row of the verification."""

from deepinfer.ops.schedule_drafts.reference import schedule_drafts

__all__ = ["schedule_drafts"]
