"""What every arm is, and what the arms share that predict late layers from the split state."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

if TYPE_CHECKING:
    from ridgefill.models.decoder import Decoder, Rows
    from ridgefill.walk import Prefix


class Fill(Protocol):
    """An arm: a frozen dataclass that writes the late layers of a prompt's prefix."""

    @property
    def name(self) -> str:
        """The name users give it by."""
        ...

    def write(self, prefix: Prefix) -> None:
        """Writes the prefix's part of every late layer's cache, in layer order."""
        ...


@dataclass(frozen=True, eq=False)
class SplitRows:
    """Rows at the split layer, as far as a prediction needs them.

    Attributes:
        h: [B, m, W] split states.
        read: [B, m, K] what maps read of them; h itself unless the arm has maps of another `Reading`.
        rows: positions and rotary embeddings of at least these rows, which are the last ones.
        cache: what earlier turns left (only read), for per-layer embeddings.
    """

    h: Tensor
    read: Tensor
    rows: Rows
    cache: Any = None


class Predicting:
    """An arm that predicts each late layer's input, or what the layer writes, row by row; corrections measure it."""

    def inputs(self, i: int, at: SplitRows, decoder: Decoder) -> Tensor:
        """Layer i's predicted input, [B, m, d]."""
        raise NotImplementedError

    def writes(self, i: int, at: SplitRows, decoder: Decoder) -> tuple[Tensor, ...]:
        """What attention layer i would write of these rows, as `Decoder.writes`."""
        return decoder.writes(i, self.inputs(i, at, decoder), at.rows)

    def write(self, prefix: Prefix) -> None:
        """Writes what each late layer keeps of the predicted rows."""
        decoder = prefix.decoder
        for i in prefix.late_layers:
            at = prefix.at_split(i)
            if decoder.recurrent(i):
                prefix.write(i, partial(self.inputs, i, at, decoder))
            else:
                prefix.write_ready(i, partial(self.writes, i, at, decoder))


def predicting(fill: Fill) -> Predicting | None:
    """The arm if it predicts, or the one that it wraps; None where there is nothing to measure."""
    inner = getattr(fill, "fill", fill)
    return inner if isinstance(inner, Predicting) else None
