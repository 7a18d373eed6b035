"""The identity fill: the split state in place of every late layer's input (Table 3; POP's fill)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ridgefill.prefill import Prefix


@dataclass(frozen=True)
class Identity:
    """h^_l = h_S."""

    name: str = "identity"

    def write(self, prefix: Prefix) -> None:
        """Writes keys and values of the split state."""
        for i in prefix.late_layers:
            prefix.write(i, prefix.split_state(i))
