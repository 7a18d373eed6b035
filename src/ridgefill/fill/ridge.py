"""RidgeFill: each late layer's input is an affine map of the split state (paper 2.2)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ridgefill.maps import RidgeMaps
    from ridgefill.prefill import Prefix


@dataclass(frozen=True)
class Ridge:
    """h^_l = A_l h_S + b_l, with the maps of a fit."""

    maps: RidgeMaps = field(repr=False)
    name: str = "ridge"

    def write(self, prefix: Prefix) -> None:
        """Writes keys and values of the predicted inputs."""
        for i in prefix.late_layers:
            prefix.write(i, self.maps.predict(i, prefix.split_state(i)))
