"""What one prefill did."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ridgefill.devices import wait


@dataclass
class PrefillStats:
    """What one prefill did.

    Attributes:
        tokens: prompt tokens of the call, padding left out, summed over the batch.
        filled: prompt rows whose late layers were filled.
        exact: prompt rows that run every layer (tail, leading and selected rows, or all of them).
        selected: of these, prefix rows that a selector chose, beyond the leading ones.
        fill: the arm's name.
        reason: why everything ran exactly, or None.
        seconds: wall time of each stage: "lower", "select", "fill" (the late layers of all but the tail; of the
            tail too where it had to run with them) and, once the model has run, "tail".
    """

    tokens: int = 0
    filled: int = 0
    exact: int = 0
    selected: int = 0
    fill: str = "exact"
    reason: str | None = None
    seconds: dict[str, float] = field(default_factory=dict)

    def add_tail(self, ids: Tensor, mask: Tensor | None) -> None:
        """Counts the tail's real tokens, ids [B, T], which run exactly."""
        real = ids.numel() if mask is None else int(mask[:, -ids.shape[1] :].sum())
        self.tokens, self.exact = self.tokens + real, self.exact + real

    @contextmanager
    def stage(self, name: str, device: torch.device) -> Iterator[None]:
        """Times one stage, waiting for the device at both ends."""
        wait(device)
        start = time.perf_counter()
        yield
        wait(device)
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start


def exact_stats(ids: Tensor, mask: Tensor | None, reason: str) -> PrefillStats:
    """Stats of a prompt that runs exactly, and why."""
    stats = PrefillStats(reason=reason)
    stats.add_tail(ids, mask)
    return stats
