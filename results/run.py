"""Measures what the README's table says, on the embedded default model; run by ``make results``.

Each step is a command of the package and writes its own JSON with versions, date and command; a step whose file is
there is skipped, so a stopped run goes on. Delete a file to measure it again.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(
    __file__
).parent.parent  # paths below are relative to it, so that recorded commands can be run again
OUT = Path("results") / "smollm2-135m"
MAPS = Path(".cache") / "results-maps"
SPLITS = (7, 15, 19)  # depths 1/4, 1/2, 5/8
TAIL = "1024"


def main() -> None:
    """All steps, then the table."""
    os.chdir(ROOT)
    OUT.mkdir(exist_ok=True)
    if not (MAPS / f"split-{SPLITS[-1]:02d}").exists():
        splits = ",".join(map(str, SPLITS))
        form = ("--form", "plain")  # these figures are the paper's maps'; other forms: results/maps
        fit = ("fit", "embedded", "--texts", "embedded", "--splits", splits, "--tokens", "65536", *form)
        command(*fit, "-o", MAPS)
    for split in SPLITS:
        maps = MAPS / f"split-{split:02d}"
        check(maps, f"prose-{split:02d}", "--texts", "embedded", "--needles", "6")
        check(maps, f"code-docs-{split:02d}", "--needles", "0")
    check(MAPS / "split-15", "prose-15-no-leading", "--texts", "embedded", "--needles", "0", "--leading", "0")
    for split in SPLITS:
        bench(MAPS / f"split-{split:02d}", f"ttft-{split:02d}", "8192" if split != 15 else "2048,4096,8192")
    (OUT / "README.md").write_text(table(), encoding="utf-8")
    print(table())


def check(maps: Path, name: str, *options: str) -> None:
    """One `ridgefill check`, unless done."""
    if not (OUT / f"{name}.json").exists():
        base = (
            "check",
            "embedded",
            maps,
            "--tail",
            TAIL,
            "--tokens",
            "4096",
            "--documents",
            "3",
            "--no-timing",
        )
        command(*base, *options, "--json", OUT / f"{name}.json", may_fail=True)


def bench(maps: Path, name: str, lengths: str) -> None:
    """One `ridgefill bench ttft`, unless done."""
    if not (OUT / name / "ttft.json").exists():
        base = ("bench", "ttft", "embedded", maps, "--texts", "embedded", "--tail", TAIL)
        command(*base, "--lengths", lengths, "--repeats", "3", "-o", OUT / name)


def command(*words: Any, may_fail: bool = False) -> None:
    """Runs the package's command line; ``may_fail`` lets `check` say that maps are not recommended."""
    program = Path(sys.executable).with_name("ridgefill")
    done = subprocess.run([program, *map(str, words)], check=False)
    if done.returncode > (1 if may_fail else 0):
        sys.exit(done.returncode)


def table() -> str:
    """The measured table as Markdown."""
    lines = [
        "# SmolLM2-135M-Instruct, measured",
        "",
        "Made by `make results`; each figure's JSON, with versions, date and command, lies beside this page.",
        "Tail 1,024, 16 exact leading rows; 3 documents of 4,096 tokens that the maps were not fitted on; 6 planted",
        "facts. Maps fitted on 59 thousand tokens of speeches, plays, Python source and Python documentation.",
        "",
        "| split of 30 | time to first token, 8,192 tokens | speedup (ceiling) | loss, prose: ridge (identity) "
        "| loss, code and docs: ridge (identity) | filled facts found (exact) |",
        "|---|---|---|---|---|---|",
    ]
    for split in SPLITS:
        t = next(r for r in read(f"ttft-{split:02d}/ttft")["lengths"] if r["tokens"] == 8192)
        lines.append(
            f"| {split} | {t['filled_median_s']:.1f} s (exact {t['exact_median_s']:.1f} s) "
            f"| {t['speedup']:.2f}x ({t['macs_ceiling']:.2f}x) "
            f"| {loss(f'prose-{split:02d}')} | {loss(f'code-docs-{split:02d}')} | {facts(f'prose-{split:02d}')} |"
        )
    lines += [
        "",
        f"Split 15 without exact leading rows: prose {loss('prose-15-no-leading')}.",
        "",
        "At split 15:",
        "",
    ]
    lines += ["| tokens | exact | filled | speedup | ceiling |", "|---|---|---|---|---|"]
    for r in read("ttft-15/ttft")["lengths"]:
        exact, filled = (statistics.median(r[k]) for k in ("exact_s", "filled_s"))
        lines.append(
            f"| {r['tokens']:,} | {exact:.2f} s | {filled:.2f} s | {r['speedup']:.2f}x | {r['macs_ceiling']:.2f}x |"
        )
    e = read("ttft-15/ttft")["environment"]
    versions = f"torch {e['torch']}, transformers {e['transformers']}, {e['date'][:10]}"
    lines += [
        "",
        f"{e['device']}, {e['threads']} threads, {versions}. Losses are nats per token of the tail above exact;",
        "speedups are ratios of medians of 3 interleaved runs; the ceiling counts multiply-accumulates",
        "(`ridgefill cost`).",
        "",
    ]
    return "\n".join(lines)


def read(name: str) -> dict[str, Any]:
    """One result."""
    return json.loads((OUT / f"{name}.json").read_text(encoding="utf-8"))


def loss(name: str) -> str:
    """Ridge and identity delta-NLL of one check."""
    delta = read(name)["delta_nll"]
    return f"{delta['ridge']['all']:+.3f} ({delta['identity']['all']:+.3f})"


def facts(name: str) -> str:
    """Planted facts that each arm found."""
    needles = read(name)["needles"]
    return f"{sum(n['filled'] for n in needles)} of {len(needles)} ({sum(n['exact'] for n in needles)})"


if __name__ == "__main__":
    main()
