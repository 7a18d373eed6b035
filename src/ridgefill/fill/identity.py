"""The identity fill: the split state in place of every late layer's input (Table 3; POP's fill)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from ridgefill.models.decoder import Decoder, Rows
    from ridgefill.walk import Prefix


@dataclass(frozen=True)
class Identity:
    """h^_l = h_S; with several residual streams, the late layer's own mix of the split layer's streams."""

    name: str = "identity"

    def predict(
        self, i: int, h_split: Tensor, decoder: Decoder, rows: Rows | None = None, cache: Any = None
    ) -> Tensor:
        """Layer i's input if its state were the split state: h_split [B, m, d_in] -> [B, m, d_out].

        Args:
            rows, cache: as in `Decoder.layer_input`.
        """
        return decoder.layer_input(i, h_split, rows, cache)

    def write(self, prefix: Prefix) -> None:
        """Writes what each late layer keeps of the split state."""
        for i in prefix.late_layers:
            prefix.write(i, partial(self._inputs, i, prefix))

    def _inputs(self, i: int, prefix: Prefix) -> Tensor:
        return self.predict(i, prefix.split_state(i), prefix.decoder, prefix.rows, prefix.cache)
