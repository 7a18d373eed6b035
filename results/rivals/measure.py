"""Token-dropping rivals at the fill's compute, on the default model: needles, then loss; then README.md.

python results/rivals/measure.py            # what is there already is kept
python results/rivals/measure.py --page     # README.md alone
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from ridgefill.files import write_text

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
MAPS = ".cache/rows-maps/smollm2/split-15"
sys.path.insert(0, str(HERE.parent / "study"))
from page import Found, loss_table, needle_table  # noqa: E402

ARMS = (
    "ridge; spans: ridge rows=spans(peak,0.05); random: ridge rows=random(0.05); "
    "longer tail: ridge rows=tail(0.05); none matched: none tail=matched; snapkv; fastkv"
)
# GemFilter runs what it keeps once more: the fill's compute pays for 711 tokens of 2,560, and the loss needs 768.
RUNS = {
    "needles": [
        "--arms", f"{ARMS}; gemfilter", "--texts", "embedded", "--tokens", "1024", "--tail", "256", "--count", "6",
    ],
    "loss": [
        "--arms", ARMS, "--documents", "3", "--tokens", "2560",
        "--tail", "768", "--scored", "384", "--context", "768",
    ],
}  # fmt: skip


def main() -> None:
    """Measures, then writes the page."""
    if "--page" not in sys.argv:
        sys.path.insert(0, str(HERE.parent / "study"))
        from study import maps_folder, model_folder

        from ridgefill import load_model

        if not (ROOT / MAPS).exists():
            maps_folder("smollm2", 15, *load_model(model_folder("smollm2")))
        for kind, options in RUNS.items():
            command = ["eval", kind, "embedded", MAPS, *options, "-o", f"results/rivals/{kind}"]
            subprocess.run([str(Path(sys.executable).parent / "ridgefill"), *command], check=True, cwd=ROOT)
    notes = (HERE / "NOTES.md").read_text().strip()
    lines = ["# Rivals that drop tokens, at the fill's compute", "", notes, ""]
    for kind, table in (("needles", needle_table), ("loss", loss_table)):
        if (found := Found.of(HERE / kind)) is not None:
            made = found.about["environment"]
            lines += [f"## {kind[0].upper()}{kind[1:]}", "", *table(found), ""]
            lines += [f"torch {made['torch']}, transformers {made['transformers']}, {made['date'][:10]}.", ""]
    write_text(HERE / "README.md", "\n".join(lines).rstrip() + "\n")


if __name__ == "__main__":
    main()
