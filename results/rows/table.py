"""The page of what `measure.py` found: python results/rows/table.py."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

from scipy.stats import binomtest

from ridgefill.eval.intervals import non_inferiority, paired_difference, sign_test

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
of a column see the same prompts, or every tenth of them. Counts are found of asked; *of exact's* leaves out
what the exact model itself does not find. The paraphrased question shares no content word with its needle. Losses are
nats per token above exact on 2 documents (1 on Gemma) of 3,072 tokens per domain, tail 1,024, the first and the last
512 tokens of the tail; there the selectors' question is the 64 rows before the tail. Which score ranks the right
sentence: [RANKING.md](RANKING.md).
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
    lines += ["", *pooled(found, arms), *cost(name)]
    e = found["environment"]
    versions = f"torch {e['torch']}, transformers {e['transformers']}, {e['date'][:10]}"
    lines += ["", f"{e['device']}, {e['threads']} threads, {versions}."]
    return lines


def pooled(found: dict[str, Any], arms: list[str]) -> list[str]:
    """The default spans beside exact, all cells of RULER's words together (paper 3.4)."""
    arm, score, base, strata = "spans 5 %", [], [], []
    for cell in (c for c in found["cells"] if "paraphrased" not in c):
        mine, exact = outcomes(found, arm, cell), outcomes(found, "exact", cell)
        both = [i for i in mine if i in exact]
        score += [float(mine[i]) for i in both]
        base += [float(exact[i]) for i in both]
        strata += [cell] * len(both)
    if not score:
        return []
    difference = paired_difference(score, base, strata)
    test = non_inferiority(score, base, strata, margin=2.0)
    sign = sign_test(score, base)
    known = [s for s, b in zip(score, base, strict=True) if b]
    low, high = binomtest(int(sum(known)), len(known)).proportion_ci(method="exact")
    ends = "" if difference.low is None else f" [{100 * difference.low:+.1f}, {100 * difference.high:+.1f}]"
    lower = "no bound" if test.lower is None else f"{test.lower:+.1f}"
    kept = f"{sum(known):.0f} ({sum(known) / len(known):.1%}, 95 % interval {low:.1%} to {high:.1%})"
    return [
        f"RULER's question, all {len(score)} prompts: `spans(peak, 0.05)` finds {sum(score):.0f}, exact "
        f"{sum(base):.0f}: {100 * difference.mean:+.1f} points{ends}; better {sign.better}, worse {sign.worse}. "
        f"Within 2 points of exact: {'yes' if test.holds else 'not shown'} (one-sided bound {lower} points, the "
        f"binomial floor of {test.n} prompts, {test.floor:.1f}, included). Of the {len(known)} that exact finds it "
        f"keeps {kept}."
    ]


def cost(name: str) -> list[str]:
    """What `cost.py` measured of one setting."""
    path = HERE / f"{name}-cost.json"
    if not path.exists():
        return []
    found = json.loads(path.read_text())
    lines = [
        "",
        "| arm | exact rows | speedup | of (count) | measured over counted |",
        "|---|---|---|---|---|",
    ]
    for arm, measured in found["arms"].items():
        r = measured["lengths"][0]
        numbers = f"{r['speedup']:.2f}x | {r['macs_ceiling']:.2f}x | {r['measured_over_counted']:.2f}"
        lines.append(f"| {arm} | {r['exact_rows']} | {numbers} |")
    n = next(iter(found["arms"].values()))["lengths"][0]["tokens"]
    return ["", f"Time to first token at {n:,} tokens, each arm interleaved with exact (`cost.py`):", *lines]


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
