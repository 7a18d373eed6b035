"""Paired intervals, non-inferiority and the sign test (paper 3.4, Table 7)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ridgefill.errors import SettingError

METHODS = ("BCa", "percentile")
SIDES = ("both", "lower", "upper")
RESAMPLES = 5000
_BITS = 42  # of a mean: below them lies rounding, and equal resamples must stay equal
_DRAWS = 4_000_000  # resampled indices held at once

Array = NDArray[np.float64]
# The weighted means of each column, [columns, resamples] -> the statistic, [resamples].
Statistic = Callable[[Array], Array]


class _Result:
    def to_json(self) -> dict[str, Any]:
        """The fields; "reason" only where there is one."""
        return {k: v for k, v in vars(self).items() if k != "reason" or v is not None}


@dataclass(frozen=True)
class Interval(_Result):
    """A mean of paired values, and between what it lies.

    Attributes:
        mean: the estimate, with the weights that ``method`` names; of a share, the ratio of two means.
        median: of the values, unweighted; None for a share.
        low, high: the ends. None at the open end of a one-sided bound, and at both where ``reason`` says why.
        level: the confidence level, 0.95 for 95 %.
        method: how the ends were found, in words.
        n: values.
        reason: why there is no interval, or None.
    """

    mean: float | None
    median: float | None
    low: float | None
    high: float | None
    level: float
    method: str
    n: int
    reason: str | None = None


@dataclass(frozen=True)
class NonInferiority(_Result):
    """Whether one arm is at most ``margin`` points worse than another.

    Attributes:
        margin: the loss allowed, in points, fixed before the run.
        lower: the more conservative of ``bound`` and -``floor``, in points; None without a bound.
        holds: lower > -margin.
        floor: `binomial_floor` of n, in points.
        bound: one-sided lower bootstrap bound of the difference, in points.
        difference: mean difference, in points.
        n: paired items.
    """

    margin: float
    lower: float | None
    holds: bool
    floor: float
    bound: float | None
    difference: float
    n: int


@dataclass(frozen=True)
class SignTest(_Result):
    """On how many items one arm did better or worse than another, and how likely that is by chance.

    Attributes:
        better, worse, ties: items.
        p: two-sided, of the discordant items; 1 where there are none.
    """

    better: int
    worse: int
    ties: int
    p: float


def interval(
    values: ArrayLike,
    strata: Sequence[str] | None = None,
    *,
    method: str = "BCa",
    resamples: int = RESAMPLES,
    seed: int = 0,
    level: float = 0.95,
    side: str = "both",
    equal_strata: bool = False,
) -> Interval:
    """The mean of ``values`` and its bootstrap interval, resampled within each stratum.

    A stratum of one item cannot be resampled: it is kept as it is in every resample. Where the values of each
    stratum are all equal, so is every resample, and both ends are the mean. On few and very skewed values even BCa
    covers the truth a little less often than its level says.

    Args:
        values: [n], one for each item; for a paired comparison, the differences.
        strata: [n], the task or domain of each item; one for all unless named.
        method: "BCa" (bias-corrected and accelerated; Efron, 1987) or "percentile".
        resamples: drawn for the interval.
        seed: of the draws.
        level: of the interval, or of the one-sided bound.
        side: "both", or "lower" or "upper" for a one-sided bound.
        equal_strata: weigh every stratum the same, instead of every item.

    Raises:
        SettingError: no values, values that are not finite, or a setting out of range.
    """
    how = _How(method, resamples, seed, level, side)
    found = _finite(values)
    groups = _groups(found[None], strata)
    weights = _weights(groups, equal_strata)
    low, high, words, reason = _bootstrap(groups, weights, _first, how)
    mean = _estimate(groups, weights, _first)
    words += ", strata weighted equally" if equal_strata and len(groups) > 1 else ""
    return Interval(mean, float(np.median(found)), low, high, level, words, len(found), reason)


def paired_difference(
    treated: ArrayLike, base: ArrayLike, strata: Sequence[str] | None = None, **options: Any
) -> Interval:
    """`interval` of treated - base, item by item (paper 3.4).

    Args:
        treated, base: [n] each, of the same items in the same order.
        strata: [n].
        options: of `interval`.

    Raises:
        SettingError: as `interval`, or the two differ in length.
    """
    return interval(_paired(treated, base)[2], strata, **options)


def share_closed(
    base: ArrayLike,
    treated: ArrayLike,
    exact: ArrayLike,
    strata: Sequence[str] | None = None,
    *,
    method: str = "BCa",
    resamples: int = RESAMPLES,
    seed: int = 0,
    level: float = 0.95,
) -> Interval:
    """Share of an arm's distance to exact that a treatment takes away (paper 6.6: loss removed, gap closed).

    mean(base - treated) / mean(base - exact), the ratio of means over the same items: 1 where the treatment is
    as good as exact, 0 where it changes nothing. Without an interval where the distance itself has one that
    holds 0, for then the share has no bound.

    Args:
        base: [n], the filled arm, such as its loss on each document.
        treated: [n], the filled arm with one component spliced.
        exact: [n].
        strata, method, resamples, seed, level: as in `interval`.

    Raises:
        SettingError: as `paired_difference`.
    """
    how = _How(method, resamples, seed, level, "both")
    gained, whole = _paired(base, treated)[2], _paired(base, exact)[2]
    gap = interval(whole, strata, method="percentile", resamples=resamples, seed=seed, level=level)
    groups = _groups(np.stack([gained, whole]), strata)
    weights, n = _weights(groups, False), len(whole)
    if gap.mean == 0:
        return Interval(None, None, None, None, level, how.words, n, "base and exact do not differ")
    share = _estimate(groups, weights, _ratio)
    if gap.reason or gap.low is None or gap.high is None or gap.low <= 0 <= gap.high:
        why = gap.reason or "the difference of base and exact is too small to tell from 0"
        return Interval(share, None, None, None, level, how.words, n, why)
    low, high, words, reason = _bootstrap(groups, weights, _ratio, how)
    return Interval(share, None, low, high, level, words, n, reason)


def binomial_floor(n: int) -> float:
    """What n items can never rule out, in points: 100 * (1 - 0.05^(1/n)).

    It is the failure rate at which n items still all pass once in twenty times (paper 3.4).

    Raises:
        SettingError: n is below 1.
    """
    if n < 1:
        raise SettingError(f"the binomial floor of {n} items", "there are none", "name items that were run")
    return 100.0 * (1.0 - 0.05 ** (1.0 / n))


def non_inferiority(
    treated: ArrayLike,
    base: ArrayLike,
    strata: Sequence[str] | None = None,
    *,
    margin: float = 2.0,
    method: str = "BCa",
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> NonInferiority:
    """Tests that treated is at most ``margin`` points below base (paper 3.4).

    The bound is the lower of the one-sided 95 % bootstrap bound and minus the binomial floor: where both arms get
    nearly all right the bootstrap shrinks to nothing, and the floor keeps what n items cannot rule out.

    Args:
        treated, base: [n] scores from 0 to 1 of the same items, higher is better.
        strata: [n].
        margin: points, fixed before the run; the paper takes 2 against exact and 3 against POP.
        method, resamples, seed: as in `interval`.

    Raises:
        SettingError: as `paired_difference`, or a margin that is not above 0.
    """
    if not margin > 0:
        raise SettingError(f"a margin of {margin} points", "it must be above 0", "take 2, as the paper does")
    points = 100.0 * _paired(treated, base)[2]
    found = interval(points, strata, method=method, resamples=resamples, seed=seed, side="lower")
    floor = binomial_floor(len(points))
    lower = None if found.low is None else min(found.low, -floor)
    holds = lower is not None and lower > -margin
    return NonInferiority(float(margin), lower, holds, floor, found.low, float(points.mean()), found.n)


def sign_test(treated: ArrayLike, base: ArrayLike) -> SignTest:
    """Two-sided sign test on the items where the two arms differ (paper Table 7).

    Args:
        treated, base: [n] scores of the same items, higher is better.

    Raises:
        SettingError: as `paired_difference`.
    """
    from scipy.stats import binomtest

    left, right, _ = _paired(treated, base)
    ties = np.isclose(left, right, rtol=1e-9, atol=1e-12)
    better = int(((left > right) & ~ties).sum())
    worse = int(((left < right) & ~ties).sum())
    p = float(binomtest(better, better + worse).pvalue) if better + worse else 1.0
    return SignTest(better, worse, int(ties.sum()), p)


@dataclass(frozen=True)
class _How:
    """How an interval is found; checked."""

    method: str
    resamples: int
    seed: int
    level: float
    side: str

    def __post_init__(self) -> None:
        for good, asked, why, instead in (
            (self.method in METHODS, f"the method {self.method!r}", "there is none", " or ".join(METHODS)),
            (self.side in SIDES, f"the side {self.side!r}", "there is none", ", ".join(SIDES)),
            (self.resamples >= 2, f"{self.resamples} resamples", "it takes several", str(RESAMPLES)),
            (0.5 < self.level < 1, f"the level {self.level}", "it must lie between 0.5 and 1", "0.95"),
        ):
            if not good:
                raise SettingError(f"an interval with {asked}", why, f"take {instead}")

    @property
    def words(self) -> str:
        one_sided = "" if self.side == "both" else ", one-sided"
        return f"{self.method}, stratified, {self.resamples} resamples{one_sided}"


def _bootstrap(
    groups: list[Array], weights: list[float], statistic: Statistic, how: _How
) -> tuple[float | None, float | None, str, str | None]:
    """Both ends, the method in words, and why there is none.

    Args:
        groups: for each stratum, [columns, items].
        weights: of each stratum; they add up to 1.
    """
    words = how.words
    single = sum(group.shape[1] == 1 for group in groups)
    if single == len(groups):
        why = "there is one item" if single == 1 else "every stratum has one item, and none can be resampled"
        return None, None, words, why
    if single:
        words += f", {single} {'stratum' if single == 1 else 'strata'} of one item kept fixed"
    if all(np.ptp(group, axis=1).max() <= _rounding(groups) for group in groups):
        same = _estimate(groups, weights, statistic)
        return *_ends(same, same, how.side), words + " (all equal within a stratum)", None
    low, high = _scipy(groups, weights, statistic, how)
    if not (np.isfinite(low) and np.isfinite(high)) and how.method != "percentile":
        words = words.replace(how.method, f"percentile ({how.method} is undefined here)")
        low, high = _scipy(groups, weights, statistic, replace(how, method="percentile"))
    if not (np.isfinite(low) and np.isfinite(high)):
        return None, None, words, "some resamples have no finite value"
    return *_ends(low, high, how.side), words, None


def _scipy(groups: list[Array], weights: list[float], statistic: Statistic, how: _How) -> tuple[float, float]:
    """Both ends by `scipy.stats.bootstrap`, which draws item numbers, so that an item's columns stay together."""
    import warnings

    from scipy.stats import bootstrap

    both = list(zip(groups, weights, strict=True))
    drawn = [(group, w) for group, w in both if group.shape[1] > 1]
    fixed = sum((w * group[:, 0] for group, w in both if group.shape[1] == 1), np.zeros(len(groups[0])))
    step = _rounding(groups)

    def of_items(*items: NDArray[np.int64], axis: int = -1) -> Array:
        parts = [w * group[:, i].mean(axis) for (group, w), i in zip(drawn, items, strict=True)]
        means = sum(parts) + fixed.reshape(-1, *[1] * (parts[0].ndim - 1))
        return statistic(np.round(means / step) * step)  # resamples that tie stay tied

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what is degenerate: seen in the ends
        found = bootstrap(
            [np.arange(group.shape[1]) for group, _ in drawn],
            of_items,
            vectorized=True,
            axis=-1,
            n_resamples=how.resamples,
            batch=max(1, min(how.resamples, _DRAWS // sum(group.shape[1] for group, _ in drawn))),
            # a one-sided bound is the end of the two-sided interval that leaves as much out on each side
            confidence_level=how.level if how.side == "both" else 2 * how.level - 1,
            method=how.method,
            rng=np.random.default_rng(how.seed),
        ).confidence_interval
    return float(found.low), float(found.high)


def _ends(low: float, high: float, side: str) -> tuple[float | None, float | None]:
    return (None if side == "upper" else low), (None if side == "lower" else high)


def _first(means: Array) -> Array:
    return means[0]


def _ratio(means: Array) -> Array:
    with np.errstate(over="ignore"):
        return means[0] / np.where(means[1] == 0, np.copysign(1e-300, means[1]), means[1])


def _estimate(groups: list[Array], weights: list[float], statistic: Statistic) -> float:
    means = sum(w * group.mean(1) for group, w in zip(groups, weights, strict=True))
    return float(statistic(np.asarray(means)))


def _rounding(groups: list[Array]) -> float:
    """The step below which two means count as one; never 0."""
    largest = max(float(np.abs(group).max()) for group in groups)
    return float(np.ldexp(1.0, max(int(np.frexp(largest)[1]) - _BITS, -960)))


def _groups(columns: Array, strata: Sequence[str] | None) -> list[Array]:
    """The columns [c, n] of each stratum, in the order of their names."""
    n = columns.shape[1]
    names = ["all"] * n if strata is None else list(strata)
    if len(names) != n:
        raise SettingError(f"{n} values", f"{len(names)} strata are named", "name one stratum for each value")
    labels = np.array(names, dtype=object)
    return [columns[:, labels == name] for name in sorted(set(names))]


def _weights(groups: list[Array], equal_strata: bool) -> list[float]:
    n = sum(group.shape[1] for group in groups)
    return [1 / len(groups) if equal_strata else group.shape[1] / n for group in groups]


def _paired(treated: ArrayLike, base: ArrayLike) -> tuple[Array, Array, Array]:
    """Both, and their difference."""
    left, right = _finite(treated), _finite(base)
    if len(left) != len(right):
        raise SettingError(
            f"compare {len(left)} items with {len(right)}", "they are not the same items", "pair them first"
        )
    return left, right, left - right


def _finite(values: ArrayLike) -> Array:
    found = np.asarray(values, dtype=np.float64).reshape(-1)
    if not len(found):
        raise SettingError("an interval of no values", "there is nothing to resample", "run some items first")
    if not np.isfinite(found).all():
        raise SettingError("an interval", "some values are not finite numbers", "leave their items out")
    return found
