"""The exact arm, and its check: writing from the true inputs (Table 3)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from ridgefill.walk import Prefix


@dataclass(frozen=True)
class Exact:
    """Nothing is skipped: the late layers run whole for every prefix row."""

    name: str = "exact"

    def write(self, prefix: Prefix) -> None:
        """Runs the late layers on the prefix, which writes their caches."""
        h = prefix.h_split
        for i in prefix.late_layers:
            h = prefix.decoder.run_layer(i, h, prefix.rows, prefix.cache)


@dataclass(frozen=True)
class TrueInputs:
    """Writes as a fill does, but from the true h_l: must equal `Exact` bit for bit, or the model is not supported.

    A check of the writing path, not a way to save time: every layer runs.
    """

    name: str = "true"

    def write(self, prefix: Prefix) -> None:
        """Runs the late layers beside the cache, and fills the cache from the inputs they had."""
        h, beside = prefix.h_split, prefix.empty_cache()
        for i in prefix.late_layers:
            prefix.write(i, partial(_inputs, i, h, prefix), h)
            h = prefix.decoder.run_layer(i, h, prefix.rows, beside)


def _inputs(i: int, h: Tensor, prefix: Prefix) -> Tensor:
    return prefix.decoder.layer_input(i, h, prefix.rows, prefix.cache)[:, prefix.first_read(i) :]
