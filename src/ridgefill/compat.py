"""What differs between the supported transformers versions, in one place."""

from __future__ import annotations

from typing import Any

import transformers
from packaging.version import Version
from transformers import DynamicCache

TESTED_TRANSFORMERS = ("5.17", "5.25")  # supported range, upper end excluded; both ends are tested

# 5.24 renamed the argument; older versions swallow an unknown `cache=` in **kwargs and cache nothing.
CACHE_ARG = "cache" if Version(transformers.__version__) >= Version("5.24.0.dev0") else "past_key_values"


def cache_kwarg(cache: Any) -> dict[str, Any]:
    """The cache as keyword argument of a model's, layer's or ``generate``'s call."""
    return {CACHE_ARG: cache}


def take_cache(kwargs: dict[str, Any]) -> Any:
    """The cache among a forward call's keyword arguments, under either name, or None."""
    found = kwargs.get(CACHE_ARG)
    return found if found is not None else kwargs.get("past_key_values")


def new_cache(model: Any) -> DynamicCache:
    """An empty cache whose layers have the types that the model's config names."""
    return DynamicCache(config=model.config)
