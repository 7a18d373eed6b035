"""What evaluations found, in sentences made from their numbers (paper 3.1, 3.4, 6)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ridgefill.eval.controls import controls
from ridgefill.eval.evaluation import (
    Evaluation,
    Finding,
    difference_text,
    interval_text,
    plural,
    value_text,
)

SMALL_LOSS = 0.1  # nats per token: a mean loss that most readers would call harmless
LOST = -0.1  # of the score: so much less is found that no small loss should hide it
MORE = 1.2  # times: what the first tokens lose over what the last lose
NAMED = 3  # worst documents that a sentence names
TOKENS = {"novel_nll": "novel tokens", "key_nll": "key tokens", "nll": "all scored tokens"}
SCORES = {
    "ruler": "RULER score",
    "needles": "retrieval from filled rows",
    "longbench": "LongBench score",
    "splice": "retrieval",
    "two-turn": "score on the turns",
}


def find(run: Evaluation) -> list[Finding]:
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


def find_across(runs: Sequence[Evaluation]) -> list[Finding]:
    """What only several runs together show: a small mean loss beside lost retrieval, the same arm in both."""
    found = []
    for loss in runs:
        for other in runs:
            hidden = [
                f"{arm}: {_difference(nll)} nats a token, yet {value_text('score', row['mean'])} "
                f"against {other.baseline}'s {_baseline_text(other, row)}"
                for arm, nll in _rows(loss, "nll")
                if abs(nll["difference"]["mean"]) < SMALL_LOSS
                and (row := _same_arm(loss, arm, other)) is not None
                and row["difference"]["mean"] <= LOST
                and _level(row) == "lower"
            ]
            if hidden:
                lead = f"Mean loss ({loss.name}) hides what these arms do to {loss.model}'s {_score_words(other)}"
                found.append(Finding(f"{lead} ({other.name})", tuple(hidden)))
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


def _scores(run: Evaluation) -> Iterator[Finding]:
    """Who keeps the score, who loses it, and whose interval cannot say."""
    rows = sorted(_rows(run, score_metric(run)), key=lambda each: -each[1]["mean"])
    for verdict, opening in _OPENINGS.items():
        members = [(arm, row) for arm, row in rows if _verdict(row) == verdict]
        if not members:
            continue
        first = members[0][1]
        what = f"{run.baseline}'s {_baseline_text(run, first)} in {_score_words(run)}"
        tested = first.get("noninferiority")
        margin = f" at a margin of {tested['margin']:.1f} points" if tested else ""
        lead = opening.format(
            what=what, items=plural(first.get("n_paired", first["n"]), "item"), margin=margin
        )
        yield Finding(lead, tuple(_score_text(arm, row) for arm, row in members))


_OPENINGS = {
    "kept": "Non-inferior to {what}{margin} ({items})",
    "higher": "Better than {what}, the interval above 0 ({items})",
    "undecided": "Not told from {what}: the interval holds 0, but non-inferiority{margin} is not shown ({items})",
    "lower": "Worse than {what}, the interval below 0 ({items})",
}


def _verdict(row: Mapping[str, Any]) -> str:
    tested = row.get("noninferiority")
    return "kept" if tested and tested["holds"] else _level(row)


def _score_text(arm: str, row: Mapping[str, Any]) -> str:
    text = f"{arm} {value_text('score', row['mean'])} ({_difference(row)}"
    tested = row.get("noninferiority")
    bound = tested["lower"] if tested else None
    return text + (f", at worst {bound:+.1f})" if bound is not None else ")")


def _difference(row: Mapping[str, Any]) -> str:
    metric, difference = row["metric"], row["difference"]
    return f"{difference_text(metric, difference['mean'])} {interval_text(metric, difference)}".strip()


def _baseline_text(run: Evaluation, row: Mapping[str, Any]) -> str:
    """The baseline's mean on the items that the arm has too."""
    metric = row["metric"]
    mine, theirs = run.values(metric, row["arm"]), run.values(metric, run.baseline)
    both = [value for item, value in theirs.items() if item in mine]
    return value_text(metric, sum(both) / len(both))


def _hidden_by_mean(run: Evaluation) -> Iterator[Finding]:
    """A small loss on all tokens beside a large one on those that need the prefix."""
    hidden = []
    for arm, nll in _rows(run, "nll"):
        key = run.row(arm, "key_nll")
        if key is None or not key["difference"]:
            continue
        mean, worst = nll["difference"]["mean"], key["difference"]["mean"]
        if abs(mean) < SMALL_LOSS < worst and worst > 3 * abs(mean):
            hidden.append(
                f"{arm}: {_difference(nll)} nats on all scored tokens, {_difference(key)} on key tokens"
            )
    if hidden:
        yield Finding(
            "Mean loss hides what these arms do to key tokens, which need the far context", tuple(hidden)
        )


def _losses(run: Evaluation) -> Iterator[Finding]:
    """What each arm costs on the tokens that test the prefix, cheapest first, sorted by what the intervals say."""
    needing = [m for m in run.metrics if m in ("novel_nll", "key_nll")]
    metrics = needing or [m for m in run.metrics if m == "nll"]
    if not metrics:
        return
    first = {arm: row["difference"]["mean"] for arm, row in _rows(run, metrics[0])}
    classed: dict[str, list[str]] = {}
    for arm in sorted(first, key=lambda name: first[name]):
        rows = [row for row in (run.row(arm, m) for m in metrics) if row is not None and row["difference"]]
        costs = " / ".join(_difference(row) for row in rows)
        classed.setdefault(_decided(rows), []).append(f"{arm}: {costs}")
    what = " / ".join(TOKENS[metric] for metric in metrics)
    for decided, arms in classed.items():
        yield Finding(f"Nats above {run.baseline}'s on {what}, {decided}", tuple(arms))


def _decided(rows: Sequence[Mapping[str, Any]]) -> str:
    """Which intervals exclude 0, in words."""
    levels = [_level(row) for row in rows]
    if len(set(levels)) == 1:
        return {
            "higher": "intervals above 0: worse than exact",
            "lower": "intervals below 0: better than exact",
            "undecided": "intervals hold 0: not told from exact",
        }[levels[0]]
    words = {"higher": "worse than exact", "lower": "better than exact", "undecided": "not told from it"}
    return ", ".join(
        f"{TOKENS[row['metric']]} {words[level]}" for row, level in zip(rows, levels, strict=True)
    )


def _agreement(run: Evaluation) -> Iterator[Finding]:
    """How often an arm would go on as exact does."""
    arms = []
    for arm, row in sorted(_rows(run, "top1"), key=lambda each: -each[1]["mean"]):
        kl = run.row(arm, "kl")
        beside = "" if kl is None else f", KL mean {kl['mean']:.3f}, median {kl['median']:.3f} nats"
        arms.append(f"{arm}: {value_text('top1', row['mean'])} of steps{beside}")
    if arms:
        yield Finding(f"Most likely token the same as {run.baseline}'s", tuple(arms))


def _heavy_tails(run: Evaluation) -> Iterator[Finding]:
    """Where a few documents make the mean."""
    heavy = []
    for arm in run.others:
        texts = (_heavy_tail(run, arm, metric) for metric in ("kl", "novel_nll", "nll"))
        heavy += [text for text in texts if text is not None][:1]
    if heavy:
        yield Finding("A few documents make the mean, so read it beside the median", tuple(heavy))


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
    named = ", ".join(f"{item} ({differences[item]:+.3f})" for item in worst[: min(carried, NAMED)])
    return (
        f"{arm}: {what} {mean:+.3f} nats in the mean, {median:+.3f} in the median; "
        f"{carried} of {len(worst)} carry half of it: {named}{' and others' if carried > NAMED else ''}"
    )


def _carry_half(values: Sequence[float]) -> int:
    """How many of the largest values hold half of the sum of all above 0."""
    rising, half = 0.0, sum(v for v in values if v > 0) / 2
    for count, value in enumerate(sorted(values, reverse=True), 1):
        rising += value
        if rising >= half:
            return count
    return len(values)


def _first_and_last(run: Evaluation) -> Iterator[Finding]:
    """Arms that cost more on the first scored tokens than on the last: the tail is what repairs them."""
    stem = next((m for m in ("nll", "novel_nll") if f"{m}_first" in run.metrics), None)
    if stem is None:
        return
    last = {arm: row["difference"]["mean"] for arm, row in _rows(run, f"{stem}_last")}
    worse = []
    for arm, row in _rows(run, f"{stem}_first"):
        first = row["difference"]["mean"]
        if arm in last and first > last[arm] + 0.01 and first > MORE * last[arm]:
            times = f", {first / last[arm]:.1f} times" if last[arm] > 0.005 else ""
            worse.append(f"{arm}: {first:+.3f} against {last[arm]:+.3f} nats{times}")
    if worse:
        scored = run.settings.get("scored")
        count = f"{scored:,} " if isinstance(scored, int) else ""
        what = "novel " if stem == "novel_nll" else ""
        lead = f"The first {count}{what}tokens of the tail lose more than the last"
        yield Finding(lead, tuple(worse))
