"""The page of what `measure.py` found: python results/rows/table.py."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

from scipy.stats import binomtest

HERE = Path(__file__).parent
SETTINGS = {
    "smollm2-07": "SmolLM2-135M-Instruct, split 7 of 30 (depth 1/4)",
    "smollm2-15": "SmolLM2-135M-Instruct, split 15 of 30 (depth 1/2)",
    "gemma3-09": "Gemma-3-270M, split 9 of 18 (depth 1/2)",
}
HEAD = """# Which rows to run exactly

Made by `python results/rows/measure.py SETTING` and `python results/rows/table.py`; each figure's JSON, with
versions and date, lies beside this page. Prompts of 2,048 tokens, tail 512, 16 exact leading rows, RULER's words
(`ridgefill.eval.haystack`), every needle in the filled region; an answer counts if greedy decoding gives it. The arms
of a column see the same prompts, or every second or third of them. Counts are found of asked; *of exact's* leaves out
what the exact model itself does not find. The paraphrased question shares no content word with its needle. Losses are
nats per token above exact on 2 documents of 3,072 tokens per domain, tail 1,024, the first and the last 512 tokens of
the tail; there the selectors' question is the 64 rows before the tail. Which score ranks the right sentence:
[RANKING.md](RANKING.md).
"""


def outcomes(found: dict[str, Any], arm: str, cell: str) -> dict[int, bool]:
    """prompt -> whether the answer was found."""
    prompts = found["cells"][cell].get(arm, {"prompts": []})["prompts"]
    return {p.get("item", i): p["found"] for i, p in enumerate(prompts)}


def share(found: dict[str, Any], arm: str, cell: str) -> str:
    """Found of asked, and of what exact finds."""
    mine, exact = outcomes(found, arm, cell), outcomes(found, "exact", cell)
    if not mine:
        return ""
    words = f"{sum(mine.values())} of {len(mine)}"
    known = [i for i in mine if exact.get(i)]
    return words if arm == "exact" else f"{words} ({sum(mine[i] for i in known)} of exact's {len(known)})"


def loss(found: dict[str, Any], arm: str, domain: str) -> str:
    """First and last 512 tokens, above exact."""
    kept = found["loss"].get(domain, {})
    if arm not in kept or "exact" not in kept:
        return ""
    parts = []
    for part in ("first", "last"):
        both = zip(kept[arm], kept["exact"], strict=True)
        parts.append(f"{statistics.mean(a[part] - b[part] for a, b in both):+.3f}")
    return " / ".join(parts)


def rows_run(found: dict[str, Any], arm: str) -> str:
    """Rows that the selector chose, of the prefix."""
    chosen = [p["selected"] for cell in found["cells"].values() if arm in cell for p in cell[arm]["prompts"]]
    prefix = found["tokens"] - found["tail"]
    return f"{statistics.mean(chosen) / prefix:.1%}" if chosen and arm != "exact" else ""


def section(name: str, title: str) -> list[str]:
    """One setting's table."""
    path = HERE / f"{name}.json"
    if not path.exists():
        return []
    found = json.loads(path.read_text())
    cells = list(found["cells"])
    arms = list(dict.fromkeys(arm for cell in found["cells"].values() for arm in cell))
    arms += [arm for arm in found["loss"].get("prose", {}) if arm not in arms]
    domains = list(found["loss"])
    head = ["rows", "exact rows", *cells, *(f"loss, {domain}: first / last" for domain in domains)]
    lines = ["", f"## {title}", "", "| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for arm in arms:
        line = [arm, rows_run(found, arm), *(share(found, arm, cell) for cell in cells)]
        lines.append("| " + " | ".join([*line, *(loss(found, arm, domain) for domain in domains)]) + " |")
    lines += ["", *pooled(found, arms)]
    e = found["environment"]
    versions = f"torch {e['torch']}, transformers {e['transformers']}, {e['date'][:10]}"
    lines += ["", f"{e['device']}, {e['threads']} threads, {versions}."]
    return lines


def pooled(found: dict[str, Any], arms: list[str]) -> list[str]:
    """What the default spans keep of what exact finds, with an exact 95 % interval."""
    arm, lines = "spans 5 %", []
    for label, cells in {
        "RULER's question": [c for c in found["cells"] if "paraphrased" not in c],
        "paraphrased question": [c for c in found["cells"] if "paraphrased" in c],
    }.items():
        kept = known = new = 0
        for cell in cells:
            mine, exact = outcomes(found, arm, cell), outcomes(found, "exact", cell)
            kept += sum(mine[i] and exact.get(i, False) for i in mine)
            known += sum(exact.get(i, False) for i in mine)
            new += sum(mine[i] and not exact.get(i, True) for i in mine)
        if known:
            low, high = binomtest(kept, known).proportion_ci(method="exact")
            lines.append(
                f"{label}: `spans(peak, 0.05)` keeps {kept} of the {known} answers that exact finds "
                f"({kept / known:.1%}, 95 % interval {low:.1%} to {high:.1%}), and finds {new} that exact does not."
            )
    return lines


def main() -> None:
    """Writes the page."""
    notes = HERE / "NOTES.md"
    lines = [HEAD.rstrip()]
    for name, title in SETTINGS.items():
        lines += section(name, title)
    if notes.exists():
        lines += ["", notes.read_text().rstrip()]
    (HERE / "README.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
