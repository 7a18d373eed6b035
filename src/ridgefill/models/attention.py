"""Attention layers: what a filled row writes, and where (paper 2.1: keys and values, nothing else)."""

from __future__ import annotations

import sys
from typing import Any

from torch import Tensor
from transformers.cache_utils import DynamicLayer


def project(layer: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """Keys before rotary embedding and values that ``layer`` computes from its input.

    Args:
        layer: a decoder layer with ``self_attn`` and, unless it norms its outputs instead, ``input_layernorm``.
        x: [B, m, d] input of the layer, true or predicted.

    Returns:
        keys, values: [B, H_kv, m, head_dim] each.
    """
    attention = layer.self_attn
    h = layer.input_layernorm(x) if hasattr(layer, "input_layernorm") else x
    by_head = (*h.shape[:-1], -1, attention.head_dim)
    keys, norm = attention.k_proj(h), getattr(attention, "k_norm", None)
    if norm is not None:  # over one head, or over all of them at once
        keys = norm(keys.view(by_head) if norm.weight.shape[-1] == attention.head_dim else keys)
    keys = keys.view(by_head)
    return keys.transpose(1, 2), attention.v_proj(h).view(by_head).transpose(1, 2)


def rotate(layer: Any, keys: Tensor, rope: tuple[Tensor, Tensor] | None) -> Tensor:
    """Keys [B, H_kv, m, head_dim] at their own positions, by the model's own rotary function (None: it has none)."""
    if rope is None:
        return keys
    apply = sys.modules[type(layer.self_attn).__module__].apply_rotary_pos_emb
    return apply(keys[:, :0], keys, *rope)[1]  # no query heads: a filled row has no query


def append(cache_layer: Any, written: tuple[Tensor, ...], rows: int) -> None:
    """Appends what ``rows`` prefix rows wrote; the first rows may be absent where a window hides them.

    Args:
        cache_layer: the layer's part of a transformers cache, still empty or holding earlier turns.
        written: keys, values [B, H_kv, m, head_dim] and, where the layer has an indexer, its keys
            [B, m, index_head_dim]; the last m of the ``rows`` rows.
    """
    keys, values = written[:2]
    if type(cache_layer) is DynamicLayer and not cache_layer.is_initialized:
        cache_layer.lazy_initialization(keys, values)
        cache_layer.keys, cache_layer.values = keys, values  # `update` would copy them once more
        return
    cache_layer.update(keys, values)
    if len(written) > 2:
        cache_layer.update_indexer(written[2])
    if hasattr(cache_layer, "cumulative_length"):
        cache_layer.cumulative_length += rows - keys.shape[-2]
