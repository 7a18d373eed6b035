"""The fastest setting that keeps to the user's limits, on the user's texts (paper section 9)."""

from __future__ import annotations

from ridgefill.tune.result import Figure, Limits, Trial, TuneResult
from ridgefill.tune.search import tune

__all__ = ["Figure", "Limits", "Trial", "TuneResult", "tune"]
