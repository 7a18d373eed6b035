"""What evaluations found, in sentences made from their numbers (paper 3.1, 3.4, 6)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from ridgefill.eval.controls import controls
from ridgefill.eval.evaluation import (
    Evaluation,
    difference_text,
    interval_text,
    listed,
    plural,
    value_text,
)

SMALL_LOSS = 0.1  # nats per token: a mean loss that most readers would call harmless
LOST = -0.1  # of the score: so much less is found that no small loss should hide it
NAMED = 3  # worst documents that a sentence names
TOKENS = {"novel_nll": "a novel token", "key_nll": "a key token", "nll": "a token"}
SCORES = {
    "ruler": "RULER score",
    "longbench": "LongBench score",
    "splice": "retrieval",
    "two-turn": "score on the turns",
}


def find(run: Evaluation) -> list[str]:
    """One run's findings, the ones that decide first. Empty where it has no arm beside its baseline."""
    return [
        *_scores(run),
        *_hidden_by_mean(run),
        *controls(run),
        *_losses(run),
        *_agreement(run),
        *_heavy_tails(run),
        *_first_and_last(run),
    ]


def find_across(runs: Sequence[Evaluation]) -> list[str]:
    """What only several runs together show: a small mean loss beside lost retrieval, the same arm in both."""
    found = []
    for loss in runs:
        for arm, nll in _rows(loss, "nll"):
            if not abs(nll["difference"]["mean"]) < SMALL_LOSS:
                continue
            for other in runs:
                row = _same_arm(loss, arm, other)
                if row is None or not row["difference"]["mean"] <= LOST or _level(row) != "lower":
                    continue
                found.append(
                    f"Mean loss hides what {arm} does to {loss.model}: it costs "
                    f"{_cost(nll)} nats a token ({loss.name}), yet its {_score_words(other)} is "
                    f"{value_text('score', row['mean'])} where {other.baseline}'s is "
                    f"{_baseline_text(other, row)} ({other.name})."
                )
    return found


def _same_arm(loss: Evaluation, arm: str, other: Evaluation) -> Mapping[str, Any] | None:
    """The score of another run's arm, if it is the same fill of the same model."""
    if other is loss or other.model != loss.model or arm not in other.arms:
        return None
    same = other.plan(arm) == loss.plan(arm) and other.maps == loss.maps
    row = other.row(arm, score_metric(other)) if same else None
    return row if row is not None and row["difference"] else None


def score_metric(run: Evaluation) -> str:
    """The score of items whose needles lie in filled rows, where a run has it; else that of all items."""
    return "score_filled" if "score_filled" in run.metrics else "score"


def headline(run: Evaluation) -> str | None:
    """The metric that a run is about; None if it has no item."""
    order = (score_metric(run), "novel_nll", "nll", "kl", "top1", *run.metrics)
    return next((metric for metric in order if metric in run.metrics), None)


def _rows(run: Evaluation, metric: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """(arm, summary row) of all items, for every arm that has a difference from the baseline."""
    for arm in run.others:
        row = run.row(arm, metric)
        if row is not None and row["difference"]:
            yield arm, row


def _level(row: Mapping[str, Any]) -> str:
    """How a row's interval lies: "higher" or "lower" than the baseline's, or "undecided"."""
    low, high = row["difference"].get("low"), row["difference"].get("high")
    if low is None or high is None:
        return "undecided"
    return "higher" if low > 0 else "lower" if high < 0 else "undecided"


def _score_words(run: Evaluation) -> str:
    filled = " from filled rows" if score_metric(run) == "score_filled" else ""
    return SCORES.get(run.kind, "score") + filled


def _scores(run: Evaluation) -> Iterator[str]:
    """Who keeps the score, who loses it, and whose interval cannot say."""
    metric = score_metric(run)
    rows = sorted(_rows(run, metric), key=lambda each: -each[1]["mean"])
    order = ("kept", "higher", "undecided", "lower")
    classed = sorted(((_verdict(row), arm, row) for arm, row in rows), key=lambda each: order.index(each[0]))
    for verdict, group in groupby(classed, key=lambda each: each[0]):
        members = [(arm, row) for _, arm, row in group]
        what = f"{run.baseline}'s {_baseline_text(run, members[0][1])} in {_score_words(run)}"
        items = f"{plural(members[0][1]['n'], 'item')}"
        yield _OPENINGS[verdict].format(
            what=what, items=items, margin=_margin_text(members[0][1])
        ) + listed(_score_text(arm, row) for arm, row in members) + "."


_OPENINGS = {
    "kept": "Non-inferior to {what} at a margin of {margin} points ({items}): ",
    "higher": "Better than {what}, the interval above 0 ({items}): ",
    "undecided": "Not decided against {what}, the interval holds 0 ({items}): ",
    "lower": "Worse than {what}, the interval below 0 ({items}): ",
}


def _verdict(row: Mapping[str, Any]) -> str:
    tested = row.get("noninferiority")
    return "kept" if tested and tested["holds"] else _level(row)


def _margin_text(row: Mapping[str, Any]) -> str:
    tested = row.get("noninferiority")
    return f"{tested['margin']:.1f}" if tested else ""


def _score_text(arm: str, row: Mapping[str, Any]) -> str:
    text = f"{arm} {value_text('score', row['mean'])} ({_difference(row)}"
    tested = row.get("noninferiority")
    return text + (f", at worst {tested['lower']:+.1f})" if tested else ")")


def _difference(row: Mapping[str, Any]) -> str:
    metric, difference = row["metric"], row["difference"]
    return f"{difference_text(metric, difference['mean'])} {interval_text(metric, difference)}".strip()


def _baseline_text(run: Evaluation, row: Mapping[str, Any]) -> str:
    """The baseline's mean on the items that the arm has too."""
    return value_text(row["metric"], row["mean"] - row["difference"]["mean"])


def _cost(row: Mapping[str, Any]) -> str:
    return _difference(row)


def _hidden_by_mean(run: Evaluation) -> Iterator[str]:
    """A small loss on all tokens beside a large one on those that need the prefix."""
    for arm, nll in _rows(run, "nll"):
        key = run.row(arm, "key_nll")
        if key is None or not key["difference"]:
            continue
        mean, worst = nll["difference"]["mean"], key["difference"]["mean"]
        if abs(mean) < SMALL_LOSS < worst and worst > 3 * abs(mean):
            yield (
                f"Mean loss hides what {arm} does: {_cost(nll)} nats over all scored tokens, "
                f"{_cost(key)} on key tokens, which need the far context."
            )


def _losses(run: Evaluation) -> Iterator[str]:
    """What each arm costs on the tokens that test the prefix, cheapest first."""
    metrics = [m for m in ("novel_nll", "key_nll") if m in run.metrics] or ["nll"]
    first = {arm: row["difference"]["mean"] for arm, row in _rows(run, metrics[0])}
    for arm in sorted(first, key=lambda name: first[name]):
        rows = [row for row in (run.row(arm, m) for m in metrics) if row is not None and row["difference"]]
        costs = [f"{_cost(row)} nats on {TOKENS[row['metric']]}" for row in rows]
        yield f"{arm} costs {' and '.join(costs)}: {_decided(rows)}."


def _decided(rows: Sequence[Mapping[str, Any]]) -> str:
    """Which intervals exclude 0, in words."""
    words = {"higher": "worse than exact", "lower": "better than exact", "undecided": "not told from 0"}
    levels = [_level(row) for row in rows]
    if len(set(levels)) == 1:
        both = "both intervals" if len(rows) == 2 else "the interval"
        return {
            "higher": f"{both} {'exclude' if len(rows) == 2 else 'excludes'} 0",
            "lower": f"{both} below 0, better than exact",
            "undecided": f"{both} {'hold' if len(rows) == 2 else 'holds'} 0",
        }[levels[0]]
    return ", ".join(
        f"{TOKENS[row['metric']].removeprefix('a ')}s {words[level]}"
        for row, level in zip(rows, levels, strict=True)
    )


def _agreement(run: Evaluation) -> Iterator[str]:
    """How often an arm would go on as exact does."""
    for arm, row in _rows(run, "top1"):
        kl = run.row(arm, "kl")
        beside = "" if kl is None else f"; KL mean {kl['mean']:.3f}, median {kl['median']:.3f} nats"
        yield f"{arm} has {run.baseline}'s most likely token on {value_text('top1', row['mean'])} of steps{beside}."


def _heavy_tails(run: Evaluation) -> Iterator[str]:
    """Where a few documents make the mean."""
    for arm in run.others:
        for metric in ("kl", "novel_nll", "nll"):
            text = _heavy_tail(run, arm, metric)
            if text is not None:
                yield text
                break


def _heavy_tail(run: Evaluation, arm: str, metric: str) -> str | None:
    row = run.row(arm, metric)
    if row is None or not row["difference"] or row["n"] < 5:
        return None
    mean, median = row["difference"]["mean"], row["difference"]["median"]
    if not (mean > 0.005 and mean > 2 * abs(median)):
        return None
    differences = run.differences(metric, arm)
    worst = sorted(differences, key=lambda item: -differences[item])
    carried = _carry_half(list(differences.values()))
    what = {"kl": "KL", "novel_nll": "novel-token loss", "nll": "loss"}[metric]
    named = listed(f"{item} ({differences[item]:+.3f})" for item in worst[: min(carried, NAMED)])
    return (
        f"A few documents make the mean of {arm}: {what} {mean:+.3f} nats in the mean, {median:+.3f} in the median; "
        f"{carried} of {len(worst)} carry half of it: {named}{' and others' if carried > NAMED else ''}."
    )


def _carry_half(values: Sequence[float]) -> int:
    """How many of the largest values hold half of the sum of all above 0."""
    rising, half = 0.0, sum(v for v in values if v > 0) / 2
    for count, value in enumerate(sorted(values, reverse=True), 1):
        rising += value
        if rising >= half:
            return count
    return len(values)


def _first_and_last(run: Evaluation) -> Iterator[str]:
    """Arms that cost more on the first scored tokens than on the last: the tail is what repairs them."""
    stem = next((m for m in ("nll", "novel_nll") if f"{m}_first" in run.metrics), None)
    if stem is None:
        return
    last = {arm: row["difference"]["mean"] for arm, row in _rows(run, f"{stem}_last")}
    worse = []
    for arm, row in _rows(run, f"{stem}_first"):
        first = row["difference"]["mean"]
        if arm in last and first > last[arm] + 0.01:
            times = f", {first / last[arm]:.1f} times" if last[arm] > 0.005 else ""
            worse.append(f"{arm} {first:+.3f} against {last[arm]:+.3f} nats{times}")
    if worse:
        scored = run.settings.get("scored")
        count = f"{scored:,} " if isinstance(scored, int) else ""
        what = "novel " if stem == "novel_nll" else ""
        yield (
            f"The first {count}scored {what}tokens suffer more than the last: {listed(worse)}. "
            "What a user reads first is worse than the mean says."
        )
