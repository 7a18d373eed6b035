"""The folder of a search: what decides its items and maps, so that a later call goes on with the same ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ridgefill.errors import SettingError
from ridgefill.files import write_json

FORMAT = 1
REPORT = "tune.json"


def begin(folder: Path, settings: dict[str, Any]) -> None:
    """Begins the folder's report, or makes sure that it is of the same search.

    Args:
        settings: flat; limits, time, splits, tails and rows are none, for they may change from call to call.

    Raises:
        SettingError: the folder holds another search, by what differs, or a report that cannot be read.
        OutputError: it cannot be written.
    """
    path, asked = folder / REPORT, f"go on with the search in {folder}"
    if not path.exists():
        finish(folder, settings, None)
        return
    try:
        old = json.loads(path.read_text(encoding="utf-8"))["settings"]
        differ = [key for key in settings if old.get(key) != settings[key]]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise SettingError(asked, f"its {REPORT} cannot be read", "name another folder") from error
    if differ:
        shown = ", ".join(f"{key} was {old.get(key)!r}, now {settings[key]!r}" for key in differ)
        raise SettingError(asked, f"it is another search: {shown}", "name another folder")


def finish(folder: Path, settings: dict[str, Any], result: dict[str, Any] | None) -> None:
    """Writes the report, whole or not at all.

    Raises:
        OutputError: it cannot be written.
    """
    write_json(folder / REPORT, {"format": FORMAT, "settings": settings, "result": result})
