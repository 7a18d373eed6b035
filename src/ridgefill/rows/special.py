"""Special tokens (paper 2.4): "control, unknown and user-defined tokens ... there is no cap"."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ridgefill.errors import SettingError
from ridgefill.rows.base import Prompt, Selector
from ridgefill.rows.settings import written


@dataclass(frozen=True)
class SpecialRows(Selector):
    """Rows of special tokens: what the tokenizer says, or else the table of the maps."""

    def select(self, prompt: Prompt) -> Tensor:
        """[m] bool.

        Raises:
            SettingError: neither a tokenizer nor a table.
        """
        ids = prompt.ids[: prompt.prefix].cpu()
        if prompt.tokenizer is not None:
            return torch.isin(ids, _tensor(special_ids(prompt.tokenizer)))
        if prompt.table is None:
            raise SettingError(
                "special rows",
                "neither a tokenizer nor maps with a token table were given",
                "pass tokenizer=..., or fit the maps again",
            )
        known = ids < len(prompt.table.special)
        return known & prompt.table.special[ids.where(known, 0)]

    def __str__(self) -> str:
        return written("special", self)


def special_ids(tokenizer: Any) -> set[int]:
    """Control, unknown and user-defined (added) tokens."""
    return {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}


def control_ids(tokenizer: Any) -> set[int]:
    """Tokens that are no text: `special_ids` less the added words and blanks that a text may hold."""
    added = tokenizer.added_tokens_decoder
    return {*tokenizer.all_special_ids, *(i for i, token in added.items() if token.special)}


def _tensor(ids: set[int]) -> Tensor:
    return torch.tensor(sorted(ids), dtype=torch.long)
