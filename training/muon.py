"""Muon for the matrices: momentum, made orthogonal by a Newton-Schulz iteration, scaled to AdamW's
step size.

Knows tensors only. Matrices of one shape are stacked and updated together; 3-D parameters are
stacks already.
"""

from collections.abc import Iterable

import torch
from torch import Tensor


def orthogonal(matrices: Tensor, steps: int = 5) -> Tensor:
    """U V^T of each matrix of [n, r, c], r <= c, approximately: an odd quintic iterated in bf16."""
    x = matrices.bfloat16()
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x


class Muon:
    """The optimiser; `views` of the parameters keep their storage."""

    def __init__(
        self, parameters: Iterable[tuple[Tensor, int]], momentum: float = 0.95, decay: float = 0.1
    ) -> None:
        """`parameters`: (parameter, rows of one matrix in it); a fused parameter holds several
        matrices.
        """
        self.momentum, self.decay = momentum, decay
        self.groups: dict[tuple[int, int], list[tuple[Tensor, int]]] = {}
        for parameter, rows in parameters:
            self.groups.setdefault((rows, parameter.shape[-1]), []).append((parameter, rows))
        self.buffers = {
            shape: torch.zeros(
                sum(p.numel() for p, _ in members) // (shape[0] * shape[1]),
                *shape,
                device=members[0][0].device,
            )
            for shape, members in self.groups.items()
        }

    @torch.no_grad()
    def step(self, rate: float) -> None:
        """One update with the gradients at hand."""
        for (rows, columns), members in self.groups.items():
            gradient = torch.cat(
                [p.grad.view(-1, rows, columns) for p, _ in members if p.grad is not None]
            )
            buffer = self.buffers[rows, columns]
            buffer.lerp_(gradient, 1 - self.momentum)
            update = gradient.lerp_(buffer, self.momentum)
            update = orthogonal(update.mT if rows > columns else update)
            update = (update.mT if rows > columns else update).float() * (
                0.2 * max(rows, columns) ** 0.5
            )
            counts = [p.numel() // (rows * columns) for p, _ in members]
            for (parameter, _), part in zip(members, update.split(counts), strict=True):
                parameter.mul_(1 - rate * self.decay).add_(
                    part.reshape(parameter.shape), alpha=-rate
                )

    def state(self) -> dict[tuple[int, int], Tensor]:
        """The momentum, to be saved."""
        return self.buffers

    def load(self, state: dict[tuple[int, int], Tensor]) -> None:
        """Take saved momentum back."""
        for shape, buffer in state.items():
            self.buffers[shape].copy_(buffer)
