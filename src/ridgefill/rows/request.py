"""What selectors may read beside the model and the prompt's tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ridgefill.rows.base import check_question

if TYPE_CHECKING:
    from ridgefill.rows.token_table import TokenTable

Span = tuple[int, int]


@dataclass(frozen=True)
class Request:
    """Comes with a prompt.

    Attributes:
        tokenizer: for selectors that read text.
        table: classes and frequencies of tokens, from the fit.
        question: rows [first, stop) of the question, padding not counted; or one pair for each sequence. None: the
            prompt ends with it.
        ids: [B, n] the whole prompt, where the walk has only a part of it.
    """

    tokenizer: Any = None
    table: TokenTable | None = None
    question: Span | Sequence[Span] | None = None
    ids: Tensor | None = None

    def of(self, b: int) -> Request:
        """The same with the question of sequence b alone."""
        question: Any = self.question
        if question is None or isinstance(question[0], int):
            return self
        return replace(self, question=tuple(question[b]))

    def question_in(self, n: int) -> Span | None:
        """The question's rows in a prompt of n tokens; for a request of one sequence (`of`).

        Raises:
            SettingError: it lies outside the prompt.
        """
        question: Any = self.question
        check_question(question, n)
        return None if question is None else tuple(question)
