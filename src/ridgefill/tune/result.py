"""What a search for a setting found: limits, figures, trials, and the answer in words."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

from ridgefill.errors import SettingError

LOSSES = ("key_nll", "novel_nll")
RETRIEVAL = "retrieval"
_TITLES = {"key_nll": "key tokens, nats", "novel_nll": "novel tokens, nats", RETRIEVAL: "facts kept"}
_WORDS = {
    "key_nll": "loss on key tokens rises by",
    "novel_nll": "loss on novel tokens rises by",
    RETRIEVAL: "facts in filled rows that exact finds and the fill keeps:",
}


@dataclass(frozen=True)
class Limits:
    """What a setting must keep to; None leaves a measure out.

    Attributes:
        key_nll: nats per key token above exact, at most; mean over documents (paper 3.1).
        novel_nll: the same of novel tokens.
        retrieval: of the facts in filled rows that exact finds, the share that must be found, above 0 to 1.

    Raises:
        SettingError: no limit at all, or one that nothing or everything keeps to.
    """

    key_nll: float | None
    novel_nll: float | None
    retrieval: float | None

    def __post_init__(self) -> None:
        if not self.wanted:
            raise SettingError(
                "tune", "no limit was given, so the fastest setting is always the answer",
                "give --max-key-nll, --max-novel-nll or --min-retrieval",
            )  # fmt: skip
        for name in LOSSES:
            value = getattr(self, name)
            if value is not None and not 0 <= value < math.inf:
                asked = f"a limit of {value} nats on {name}"
                raise SettingError(asked, "it is what a token may lose", "give 0 or more, such as 0.05")
        if self.retrieval is not None and not 0 < self.retrieval <= 1:
            raise SettingError(
                f"a limit of {self.retrieval} on retrieval",
                "it is a share of what exact retrieves",
                "give more than 0 and at most 1, such as 0.95",
            )

    @property
    def wanted(self) -> dict[str, float]:
        """Measure -> limit, of those that are set."""
        return {name: value for name, value in vars(self).items() if value is not None}


@dataclass(frozen=True)
class Figure:
    """One measure of one candidate.

    Attributes:
        mean: mean rise of the loss in nats, or the share of facts kept.
        low, high: ends of its 95 % interval; None where so few items have none.
        n: documents with such tokens, or facts that exact finds.
        limit: that it is judged by.
        more_is_better: of retrieval.
    """

    mean: float
    low: float | None
    high: float | None
    n: int
    limit: float
    more_is_better: bool = False

    @property
    def missed_by(self) -> float:
        """How far the mean lies on the wrong side of the limit; 0 if it holds."""
        return max(0.0, self.limit - self.mean if self.more_is_better else self.mean - self.limit)

    @property
    def holds(self) -> bool:
        """The mean keeps to the limit, on these items."""
        return self.missed_by == 0

    @property
    def confident(self) -> bool:
        """The whole interval keeps to the limit."""
        if self.low is None or self.high is None:
            return False
        return self.low >= self.limit if self.more_is_better else self.high <= self.limit

    @property
    def excluded(self) -> bool:
        """The whole interval lies on the wrong side of the limit."""
        if self.low is None or self.high is None:
            return False
        return self.high < self.limit if self.more_is_better else self.low > self.limit

    def __str__(self) -> str:
        form = "{:.0%}" if self.more_is_better else "{:+.4f}"
        ends = "" if self.low is None or self.high is None else f" [{form}, {form}]"
        return (form + ends).format(*(v for v in (self.mean, self.low, self.high) if v is not None))

    def to_json(self) -> dict[str, Any]:
        """The fields, and what follows from them."""
        return vars(self) | {"holds": self.holds, "confident": self.confident}


@dataclass(frozen=True)
class Trial:
    """One candidate and what became of it.

    Attributes:
        name: its settings in words, by which its measurements are filed.
        macs_over_exact: counted multiply-accumulates over exact's; None where the count does not know the rows.
        state: "holds" or "fails" (all items), "dropped" (by a third of them, or by its count), "refused" (the model
            cannot run it), "not tried" (time) or "not needed" (another holds).
        figures: measure -> figure, as far as measured.
        why: in words.
    """

    name: str
    macs_over_exact: float | None
    state: str = "not tried"
    figures: Mapping[str, Figure] = field(default_factory=dict)
    why: str = ""

    @property
    def missed_by(self) -> float:
        """The sum of what its figures miss their limits by: nats, and shares of facts."""
        return sum(figure.missed_by for figure in self.figures.values())

    @property
    def confident(self) -> bool:
        """Every figure's whole interval keeps to its limit."""
        return bool(self.figures) and all(figure.confident for figure in self.figures.values())

    def to_json(self) -> dict[str, Any]:
        """The fields."""
        return vars(self) | {"figures": {name: f.to_json() for name, f in self.figures.items()}}


@dataclass(frozen=True)
class TuneResult:
    """What the search found.

    Attributes:
        limits: that were asked for.
        trials: every candidate, the fastest by counted compute first.
        winner: the first that holds on all items, or None.
        timing: the winner's measured seconds beside exact's (`bench.ttft.Ttft.to_json`), or None.
        setting: the setting file, or None.
        tokens: prompt length of everything measured.
        seconds: that this call took.
        remarks: what a reader should know, one sentence each.
    """

    limits: Limits
    trials: tuple[Trial, ...]
    winner: Trial | None
    timing: Mapping[str, Any] | None
    setting: Path | None
    tokens: int
    seconds: float
    remarks: tuple[str, ...] = ()

    @property
    def nearest(self) -> Trial | None:
        """Of the candidates that do not hold, the one that misses its limits by the least."""
        measured = [t for t in self.trials if t.figures and t.state in ("fails", "dropped")]
        return min(measured, key=lambda t: t.missed_by, default=None)

    @property
    def not_tried(self) -> tuple[Trial, ...]:
        """Candidates that time did not allow, or that need maps which it did not allow."""
        return tuple(t for t in self.trials if t.state == "not tried")

    def words(self) -> list[str]:
        """The answer in plain sentences, the conclusion first."""
        head = self._none() if self.winner is None else self._found(self.winner)
        return [*head, *self._left(), *self.remarks]

    def _found(self, won: Trial) -> list[str]:
        how = (
            "with confidence: every interval lies within its limit"
            if won.confident
            else "on these texts, but not with confidence: an interval reaches beyond its limit or is missing"
        )
        lines = [
            f"The fastest setting that holds, by counted compute: {won.name}. It holds {how}.",
            *_figures(won),
        ]
        if passed := sum(t.state == "not tried" for t in self.trials[: self.trials.index(won)]):
            lines.insert(1, f"That is among the settings tried: {passed} of less compute were not.")
        if self.timing is None:
            counted = "an unknown share" if won.macs_over_exact is None else f"{won.macs_over_exact:.2f}"
            return [*lines, f"Its speed was not measured; by count it takes {counted} of exact's compute."]
        speed = self.timing["speedup"]
        lines.append(
            f"Measured here, the first token of {self.tokens:,} tokens comes {speed:.2f} times as fast."
        )
        if speed <= 1:
            lines.append("That is no gain on this machine at this length: try longer prompts, or stay exact.")
        return lines

    def _none(self) -> list[str]:
        tried = [t for t in self.trials if t.state in ("fails", "dropped", "refused")]
        if not tried:
            return ["No setting was tried, so none was found and no setting file was written."]
        lines = [f"None of the {len(tried)} settings tried holds; no setting file was written."]
        if self.nearest is not None:
            lines += [f"The nearest is {self.nearest.name}: {self.nearest.why}.", *_figures(self.nearest)]
        return lines

    def _left(self) -> list[str]:
        if not self.not_tried:
            return []
        names = [t.name for t in self.not_tried]
        shown = "; ".join(names[:4]) + (f"; and {len(names) - 4} more" if len(names) > 4 else "")
        return [f"Time did not allow {len(names)} of {len(self.trials)} settings: {shown}."]

    def table(self) -> Table:
        """All candidates for a terminal, and why each was dropped."""
        drawn = Table(title="Settings, the fastest by counted compute first", title_justify="left")
        drawn.add_column("setting")
        drawn.add_column("compute / exact", justify="right")
        for name, limit in self.limits.wanted.items():
            sign = "≥" if name == RETRIEVAL else "≤"
            drawn.add_column(f"{_TITLES[name]} ({sign} {limit:g})", justify="right")
        drawn.add_column("verdict")
        for t in self.trials:
            counted = "?" if t.macs_over_exact is None else f"{t.macs_over_exact:.3f}"
            figures = (t.figures.get(name) for name in self.limits.wanted)
            shown = ("" if f is None else f"{f} n {f.n}" for f in figures)
            verdict = f"{t.state}: {t.why}" if t.why else t.state
            drawn.add_row(*map(escape, (t.name, counted, *shown, verdict)))
        return drawn

    def to_json(self) -> dict[str, Any]:
        """Everything, JSON-able."""
        return {
            "limits": vars(self.limits),
            "trials": [t.to_json() for t in self.trials],
            "winner": None if self.winner is None else self.winner.name,
            "nearest": None if self.winner or self.nearest is None else self.nearest.name,
            "timing": None if self.timing is None else dict(self.timing),
            "setting": None if self.setting is None else self.setting.name,
            "tokens": self.tokens,
            "seconds": round(self.seconds, 3),
            "remarks": list(self.remarks),
        }


def _figures(trial: Trial) -> list[str]:
    return [
        f"{_WORDS[name][0].upper()}{_WORDS[name][1:]} {figure}, n {figure.n}, "
        f"limit {figure.limit:g}{'' if figure.holds else ': too far'}."
        for name, figure in trial.figures.items()
    ]
