"""Which rows of one vLLM step are filled and which run every layer. Only numpy: nothing here needs vLLM."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Part:
    """One request's rows in a step.

    Attributes:
        row: the request's row in the batch (of its block table).
        first: where its rows begin among the step's.
        start: position of the first of them in the request.
        count: how many there are.
        exact: [count] True on rows that run every layer.
        read: how many of the rows maps read, from the first on: those before the tail of a prompt that is filled,
            exact ones among them; all of its rows if it is filled as a whole.
        whole: the prompt is filled when all of it is there (`joint.Kept`); ``exact`` then says nothing.
    """

    row: int
    first: int
    start: int
    count: int
    exact: np.ndarray
    read: int = 0
    whole: bool = False

    @property
    def fills(self) -> int:
        """How many of the rows are filled in this step."""
        return 0 if self.whole else int(self.count - self.exact.sum())


@dataclass(frozen=True)
class Run:
    """Consecutive exact rows of one request: to attention a request of its own.

    Attributes:
        row: the request's row in the batch.
        count: how many rows.
        length: the last one's position + 1, and so how many keys that row reads.
    """

    row: int
    count: int
    length: int


def exact_rows(
    start: int, count: int, prompt: int, tail: int, leading: int, chosen: np.ndarray | None = None
) -> np.ndarray:
    """[count] True on the rows from position ``start`` that run every layer.

    Args:
        prompt: n, the prompt's tokens; what follows was generated.
        tail, leading: last and first prompt tokens that run every layer.
        chosen: [m] True on further rows of the prompt that do, or None.
    """
    positions = np.arange(start, start + count)
    exact = (positions < leading) | (positions >= prompt - tail)
    if chosen is not None:
        inside = positions[positions < len(chosen)]
        exact[: len(inside)] |= chosen[inside]
    return exact


def runs_of(row: int, positions: np.ndarray) -> Iterable[Run]:
    """The runs of ascending positions."""
    for piece in np.split(positions, np.flatnonzero(np.diff(positions) != 1) + 1):
        if len(piece):
            yield Run(row, len(piece), int(piece[-1]) + 1)
