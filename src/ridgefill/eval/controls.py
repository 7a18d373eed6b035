"""Whether chosen rows do better than as many random ones or a longer tail (paper 2.4, 6.5)."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ridgefill.eval.evaluation import Evaluation, difference_text, plural, value_text
from ridgefill.eval.results import METRICS

EQUAL = 0.05  # relative difference in multiply-accumulates that still counts as equal cost
LEVEL = 0.05  # of the sign test
PLAIN = ("leading", "special", "digits")  # rows that are no choice by content
_NAMES = re.compile(r"(?:^|\|)\s*(\w+)")


def controls(run: Evaluation) -> Iterator[str]:
    """Every selector beside its controls, on the metric the run is about."""
    metric = next((m for m in ("score_filled", "score", "key_nll", "novel_nll", "nll") if m in run.metrics), None)
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
                    yield text


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
    gains = list(run.differences(metric, arm, control).values())
    if not gains:
        return None
    if METRICS.get(metric.removesuffix("_filled")) is False:
        gains = [-gain for gain in gains]  # a lower loss is better
    better, worse = sum(g > 0 for g in gains), sum(g < 0 for g in gains)
    equal = _equal(run.macs(arm), run.macs(control))
    cost = "at equal compute" if equal else "(compute not compared)"
    verdict = _verdict(better, worse)
    return (
        f"{_OPENINGS[verdict].format(arm=arm, what=what, cost=cost)}: {_means(run, metric, arm, control)}; "
        f"better on {better:,}, worse on {worse:,} of {plural(len(gains), 'item')} (sign test p = "
        f"{sign_test(better, worse):.2g}), {control} being the control."
    )


_OPENINGS = {
    "better": "The choice of rows counts: {arm} does better than {what} {cost}",
    "worse": "{arm} does worse than {what} {cost}",
    "same": "{what} {cost} cannot be told from {arm}",
}


def _verdict(better: int, worse: int) -> str:
    if sign_test(better, worse) >= LEVEL:
        return "same"
    return "better" if better > worse else "worse"


def sign_test(better: int, worse: int) -> float:
    """Two-sided p of as uneven a split of the items that differ; 1 where none does."""
    if better + worse == 0:
        return 1.0
    from scipy.stats import binomtest

    return float(binomtest(better, better + worse).pvalue)


def _means(run: Evaluation, metric: str, arm: str, control: str) -> str:
    mine, theirs = run.values(metric, arm), run.values(metric, control)
    both = [item for item in mine if item in theirs]
    one, other = _mean([mine[item] for item in both]), _mean([theirs[item] for item in both])
    unit = "" if value_text(metric, one).endswith("%") else " nats"
    return (
        f"{value_text(metric, one)} against {value_text(metric, other)}"
        f"{unit} ({difference_text(metric, one - other)})"
    )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
