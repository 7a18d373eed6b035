"""RidgeFill: each late layer's input, or what it writes, is an affine map of what the split knows (paper 2.2)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import Tensor

from ridgefill.fill.base import Predicting, SplitRows

if TYPE_CHECKING:
    from ridgefill.maps import RidgeMaps
    from ridgefill.models.decoder import Decoder


@dataclass(frozen=True)
class Ridge(Predicting):
    """h^_l = A_l h_S + b_l, with the maps of a fit; or the keys and values themselves, from what the maps read."""

    maps: RidgeMaps = field(repr=False)
    name: str = "ridge"

    def inputs(self, i: int, at: SplitRows, decoder: Decoder) -> Tensor:
        """Layer i's predicted input [B, m, d]; the split layer needs no map, for its input is known."""
        if i == self.maps.split and i not in self.maps.maps:
            return decoder.layer_input(i, at.h, at.rows, at.cache)
        return self.maps.predict(i, at.read)

    def writes(self, i: int, at: SplitRows, decoder: Decoder) -> tuple[Tensor, ...]:
        """What attention layer i writes: from the predicted input, or predicted itself."""
        if self.maps.reading.gives == "writes" and i in self.maps.maps:
            return decoder.finish(i, self.maps.predict(i, at.read), at.rows)
        return super().writes(i, at, decoder)
