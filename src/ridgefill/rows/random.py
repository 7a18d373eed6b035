"""Random rows: the other control at equal cost (paper 2.4)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ridgefill.rows.base import Budget, Prompt, Selector, check_budget
from ridgefill.rows.ranking import best
from ridgefill.rows.settings import check_count, written


@dataclass(frozen=True)
class RandomRows(Selector):
    """Rows drawn evenly; the same ones for the same seed and prefix length."""

    budget: Budget = 0.10
    seed: int = 0

    def __post_init__(self) -> None:
        check_budget("random rows", self.budget)
        check_count("random rows: a seed", self.seed, least=0)

    def select(self, prompt: Prompt) -> Tensor:
        """[m] bool."""
        order = torch.randperm(prompt.prefix, generator=torch.Generator().manual_seed(self.seed))
        return best(prompt, order.float(), prompt.count(self.budget))

    def __str__(self) -> str:
        return written("random", self)
