"""Attention-selected rows (paper 2.4): the "+ rows" arms of the reference study."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ridgefill.rows.base import Budget, Prompt, Selector, check_budget
from ridgefill.rows.ranking import best, check_layers, lower_attention
from ridgefill.rows.settings import check_count, check_flag, written


@dataclass(frozen=True)
class AttentionRows(Selector):
    """The rows that receive the most attention from the prompt's last rows, in layers below the split.

    Attention is summed over the heads of every layer read. If row i's value changes by dv, a query's output
    changes by exactly a_i * dv, so that rows matter in proportion to the attention they receive.

    Attributes:
        budget: rows kept.
        window: query rows.
        layers: layers read, or None for the paper's (see `readable_layers`).
        hidden: read the rows just before the question instead.
    """

    budget: Budget = 0.10
    window: int = 64
    layers: tuple[int, ...] | None = None
    hidden: bool = False

    query_aware = True
    attends = True

    def __post_init__(self) -> None:
        check_budget("attention rows", self.budget)
        check_count("attention rows: a window", self.window)
        check_layers("attention rows", self.layers)
        check_flag("attention rows: hidden", self.hidden)

    def select(self, prompt: Prompt) -> Tensor:
        """[m] bool.

        Raises:
            SettingError: no model to read, no attention layer below the split, or no question to hide.
        """
        queries = prompt.queries(self.window, self.hidden)
        received = lower_attention(prompt, "attention rows", self.layers, queries)
        return best(prompt, received.sum((0, 1)), prompt.count(self.budget))

    def __str__(self) -> str:
        return written("attention", self)
