"""What a row selector is, and what it may read (paper 2.4)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from ridgefill.errors import SettingError

if TYPE_CHECKING:
    from ridgefill.rows.token_table import TokenTable

Budget = int | float  # a count of rows, or a share in (0, 1] of the prefix rows


class Reader(Protocol):
    """The model's attention, read on demand and never as an n x n matrix."""

    @property
    def split(self) -> int:
        """S."""
        ...

    @property
    def n_layers(self) -> int:
        """L."""
        ...

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """Layers whose attention reaches every earlier row; hybrids and sliding windows have others."""
        ...

    def lower(self, layers: Sequence[int], queries: range, peak: bool = False) -> Tensor:
        """[layers, heads, m]: attention of the prefix rows from the query rows, summed over the queries.

        Args:
            layers: attention layers up to the split layer, whose own input is exact for every row.
            queries: prompt rows; each attends to the rows up to itself.
            peak: the largest over the queries instead of the sum.
        """
        ...

    def probe(self, queries: int) -> Tensor:
        """[late attention layers, heads, m]: the last ``queries`` rows through the real late layers over the fill."""
        ...


@dataclass(frozen=True)
class Prompt:
    """One prompt, without padding, as selectors see it.

    Attributes:
        ids: [n] its tokens, on the host.
        prefix: m; rows 0 .. m-1 can be chosen, the rest are the tail.
        leading: the first rows, which run exactly whatever a selector says.
        tokenizer: for selectors that read text, or None.
        table: classes and frequencies of the tokens, from the fit, or None.
        question: rows [first, stop) of the question; None if the prompt ends with it.
        reader: for selectors that read attention, or None.

    Raises:
        SettingError: the question lies outside the prompt.
    """

    ids: Tensor
    prefix: int
    leading: int = 0
    tokenizer: Any = None
    table: TokenTable | None = None
    question: tuple[int, int] | None = None
    reader: Reader | None = None

    def __post_init__(self) -> None:
        check_question(self.question, self.n)

    @property
    def n(self) -> int:
        """Number of prompt tokens."""
        return len(self.ids)

    def count(self, budget: Budget) -> int:
        """A budget as a count of prefix rows, rounded half to even."""
        return min(self.prefix, budget if isinstance(budget, int) else round(budget * self.prefix))

    def queries(self, window: int, hidden: bool = False) -> range:
        """The last ``window`` rows of the question; those just before it if it is hidden from the selector.

        Raises:
            SettingError: the question is to be hidden and nobody said where it is, or nothing stands before it.
        """
        if hidden and (self.question is None or self.question[0] == 0):
            raise SettingError(
                "rows chosen with the question hidden",
                "nobody said where the question is" if self.question is None else "no row stands before it",
                "give question=(first row, row after the last)",
            )
        stop = self.n if self.question is None else self.question[0 if hidden else 1]
        first = 0 if hidden or self.question is None else self.question[0]
        return range(max(first, stop - window), stop)

    @cached_property
    def pieces(self) -> list[str]:
        """The text of every token, [n]; together they are the prompt's text.

        A character of several tokens stands whole in the first of them.

        Raises:
            SettingError: there is no tokenizer.
        """
        if self.tokenizer is None:
            raise SettingError(
                "rows chosen by their text",
                "they need the tokenizer and none was given",
                "pass tokenizer=...",
            )
        from ridgefill.rows.text import token_pieces

        return token_pieces(self.tokenizer, self.ids.tolist())


class Selector:
    """Base of every selector: a frozen dataclass with ``select``; ``a | b`` chooses what either chooses.

    Attributes:
        query_aware: it reads the question, and chooses other rows for another.
        attends: it reads the model's attention from the tail, whose layers must run with the prefix.
        probes: it reads the late layers, so that prefill takes two sweeps.
    """

    query_aware: bool = False
    attends: bool = False
    probes: bool = False

    def select(self, prompt: Prompt) -> Tensor:
        """[m] bool: the prefix rows that run every layer.

        Raises:
            SettingError: what the selector needs is not there, by name.
        """
        raise NotImplementedError

    def __or__(self, other: Selector) -> Selector:
        return Union((*_parts(self), *_parts(other)))


@dataclass(frozen=True)
class Union(Selector):
    """Whatever any of its parts chooses."""

    parts: tuple[Selector, ...]

    @property
    def query_aware(self) -> bool:  # type: ignore[override]
        """Whether any part is."""
        return any(part.query_aware for part in self.parts)

    @property
    def attends(self) -> bool:  # type: ignore[override]
        """Whether any part does."""
        return any(part.attends for part in self.parts)

    @property
    def probes(self) -> bool:  # type: ignore[override]
        """Whether any part does."""
        return any(part.probes for part in self.parts)

    def select(self, prompt: Prompt) -> Tensor:
        """[m] bool."""
        chosen = torch.zeros(prompt.prefix, dtype=torch.bool)
        for part in self.parts:
            chosen |= part.select(prompt)
        return chosen

    def __str__(self) -> str:
        return " | ".join(map(str, self.parts))


class Score(Protocol):
    """What ranks rows: more is better. A frozen dataclass; for the properties see `Selector`."""

    @property
    def query_aware(self) -> bool: ...  # noqa: D102

    @property
    def attends(self) -> bool: ...  # noqa: D102

    @property
    def probes(self) -> bool: ...  # noqa: D102

    def score(self, prompt: Prompt) -> Tensor:
        """[m] fp32."""
        ...


def top(score: Tensor, count: int) -> Tensor:
    """[m] bool: the ``count`` highest rows of score [m], ties to the lower position."""
    chosen = torch.zeros(len(score), dtype=torch.bool)
    chosen[score.argsort(descending=True, stable=True)[:count]] = True
    return chosen


def check_budget(asked: str, budget: Budget) -> None:
    """Raises SettingError for a budget that is neither a count nor a share up to 1."""
    share = isinstance(budget, float) and 0 <= budget <= 1
    count = isinstance(budget, int) and not isinstance(budget, bool) and budget >= 0
    if not (share or count):
        raise SettingError(
            f"{asked} with a budget of {budget}",
            "a share of the prefix rows lies between 0 and 1",
            "give a share such as 0.1, or a whole number of rows",
        )


def check_question(question: Any, n: int) -> None:
    """Raises SettingError for what is neither None nor a pair of rows within a prompt of n tokens."""
    if question is None:
        return
    first, stop = question
    if not (isinstance(first, int) and isinstance(stop, int) and 0 <= first < stop <= n):
        raise SettingError(
            f"a question in rows {first} to {stop}",
            f"the prompt has {n} rows",
            "give (first row, row after the last), counted from 0 without padding",
        )


def _parts(selector: Selector) -> tuple[Selector, ...]:
    return selector.parts if isinstance(selector, Union) else (selector,)
