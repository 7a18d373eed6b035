"""What `ridgefill check` measured here and `filling` goes by: the prompt length from which filling pays."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ridgefill.bench.environment import machine_key
from ridgefill.files import cache_dir, write_json
from ridgefill.plan import FillPlan

if TYPE_CHECKING:
    from ridgefill.maps import RidgeMaps


def remember(maps: RidgeMaps, plan: FillPlan, device: torch.device, tokens: int) -> Path:
    """Keeps the prompt length from which filling pays, for `recall`.

    Raises:
        OutputError: the cache folder cannot be written.
    """
    path = _path(maps)
    known = _read(path)
    known[_key(plan, device)] = tokens
    write_json(path, known)
    return path


def recall(maps: RidgeMaps, plan: FillPlan, device: torch.device) -> int | None:
    """The remembered length for these maps, plan and machine; None if nothing was measured."""
    found = _read(_path(maps)).get(_key(plan, device))
    return found if isinstance(found, int) else None


def _path(maps: RidgeMaps) -> Path:
    return cache_dir() / "break-even" / f"{maps.content_hash[:32]}.json"


def _key(plan: FillPlan, device: torch.device) -> str:
    further = [f"{key} {value}, " for key, value in plan.to_json().items() if key in ("rows", "corrections")]
    return f"tail {plan.tail}, leading {plan.leading}, {''.join(further)}{machine_key(device)}"


def _read(path: Path) -> dict[str, Any]:
    with contextlib.suppress(OSError, ValueError):
        found = json.loads(path.read_text())
        return found if isinstance(found, dict) else {}
    return {}
