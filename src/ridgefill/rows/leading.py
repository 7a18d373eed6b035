"""The first rows, which hold the attention sink."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ridgefill.rows.base import Prompt, Selector
from ridgefill.rows.settings import check_count, written


@dataclass(frozen=True)
class LeadingRows(Selector):
    """The first ``count`` rows of the prompt."""

    count: int = 16

    def __post_init__(self) -> None:
        check_count("leading rows: a count", self.count, least=0)

    def select(self, prompt: Prompt) -> Tensor:
        """[m] bool."""
        return torch.arange(prompt.prefix) < self.count

    def __str__(self) -> str:
        return written("leading", self)
