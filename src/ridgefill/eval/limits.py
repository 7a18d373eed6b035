"""What evaluations cannot tell, in sentences (paper 3.4, 8)."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence

from ridgefill.eval.evaluation import Evaluation, plural, value_text
from ridgefill.eval.findings import score_metric

FEW = 10  # items: fewer make every interval rough
LOW = 0.5  # an exact score below this leaves little to lose
MANY = 5  # arms: so many looks that one may be luck
SHOWN = 8  # names in one sentence


def limits(run: Evaluation) -> list[str]:
    """One run's limits, those that forbid a reading first."""
    return [
        *_unfinished(run),
        *_floor(run),
        *_filled(run),
        *_tokens(run),
        *_counts(run),
        *_baseline(run),
        *_approximate(run),
        *_looks(run),
        *_ledger(run),
    ]


def limits_across(runs: Sequence[Evaluation]) -> list[str]:
    """What all runs together leave open."""
    found = []
    models = sorted({run.model for run in runs})
    if len(models) == 1:
        found.append(f"One model only ({models[0]}): nothing here says how another behaves.")
    seeds = {str(run.settings["seed"]) for run in runs if "seed" in run.settings}
    if len(seeds) <= 1:
        found.append(
            "One draw of items (one seed): the intervals cover which items were drawn, not another way to draw them."
        )
    if not any(run.kind in ("ruler", "needles", "longbench", "two-turn") for run in runs):
        found.append(
            "No retrieval was measured, and mean loss can hide its loss: run `ridgefill eval ruler` too."
        )
    return found


def needed(margin: float) -> int:
    """How many items without a failure a margin in points takes: the binomial floor falls to it (3.4)."""
    return math.ceil(math.log(0.05) / math.log(1 - margin / 100))


def _unfinished(run: Evaluation) -> Iterator[str]:
    missing = run.missing()
    if not run.lines:
        yield "No item has run yet."
        return
    if missing:
        total = len(run.planned())
        named = ", ".join(f"{arm} {count:,}" for arm, count in list(missing.items())[:SHOWN])
        yield (
            f"Unfinished: of {plural(total, 'item')} these arms miss some: {named}. "
            "Their differences are over the items that both have."
        )
    elif not run.finished:
        yield "It wrote no summary of these items: more may have been planned. The same command goes on with it."


def _floor(run: Evaluation) -> Iterator[str]:
    """Where so few items cannot show non-inferiority whatever they score."""
    metric = score_metric(run)
    for arm in run.others:
        row = run.row(arm, metric)
        tested = row.get("noninferiority") if row is not None else None
        if row is None or not tested or not tested["floor"] > tested["margin"]:
            continue
        more = f"; {needed(tested['margin']):,} would be needed" if 0 < tested["margin"] < 100 else ""
        yield (
            f"{plural(row['n'], 'item')} cannot show non-inferiority at a margin of {tested['margin']:.1f} points: "
            f"even without one failure the bound is {tested['floor']:.1f} points (binomial floor){more}."
        )
        return


def _filled(run: Evaluation) -> Iterator[str]:
    if run.kind == "longbench":
        yield from _short(run)
        return
    filled = run.facts("filled")
    if not filled:
        return
    inside = sum(value is True for value in filled.values())
    if inside == 0:
        yield (
            "No item has its needles in filled rows: these scores say nothing about the fill. "
            "Use longer prompts or a shorter tail."
        )
    elif inside < len(filled):
        rest = len(filled) - inside
        yield (
            f"{rest:,} of {plural(len(filled), 'item')} have a needle in exact rows and are left out where it says "
            "filled."
        )


def _short(run: Evaluation) -> Iterator[str]:
    """Arms that ran some prompts exactly: those were too short to fill."""
    for arm in run.others:
        filled = [line["fills"] for line in run.lines if line["arm"] == arm and line.get("fills") is not None]
        if not all(filled):
            count = f"{filled.count(False):,} of {plural(len(filled), 'prompt')}"
            yield f"{arm} filled no row of {count}: too short for it."


def _tokens(run: Evaluation) -> Iterator[str]:
    if run.kind != "loss" or not run.lines:
        return
    items = run.values("nll", run.baseline) or run.values("novel_nll", run.baseline)
    for metric, what, advice in (
        ("key_nll", "key tokens", "they need documents with more context than the key tokens' window"),
        ("novel_nll", "novel tokens", "everything scored repeats earlier text"),
    ):
        have = run.values(metric, run.baseline)
        if not have:
            yield f"No document has {what} ({advice}): what the far context gives was not measured."
        elif len(have) < len(items):
            yield f"Only {len(have):,} of {plural(len(items), 'document')} have {what}."


def _counts(run: Evaluation) -> Iterator[str]:
    sizes = Counter({item: 1 for item in run.planned()})
    strata = Counter({line["item"]: line["stratum"] for line in run.lines}.values())
    single = [str(name) for name, count in strata.items() if count == 1]
    if single and len(strata) > 1:
        shown = ", ".join(single[:SHOWN]) + (" and others" if len(single) > SHOWN else "")
        yield f"Strata of one item have no spread of their own: {shown}."
    if 0 < len(sizes) < FEW:
        yield f"{plural(len(sizes), 'item')} are few: take the intervals as rough."


def _baseline(run: Evaluation) -> Iterator[str]:
    row = run.row(run.baseline, score_metric(run))
    if row is not None and row["mean"] < LOW:
        yield (
            f"{run.baseline} itself scores {value_text('score', row['mean'])}: the model hardly does "
            "this task, so little can be lost on it."
        )


def _approximate(run: Evaluation) -> Iterator[str]:
    unknown = [arm for arm in run.arms if run.macs(arm) is None]
    if unknown:
        yield f"The compute of these arms is not counted: {', '.join(unknown[:SHOWN])}."


def _looks(run: Evaluation) -> Iterator[str]:
    if len(run.others) >= MANY:
        yield (
            f"{len(run.others)} arms are compared, and no interval allows for so many looks: of arms that do not "
            "differ from exact, about one interval in twenty excludes 0."
        )


def _ledger(run: Evaluation) -> Iterator[str]:
    if not run.about.get("ledger"):
        yield "Not declared in a ledger before it ran: read it as exploration, not as a test."
