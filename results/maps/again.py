"""What reads rich maps, measured again: the first ones gave the mean row a wrong mean (docs/decisions/0013).

    python results/maps/again.py smollm2|gemma3|hybrid [--part loss|needles|time]

The lines of the first measurement go to `wrong-mean/`, the maps are fitted again, and the declared study's functions
measure them on the same documents. Declared by itself, in the same ledger, before it ran.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace

import forms

from ridgefill.eval.results import ITEMS, RUN
from ridgefill.files import sha256_file, write_json, write_text
from ridgefill.ledger import Ledger

CLAIM = (
    "Rich maps whose intercept belongs to the reduced map lose less than plain ones, measured again on every model. "
    "The first ones' belonged to the map before its reduction, so that the mean row was not given the mean."
)
PREDICTION = (
    "On Gemma-3 rich maps lose less than plain ones at each split; the first ones lost 0.3 nats and more. On SmolLM2 "
    "they lose a tenth less than the first ones at half depth. The other predictions stand as they were."
)
KEPT = forms.HERE / "wrong-mean"


def set_aside(name: str, kind: str) -> None:
    """The first measurement's lines of rich maps, and their arms, once."""
    folder, kept = forms.HERE / name / kind, KEPT / f"{name}-{kind}.jsonl"
    if kept.exists() or not (folder / ITEMS).exists():
        return
    lines = (folder / ITEMS).read_text(encoding="utf-8").splitlines(keepends=True)
    rich = [json.loads(line)["arm"].startswith("rich") for line in lines]
    run = json.loads((folder / RUN).read_text())
    run["arms"] = {arm: about for arm, about in run["arms"].items() if not arm.startswith("rich")}
    KEPT.mkdir(exist_ok=True)
    write_text(kept, "".join(line for line, is_rich in zip(lines, rich, strict=True) if is_rich))
    write_text(
        folder / ITEMS, "".join(line for line, is_rich in zip(lines, rich, strict=True) if not is_rich)
    )
    write_json(folder / RUN, run)


def main() -> None:
    """Declares it, once, and measures under the entry that each run has."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=tuple(forms.PARTS))
    parser.add_argument("--part", choices=("loss", "needles", "time"))
    given = parser.parse_args()
    ledger = Ledger.open(forms.LEDGER)
    if not any(e.said.get("claim") == CLAIM for e in ledger.entries()):
        ledger.declare(CLAIM, PREDICTION, {}, {"again.py": sha256_file(forms.HERE / "again.py")})
    forms.PARTS["hybrid"] = replace(forms.PARTS["hybrid"], skipped=0, documents=6)  # as hybrid.py
    every = {"loss": forms.loss, "needles": forms.needles, "time": forms.timed}
    wanted = {
        "smollm2": every,
        "gemma3": {"loss": forms.loss, "needles": forms.needles},
        "hybrid": {"loss": forms.loss},
    }
    for part, measure in wanted[given.what].items():
        if given.part in (None, part):
            set_aside(given.what, part)
            run = forms.HERE / given.what / part / RUN
            measure(given.what, json.loads(run.read_text())["ledger"] if run.exists() else forms.declare())


if __name__ == "__main__":
    main()
