"""What a row's update of a Gated DeltaNet layer is made from, to compare inputs by (paper 2.2)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def project(layer: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values that ``layer`` computes from its input, each row by itself.

    They are what enters the layer's short convolution, as an attention layer's keys are taken before rotary
    embedding: neither mixes in other rows. Its queries are left out, which write nothing into the state, and
    its gates, a number a head.

    Args:
        layer: a decoder layer with ``linear_attn`` and, unless its input comes normalised, ``input_layernorm``.
        x: [B, m, d] input of the layer, true or predicted.

    Returns:
        keys [B, m, H_k * dk] and values [B, m, H_v * dv].
    """
    mixer = layer.linear_attn
    h = layer.input_layernorm(x) if hasattr(layer, "input_layernorm") else x
    if hasattr(mixer, "k_proj"):
        return mixer.k_proj(h), mixer.v_proj(h)
    if hasattr(mixer, "in_proj_qkv"):
        sizes = [mixer.key_dim, mixer.key_dim, mixer.value_dim]
        _, keys, values = torch.split(mixer.in_proj_qkv(h), sizes, dim=-1)
        return keys, values
    # Fused key head by key head: the model's own function puts them in order.
    _, keys, values, *_ = mixer.fix_query_key_value_ordering(mixer.in_proj_qkvz(h), mixer.in_proj_ba(h))
    return keys.flatten(2), values.flatten(2)
