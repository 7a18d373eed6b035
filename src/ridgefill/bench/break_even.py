"""The prompt length from which filling pays on this machine; `measured.py` remembers it."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

from torch import Tensor

from ridgefill.bench.ttft import measure
from ridgefill.plan import FillPlan

FILLED_ROWS = (64, 128, 256, 512, 1024)  # how many rows beyond tail and leading rows are tried
PAYS = 0.98  # filled over exact; closer to 1 is noise


def tried_lengths(plan: FillPlan, tokens: int) -> list[int]:
    """The prompt lengths that `measure_break_even` tries in a text of ``tokens`` tokens."""
    lengths = [plan.tail + plan.leading + rows for rows in FILLED_ROWS]
    return [n for n in lengths if n <= tokens]


def measure_break_even(
    model: Any,
    plan: FillPlan,
    ids: Tensor,
    repeats: int = 3,
    tick: Callable[[], None] = lambda: None,
    tokenizer: Any = None,
) -> int | None:
    """The shortest tried prompt from which filling is faster, at that length and every longer one tried.

    Args:
        ids: [1, n] tokens of real text.
        tokenizer: for selectors that read text.

    Returns:
        Tokens, or None if filling never paid within the text.
    """
    lengths = tried_lengths(plan, ids.shape[1])
    pays = None
    for row in reversed(measure(model, plan, ids, lengths, repeats, tick=tick, tokenizer=tokenizer)):
        if statistics.median(row.filled) > PAYS * statistics.median(row.exact):
            break
        pays = row.tokens
    return pays
