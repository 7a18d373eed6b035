"""Corrections in words: ``value_rescale(512) | terminal_state``."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import fields
from typing import Any

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


def written(corrections: Iterable[Any]) -> str:
    """Corrections as `parse_corrections` reads them."""
    return " | ".join(
        f"{_word(type(c))}({', '.join(str(getattr(c, f.name)) for f in fields(c))})" for c in corrections
    )


def _word(kind: type[Correction]) -> str:
    return kind.name.replace(" ", "_")


_KINDS: dict[str, Any] = {_word(kind): kind for kind in (ValueRescale, KeyRescale, TerminalState)}


def _correction(part: str, text: str) -> Correction:
    found = _CALL.fullmatch(part)
    kind = _KINDS.get(found[1]) if found else None
    numbers = [n.strip() for n in (found[2] or "").split(",") if n.strip()] if found else []
    if kind is not None and len(numbers) <= len(fields(kind)):
        try:
            kinds: list[Any] = [type(f.default) for f in fields(kind)]
            return kind(*(read(number) for read, number in zip(kinds, numbers, strict=False)))
        except ValueError as error:
            raise SettingError(f"the corrections {text!r}", f"{error}", _ADVICE) from None
    raise SettingError(f"the corrections {text!r}", f"{part.strip()!r} is none", _ADVICE)
