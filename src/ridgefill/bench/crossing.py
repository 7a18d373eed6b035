"""From which prompt length one setting costs no more than another."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from functools import cache
from itertools import pairwise

from ridgefill.bench.count import expected_macs
from ridgefill.bench.setting import Setting, check_count
from ridgefill.bench.shape import ModelShape

LIMIT = 1 << 20  # tokens up to which a crossing is looked for


def crossing_tokens(shape: ModelShape, ours: Setting, versus: Setting, limit: int = LIMIT) -> int | None:
    """The prompt length from which ``ours`` costs no more than ``versus``; None if there is none.

    Equal costs count as no more: prompts within both tails are exact either way, so the answer is 1 for a
    setting that never loses. It holds for every length up to ``limit``: between the lengths at which a tail, the
    leading rows, a count of rows or a window begin to bind, the difference is a polynomial in n (a quadratic, or
    one of a few degrees more over a positive one where a count of rows is scattered over n).

    Raises:
        SettingError: limit < 1, or a split out of range.
    """
    check_count("the limit", limit, 1)
    ours, versus = ours.at(shape), versus.at(shape)
    degree = 2 + _power(ours) + _power(versus)

    @cache
    def excess(n: int) -> Fraction:
        """A polynomial between the bends, with the sign of the difference."""
        difference = expected_macs(shape, n, ours) - expected_macs(shape, n, versus)
        return difference * _denominator(n, ours) * _denominator(n, versus)

    bends = {b for setting in (ours, versus) for b in bending_lengths(shape, setting) if 1 < b < limit}
    ends = sorted({1, limit} | bends)
    for low, high in reversed(list(pairwise(ends)) or [(1, 1)]):
        last = _last_positive(excess, low, high, degree)
        if last is not None:
            return last + 1 if last < limit else None
    return 1


def bending_lengths(shape: ModelShape, setting: Setting) -> set[int]:
    """Lengths between which the count is one polynomial: where a number of rows or a window begins to bind."""
    windows = {window for layer in shape.costs for _, window in layer.reads if window is not None}
    if setting.fill == "exact":
        return windows
    leading, within = setting.leading, setting.tail + setting.leading
    starts = {0, leading, setting.tail, within, setting.score_rows, setting.probe, setting.probe + leading}
    starts.add(setting.tail + 1)  # the first prompt that is not exact pays for selection at once
    if isinstance(setting.rows, int):
        starts |= {within + 1, within + setting.rows}
    return starts | {start + window for start in starts for window in windows}


def _power(setting: Setting) -> int:
    """How often the number of rows over which a count is scattered divides the setting's cost."""
    if not isinstance(setting.rows, int) or setting.fill == "exact":
        return 0
    return 2 if setting.fill == "none" else 1


def _denominator(n: int, setting: Setting) -> int:
    return max(1, n - setting.tail - setting.leading) ** _power(setting)


def _last_positive(f: Callable[[int], Fraction], low: int, high: int, degree: int) -> int | None:
    """The largest n of low..high with f(n) > 0, for f a polynomial there; None if there is none."""
    for start, stop in reversed(list(pairwise(_turns(f, low, high, degree))) or [(low, high)]):
        if f(stop) > 0:
            return stop
        if f(start) > 0:
            return _first(lambda n: f(n) <= 0, start, stop) - 1
    return None


def _turns(f: Callable[[int], Fraction], low: int, high: int, degree: int) -> list[int]:
    """low, high, and the points between which the polynomial f rises or falls only.

    It turns where its step f(n + 1) - f(n), a polynomial of one degree less, changes its sign, which happens at
    most once between two turns of the step.
    """
    if degree < 2 or high - low < 2:
        return [low, high] if low < high else [low]

    @cache
    def step(n: int) -> Fraction:
        return f(n + 1) - f(n)

    turns = {low, high}
    for start, stop in pairwise(_turns(step, low, high - 1, degree - 1)):
        rising = step(start) > 0
        if (step(stop) > 0) != rising:
            turns.add(_first(lambda n, rising=rising: (step(n) > 0) != rising, start, stop))  # type: ignore[misc]
    return sorted(turns)


def _first(holds: Callable[[int], bool], low: int, high: int) -> int:
    """The smallest n above low at which it holds; it does not at low, does at high, and changes once."""
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high
