"""Muon for matrices, Adam for the rest, without host syncs, so that a step can be a CUDA graph.

Knows parameters and gradients; must not know the model.
"""

from collections import defaultdict

import torch
from torch import Tensor, nn

# Quintic Newton-Schulz coefficients of Muon (Jordan et al. 2024): push singular values towards 1.
_A, _B, _C = 3.4445, -4.7750, 2.0315


def orthogonalise(matrices: Tensor, iterations: int = 5) -> Tensor:
    """Nearest semi-orthogonal matrices, roughly, of [N, rows, columns] (bfloat16 inside)."""
    x = matrices.to(torch.bfloat16)
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.transpose(-1, -2)
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(iterations):
        square = x @ x.transpose(-1, -2)
        x = _A * x + (_B * square + _C * square @ square) @ x
    return (x.transpose(-1, -2) if tall else x).float()


class Optimiser:
    """Both rules over one model.

    Args:
        matrices: parameters of two or more axes whose last two are a matrix; updated by Muon with
            the step of Adam's size (0.2 * sqrt(larger side) times an orthogonal matrix).
        others: parameters updated by Adam.

    Attributes:
        factor: [] scales both rates; the schedule writes it before a step.
    """

    def __init__(
        self, matrices: list[nn.Parameter], others: list[nn.Parameter], *, rate: float,
        adam_rate: float, weight_decay: float, clip: float,
    ) -> None:  # fmt: skip
        self.matrices, self.others = matrices, others
        self.rate, self.adam_rate = rate, adam_rate
        self.weight_decay, self.clip = weight_decay, clip
        device = (matrices + others)[0].device
        self.factor = torch.zeros((), device=device)
        self.count = torch.zeros((), device=device)
        self.momenta = [torch.zeros_like(p) for p in matrices]
        self.first = [torch.zeros_like(p) for p in others]
        self.second = [torch.zeros_like(p) for p in others]

    @torch.no_grad()
    def step(self) -> Tensor:
        """Update from the gradients, which are then dropped; returns their norm before clipping."""
        gradients = [p.grad for p in self.matrices + self.others]
        norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))
        torch._foreach_mul_(gradients, (self.clip / (norm + 1e-6)).clamp_max(1.0))
        self._muon([p.grad for p in self.matrices])
        self._adam([p.grad for p in self.others])
        return norm

    def _muon(self, gradients: list[Tensor]) -> None:
        torch._foreach_mul_(self.momenta, 0.95)
        torch._foreach_add_(self.momenta, gradients)
        ahead = torch._foreach_add(gradients, self.momenta, alpha=0.95)
        shapes: dict[tuple[int, int], list[int]] = defaultdict(list)
        for number, p in enumerate(self.matrices):
            shapes[(p.shape[-2], p.shape[-1])].append(number)
        rate = self.rate * self.factor
        for (rows, columns), numbers in shapes.items():
            flat = [ahead[n].reshape(-1, rows, columns) for n in numbers]
            updates = orthogonalise(torch.cat(flat)).split([len(f) for f in flat])
            size = 0.2 * max(rows, columns) ** 0.5
            for n, update in zip(numbers, updates, strict=True):
                p = self.matrices[n]
                p.mul_(1 - rate * self.weight_decay)
                p.sub_(rate * size * update.view_as(p))

    def _adam(self, gradients: list[Tensor]) -> None:
        self.count += 1
        torch._foreach_lerp_(self.first, gradients, 0.1)
        torch._foreach_mul_(self.second, 0.98)
        torch._foreach_addcmul_(self.second, gradients, gradients, value=0.02)
        bias1, bias2 = 1 - 0.9**self.count, 1 - 0.98**self.count
        steps = torch._foreach_div(self.second, bias2)
        torch._foreach_sqrt_(steps)
        torch._foreach_add_(steps, 1e-10)
        steps = torch._foreach_div(self.first, steps)
        torch._foreach_mul_(steps, self.adam_rate * self.factor / bias1)
        torch._foreach_sub_(self.others, steps)


def schedule(progress: float, warmup: float, decay: float) -> float:
    """Rate factor at `progress` in [0, 1]: linear rise, plateau, linear fall to 0."""
    if progress < warmup:
        return progress / warmup
    return min(1.0, (1.0 - progress) / decay)
