"""The study's page: predictions beside what was found, and the tables; ``study.py page`` writes it."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ridgefill.errors import SettingError
from ridgefill.eval.intervals import Interval, paired_difference
from ridgefill.eval.results import read
from ridgefill.files import write_text

MODELS = {
    "smollm2": "SmolLM2-135M-Instruct (30 layers, no QK-norm)",
    "gemma3": "Gemma-3-270M (18 layers, QK-norm)",
    "hybrid": "the tiny trained hybrid (8 layers, Gated DeltaNet and two of attention, QK-norm)",
}
METRICS = ("novel_nll", "novel_nll_first", "key_nll", "kl", "top1")
HEADS = ("novel", "novel, first", "key", "KL", "top-1")


@dataclass(frozen=True)
class Found:
    """One run: its arms and its items."""

    about: dict[str, Any]
    lines: list[dict[str, Any]]

    @classmethod
    def of(cls, folder: Path) -> Found | None:
        """The run in a folder, or None if it has not begun."""
        try:
            about, lines, _ = read(folder)
        except SettingError:
            return None
        return cls(about, lines) if lines else None

    def values(self, arm: str, metric: str) -> dict[str, float]:
        """item -> value."""
        own = (line for line in self.lines if line["arm"] == arm and metric in line["metrics"])
        return {line["item"]: line["metrics"][metric] for line in own}

    def minus(self, arm: str, base: str, metric: str) -> Interval | None:
        """An arm's mean less another's, paired by item, with its interval; None where they share no item."""
        mine, theirs = self.values(arm, metric), self.values(base, metric)
        both = [item for item in mine if item in theirs]
        strata = {line["item"]: line["stratum"] for line in self.lines}
        if not both:
            return None
        return paired_difference(
            [mine[i] for i in both], [theirs[i] for i in both], [strata[i] for i in both]
        )

    @property
    def arms(self) -> list[str]:
        """Those that ran, exact first."""
        return [arm for arm in self.about["arms"] if self.values(arm, "nll") or self.values(arm, "score")]

    @property
    def splits(self) -> list[int]:
        """Of the ridge arms."""
        return sorted({int(arm.split()[1].rstrip(",")) for arm in self.arms if arm.startswith("ridge ")})


def shown(found: Interval | None, places: int = 3) -> str:
    """A difference with its interval."""
    if found is None or found.mean is None:
        return ""
    ends = "" if found.low is None else f" [{found.low:+.{places}f}, {found.high:+.{places}f}]"
    return f"{found.mean:+.{places}f}{ends}"


def verdict(found: Interval | None, above: float = -math.inf, below: float = math.inf) -> str:
    """Whether the whole interval lies between the two, or wholly outside."""
    if found is None or found.low is None or found.high is None:
        return "not measured" if found is None else "no interval from so few items"
    if above < found.low and found.high < below:
        return "**holds**"
    return "**fails**" if found.high <= above or found.low >= below else "undecided"


def sink(loss: dict[str, Found]) -> list[str]:
    """Prediction 1."""
    lines = []
    if one := loss.get("smollm2"):
        for s in one.splits[:3]:
            bare, led = (one.minus(f"ridge {s}{end}", "exact", "novel_nll") for end in (" no leading", ""))
            lines.append(
                f"- SmolLM2, split {s}: without leading rows {shown(bare)} (more than 0.5: "
                f"{verdict(bare, above=0.5)}), with 16 {shown(led)} (less than 0.15: "
                f"{verdict(led, below=0.15)})."
            )
    if one := loss.get("gemma3"):
        for s in one.splits:
            apart = one.minus(f"ridge {s} no leading", f"ridge {s}", "novel_nll")
            says = verdict(apart, -0.05, 0.05)
            lines.append(
                f"- Gemma-3, split {s}: without leading rows less with them {shown(apart)} (under 0.05: {says})."
            )
    return lines


def sink_in_fit(loss: dict[str, Found]) -> list[str]:
    """Prediction 2."""
    lines = []
    for name, one in loss.items():
        for s in one.splits:
            worse = one.minus(f"ridge {s} sink in fit", f"ridge {s}", "novel_nll")
            if worse is not None:
                says = verdict(worse, above=0.02)
                lines.append(f"- {name}, split {s}: {shown(worse)} (more than 0.02: {says}).")
    return lines


def retrieval(loss: dict[str, Found], needles: dict[str, Found]) -> list[str]:
    """Prediction 3."""
    lines = []
    for name, one in needles.items():
        parts = [f"exact {count(one, 'exact')}"] + [
            f"split {s} {count(one, f'ridge {s}')}" for s in one.splits
        ]
        lines.append(f"- {name}, needles found by ridge: {', '.join(parts)}.")
    if one := loss.get("smollm2"):
        apart = one.minus(f"ridge {one.splits[-2]}", f"ridge {one.splits[-1]}", "novel_nll")
        says = verdict(apart, -0.05, 0.05)
        lines.append(
            f"- SmolLM2, novel-token loss at depth 1/2 less that at 5/8: {shown(apart)} (under 0.05: {says})."
        )
    return lines


def halves(found: Found | None) -> list[str]:
    """Prediction 4."""
    if found is None:
        return ["- Not measured."]
    parts = ("none", "whole", "first half", "last half")
    lines = ["", "| split | " + " | ".join(f"{part} exact" for part in parts) + " |", "|---|---|---|---|---|"]
    for s in found.splits:
        names = [f"ridge {s}" + ("" if part == "none" else f", {part} exact") for part in parts]
        lines.append(f"| {s} | " + " | ".join(count(found, name) for name in names) + " |")
    return [*lines, ""]


def spans(needles: dict[str, Found]) -> list[str]:
    """Prediction 5."""
    lines = []
    for name, one in needles.items():
        for s in one.splits:
            apart = one.minus(f"ridge {s} spans", "exact", "score")
            random = (
                f"; random rows {count(one, f'ridge {s} random')}" if f"ridge {s} random" in one.arms else ""
            )
            says = verdict(apart, above=-0.10)
            lines.append(
                f"- {name}, split {s}: spans {count(one, f'ridge {s} spans')}, exact {count(one, 'exact')}, "
                f"ridge alone {count(one, f'ridge {s}')}{random} (within 10 points: {says})."
            )
    return lines


def count(found: Found, arm: str) -> str:
    """Found of asked."""
    scores = found.values(arm, "score").values()
    return f"{sum(scores):.0f} of {len(scores)}" if scores else "not run"


def loss_table(found: Found) -> list[str]:
    """Every arm's loss less exact's, and its compute."""
    head = ["arm", "compute", *HEADS]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for arm in found.arms:
        cost = found.about["arms"][arm]["macs_over_exact"]
        cells = (
            [shown(found.minus(arm, "exact", metric)) for metric in METRICS]
            if arm != "exact"
            else absolute(found)
        )
        lines.append("| " + " | ".join([arm, "" if cost is None else f"{cost:.2f}", *cells]) + " |")
    return lines


def absolute(found: Found) -> list[str]:
    """Exact's own figures."""
    cells = []
    for metric in METRICS:
        values = found.values("exact", metric).values()
        cells.append(f"{statistics.mean(values):.3f} (n {len(values)})" if values else "")
    return cells


def needle_table(found: Found) -> list[str]:
    """Found of asked, by kind of prompt."""
    cells = list(dict.fromkeys(line["stratum"] for line in found.lines))
    lines = ["| arm | " + " | ".join(cells) + " | all |", "|" + "---|" * (len(cells) + 2)]
    for arm in found.arms:
        row = []
        for cell in cells:
            own = [x["metrics"]["score"] for x in found.lines if x["arm"] == arm and x["stratum"] == cell]
            row.append(f"{sum(own):.0f} of {len(own)}" if own else "")
        lines.append(f"| {arm} | " + " | ".join([*row, count(found, arm)]) + " |")
    return lines


def write_page(folder: Path) -> None:
    """README.md from the runs in ``folder``."""
    runs = {
        part: {name: Found.of(folder / name / part) for name in MODELS}
        for part in ("loss", "needles", "halves")
    }
    loss = {name: run for name, run in runs["loss"].items() if run is not None}
    needles = {name: run for name, run in runs["needles"].items() if run is not None}
    said = {
        "1. Is the shallow failure of a model without QK-norm the attention sink?": sink(loss),
        "2. Does a sink row per document distort the fit?": sink_in_fit(loss),
        "3. Where does retrieval come back, and is it seen in the loss?": retrieval(loss, needles),
        "4. Does half a needle hurt?": halves(runs["halves"]["smollm2"]),
        "5. Do whole spans bring retrieval back?": spans(needles),
    }
    lines = ["# What the fill costs, by depth: the study", "", HEAD.strip(), ""]
    for title, part in said.items():
        lines += [f"## {title}", "", *part, ""]
    notes = folder / "NOTES.md"
    lines += [notes.read_text().strip(), ""] if notes.exists() else []
    for name, title in MODELS.items():
        if name in loss:
            e = loss[name].about["environment"]
            made = f"torch {e['torch']}, transformers {e['transformers']}, {e['threads']} thread, {e['date'][:10]}"
            lines += [f"## {title[0].upper()}{title[1:]}", "", *loss_table(loss[name]), ""]
            lines += [*needle_table(needles[name]), ""] if name in needles else []
            lines += [f"Declared in `ledger.jsonl`, entry {loss[name].about['ledger'][:12]}. {made}.", ""]
    write_text(folder / "README.md", "\n".join(lines).rstrip() + "\n")


HEAD = """Made by `python results/study/study.py smollm2`, `gemma3`, `hybrid`, `page`; every item, with plans,
versions and dates, lies beside this page; `ridgefill report results/study` draws it. The predictions were declared
in the ledger before anything ran ([PREDICTION.md](PREDICTION.md)). Losses: nats per token above exact on documents of
three domains that no map was fitted on (prose alone for the hybrid), paired by document, with 95 % BCa intervals
resampled within domain; novel and key tokens as in paper 3.1, key tokens being those that need more than the last 768
tokens (256 for the hybrid). Needles stand in filled rows of prompts of 1,024 tokens, tail 256. "spans" is
`spans(peak,0.05)`, on the hybrid `spans(overlap,0.05)`."""
