"""A report's tables: what was run, every metric by arm and stratum, by length and depth, by document."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import Any

from ridgefill.eval.evaluation import (
    Evaluation,
    difference_text,
    interval_text,
    is_share,
    value_text,
)
from ridgefill.eval.pictures import NAMES, any_filled, depth_label, drawn_metrics, grid, seconds_over_exact

WORST = 10  # documents in their table
METRIC_WORDS = {
    "score": "Score",
    "score_filled": "Score, items with every needle in filled rows",
    "nll": "Loss on all scored tokens, nats per token",
    "nll_first": "Loss on the first scored tokens, nats per token",
    "nll_last": "Loss on the last scored tokens, nats per token",
    "novel_nll": "Loss on novel tokens, nats per token",
    "novel_nll_first": "Loss on novel tokens among the first scored, nats per token",
    "novel_nll_last": "Loss on novel tokens among the last scored, nats per token",
    "key_nll": "Loss on key tokens, nats per token",
    "kl": "KL divergence from exact, nats per token",
    "top1": "Steps with exact's most likely token",
    "perplexity_gap": "Perplexity above exact's (documents, then strata, weighted equally)",
}


@dataclass(frozen=True)
class Table:
    """A table of text.

    Attributes:
        head: column titles; the first column names the rows.
        rows: each as long as ``head``.
        caption: what it shows.
        shades: (row, column) -> 0..1, how good a cell is, where cells are coloured.
    """

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str = ""
    shades: Mapping[tuple[int, int], float] = field(default_factory=dict)


def what_ran(run: Evaluation) -> Table:
    """Model, maps, settings, ledger entry, environment."""
    about = run.about
    count = len({line["item"] for line in run.lines})
    rows = [
        ("measured", f"{run.kind}, {count:,} items in {len(run.strata):,} strata"),
        ("model", run.model),
        ("maps", run.maps or "none"),
        ("tokenizer", str(about.get("tokenizer") or "not named")),
        ("ledger entry", str(about.get("ledger") or "none: not declared before it ran")),
        *((name, _words(value)) for name, value in run.settings.items()),
        *((name, _words(value)) for name, value in (about.get("environment") or {}).items()),
    ]
    return Table(("what", "value"), rows)


def _words(value: Any) -> str:
    if isinstance(value, list):
        listed = [str(v) for v in value]
        return ", ".join(listed) if len(listed) <= 8 else f"{len(listed):,}: {', '.join(listed[:4])}, ..."
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def arms(run: Evaluation) -> Table:
    """Every arm's plan in words, its compute, and its time where it was taken."""
    timed = bool(run.seconds(run.baseline))
    rows = [
        (arm, *_arm(run, arm), *([_ratio(seconds_over_exact(run, arm))] if timed else [])) for arm in run.arms
    ]
    tokens = run.about.get("tokens")
    at = f" at {tokens:,} tokens" if isinstance(tokens, int) else ""
    return Table(
        ("arm", "fill", "split", "tail", "leading", "rows and corrections", "compute / exact")
        + (("seconds / exact",) if timed else ()),
        rows,
        f"The arms, and their prompt's multiply-accumulates over exact's{at}."
        + (" Seconds are whole answers, the median over items." if timed else ""),
    )


def _arm(run: Evaluation, arm: str) -> list[str]:
    plan, about = run.plan(arm), run.about["arms"][arm]
    exact = plan.get("fill") == "exact"
    parts = [str(plan[k]) for k in ("rows", "corrections") if plan.get(k)]
    parts += [
        text
        for text in (about.get("notes"), about.get("words") if exact and arm != run.baseline else "")
        if text
    ]
    numbers = ["" if exact or plan.get(k) is None else f"{plan[k]:,}" for k in ("split", "tail", "leading")]
    return [str(plan.get("fill", "")), *numbers, "; ".join(parts), _ratio(run.macs(arm))]


def _ratio(value: float | None) -> str:
    return "not known" if value is None else f"{value:.2f}"


def glance(run: Evaluation) -> Table:
    """Every arm's compute and its difference from exact in the metrics that count, in one table."""
    metrics = drawn_metrics([run], 6)
    rows = []
    for arm in run.arms:
        found = [run.row(arm, metric) for metric in metrics]
        rows.append((arm, _ratio(run.macs(arm)), *map(_short, found)))
    short = [NAMES[metric].split(",")[0] for metric in metrics]
    return Table(
        ("arm", "compute / exact", *short),
        rows,
        f"At a glance: {run.baseline}'s own values, and every other arm's difference from it with its interval "
        "(scores in points, losses in nats per token).",
    )


def _short(row: Mapping[str, Any] | None) -> str:
    if row is None:
        return "-"
    if not row["difference"]:
        return value_text(row["metric"], row["mean"])
    mean = difference_text(row["metric"], row["difference"]["mean"])
    return f"{mean} {interval_text(row['metric'], row['difference'])}".strip()


def overall(run: Evaluation, metric: str) -> Table:
    """All items in one metric: every arm's mean, median, difference and tests."""
    rows = [(arm, row) for arm in run.arms if (row := run.row(arm, metric)) is not None]
    columns = [column for column in _COLUMNS if any(column[1](row) for _, row in rows)]
    points = "Differences are points. " if is_share(metric) else ""
    return Table(
        ("arm", *(title for title, _ in columns)),
        [(arm, *(cell(row) for _, cell in columns)) for arm, row in rows],
        f"{points}{_method(row for _, row in rows)}".strip(),
    )


def _method(rows: Any) -> str:
    methods = {
        row["difference"]["method"] for row in rows if row["difference"] and row["difference"].get("method")
    }
    return f"Intervals: {'; '.join(sorted(methods))}." if methods else ""


def _of_difference(text: Callable[[str, Mapping[str, Any]], str]) -> Callable[[Mapping[str, Any]], str]:
    return lambda row: text(row["metric"], row["difference"]) if row["difference"] else ""


def _median(metric: str, difference: Mapping[str, Any]) -> str:
    return "" if difference.get("median") is None else difference_text(metric, difference["median"])


def _tested(row: Mapping[str, Any]) -> str:
    tested = row.get("noninferiority")
    if not tested:
        return ""
    bound = "no bound" if tested["lower"] is None else f"{tested['lower']:+.1f}"
    return f"{'yes' if tested['holds'] else 'no'} ({bound}, margin {tested['margin']:.1f})"


def _signs(row: Mapping[str, Any]) -> str:
    sign = row.get("sign_test")
    return f"{sign['better']} / {sign['worse']} / {sign['ties']}, p = {sign['p']:.2g}" if sign else ""


_COLUMNS: tuple[tuple[str, Callable[[Mapping[str, Any]], str]], ...] = (
    ("n", lambda row: f"{row['n']:,}"),
    ("mean", lambda row: value_text(row["metric"], row["mean"])),
    ("median", lambda row: value_text(row["metric"], row["median"])),
    ("less exact's", _of_difference(lambda metric, found: difference_text(metric, found["mean"]))),
    (
        "95 % interval",
        _of_difference(lambda m, found: interval_text(m, found) or str(found.get("reason") or "")),
    ),
    ("median of differences", _of_difference(_median)),
    ("non-inferior (bound)", _tested),
    ("better / worse / same", _signs),
)


def by_stratum(run: Evaluation, metric: str) -> Table | None:
    """Arms by strata: means, and differences with their intervals; None where there is one stratum."""
    strata = [s for s in run.strata if any(run.row(arm, metric, s) for arm in run.arms)]
    if len(strata) < 2:
        return None
    cells = [[_cell(run.row(arm, metric, stratum)) for stratum in strata] for arm in run.arms]
    caption = "Mean, and in parentheses the difference from exact with its interval."
    if len(strata) < len(run.arms):
        return Table(
            ("arm", *strata), [(arm, *line) for arm, line in zip(run.arms, cells, strict=True)], caption
        )
    turned = zip(strata, zip(*cells, strict=True), strict=True)
    return Table(("stratum", *run.arms), [(stratum, *line) for stratum, line in turned], caption)


def _cell(row: Mapping[str, Any] | None) -> str:
    if row is None:
        return "-"
    value = value_text(row["metric"], row["mean"])
    if not row["difference"]:
        return f"{value} (n {row['n']:,})"
    mean = difference_text(row["metric"], row["difference"]["mean"])
    return f"{value} ({' '.join((mean, interval_text(row['metric'], row['difference']))).strip()})"


def by_length(run: Evaluation) -> Table | None:
    """Arms by prompt length: mean score; None where lengths are not known."""
    lengths = run.lengths()
    rounded = "" if lengths == run.facts("length") else ", rounded up to a power of two"
    return _heat(run, lengths, lambda length: f"{length:,}", f"prompt length in tokens{rounded}")


def by_depth(run: Evaluation) -> Table | None:
    """Arms by the needle's depth; None where depths are not known."""
    cells = {arm: grid(run, arm) for arm in run.arms}
    places = sorted({place for found in cells.values() for _, place in found})
    if not places:
        return None
    values = {
        arm: {p: [v for (_, place), scores in found.items() if place == p for v in scores] for p in places}
        for arm, found in cells.items()
    }
    return _heat_table(run, values, places, depth_label, "depth of the needle")


def _heat(run: Evaluation, facts: Mapping[str, Any], label: Callable[[Any], str], what: str) -> Table | None:
    metric = "score_filled" if any_filled(run) else "score"
    scores = {arm: run.values(metric, arm) for arm in run.arms}
    places = sorted({facts[item] for found in scores.values() for item in found if item in facts})
    if len(places) < 2:
        return None
    values = {
        arm: {p: [v for item, v in found.items() if facts.get(item) == p] for p in places}
        for arm, found in scores.items()
    }
    return _heat_table(run, values, places, label, what)


def _heat_table(
    run: Evaluation,
    values: Mapping[str, Mapping[Any, Sequence[float]]],
    places: Sequence[Any],
    label: Callable[[Any], str],
    what: str,
) -> Table:
    rows, shades = [], {}
    for i, arm in enumerate(run.arms):
        cells = [arm]
        for j, place in enumerate(places, 1):
            found = values[arm].get(place, ())
            cells.append(f"{value_text('score', fmean(found))} (n {len(found):,})" if found else "-")
            if found:
                shades[i, j] = min(1.0, max(0.0, fmean(found)))
        rows.append(cells)
    items = "items with every needle in filled rows" if any_filled(run) else "all items"
    return Table(("arm", *map(label, places)), rows, f"Mean score by {what}, {items}.", shades)


def by_document(run: Evaluation, metric: str) -> Table | None:
    """Every arm's mean beside its median, then the worst documents: those of the worst mean rank over arms."""
    columns = {arm: run.differences(metric, arm) for arm in run.others}
    columns = {arm: found for arm, found in columns.items() if found}
    items = list(dict.fromkeys(item for found in columns.values() for item in found))
    if len(items) < 2:
        return None
    sign = 1 if is_share(metric) and metric != "perplexity_gap" else -1  # the worst first
    places: dict[str, list[int]] = {}
    for found in columns.values():
        for place, item in enumerate(sorted(found, key=lambda each: sign * found[each])):
            places.setdefault(item, []).append(place)
    worst = sorted(items, key=lambda item: fmean(places[item]))[:WORST]
    rows = [
        [name, "", *(difference_text(metric, of(list(found.values()))) for found in columns.values())]
        for name, of in (("mean", fmean), ("median", median))
    ]
    rows += [
        [
            item,
            run.stratum(item),
            *(difference_text(metric, f[item]) if item in f else "-" for f in columns.values()),
        ]
        for item in worst
    ]
    words = METRIC_WORDS.get(metric, metric)
    caption = (
        f"{words}, less exact's: mean beside median of {len(items):,} items, then the worst {len(worst):,}."
    )
    return Table(("item", "stratum", *columns), rows, caption)
