"""What ranks tell each other: that they are there, and the digest of what each of them found.

Knows torch.distributed; must not know models or answers.
"""

import hashlib
from datetime import timedelta

import torch
import torch.distributed as dist

from deepinfer.commands.report.records import Job


class Exchange:
    """The group of all ranks of a job; one rank alone needs none.

    Its device has to be set before.
    """

    def __init__(self, job: Job) -> None:
        self.ranks = job.ranks
        self._open = job.transport is not None
        self._device = torch.device("cpu" if job.transport != "nccl" else "cuda")
        if self._open:
            store = dist.FileStore(job.store, job.ranks)  # type: ignore[attr-defined]  # it is there
            dist.init_process_group(
                job.transport, store=store, rank=job.rank,
                world_size=job.ranks, timeout=timedelta(seconds=job.seconds),
            )  # fmt: skip

    def wait(self) -> None:
        """Go on when all ranks are here."""
        if self._open:
            self._gather(b"here")

    def agreed(self, text: str) -> bool | None:
        """Whether all ranks say the same; None for one alone."""
        if not self._open:
            return None
        digests = self._gather(text.encode())
        return all(torch.equal(digest, digests[0]) for digest in digests)

    def _gather(self, data: bytes) -> list[torch.Tensor]:
        digest = hashlib.sha256(data).digest()
        mine = torch.tensor(list(digest), dtype=torch.uint8, device=self._device)
        all_of_them = [torch.empty_like(mine) for _ in range(self.ranks)]
        dist.all_gather(all_of_them, mine)
        return [digest.cpu() for digest in all_of_them]

    def close(self) -> None:
        """Leave the group."""
        if self._open:
            dist.destroy_process_group()
