"""A prompt in the making: everything drawn but its size, and the size that fits a wanted length."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

Span = tuple[int, int]


@dataclass(frozen=True)
class Prompt:
    """One prompt.

    Attributes:
        input: its text without the answer's prefix.
        answer_prefix: how the answer begins, with the space before it.
        outputs: the references.
        gold: characters [first, stop) of ``input`` that hold the answer, where the maker alone knows them.
    """

    input: str
    answer_prefix: str
    outputs: tuple[str, ...]
    gold: tuple[Span, ...] | None = None


@dataclass(frozen=True)
class Draft:
    """A prompt whose size is open.

    Attributes:
        render: size (repetitions, words, documents, as the task counts) -> prompt; longer for a larger size.
        least: the smallest size that holds what is asked for.
    """

    render: Callable[[int], Prompt]
    least: int


def largest(length: Callable[[int], int], limit: int, least: int, guess: int) -> int | None:
    """The largest size whose length is at most ``limit``, found in few tries; None if even ``least`` is longer.

    Args:
        length: size -> length; rises with it, nearly in proportion.
        guess: where to look first, such as the size of the sample before.
    """
    low, short = least, length(least)
    if short > limit:
        return None
    high, long = 0, 0  # the smallest size known to be too long, and its length; 0: none is
    size, tries = max(guess, low + 1), 0
    while not high or high - low > 1:
        found = length(size)
        if found <= limit:
            low, short = size, found
        else:
            high, long = size, found
        tries += 1
        size = _next(low, short, high, long, limit, bisect=tries % 5 == 0)
    return low


def _next(low: int, short: int, high: int, long: int, limit: int, *, bisect: bool) -> int:
    if not high:  # by the average length of what is there, and a little beyond
        return max(low + 1, int(low * limit / max(short, 1)) + 1)
    if bisect:
        return max(low + 1, (low + high) // 2)
    return min(high - 1, max(low + 1, low + (high - low) * (limit - short) // (long - short)))
