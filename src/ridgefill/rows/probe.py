"""The probe (paper 2.4, the 27B selector): the late layers' own attention over the filled cache."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ridgefill.errors import SettingError
from ridgefill.rows.attention import AttentionRows
from ridgefill.rows.base import Budget, Prompt, Selector, check_budget
from ridgefill.rows.digits import DigitRows
from ridgefill.rows.protected import ProtectedRows
from ridgefill.rows.ranking import best, need_reader
from ridgefill.rows.settings import check_count, check_factor, written

BASE_RULES = ProtectedRows(0.5) | DigitRows() | AttentionRows(0.20)  # they set the size of the "27b" budget


@dataclass(frozen=True)
class ProbeRows(Selector):
    """The rows that the last prompt rows attend to when they run the real late layers over the filled cache.

    Attention is summed over the late attention layers and their heads.

    Attributes:
        budget: rows kept; "27b" is the number that `BASE_RULES` choose on the same prompt, times ``factor``.
        queries: last prompt rows that run the late layers.
        factor: of the "27b" count alone.
        within: rows that come first and count against the budget, such as the lexical net.
    """

    budget: Budget | str = "27b"
    queries: int = 256
    factor: float = 1.0
    within: Selector | None = None

    query_aware = True
    attends = True
    probes = True

    def __post_init__(self) -> None:
        if isinstance(self.budget, str):
            if self.budget != "27b":
                raise SettingError(
                    f"probe rows with a budget of {self.budget!r}",
                    "the only rule with a name is 27b",
                    "give 27b, a share such as 0.1, or a whole number of rows",
                )
        else:
            check_budget("probe rows", self.budget)
        check_count("probe rows: queries", self.queries)
        check_factor("probe rows: a factor", self.factor)
        if not (self.within is None or isinstance(self.within, Selector)):
            raise SettingError(
                f"probe rows with within={self.within!r}",
                "it is no selector",
                "give one such as LexicalRows()",
            )

    def count(self, prompt: Prompt) -> int:
        """Rows kept in all, those of ``within`` among them."""
        if isinstance(self.budget, str):
            return min(prompt.prefix, round(self.factor * int(BASE_RULES.select(prompt).sum())))
        return prompt.count(self.budget)

    def select(self, prompt: Prompt) -> Tensor:
        """[m] bool.

        Raises:
            SettingError: no model to read; or no tokenizer, token table or attention layer below the split,
                which the "27b" count needs.
        """
        reader = need_reader(prompt, "probe rows")
        first = torch.zeros(prompt.prefix, dtype=torch.bool)
        if self.within is not None:
            first = self.within.select(prompt)
        rest = max(0, self.count(prompt) - int(first.sum()))
        received = reader.probe(self.queries).float().cpu().sum((0, 1))
        return first | best(prompt, received, rest, taken=first)

    def __str__(self) -> str:
        return written("probe", self)
