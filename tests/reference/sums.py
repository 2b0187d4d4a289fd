"""Two ways to take the sums of the reference: in float64, or in float32 pieces in a chosen order."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch


class Sums(Protocol):
    """How sums of products are taken."""

    def multiply(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        """left @ right of float64 tensors, as a float64 tensor."""


@dataclass(frozen=True)
class Float64Sums:
    """Sums in float64."""

    def multiply(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        """left @ right."""
        return torch.matmul(left, right)


@dataclass(frozen=True)
class Float32Sums:
    """Sums in float32: the inner axis as it is for order 0, else shuffled by the order, then in ascending pieces."""

    order: int
    piece_width: int = 16

    def multiply(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        """left @ right, each piece and each addition of pieces in float32."""
        shuffle = self.shuffle(left.shape[-1])
        lefts = left.to(torch.float32).index_select(-1, shuffle).split(self.piece_width, dim=-1)
        rights = right.to(torch.float32).index_select(-2, shuffle).split(self.piece_width, dim=-2)
        total = torch.matmul(lefts[0], rights[0])
        for piece in range(1, len(lefts)):
            total = total + torch.matmul(lefts[piece], rights[piece])
        return total.to(torch.float64)

    def shuffle(self, count: int) -> torch.Tensor:
        """The order in which the terms of a sum of this many are taken."""
        if self.order == 0:
            return torch.arange(count)
        return torch.from_numpy(np.random.default_rng(self.order).permutation(count))
