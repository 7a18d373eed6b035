"""The identity fill: the split state in place of every late layer's input (Table 3; POP's fill)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from ridgefill.fill.base import Predicting, SplitRows

if TYPE_CHECKING:
    from ridgefill.models.decoder import Decoder


@dataclass(frozen=True)
class Identity(Predicting):
    """h^_l = h_S; with several residual streams, the late layer's own mix of the split layer's streams."""

    name: str = "identity"

    def inputs(self, i: int, at: SplitRows, decoder: Decoder) -> Tensor:
        """Layer i's input [B, m, d] if its state were the split state."""
        return decoder.layer_input(i, at.h, at.rows, at.cache)
