"""README.md of the forms study: predictions beside what was found, and the tables; ``forms.py page`` writes it."""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path

from ridgefill.files import write_text

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "study"))
from page import MODELS, Found, count, loss_table, needle_table, shown, verdict  # noqa: E402


def splits(found: Found) -> list[int]:
    """Those measured."""
    return sorted({int(arm.split()[1]) for arm in found.arms if arm.startswith("plain ")})


def less(found: Found, split: int) -> str:
    """How much less the rich maps lose than the plain ones."""
    plain, rich = (found.minus(f"{form} {split}", "exact", "novel_nll") for form in ("plain", "rich"))
    if plain is None or rich is None or not plain.mean or rich.mean is None:
        return "not measured"
    return f"{100 * (1 - rich.mean / plain.mean):+.0f} % of {plain.mean:+.3f}"


def predictions(loss: dict[str, Found], needles: dict[str, Found], folder: Path) -> list[str]:
    """Each prediction beside what came of it."""
    lines = ["### 1 and 2. Rich maps lose less than plain ones", ""]
    for name, one in loss.items():
        for s in splits(one):
            apart = one.minus(f"rich {s}", f"plain {s}", "novel_nll")
            lines.append(
                f"- {name}, split {s}: {shown(apart)} nats ({verdict(apart, below=0)}); {less(one, s)} less."
            )
    lines += ["", "### 3. Direct costs as much as plain, within 0.01", ""]
    for name, one in loss.items():
        for s in splits(one):
            apart = one.minus(f"direct {s}", f"plain {s}", "novel_nll")
            lines.append(f"- {name}, split {s}: {shown(apart)} ({verdict(apart, -0.01, 0.01)}).")
    lines += ["", "### 4. Needles", ""]
    for name, one in needles.items():
        arms = [a for a in one.arms if a not in ("exact",)]
        parts = ", ".join(f"{arm} {count(one, arm)}" for arm in arms)
        lines.append(f"- {name}: exact {count(one, 'exact')}; {parts}.")
    lines += ["", "### 5. Storage", ""]
    if one := loss.get("smollm2"):
        for form in ("plain", "rich"):
            for kind in ("int8", "q8_0"):
                apart = one.minus(f"{form} 15 {kind}", f"{form} 15", "novel_nll")
                lines.append(f"- {form}, {kind}: {shown(apart, 5)} ({verdict(apart, -0.005, 0.005)}).")
    return [*lines, "", "### 6. Compute and time", "", *times(folder)]


def times(folder: Path) -> list[str]:
    """Seconds and ratios, medians of interleaved repetitions."""
    path = folder / "smollm2" / "time.json"
    if not path.exists():
        return ["Not measured."]
    found = json.loads(path.read_text())
    exact = statistics.median(found["seconds"]["exact"])
    lines = [
        f"SmolLM2, {found['tokens']:,} tokens, tail {found['tail']:,}, {len(found['seconds']['exact'])} repetitions "
        f"interleaved ({found['environment']['date'][:10]}); exact takes {exact:.1f} s.",
        "",
        "| maps | seconds | speedup | by count | of it filling, s |",
        "|---|---|---|---|---|",
    ]
    for key, ceiling in found["macs_ceiling"].items():
        spent = statistics.median(found["seconds"][key])
        ratio = statistics.median(
            e / f for e, f in zip(found["seconds"]["exact"], found["seconds"][key], strict=True)
        )
        filling = statistics.median(s.get("fill", 0.0) for s in found["stages"][key])
        lines.append(f"| {key} | {spent:.2f} | {ratio:.2f} | {ceiling:.2f} | {filling:.2f} |")
    return lines


def first(folder: Path, loss: dict[str, Found]) -> list[str]:
    """What rich maps lost as they were first, beside what they lose, on the documents that both were measured on."""
    lines = ["| rich maps | documents | with the wrong mean | mended | plain |", "|---|---|---|---|---|"]
    for name, one in loss.items():
        kept = folder / "wrong-mean" / f"{name}-loss.jsonl"
        before: dict[str, dict[str, float]] = {}
        for line in kept.read_text().splitlines() if kept.exists() else ():
            item = json.loads(line)
            before.setdefault(item["arm"], {})[item["item"]] = item["metrics"]["novel_nll"]
        exact = one.values("exact", "novel_nll")
        for arm, then in before.items():
            now, plain = (one.values(a, "novel_nll") for a in (arm, arm.replace("rich", "plain")))
            both = [i for i in then if i in now and i in plain and i in exact]
            if both:
                cells = (
                    f"{statistics.mean(each[i] - exact[i] for i in both):+.3f}" for each in (then, now, plain)
                )
                lines.append(f"| {name}, {arm} | {len(both)} | {' | '.join(cells)} |")
    return lines


def tables(loss: dict[str, Found], needles: dict[str, Found]) -> list[str]:
    """Every arm."""
    lines = []
    for name, one in loss.items():
        lines += [
            "",
            f"### {MODELS[name]}",
            "",
            f"{len({line['item'] for line in one.lines})} documents.",
            "",
        ]
        lines += loss_table(one)
        lines += ["", *needle_table(needles[name])] if name in needles else []
    return lines


def write_page(folder: Path) -> None:
    """README.md."""
    loss, needles = (
        {name: found for name in MODELS if (found := Found.of(folder / name / kind)) is not None}
        for kind in ("loss", "needles")
    )
    notes = folder / "NOTES.md"
    lines = ["# Forms of maps: the paper's, and what costs less or loses less", ""]
    lines += [notes.read_text().strip(), ""] if notes.exists() else []
    lines += [
        "Made by `make results-maps`; predictions were declared first, in `ledger.jsonl` (PREDICTION.md holds their "
        "words). Rich maps are those of `again.py`, the hybrid's documents those of `hybrid.py`; both say why. How "
        "the forms were chosen: `IDEAS.md`.",
        "",
        "## What came of the predictions",
        "",
    ]
    lines += predictions(loss, needles, folder)
    lines += ["", "## Rich maps with the wrong mean (docs/decisions/0013)", "", *first(folder, loss)]
    lines += ["", "## Tables", *tables(loss, needles)]
    write_text(folder / "README.md", "\n".join(lines) + "\n")
