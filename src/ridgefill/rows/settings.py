"""What selectors and scores check about their own settings, and how they are written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import MISSING, Field, fields
from typing import Any

from ridgefill.errors import SettingError


def check_count(asked: str, value: Any, least: int = 1) -> None:
    """Raises SettingError for what is no whole number of at least ``least``."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise SettingError(f"{asked} of {value!r}", "it is a count", f"give a whole number from {least}")


def check_choice(asked: str, value: Any, choices: Sequence[str]) -> None:
    """Raises SettingError for a word that is none of ``choices``."""
    if value not in choices:
        raise SettingError(f"{asked} {value!r}", "there is none of that name", f"use {' or '.join(choices)}")


def check_flag(asked: str, value: Any) -> None:
    """Raises SettingError for what is neither True nor False."""
    if not isinstance(value, bool):
        raise SettingError(f"{asked}={value!r}", "it is a yes or no", "give True or False")


def check_factor(asked: str, value: Any) -> None:
    """Raises SettingError for what is no finite number from 0."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < float("inf"):
        raise SettingError(
            f"{asked} of {value!r}", "it multiplies a count", "give a number from 0, such as 1.0"
        )


def written(name: str, what: Any) -> str:
    """A selector or score as `parse_rows` reads it: its name, and the settings that are not the default.

    >>> written("attention", AttentionRows(0.2, layers=(3, 7)))  # doctest: +SKIP
    'attention(0.2, layers=(3, 7))'
    """
    parts = []
    for place, setting in enumerate(fields(what)):
        value = getattr(what, setting.name)
        if value != _default(setting):
            parts.append(f"{setting.name}={_value(value)}" if place else _value(value))
    return f"{name}({', '.join(parts)})" if parts else name


def _default(setting: Field[Any]) -> Any:
    return setting.default if setting.default_factory is MISSING else setting.default_factory()


def _value(value: Any) -> str:
    if isinstance(value, tuple):
        return f"({', '.join(map(_value, value))}{',' if len(value) == 1 else ''})"
    return str(value)
