"""Fields of a data row, or an error that says which row lacks what."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ridgefill.errors import CorpusError


def text(row: Mapping[str, Any], name: str, where: str) -> str:
    """A field that is text, empty or not.

    Raises:
        CorpusError: it is missing, or no text.
    """
    value = _given(row, name, where)
    if not isinstance(value, str):
        raise _wrong(name, "text", value, where)
    return value


def whole(row: Mapping[str, Any], name: str, where: str) -> int:
    """A field that is a whole number.

    Raises:
        CorpusError: it is missing, or no whole number.
    """
    value = _given(row, name, where)
    if not isinstance(value, int) or isinstance(value, bool):
        raise _wrong(name, "a whole number", value, where)
    return value


def listed(row: Mapping[str, Any], name: str, where: str) -> tuple[str, ...]:
    """A field that is a list of texts, with at least one.

    Raises:
        CorpusError: it is missing, empty, or another thing.
    """
    value = _given(row, name, where)
    if not (isinstance(value, list) and value and all(isinstance(x, str) for x in value)):
        raise _wrong(name, "a list of texts with something in it", value, where)
    return tuple(value)


def _given(row: Mapping[str, Any], name: str, where: str) -> Any:
    if name not in row:
        raise CorpusError(
            f"read {where}", f"it has no field {name!r}", "give every sample the official fields"
        )
    return row[name]


def _wrong(name: str, wanted: str, value: Any, where: str) -> CorpusError:
    found = "a " + type(value).__name__ if value not in (None, []) else "null" if value is None else "empty"
    return CorpusError(
        f"read {where}",
        f"its field {name!r} is {found}",
        f"{name!r} must be {wanted}, as in the official files",
    )
