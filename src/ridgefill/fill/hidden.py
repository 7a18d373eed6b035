"""Rows of a cache that nobody may see: hidden by a mask for as long as the cache lives (paper Table 3)."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

from ridgefill.compat import take_cache
from ridgefill.errors import SettingError


def refuse_unmasked(asked: str, config: Any) -> None:
    """Raises SettingError where the model's attention takes no mask that hides rows."""
    kind = config._attn_implementation
    if kind not in ("sdpa", "eager"):
        raise SettingError(
            f"{asked} with {kind} attention",
            "rows can only be hidden where the attention takes a [B, 1, q, kv] mask",
            "load the model with attn_implementation='sdpa' or 'eager'",
        )


def hide(layer: Any, i: int, cache: Any, hidden: Tensor) -> None:
    """Masks the ``hidden`` [B, m] first rows in ``layer``'s attention whenever it runs over ``cache``."""
    owner = weakref.ref(cache)

    def hook(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
        cache = take_cache(kwargs)
        if cache is None or cache is not owner():
            return None
        h = args[0] if args else kwargs["hidden_states"]
        kwargs["attention_mask"] = _mask_out(kwargs.get("attention_mask"), h, cache, i, hidden)
        return args, kwargs

    handle = layer.register_forward_pre_hook(hook, with_kwargs=True)
    weakref.finalize(cache, handle.remove)


def _mask_out(mask: Tensor | None, h: Tensor, cache: Any, i: int, hidden: Tensor) -> Tensor:
    """The layer's mask [B, 1, q, kv] with the hidden rows masked as well."""
    length, offset = cache.get_mask_sizes(h.shape[1], i)
    columns = torch.zeros(h.shape[0], length, dtype=torch.bool, device=h.device)
    columns[:, : max(0, hidden.shape[1] - offset)] = hidden[:, offset:].to(h.device)
    columns = columns[:, None, None, :]
    if mask is not None and mask.dtype == torch.bool:
        return mask & ~columns
    if mask is None:  # the model leaves the mask out for a single query row, which sees every key
        mask = torch.zeros(h.shape[0], 1, h.shape[1], length, dtype=h.dtype, device=h.device)
    return mask.masked_fill(columns, torch.finfo(mask.dtype).min)
