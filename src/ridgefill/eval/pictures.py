"""A report's pictures as SVG: over splits, speed against loss, by length and depth, by document."""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ridgefill.eval.evaluation import FILLED, Evaluation, is_share

if TYPE_CHECKING:
    from matplotlib.figure import Figure

INK = "#010203"  # stands for the page's own text colour until the picture is placed
FAR = 1.0  # nats
DEPTHS = 5  # bins of the needle's depth
MARKS = "osD^vPX*<>"
NAMES = {
    "score": "score, points",
    "score_filled": "score from filled rows, points",
    "novel_nll": "novel-token loss, nats",
    "key_nll": "key-token loss, nats",
    "nll": "loss, nats",
    "kl": "KL, nats",
    "top1": "top-1 agreement, points",
}


@dataclass(frozen=True)
class Picture:
    """One picture.

    Attributes:
        name: of its file, without the ending.
        caption: what it shows, in words.
        svg: an <svg> element whose ink is `INK`.
    """

    name: str
    caption: str
    svg: str

    def inline(self) -> str:
        """For a page: in the page's text colour, on its background."""
        return self.svg.replace(INK, "currentColor")

    def file(self) -> str:
        """For a file of its own: dark on white."""
        head, _, rest = self.svg.replace(INK, "#222222").partition(">")
        return f'{head}><rect width="100%" height="100%" fill="#ffffff"/>{rest}\n'


@dataclass(frozen=True)
class _Point:
    """An arm in a picture: a mean difference from the baseline with its interval."""

    label: str
    x: float
    mean: float
    low: float | None
    high: float | None

    @property
    def bar(self) -> tuple[float, float]:
        """The interval's ends; the mean where there is none."""
        return (self.mean if self.low is None else self.low, self.mean if self.high is None else self.high)


def groups(runs: Sequence[Evaluation]) -> list[list[Evaluation]]:
    """Runs of the same model on the same items, which can stand in one picture."""
    found: dict[str, list[Evaluation]] = {}
    for run in runs:
        found.setdefault(repr((run.model, run.kind, sorted(run.settings.items()))), []).append(run)
    return list(found.values())


def drawn_metrics(runs: Sequence[Evaluation], most: int = 3) -> list[str]:
    """The metrics worth a panel, at most so many."""
    there = {metric for run in runs for metric in run.metrics}
    if "score_filled" in there:
        there.discard("score")
    return [metric for metric in NAMES if metric in there][:most]


def curve(runs: Sequence[Evaluation], name: str) -> Picture | None:
    """Differences from exact over the split, one line for each kind of arm; None where no kind has two splits."""
    metrics = drawn_metrics(runs)
    lines = {metric: _families(runs, metric) for metric in metrics}
    shown = [m for m in metrics if any(len({p.x for p in points}) > 1 for points in lines[m].values())]
    if not shown:
        return None
    labels = list(dict.fromkeys(label for m in shown for label in lines[m]))
    relative = all(run.about.get("layers") for run in runs)
    with _figure(name, len(shown), labels) as (figure, axes):
        for metric, ax in zip(shown, axes, strict=True):
            for label, points in lines[metric].items():
                _line(ax, sorted(points, key=lambda p: p.x), labels.index(label), metric)
            ax.axhline(0, color=INK, linewidth=0.8, alpha=0.6)
            ax.set(
                xlabel="split / layers" if relative else "split, layer",
                ylabel=f"{NAMES[metric]}, less exact's",
            )
        svg = _svg(figure)
    return Picture(name, "Difference from exact over the split, with 95 % intervals.", svg)


def pareto(runs: Sequence[Evaluation], name: str) -> Picture | None:
    """Differences from exact over compute; None where fewer than two arms have both.

    Compute is counted multiply-accumulates over exact's, or seconds over exact's where nothing was counted.
    """
    counted = any(run.macs(arm) is not None for run in runs for arm in run.others)
    points = {metric: _costs(runs, metric, counted) for metric in drawn_metrics(runs, 2)}
    points = {metric: found for metric, found in points.items() if len(found) > 1}
    if not points:
        return None
    labels = list(dict.fromkeys(p.label for found in points.values() for p in found))
    with _figure(name, len(points), labels) as (figure, axes):
        for (metric, found), ax in zip(points.items(), axes, strict=True):
            for point in found:
                _line(ax, [point], labels.index(point.label), metric)
            _scale(ax, "y", metric, [p.mean for p in found])
            ax.plot([1], [0], marker="+", color=INK, markersize=11)
            ax.axhline(0, color=INK, linewidth=0.8, alpha=0.6)
            what = "multiply-accumulates" if counted else "seconds"
            ax.set(xlabel=f"{what} / exact's", ylabel=f"{NAMES[metric]}, less exact's", xlim=(0, None))
        svg = _svg(figure)
    better = "Left is faster; the cross is exact. Up is better for a score, down for a loss."
    return Picture(name, f"Speed against error, with 95 % intervals. {better}", svg)


def depth(run: Evaluation, name: str) -> Picture | None:
    """Mean score by prompt length and needle depth, a panel for each arm; None where depths are not known."""
    grids = {arm: grid(run, arm) for arm in run.arms}
    grids = {arm: cells for arm, cells in grids.items() if cells}
    if not grids:
        return None
    lengths = sorted({length for cells in grids.values() for length, _ in cells})
    with _figure(name, len(grids), [], height=1.3 + 0.35 * len(lengths), across=3) as (figure, axes):
        for (arm, cells), ax in zip(grids.items(), axes, strict=True):
            _heat(ax, cells, lengths, arm)
        svg = _svg(figure)
    items = "items with every needle in filled rows" if any_filled(run) else "all items"
    return Picture(name, f"Score in percent by prompt length and depth of the needle, {items}.", svg)


def documents(run: Evaluation, metric: str, name: str) -> Picture | None:
    """Every document's difference from exact, a row for each arm, with mean and median; None without any."""
    values = {arm: list(run.differences(metric, arm).values()) for arm in run.others}
    values = {arm: found for arm, found in values.items() if found}
    if not values:
        return None
    from statistics import fmean, median

    scale = 100 if is_share(metric) else 1
    with _figure(name, 1, [], height=1.2 + 0.35 * len(values), width=8) as (figure, (ax,)):
        for i, found in enumerate(values.values()):
            shown = [scale * v for v in found]
            ax.plot(shown, [i] * len(shown), "|", color="C0", alpha=0.7, markersize=12)
            ax.plot([fmean(shown)], [i], "D", color="C1", label="mean" if i == 0 else None)
            ax.plot([median(shown)], [i], "o", color="C2", label="median" if i == 0 else None)
        _scale(ax, "x", metric, [v for found in values.values() for v in found])
        ax.axvline(0, color=INK, linewidth=0.8, alpha=0.6)
        ax.set_yticks(range(len(values)), list(values))
        ax.set(xlabel=f"{NAMES.get(metric, metric)}, less exact's", ylim=(len(values) - 0.5, -0.5))
        ax.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
        svg = _svg(figure)
    return Picture(name, "Each document's difference from exact (strokes), with their mean and median.", svg)


def any_filled(run: Evaluation) -> bool:
    """Whether some item has all its needles in filled rows."""
    return "score" + FILLED in run.metrics


def grid(run: Evaluation, arm: str) -> dict[tuple[int, int], list[float]]:
    """(prompt length, depth bin) -> an arm's scores, of filled items where there are any."""
    lengths, depths = run.lengths(), run.facts("depth")
    values = run.values("score" + FILLED if any_filled(run) else "score", arm)
    cells: dict[tuple[int, int], list[float]] = {}
    for item, value in values.items():
        if item in lengths and item in depths:
            place = min(DEPTHS - 1, int(depths[item] * DEPTHS))
            cells.setdefault((lengths[item], place), []).append(value)
    return dict(sorted(cells.items()))


def depth_label(place: int) -> str:
    """A depth bin in percent."""
    return f"{100 * place // DEPTHS}-{100 * (place + 1) // DEPTHS} %"


def _heat(ax: Any, cells: dict[tuple[int, int], list[float]], lengths: Sequence[int], arm: str) -> None:
    """One arm's panel: a coloured, labelled square for each cell that has items."""
    from matplotlib import colormaps

    for (length, place), scores in cells.items():
        mean = sum(scores) / len(scores)
        row = lengths.index(length)
        colour = colormaps["cividis"](mean)
        ax.fill([place, place + 1, place + 1, place], [row, row, row + 1, row + 1], color=colour)
        text = "#000000" if mean > 0.5 else "#ffffff"
        ax.text(place + 0.5, row + 0.5, f"{100 * mean:.0f}", ha="center", va="center", color=text)
    ax.set_xticks([i + 0.5 for i in range(DEPTHS)], [f"{(100 * i + 50) // DEPTHS}" for i in range(DEPTHS)])
    ax.set_yticks([i + 0.5 for i in range(len(lengths))], [f"{n:,}" for n in lengths])
    ax.set(title=arm, xlabel="depth, %", ylabel="tokens", xlim=(0, DEPTHS), ylim=(len(lengths), 0))


def _families(runs: Sequence[Evaluation], metric: str) -> dict[str, list[_Point]]:
    """Arms that differ in nothing but the split, as points over it."""
    arms = [(run, arm) for run in runs for arm in run.others if run.plan(arm).get("split")]
    arms = [(run, arm) for run, arm in arms if run.plan(arm).get("fill") not in ("exact", "true")]
    varying = [k for k in ("tail", "leading") if len({run.plan(arm).get(k) for run, arm in arms}) > 1]
    found: dict[str, list[_Point]] = {}
    for run, arm in arms:
        plan = run.plan(arm)
        x = plan["split"] / (run.about.get("layers") or 1)
        parts = [str(plan.get("fill"))]
        parts += [f"{k} {plan[k]}" for k in ("rows", "corrections") if plan.get(k)]
        parts += [f"{k} {plan.get(k)}" for k in varying]
        label = ", ".join(parts)
        point = _point(run, arm, metric, label, x)
        if point is not None:
            found.setdefault(label, []).append(point)
    return found


def _costs(runs: Sequence[Evaluation], metric: str, counted: bool) -> list[_Point]:
    """Every arm that has a cost, as a point over it."""
    found = []
    for run in runs:
        for arm in run.others:
            x = run.macs(arm) if counted else seconds_over_exact(run, arm)
            label = arm if len(runs) == 1 else f"{run.name}: {arm}"
            point = None if x is None else _point(run, arm, metric, label, x)
            if point is not None:
                found.append(point)
    return found


def seconds_over_exact(run: Evaluation, arm: str) -> float | None:
    """Median over items of an arm's seconds over the baseline's; None where they were not timed."""
    from statistics import median

    base, mine = run.seconds(run.baseline), run.seconds(arm)
    ratios = [mine[item] / base[item] for item in mine if base.get(item)]
    return median(ratios) if ratios else None


def _point(run: Evaluation, arm: str, metric: str, label: str, x: float) -> _Point | None:
    row = run.row(arm, metric)
    if row is None or not row["difference"]:
        return None
    difference, scale = row["difference"], 100 if is_share(metric) else 1
    low, high = (None if v is None else scale * v for v in (difference.get("low"), difference.get("high")))
    return _Point(label, x, scale * difference["mean"], low, high)


def _line(ax: Any, points: Sequence[_Point], number: int, metric: str) -> None:
    """Points joined by a line, with their intervals."""
    colour, mark = _look(number)
    x = [p.x for p in points]
    ax.plot(x, [p.mean for p in points], marker=mark, color=colour, markersize=6)
    ax.vlines(x, [p.bar[0] for p in points], [p.bar[1] for p in points], color=colour, alpha=0.5)


def _look(number: int) -> tuple[str, str]:
    """Colour and mark of the nth arm: no two of the first hundred look alike."""
    return f"C{number % 10}", MARKS[(number + number // 10) % len(MARKS)]


def _scale(ax: Any, side: str, metric: str, values: Sequence[float]) -> None:
    """Losses that reach far are drawn on a logarithmic scale outside +-0.1, or the good arms all lie on 0."""
    if is_share(metric) or max(values, default=0.0) < FAR:
        return
    getattr(ax, f"set_{side}scale")("symlog", linthresh=0.1)
    getattr(ax, f"{side}axis").set_major_formatter("{x:g}")


@contextmanager
def _figure(
    name: str, panels: int, labels: Sequence[str], height: float = 3.4, across: int = 2, width: float = 0
) -> Iterator[tuple[Figure, list[Any]]]:
    """A figure of so many panels with a legend for all below them, drawn in `INK` with real text."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    colours: dict[Any, Any] = dict.fromkeys(
        ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), INK
    )
    style: dict[Any, Any] = {
        "svg.fonttype": "none",
        "svg.hashsalt": name,
        "text.parse_math": False,
        "font.size": 9,
    }
    columns = min(across, panels)
    rows = -(-panels // columns)
    size = (width or (6 if columns == 1 else 9), height * rows + 0.22 * -(-len(labels) // 2))
    with (
        rc_context(style | colours | {"axes.facecolor": "none", "legend.framealpha": 0}),
        warnings.catch_warnings(),
    ):
        warnings.filterwarnings("ignore", message="Glyph .* missing")  # the reader's font has it
        figure = Figure(figsize=size, layout="constrained")
        axes = list(figure.subplots(rows, columns, squeeze=False).flat)
        for empty in axes[panels:]:
            empty.set_axis_off()
        keys = [Line2D([], [], color=colour, marker=mark) for colour, mark in map(_look, range(len(labels)))]
        if keys:
            figure.legend(
                handles=keys, labels=[_seen(label) for label in labels], loc="outside lower center", ncols=2
            )
        yield figure, axes[:panels]


def _seen(label: str) -> str:
    """A label that a legend shows: matplotlib hides those that begin with an underscore."""
    return "\u200b" + label if label.startswith("_") else label


def _svg(figure: Figure) -> str:
    """The figure as one <svg> element, the same bytes for the same numbers."""
    buffer = io.StringIO()
    nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    figure.savefig(buffer, format="svg", transparent=True, metadata=nothing)
    text = buffer.getvalue()
    return re.sub(r"\s*<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL).strip()
