"""Fitting ridge maps in closed form (paper 2.2)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ridgefill.fit.run import fit

__all__ = ["fit"]


def __getattr__(name: str) -> Any:
    # The driver imports the maps, and the maps' folder format imports `fit.quantize`: load the driver when asked for.
    if name != "fit":
        raise AttributeError(f"module 'ridgefill.fit' has no attribute {name!r}")
    from ridgefill.fit.run import fit

    return fit
