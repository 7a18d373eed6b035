"""llama.cpp, unmodified, through llama-cpp-python: ``pip install "ridgefill[llamacpp]"``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ridgefill.engines.llamacpp.engine import RidgeLlama

__all__ = ["RidgeLlama"]


def __getattr__(name: str) -> Any:  # llama_cpp is loaded when the class is asked for, not before
    if name == "RidgeLlama":
        from ridgefill.engines.llamacpp.engine import RidgeLlama

        return RidgeLlama
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
