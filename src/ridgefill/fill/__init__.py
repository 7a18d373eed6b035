"""The arms of Table 3, one file each: how the late layers of prefix rows are written."""

from ridgefill.fill.base import Fill
from ridgefill.fill.exact import Exact, TrueInputs
from ridgefill.fill.identity import Identity
from ridgefill.fill.none import NoFill
from ridgefill.fill.ridge import Ridge

__all__ = ["Exact", "Fill", "Identity", "NoFill", "Ridge", "TrueInputs"]
