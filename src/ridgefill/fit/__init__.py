"""Fitting ridge maps in closed form (paper 2.2)."""

from ridgefill.fit.run import fit

__all__ = ["fit"]
