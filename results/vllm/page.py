"""README.md of this folder, from the JSON files beside it: `python results/vllm/page.py`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
INTRO = """# vLLM

SmolLM2-135M-Instruct (30 layers) on vLLM's CPU build, rich maps of split 15, tail 1,024, 16 leading rows. Made by
`make results-vllm`; what it means is in `NOTES.md`.

"""


def both(row: dict[str, Any], name: str, digits: int) -> str:
    """A figure of both arms, exact / filled."""
    found = [row["median"][arm].get(name) for arm in ("exact", "filled")]
    return " / ".join("-" if f is None else f"{f:.{digits}f}" for f in found)


def heading(*names: str) -> list[str]:
    """The first two lines of a table."""
    return [f"| {' | '.join(names)} |", "|---" * len(names) + "|"]


def served(found: dict[str, Any], title: str) -> str:
    """A table of mixed serving, as the paper's Table 14."""
    heads = (
        "users",
        "tokens",
        "TTFT s, exact / filled",
        "speedup",
        "of each repetition",
        "others tok/s",
        "ITL p50 ms",
    )
    lines = [f"## {title}", "", *heading(*heads, "p99", "max")]
    for row in found["users"]:
        each = [
            e["ttft_s"] / f["ttft_s"]
            for e, f in zip(*(row["each"][a] for a in ("exact", "filled")), strict=True)
        ]
        lines.append(
            f"| {row['users']} | {row['median']['filled']['tokens']:.0f} | {both(row, 'ttft_s', 2)} "
            f"| {row['exact_over_filled']['ttft_s']:.2f}x | {', '.join(f'{e:.2f}' for e in each)} "
            f"| {both(row, 'others_tokens_per_s', 1)} | {both(row, 'itl_p50_ms', 0)} | {both(row, 'itl_p99_ms', 0)} "
            f"| {both(row, 'itl_max_ms', 0)} |"
        )
    made = found["environment"]
    return "\n".join([*lines, "", f"{made['date'][:10]}, {made['device']}, one core.", "", ""])


def agreed(found: dict[str, Any]) -> str:
    """Both engines' first tokens."""
    lines = ["## Both engines, fp32", ""]
    lines += [
        f"{found['tokens']} tokens, tail {found['tail']}, chunks of 512; KL of the first token in nats, and",
        "the largest difference of a likely token's log-probability.",
        "",
    ]
    heads = ("plan", "text", "engines, exact", "largest", "engines, filled", "largest", "16 tokens the same")
    lines += heading(*heads, "the fill itself")
    for row in found["rows"]:
        exact, filled = row["exact"], row["filled"]
        same = " / ".join("yes" if arm["same tokens"] else "no" for arm in (exact, filled))
        lines.append(
            f"| {row['plan']} | {row['text']} | {exact['kl']:.1e} | {exact['largest']:.1e} | {filled['kl']:.1e} "
            f"| {filled['largest']:.1e} | {same} | {row['the fill itself']['kl']:.4f} |"
        )
    return "\n".join([*lines, "", ""])


def main() -> None:
    """Writes what is there."""
    page = INTRO
    titles = {"serve-4k": "One long request among decoding users", "serve-8k": "The same, longer",
              "serve-4k-eager": "Eager on both sides", "serve-8k-eager": "Eager, longer"}  # fmt: skip
    for name, title in titles.items():
        if (path := HERE / f"{name}.json").exists():
            page += served(json.loads(path.read_text()), title)
    if (path := HERE / "agreement.json").exists():
        page += agreed(json.loads(path.read_text()))
    (HERE / "README.md").write_text(page.rstrip() + "\n")


if __name__ == "__main__":
    main()
