"""What every arm is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from ridgefill.walk import Prefix


class Fill(Protocol):
    """An arm: a frozen dataclass that writes the late layers of a prompt's prefix.

    One that predicts layer inputs has ``predict(i, h_split, decoder)`` as well; corrections measure it.
    """

    @property
    def name(self) -> str:
        """The name users give it by."""
        ...

    def write(self, prefix: Prefix) -> None:
        """Writes the prefix's part of every late layer's cache, in layer order."""
        ...
