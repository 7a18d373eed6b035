"""Corrections that push the filled cache back towards the exact one (paper 2.3), one file each."""

from ridgefill.correct.base import Correction
from ridgefill.correct.rescale import KeyRescale, ValueRescale
from ridgefill.correct.terminal_state import TerminalState

__all__ = ["Correction", "KeyRescale", "TerminalState", "ValueRescale"]
