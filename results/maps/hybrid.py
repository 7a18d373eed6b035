"""The hybrid's part of the forms study again: as declared it leaves out more prose than there is.

    python results/maps/hybrid.py

Its documents are those of `results/study`: they chose no form for it, but plain maps were measured on them before.
Declared by itself, in the same ledger, before it ran.
"""

from __future__ import annotations

from dataclasses import replace

import forms

from ridgefill.files import sha256_file
from ridgefill.ledger import Ledger

CLAIM = (
    "On the tiny hybrid rich maps lose less than plain ones. Measured on the prose documents of results/study: the "
    "part declared before leaves out six of them, and there are no more."
)
PREDICTION = (
    "Gated DeltaNet layers are given inputs by every form, so less is to be gained than on SmolLM2. Rich maps lose "
    "less than plain ones at each split, and direct ones cost within 0.01 of plain."
)


def main() -> None:
    """Declares it, once, and measures."""
    part = replace(forms.PARTS["hybrid"], skipped=0, documents=6)
    forms.PARTS["hybrid"] = part
    ledger = Ledger.open(forms.LEDGER)
    entry = next((e.hash for e in ledger.entries() if e.said.get("claim") == CLAIM), None)
    if entry is None:
        settings = {k: list(v) if isinstance(v, tuple) else v for k, v in vars(part).items()}
        files = {"hybrid.py": sha256_file(forms.HERE / "hybrid.py")}
        entry = ledger.declare(CLAIM, PREDICTION, {"hybrid": settings}, files).hash
    forms.loss("hybrid", entry)


if __name__ == "__main__":
    main()
