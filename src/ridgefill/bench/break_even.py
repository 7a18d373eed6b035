"""The prompt length from which filling pays on this machine, measured once and remembered."""

from __future__ import annotations

import contextlib
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ridgefill.bench.environment import machine_key
from ridgefill.files import cache_dir, write_json
from ridgefill.plan import FillPlan

if TYPE_CHECKING:
    from ridgefill.maps import RidgeMaps

FILLED_ROWS = (64, 128, 256, 512, 1024)  # how many rows beyond tail and leading rows are tried
PAYS = 0.98  # filled over exact; closer to 1 is noise


def tried_lengths(plan: FillPlan, tokens: int) -> list[int]:
    """The prompt lengths that `measure_break_even` tries in a text of ``tokens`` tokens."""
    lengths = [plan.tail + plan.leading + rows for rows in FILLED_ROWS]
    return [n for n in lengths if n <= tokens]


def measure_break_even(
    model: Any, plan: FillPlan, ids: Tensor, repeats: int = 3, tick: Callable[[], None] = lambda: None
) -> int | None:
    """The shortest tried prompt from which filling is faster, at that length and every longer one tried.

    Args:
        ids: [1, n] tokens of real text.

    Returns:
        Tokens, or None if filling never paid within the text.
    """
    from ridgefill.bench.ttft import measure

    lengths = tried_lengths(plan, ids.shape[1])
    pays = None
    for row in reversed(measure(model, plan, ids, lengths, repeats, tick=tick)):
        if statistics.median(row.filled) > PAYS * statistics.median(row.exact):
            break
        pays = row.tokens
    return pays


def remember(maps: RidgeMaps, plan: FillPlan, device: torch.device, tokens: int | None) -> Path:
    """Keeps what was measured, for `recall`; None (never pays) is kept as well.

    Raises:
        OutputError: the cache folder cannot be written.
    """
    path = _path(maps)
    known = _read(path)
    known[_key(plan, device)] = tokens
    write_json(path, known)
    return path


def recall(maps: RidgeMaps, plan: FillPlan, device: torch.device) -> int | None:
    """The remembered length for these maps, plan and machine; None if nothing was measured or it never paid."""
    return _read(_path(maps)).get(_key(plan, device))


def _path(maps: RidgeMaps) -> Path:
    return cache_dir() / "break-even" / f"{maps.content_hash[:32]}.json"


def _key(plan: FillPlan, device: torch.device) -> str:
    return f"tail {plan.tail}, leading {plan.leading}, {machine_key(device)}"


def _read(path: Path) -> dict[str, Any]:
    with contextlib.suppress(OSError, ValueError):
        found = json.loads(path.read_text())
        return found if isinstance(found, dict) else {}
    return {}
