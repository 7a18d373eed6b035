"""RidgeFill: each late layer's input is an affine map of the split state (paper 2.2)."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from ridgefill.maps import RidgeMaps
    from ridgefill.models.decoder import Decoder, Rows
    from ridgefill.walk import Prefix


@dataclass(frozen=True)
class Ridge:
    """h^_l = A_l h_S + b_l, with the maps of a fit."""

    maps: RidgeMaps = field(repr=False)
    name: str = "ridge"

    def predict(
        self, i: int, h_split: Tensor, decoder: Decoder, rows: Rows | None = None, cache: Any = None
    ) -> Tensor:
        """Layer i's predicted input from split states h_split [B, m, d_in] -> [B, m, d_out].

        Args:
            rows, cache: as in `Decoder.layer_input`; the split layer needs no map, for its input is known.
        """
        if i == self.maps.split and i not in self.maps.maps:
            return decoder.layer_input(i, h_split, rows, cache)
        return self.maps.predict(i, h_split)

    def write(self, prefix: Prefix) -> None:
        """Writes what each late layer keeps of the predicted inputs."""
        for i in prefix.late_layers:
            prefix.write(i, partial(self._inputs, i, prefix))

    def _inputs(self, i: int, prefix: Prefix) -> Tensor:
        return self.predict(i, prefix.split_state(i), prefix.decoder, prefix.rows, prefix.cache)
