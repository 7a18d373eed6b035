"""The summary of a run: every arm, metric and stratum, with its difference to the baseline (paper 3.1, 3.4)."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ridgefill.errors import SettingError
from ridgefill.eval.intervals import (
    RESAMPLES,
    Interval,
    interval,
    non_inferiority,
    paired_difference,
    sign_test,
)
from ridgefill.eval.results import METRICS

ALL = "all"  # the stratum that holds every item
FILLED = "score_filled"  # the score on the items whose needles all lie in filled rows
GAP = "perplexity_gap"
SCORES = ("score", FILLED)  # from 0 to 1, higher is better: these have a margin in points
_STEEPEST = 600.0  # nats; above it exp is no longer a sensible, or a finite, number


@dataclass(frozen=True)
class _Options:
    margin: float | None
    resamples: int
    method: str
    seed: int

    @property
    def drawn(self) -> dict[str, Any]:
        return {"resamples": self.resamples, "method": self.method, "seed": self.seed}


# item -> (its stratum, its value): one arm's results in one metric
Column = dict[str, tuple[str, float]]


def summarise(
    about: Mapping[str, Any],
    lines: Sequence[Mapping[str, Any]],
    *,
    margin: float | None = 2.0,
    resamples: int = RESAMPLES,
    method: str = "BCa",
    seed: int = 0,
) -> dict[str, Any]:
    """Means, medians and paired differences to the baseline, as summary.json holds them.

    Every row speaks of one arm, one metric, and one stratum or "all". Items weigh the same (paper 3.4), except
    in "perplexity_gap", exp(delta NLL) - 1 for each document, whose "all" is the mean of the strata's means
    (paper 3.1). Differences take only the items that both arms have; "n_paired" says how many where that is not
    all of ``n``. Where no interval can be had, its "low" and "high" are None and "reason" says why. "score_filled"
    repeats the score on the items whose needles all lie in filled rows.

    Args:
        about: run.json.
        lines: of items.jsonl, in any order: the summary does not depend on it.
        margin: of the non-inferiority tests of scores, in points, fixed before the run; None for no test.
        resamples, method, seed: of every interval, see `intervals.interval`.

    Returns:
        {"kind", "baseline", "rows"}, strict JSON.

    Raises:
        SettingError: an item stands twice for one arm, or an option is out of range.
    """
    options = _Options(margin, resamples, method, seed)
    baseline = about["baseline"]
    columns = _columns(lines)
    arms = _arms(about, columns)
    rows: list[dict[str, Any]] = []
    for metric in _metrics(columns):
        # Which items count as filled is the arm's to say; the baseline's score is the same either way.
        base = columns.get((baseline, "score" if metric == FILLED else metric), {})
        for arm in arms:
            column = columns.get((arm, metric), {})
            rows += _rows(arm, metric, column, None if arm == baseline else base, options)
    for arm in arms:
        if arm != baseline:
            rows += _gaps(arm, columns.get((arm, "nll"), {}), columns.get((baseline, "nll"), {}), options)
    return {"kind": about["kind"], "baseline": baseline, "rows": rows}


def _columns(lines: Iterable[Mapping[str, Any]]) -> dict[tuple[str, str], Column]:
    """(arm, metric) -> its results, items in the order of their names."""
    found: dict[tuple[str, str], Column] = {}
    seen: set[tuple[str, str]] = set()
    for line in sorted(lines, key=lambda line: str(line["item"])):
        arm, item = line["arm"], line["item"]
        if (arm, item) in seen:
            raise SettingError(
                "summarise the run",
                f"item {item} of arm {arm!r} stands there twice",
                "remove one of its lines",
            )
        seen.add((arm, item))
        values = dict(line["metrics"])
        if line.get("filled") is True and "score" in values:
            values[FILLED] = values["score"]
        for metric, value in values.items():
            found.setdefault((arm, metric), {})[item] = (line["stratum"], float(value))
    return found


def _arms(about: Mapping[str, Any], columns: Mapping[tuple[str, str], Column]) -> list[str]:
    """The baseline, then the other arms as the run lists them."""
    named = [about["baseline"], *about.get("arms", {}), *sorted({arm for arm, _ in columns})]
    return list(dict.fromkeys(named))


def _metrics(columns: Mapping[tuple[str, str], Column]) -> list[str]:
    """The metrics that any arm has, the known ones first."""
    there = {metric for _, metric in columns}
    known = ["score", FILLED, *METRICS]
    return list(dict.fromkeys([m for m in known if m in there] + sorted(there)))


def _rows(
    arm: str, metric: str, column: Column, base: Column | None, options: _Options
) -> Iterator[dict[str, Any]]:
    """One arm's rows in one metric; ``base`` is None for the baseline."""
    for stratum, items in _strata(column):
        values = [column[item][1] for item in items]
        row = _row(arm, metric, stratum, values)
        both = [] if base is None else [item for item in items if item in base]
        if base is not None and len(both) != len(items):
            row["n_paired"] = len(both)
        if base is not None and both:
            treated, exact = [column[i][1] for i in both], [base[i][1] for i in both]
            row |= _compared(metric, treated, exact, [column[i][0] for i in both], options)
        yield row


def _row(arm: str, metric: str, stratum: str, values: Sequence[float]) -> dict[str, Any]:
    return {
        "arm": arm,
        "metric": metric,
        "stratum": stratum,
        "n": len(values),
        "mean": statistics.fmean(values),
        "median": statistics.median(values),
        "difference": None,
        "noninferiority": None,
        "sign_test": None,
    }


def _compared(
    metric: str, treated: list[float], base: list[float], strata: list[str], options: _Options
) -> dict[str, Any]:
    """What the pairs say: the difference, and for a score the two tests."""
    difference = paired_difference(treated, base, strata, **options.drawn)
    found: dict[str, Any] = {"difference": _difference(difference)}
    if metric in SCORES:
        found["sign_test"] = sign_test(treated, base).to_json()
        if options.margin is not None and difference.reason is None:
            tested = non_inferiority(treated, base, strata, margin=options.margin, **options.drawn)
            found["noninferiority"] = tested.to_json()
    return found


def _gaps(arm: str, column: Column, base: Column, options: _Options) -> Iterator[dict[str, Any]]:
    """The perplexity gap's rows: its own value is a difference to the baseline."""
    gaps: Column = {
        item: (stratum, math.expm1(min(value - base[item][1], _STEEPEST)))
        for item, (stratum, value) in column.items()
        if item in base
    }
    for stratum, items in _strata(gaps):
        values, strata = [gaps[i][1] for i in items], [gaps[i][0] for i in items]
        found = interval(values, strata, equal_strata=True, **options.drawn)
        row = _row(arm, GAP, stratum, values)
        yield row | {"mean": found.mean, "difference": _difference(found)}


def _strata(column: Column) -> Iterator[tuple[str, list[str]]]:
    """Every stratum and its items, "all" first; nothing where there are no items."""
    if column:
        yield ALL, list(column)
    for stratum in sorted({stratum for stratum, _ in column.values()} - {ALL}):
        yield stratum, [item for item, (its, _) in column.items() if its == stratum]


def _difference(found: Interval) -> dict[str, Any]:
    kept = found.to_json()
    kept.pop("n")  # the row has it
    return kept
