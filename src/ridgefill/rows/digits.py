"""Digit tokens (paper 2.4 counts them for the probe's budget; Appendix I.2 runs them exactly)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ridgefill.rows.base import Prompt, Selector
from ridgefill.rows.settings import written


@dataclass(frozen=True)
class DigitRows(Selector):
    """Every row whose token holds a digit of any script; all the rows of a digit that takes several tokens."""

    def select(self, prompt: Prompt) -> Tensor:
        """[m] bool.

        Raises:
            SettingError: there is no tokenizer.
        """
        chosen: list[bool] = []
        for piece in prompt.pieces[: prompt.prefix]:
            goes_on = not piece and bool(chosen) and chosen[-1]
            chosen.append(goes_on or any(c.isdigit() for c in piece))
        return torch.tensor(chosen, dtype=torch.bool)

    def __str__(self) -> str:
        return written("digits", self)
