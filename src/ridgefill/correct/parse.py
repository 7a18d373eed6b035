"""Corrections in words: ``value_rescale(512) | terminal_state``."""

from __future__ import annotations

import re
from collections.abc import Iterable

from ridgefill.correct.base import Correction
from ridgefill.correct.rescale import KeyRescale, ValueRescale
from ridgefill.correct.terminal_state import TerminalState
from ridgefill.errors import SettingError

_CALL = re.compile(r"\s*([a-z_]+)\s*(?:\(\s*([\d.,\s]*)\))?\s*")
_ADVICE = (
    "write value_rescale(512), key_rescale(512) or terminal_state, several joined by |; a second number is the "
    "strength, such as value_rescale(512, 0.5)"
)


def parse_corrections(text: str) -> tuple[Correction, ...]:
    """The corrections that a text names; `written` gives such a text back.

    Raises:
        SettingError: an unknown name, or numbers that cannot be read.
    """
    parts = [part for part in text.split("|") if part.strip()]
    return tuple(_correction(part, text) for part in parts)


def written(corrections: Iterable[Correction]) -> str:
    """Corrections as `parse_corrections` reads them."""
    words = []
    for c in corrections:
        if isinstance(c, TerminalState):
            words.append(f"terminal_state({c.scale})")
        elif isinstance(c, ValueRescale | KeyRescale):
            name = "value_rescale" if isinstance(c, ValueRescale) else "key_rescale"
            words.append(f"{name}({c.window}, {c.strength})")
    return " | ".join(words)


def _correction(part: str, text: str) -> Correction:
    found = _CALL.fullmatch(part)
    numbers = [n.strip() for n in (found[2] or "").split(",") if n.strip()] if found else []
    try:
        if found and found[1] == "terminal_state" and len(numbers) <= 1:
            return TerminalState(*map(float, numbers))
        if found and found[1] in ("value_rescale", "key_rescale") and len(numbers) <= 2:
            kind = ValueRescale if found[1] == "value_rescale" else KeyRescale
            return kind(*map(int, numbers[:1]), *map(float, numbers[1:]))
    except ValueError as error:
        raise SettingError(f"the corrections {text!r}", f"{error}", _ADVICE) from None
    raise SettingError(f"the corrections {text!r}", f"{part.strip()!r} is none", _ADVICE)
