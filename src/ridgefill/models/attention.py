"""Attention layers: what a filled row writes, and where (paper 2.1: keys and values, nothing else)."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer

from ridgefill.reading import unit


def project(layer: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """Keys before rotary embedding and values that ``layer`` computes from its input.

    Args:
        layer: a decoder layer with ``self_attn`` and, unless it norms its outputs instead, ``input_layernorm``.
        x: [B, m, d] input of the layer, true or predicted.

    Returns:
        keys, values: [B, H_kv, m, head_dim] each.
    """
    return heads(layer, *flat(layer, x))


def flat(layer: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """As `project`, keys before their norm; [B, m, H_kv * head_dim] each."""
    attention = layer.self_attn
    h = layer.input_layernorm(x) if hasattr(layer, "input_layernorm") else x
    return attention.k_proj(h), attention.v_proj(h)


def heads(layer: Any, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """What `project` gives of what `flat` gave."""
    attention = layer.self_attn
    by_head, norm = (*keys.shape[:-1], -1, attention.head_dim), getattr(attention, "k_norm", None)
    if norm is not None:  # over one head, or over all of them at once
        keys = norm(keys.view(by_head) if norm.weight.shape[-1] == attention.head_dim else keys)
    return keys.view(by_head).transpose(1, 2), values.view(by_head).transpose(1, 2)


def targets(layer: Any, x: Tensor) -> Tensor:
    """What maps that give keys and values are fitted to: [B, m, 2 H_kv head_dim], keys first.

    Where keys are normed, a key's length means nothing: each is taken at the length that its norm would give it, so
    that short and long ones count alike.

    Args:
        x: [B, m, d] true input of the layer.
    """
    keys, values = flat(layer, x)
    norm = getattr(layer.self_attn, "k_norm", None)
    if norm is not None:
        keys = unit(keys.unflatten(-1, (-1, norm.weight.shape[-1]))).flatten(-2)
    return torch.cat([keys, values], -1)


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
