"""Whether chosen rows do better than as many random ones or a longer tail (paper 2.4, 6.5)."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ridgefill.eval.evaluation import (
    FILLED,
    Evaluation,
    Finding,
    difference_text,
    interval_text,
    is_share,
    plural,
    value_text,
)
from ridgefill.eval.results import METRICS

EQUAL = 0.05  # relative difference in multiply-accumulates that still counts as equal cost
PLAIN = ("leading", "special", "digits")  # rows that are no choice by content
_NAMES = re.compile(r"(?:^|\|)\s*(\w+)")


def controls(run: Evaluation) -> Iterator[Finding]:
    """Every selector beside its controls, on the metric the run is about."""
    metric = next(
        (m for m in ("score_filled", "score", "key_nll", "novel_nll", "nll") if m in run.metrics), None
    )
    if metric is None:
        return
    for arm in run.others:
        if not _chooses(run.plan(arm)):
            continue
        for control in run.others:
            what = _control(run.plan(arm), run.plan(control))
            if what is not None and _equal(run.macs(arm), run.macs(control)) is not False:
                text = _compared(run, metric, arm, control, what)
                if text is not None:
                    yield Finding(text)


def _names(plan: Mapping[str, Any]) -> list[str]:
    return _NAMES.findall(str(plan.get("rows") or ""))


def _chooses(plan: Mapping[str, Any]) -> bool:
    """Whether a plan's rows are chosen by what they hold."""
    names = _names(plan)
    return any(name not in (*PLAIN, "random", "tail") for name in names) and "random" not in names


def _control(plan: Mapping[str, Any], other: Mapping[str, Any]) -> str | None:
    """What ``other`` is to a plan with chosen rows: the same fill and split with other rows, or none."""
    if any(plan.get(key) != other.get(key) for key in ("fill", "split", "corrections")):
        return None
    names = _names(other)
    same_tail = plan.get("tail") == other.get("tail")
    if "random" in names and same_tail:
        return "random rows"
    if ("tail" in names and same_tail) or (not names and other.get("tail", 0) > plan.get("tail", 0)):
        return "a longer tail"
    return None


def _equal(one: float | None, other: float | None) -> bool | None:
    """Whether two costs are equal enough; None where one is not known."""
    if one is None or other is None:
        return None
    return abs(one - other) <= EQUAL * max(one, other)


def _compared(run: Evaluation, metric: str, arm: str, control: str, what: str) -> str | None:
    from ridgefill.eval.intervals import paired_difference, sign_test

    mine, theirs = run.values(metric, arm), run.values(metric, control)
    both = sorted(item for item in mine if item in theirs)
    if not both:
        return None
    ones, others = [mine[item] for item in both], [theirs[item] for item in both]
    found = paired_difference(ones, others, [run.stratum(item) for item in both]).to_json()
    sign = 1 if METRICS.get(metric.removesuffix(FILLED), True) else -1  # a lower loss is better
    counts = sign_test([sign * v for v in ones], [sign * v for v in others])
    equal = _equal(run.macs(arm), run.macs(control))
    cost = "at equal compute" if equal else "(compute not compared)"
    unit = "" if is_share(metric) else " nats"
    return (
        f"{_opening(found, sign).format(arm=arm, what=what, control=control, cost=cost)}: "
        f"{value_text(metric, _mean(ones))} against {value_text(metric, _mean(others))}{unit} "
        f"({difference_text(metric, found['mean'])} {interval_text(metric, found)}; better on "
        f"{counts.better:,}, worse on {counts.worse:,} of {plural(len(both), 'item')})."
    )


def _opening(found: Mapping[str, Any], sign: int) -> str:
    """Which of the two is better, by the interval of their difference."""
    if found["low"] is None or found["low"] <= 0 <= found["high"]:
        return "{arm} cannot be told from {what} {cost} ({control})"
    if sign * found["mean"] > 0:
        return "The choice of rows counts: {arm} does better than {what} {cost} ({control})"
    return "{arm} does worse than {what} {cost} ({control})"


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
