"""Make the first token of a long prompt come sooner, on models people already run, with nothing trained.

>>> import ridgefill
>>> maps = ridgefill.RidgeMaps.load("maps/split-15")            # doctest: +SKIP
>>> with ridgefill.filling(model, maps, tail=1024) as f:         # doctest: +SKIP
...     out = model.generate(**inputs, max_new_tokens=64)
>>> f.stats                                                      # doctest: +SKIP
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from ridgefill.correct import KeyRescale, TerminalState, ValueRescale
    from ridgefill.engines.transformers import Filling, filling
    from ridgefill.errors import RidgeFillError
    from ridgefill.fill import Exact, Identity, NoFill, Ridge, TrueInputs
    from ridgefill.fit import fit
    from ridgefill.load import load_model
    from ridgefill.maps import RidgeMaps
    from ridgefill.plan import FillPlan
    from ridgefill.prefill import FilledCache, PrefillStats, prefill
    from ridgefill.rows import (
        AttentionRows,
        AttentionScore,
        Combined,
        DigitRows,
        LeadingRows,
        LexicalRows,
        LongerTail,
        OverlapScore,
        PeakScore,
        ProbeRows,
        ProbeScore,
        ProtectedRows,
        RandomRows,
        SpanRows,
        SpecialRows,
        parse_rows,
    )

# Imported on first use: `ridgefill --help` must not wait for torch.
_HOME = {
    "AttentionRows": "rows",
    "AttentionScore": "rows",
    "Combined": "rows",
    "DigitRows": "rows",
    "Exact": "fill",
    "FillPlan": "plan",
    "FilledCache": "prefill",
    "Filling": "engines.transformers",
    "Identity": "fill",
    "KeyRescale": "correct",
    "LeadingRows": "rows",
    "LexicalRows": "rows",
    "LongerTail": "rows",
    "NoFill": "fill",
    "OverlapScore": "rows",
    "PrefillStats": "stats",
    "PeakScore": "rows",
    "ProbeRows": "rows",
    "ProbeScore": "rows",
    "ProtectedRows": "rows",
    "RandomRows": "rows",
    "Ridge": "fill",
    "RidgeFillError": "errors",
    "RidgeMaps": "maps",
    "SpanRows": "rows",
    "SpecialRows": "rows",
    "TerminalState": "correct",
    "TrueInputs": "fill",
    "ValueRescale": "correct",
    "filling": "engines.transformers",
    "fit": "fit",
    "load_model": "load",
    "parse_rows": "rows",
    "prefill": "prefill",
}

__all__ = [
    "AttentionRows",
    "AttentionScore",
    "Combined",
    "DigitRows",
    "Exact",
    "FillPlan",
    "FilledCache",
    "Filling",
    "Identity",
    "KeyRescale",
    "LeadingRows",
    "LexicalRows",
    "LongerTail",
    "NoFill",
    "OverlapScore",
    "PeakScore",
    "PrefillStats",
    "ProbeRows",
    "ProbeScore",
    "ProtectedRows",
    "RandomRows",
    "Ridge",
    "RidgeFillError",
    "RidgeMaps",
    "SpanRows",
    "SpecialRows",
    "TerminalState",
    "TrueInputs",
    "ValueRescale",
    "__version__",
    "filling",
    "fit",
    "load_model",
    "parse_rows",
    "prefill",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'ridgefill' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"ridgefill.{_HOME[name]}"), name)
    globals()[name] = value
    return value


class _Package(ModuleType):
    """Keeps ``ridgefill.fit`` and ``ridgefill.prefill`` functions, whatever was imported first.

    Importing a submodule binds it in the package under its name; here that name is left to ``__getattr__``.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        if not (isinstance(value, ModuleType) and _HOME.get(name) == name):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
