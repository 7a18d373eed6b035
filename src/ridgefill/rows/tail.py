"""A longer tail: the control at equal cost (paper 2.4, Table I.2)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ridgefill.rows.base import Budget, Prompt, Selector, check_budget
from ridgefill.rows.settings import written


@dataclass(frozen=True)
class LongerTail(Selector):
    """The last rows of the prefix, next to the tail."""

    budget: Budget = 0.10

    def __post_init__(self) -> None:
        check_budget("a longer tail", self.budget)

    def select(self, prompt: Prompt) -> Tensor:
        """[m] bool."""
        return torch.arange(prompt.prefix) >= max(prompt.leading, prompt.prefix - prompt.count(self.budget))

    def __str__(self) -> str:
        return written("tail", self)
