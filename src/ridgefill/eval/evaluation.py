"""One run as a report reads it: its arms, items and summary, and how its numbers are written."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ridgefill.errors import SettingError
from ridgefill.eval.results import METRICS, RUN, read

FILLED = "_filled"  # ends the name of a metric over the items whose needles lie in filled rows
MOST_LENGTHS = 8  # columns of a table
SHARES = ("score", "top1", "perplexity_gap")  # written in percent


@dataclass(frozen=True)
class Finding:
    """A sentence, or what several arms have in common and each arm's numbers."""

    text: str
    parts: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.text}: {'; '.join(self.parts)}." if self.parts else self.text


@dataclass(frozen=True)
class Evaluation:
    """One run.

    Attributes:
        name: its folder below the report's, or the folder's own name.
        about: run.json.
        lines: items.jsonl.
        rows: the summary's rows.
        finished: whether it wrote a summary of all these items itself.
    """

    name: str
    about: Mapping[str, Any]
    lines: Sequence[Mapping[str, Any]]
    rows: Sequence[Mapping[str, Any]]
    finished: bool

    @classmethod
    def open(cls, folder: Path, root: Path) -> Evaluation:
        """Reads a run; its summary is made here where it is missing or older than the items.

        Raises:
            SettingError: the folder holds no readable run.
        """
        try:
            about, lines, summary = read(folder)
        except json.JSONDecodeError as error:
            raise SettingError(
                f"read the run in {folder}",
                f"its summary is not JSON ({error})",
                "delete summary.json; it is remade",
            ) from error
        name = str(folder.relative_to(root)) if folder != root else folder.resolve().name
        if summary is not None and _covers(summary, lines):
            return cls(name, about, lines, summary["rows"], True)
        from ridgefill.eval.summary import summarise

        margin = _margin(summary, about)
        options: dict[str, Any] = {} if margin is None else {"margin": margin}
        rows = summarise(about, lines, **options)["rows"] if lines else []
        return cls(name, about, lines, rows, False)

    @property
    def kind(self) -> str:
        """What was measured: "loss", "ruler", ..."""
        return str(self.about.get("kind", "?"))

    @property
    def settings(self) -> Mapping[str, Any]:
        """What decided the items."""
        return self.about.get("settings") or {}

    @property
    def baseline(self) -> str:
        """The arm that the others are compared with."""
        return str(self.about.get("baseline", "exact"))

    @property
    def model(self) -> str:
        """The model's name."""
        return str(self.about.get("model", "?"))

    @property
    def maps(self) -> str | None:
        """The content hash of the maps."""
        return self.about.get("maps")

    @property
    def arms(self) -> list[str]:
        """All arms, the baseline first."""
        return sorted(self.about.get("arms") or {}, key=lambda arm: arm != self.baseline)

    @property
    def others(self) -> list[str]:
        """All arms but the baseline."""
        return [arm for arm in self.arms if arm != self.baseline]

    @property
    def strata(self) -> list[str]:
        """The strata of its items, in the order they came."""
        return list(dict.fromkeys(str(line["stratum"]) for line in self.lines))

    @property
    def metrics(self) -> list[str]:
        """The metrics of its summary, the known ones first; of filled items only where the baseline has them too."""
        named = (row["metric"] for row in self.rows)
        found = {m: None for m in named if not m.endswith(FILLED) or self.row(self.baseline, m)}
        known = [each for metric in METRICS for each in (metric + FILLED, metric)]
        return [m for m in known if m in found] + [m for m in found if m not in known]

    def plan(self, arm: str) -> Mapping[str, Any]:
        """An arm's plan: fill, split, tail, leading, rows, corrections."""
        return self.about["arms"][arm].get("plan") or {}

    def macs(self, arm: str) -> float | None:
        """An arm's multiply-accumulates over exact's."""
        return self.about["arms"][arm].get("macs_over_exact")

    def row(self, arm: str, metric: str, stratum: str = "all") -> Mapping[str, Any] | None:
        """One row of the summary."""
        asked = (arm, metric, stratum)
        return next((r for r in self.rows if (r["arm"], r["metric"], r["stratum"]) == asked), None)

    def values(self, metric: str, arm: str) -> dict[str, float]:
        """item -> an arm's value, where it has one."""
        name = metric.removesuffix(FILLED)
        return {
            line["item"]: line["metrics"][name]
            for line in self.lines
            if line["arm"] == arm
            and name in line["metrics"]
            and (name == metric or line.get("filled") is True)
        }

    def stratum(self, item: str) -> str:
        """The stratum of an item."""
        return next(str(line["stratum"]) for line in self.lines if line["item"] == item)

    def differences(self, metric: str, arm: str, against: str | None = None) -> dict[str, float]:
        """item -> an arm's value less another's (the baseline's), on the items that both have."""
        theirs = self.values(metric, self.baseline if against is None else against)
        return {k: v - theirs[k] for k, v in self.values(metric, arm).items() if k in theirs}

    def facts(self, name: str) -> dict[str, Any]:
        """item -> a fact that does not depend on the arm, such as its length, where it has one."""
        return {line["item"]: line[name] for line in self.lines if line.get(name) is not None}

    def lengths(self) -> dict[str, int]:
        """item -> its prompt's tokens; rounded up to powers of two where the run has many lengths."""
        found = self.facts("length")
        if len(set(found.values())) <= MOST_LENGTHS:
            return found
        return {item: 1 << max(0, length - 1).bit_length() for item, length in found.items()}

    def seconds(self, arm: str) -> dict[str, float]:
        """item -> how long an arm took over it, where it was timed."""
        lines = (line for line in self.lines if line["arm"] == arm)
        return {line["item"]: line["seconds"] for line in lines if line.get("seconds") is not None}

    def planned(self) -> list[str]:
        """The items that every arm should have: those the settings list, and those that any arm has."""
        listed = next((v for k in ("documents", "items") if isinstance(v := self.settings.get(k), list)), [])
        named = [item for item in listed if isinstance(item, str)]
        return list(dict.fromkeys([*named, *(line["item"] for line in self.lines)]))

    def missing(self) -> dict[str, int]:
        """arm -> how many planned items it lacks, arms that lack none left out."""
        planned = set(self.planned())
        have = {arm: {line["item"] for line in self.lines if line["arm"] == arm} for arm in self.arms}
        return {arm: len(planned - items) for arm, items in have.items() if planned - items}


def open_all(folder: Path) -> tuple[list[Evaluation], list[str]]:
    """Every run in a folder or below it, and what could not be read, in words.

    Raises:
        SettingError: no such folder, or none of its runs can be read.
    """
    folders = sorted(path.parent for path in folder.rglob(RUN)) if folder.is_dir() else []
    if not folders:
        why = f"there is no {RUN} in it or below it" if folder.is_dir() else "there is no such folder"
        raise SettingError(f"a report of {folder}", why, "name a folder that `ridgefill eval` wrote with -o")
    runs, refused = [], []
    for each in folders:
        try:
            runs.append(Evaluation.open(each, folder))
        except SettingError as error:
            refused.append(error)
    if not runs:
        raise refused[0]
    return runs, [f"{error.asked}: {error.why}" for error in refused]


def _covers(summary: Mapping[str, Any], lines: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a summary counts every item that every arm has; one made before arms were added does not."""
    counted: dict[str, int] = {}
    for row in summary["rows"]:
        if row["stratum"] == "all":
            counted[row["arm"]] = max(counted.get(row["arm"], 0), row["n"])
    held: dict[str, int] = {}
    for line in lines:
        held[line["arm"]] = held.get(line["arm"], 0) + bool(line["metrics"])
    return all(counted.get(arm, 0) >= n for arm, n in held.items())


def _margin(summary: Mapping[str, Any] | None, about: Mapping[str, Any]) -> float | None:
    """The margin that was fixed for the run, as far as its files say."""
    rows = summary["rows"] if summary is not None else []
    tested = (row["noninferiority"] for row in rows if row.get("noninferiority"))
    return next((each["margin"] for each in tested), (about.get("settings") or {}).get("margin"))


def is_share(metric: str) -> bool:
    """Whether a metric is written in percent."""
    return metric.removesuffix(FILLED) in SHARES


def value_text(metric: str, value: float) -> str:
    """A value: percent with one decimal, or nats with three."""
    return f"{_plain(100 * value, 1):.1f} %" if is_share(metric) else f"{_plain(value, 3):.3f}"


def difference_text(metric: str, value: float) -> str:
    """A difference with its sign: points with one decimal, or nats with three."""
    return f"{_plain(100 * value, 1):+.1f}" if is_share(metric) else f"{_plain(value, 3):+.3f}"


def interval_text(metric: str, difference: Mapping[str, Any]) -> str:
    """A difference's interval in brackets; empty where it has none."""
    low, high = difference.get("low"), difference.get("high")
    if low is None or high is None:
        return ""
    return f"[{difference_text(metric, low)}, {difference_text(metric, high)}]"


def _plain(value: float, places: int) -> float:
    """The value rounded; what rounds to -0 is 0."""
    return round(value, places) + 0.0


def plural(count: int, word: str) -> str:
    """A count with its word: 1 item, 2 items."""
    return f"{count:,} {word}{'' if count == 1 else 's'}"
