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
    from ridgefill.engines.transformers import Filling, filling
    from ridgefill.errors import RidgeFillError
    from ridgefill.fill import Exact, Identity, NoFill, Ridge, TrueInputs
    from ridgefill.fit import fit
    from ridgefill.load import load_model
    from ridgefill.maps import RidgeMaps
    from ridgefill.plan import FillPlan
    from ridgefill.prefill import FilledCache, PrefillStats, prefill

# Imported on first use: `ridgefill --help` must not wait for torch.
_HOME = {
    "Exact": "fill",
    "FillPlan": "plan",
    "FilledCache": "prefill",
    "Filling": "engines.transformers",
    "Identity": "fill",
    "NoFill": "fill",
    "PrefillStats": "prefill",
    "Ridge": "fill",
    "RidgeFillError": "errors",
    "RidgeMaps": "maps",
    "TrueInputs": "fill",
    "filling": "engines.transformers",
    "fit": "fit",
    "load_model": "load",
    "prefill": "prefill",
}

__all__ = [
    "Exact",
    "FillPlan",
    "FilledCache",
    "Filling",
    "Identity",
    "NoFill",
    "PrefillStats",
    "Ridge",
    "RidgeFillError",
    "RidgeMaps",
    "TrueInputs",
    "__version__",
    "filling",
    "fit",
    "load_model",
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
