"""No fill: the late layers write nothing for the prefix, so there the tail attends only to itself (Table 3)."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ridgefill.compat import take_cache
from ridgefill.errors import SettingError

if TYPE_CHECKING:
    from ridgefill.walk import Prefix


@dataclass(frozen=True)
class NoFill:
    """The lower bound of every comparison. Rows that write nothing are hidden by the attention mask.

    One mask serves layers of all lengths in the model's own code, so an unwritten row keeps a slot of zeros, and a
    hook on each late layer masks it for as long as the cache lives. Exact leading rows stay visible. A copy of such a
    cache is not hidden: it is for measuring, not for serving.
    """

    name: str = "none"

    def write(self, prefix: Prefix) -> None:
        """Reserves the slots and hides them.

        Raises:
            SettingError: the model's attention takes no mask of that form.
        """
        kind = prefix.decoder.config._attn_implementation
        if kind not in ("sdpa", "eager"):
            raise SettingError(
                f"no fill with {kind} attention",
                "rows can only be hidden where the attention takes a [B, 1, q, kv] mask",
                "load the model with attn_implementation='sdpa' or 'eager'",
            )
        hidden = ~prefix.exact_mask()
        for i in prefix.late_layers:
            prefix.write_exact_only(i)
            if not prefix.decoder.recurrent(i):
                _hide(prefix.decoder.layers[i], i, prefix.cache, hidden)


def _hide(layer: Any, i: int, cache: Any, hidden: Tensor) -> None:
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
