"""Protected tokens (paper 2.4): rows of rare tokens of the classes that carry the fill's damage."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ridgefill.errors import SettingError
from ridgefill.rows.base import Prompt, Selector, top
from ridgefill.rows.settings import written


@dataclass(frozen=True)
class ProtectedRows(Selector):
    """The rarest ``share`` of the rows whose token class is eligible.

    Of k matching positions, round-half-even(share * k) are kept, the rarest by add-one unigram frequency over
    the calibration text, ties to the lower position. It does not read the question.
    """

    share: float = 0.25

    def __post_init__(self) -> None:
        if (
            not isinstance(self.share, float | int)
            or isinstance(self.share, bool)
            or not 0 <= self.share <= 1
        ):
            raise SettingError(
                f"protected rows with a share of {self.share!r}",
                "it is a share of the rows whose class is protected",
                "give a number from 0 to 1, such as 0.25",
            )

    def select(self, prompt: Prompt) -> Tensor:
        """[m] bool.

        Raises:
            SettingError: the maps have no token table, or one of another vocabulary.
        """
        if prompt.table is None:
            raise SettingError(
                "protected rows",
                "they need the token table that a fit makes, and there is none",
                "fit the maps again, or choose other rows",
            )
        ids = prompt.ids[: prompt.prefix]
        matches = prompt.table.eligible(ids)
        score = prompt.table.rarity(ids).masked_fill(~matches, -torch.inf)
        return top(score, round(self.share * int(matches.sum())))

    def __str__(self) -> str:
        return written("protected", self)
