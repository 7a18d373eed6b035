"""The tail's attention without a mask: its queries see the whole prefix, and one another causally.

torch's CPU kernel aligns a causal mask to the upper left, so the stock path gives a [T, n] mask to the tail and pays
for every masked key and for the mask itself. Here the two parts run apart, prefix without a mask and tail causally,
and are merged by their log-sum-exps: the same attention, equal to the stock kernel to rounding.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

NAME = "ridgefill_tail"
_KERNEL: Any = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", None)


def usable(model: Any) -> bool:
    """Whether the model's attention can be replaced by this one, for the tail, without changing what it computes."""
    on_cpu = all(p.device.type == "cpu" for p in model.parameters())
    capped = getattr(model.config, "attn_logit_softcapping", None) is not None
    return _KERNEL is not None and on_cpu and not capped and model.config._attn_implementation == "sdpa"


def kernel_for(query: Tensor) -> bool:
    """Whether `attend` can compute this query's attention."""
    return _KERNEL is not None and query.device.type == "cpu"


class TailAttention:
    """Switches a model to this attention and back."""

    def __init__(self, model: Any) -> None:
        self.config: Any = model.config
        self._stock: str | None = None
        if NAME not in AttentionInterface._global_mapping:
            AttentionInterface.register(NAME, attend)
            AttentionMaskInterface.register(NAME, mask)

    def on(self) -> None:
        """The model's next forward calls use the split attention where they need no mask."""
        self._stock, self.config._attn_implementation = self.config._attn_implementation, NAME

    def off(self) -> None:
        """Back to the model's own attention; harmless if it is on already."""
        if self._stock is not None:
            self.config._attn_implementation, self._stock = self._stock, None


@contextmanager
def tail_attention(model: Any, on: bool = True) -> Iterator[None]:
    """Within it the model's attention is this one, if ``on`` and `usable`."""
    if not (on and usable(model)):
        yield
        return
    switch = TailAttention(model)
    switch.on()
    try:
        yield
    finally:
        switch.off()


def mask(
    batch_size: int, q_length: int, kv_length: int, q_offset: int = 0, kv_offset: int = 0, **kwargs: Any
) -> Tensor | None:
    """None where plain causal attention to every cached key is meant; the stock boolean mask elsewhere."""
    padding = kwargs.get("attention_mask")
    plain = (
        kwargs.get("allow_is_causal_skip", True)
        and kwargs.get("local_size") is None
        and kv_offset == 0
        and kv_length == q_offset + q_length
        and (padding is None or bool(padding.all()))
    )
    if plain:
        return None
    return sdpa_mask(batch_size, q_length, kv_length, q_offset, kv_offset, **kwargs)


def attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """Attention of the last T of n rows; the stock function wherever a mask is given.

    Args:
        query: [B, H, T, D].
        key, value: [B, H_kv, n, D].

    Returns:
        [B, T, H, D], None.
    """
    past = key.shape[2] - query.shape[2]
    if attention_mask is not None or past <= 0 or query.shape[2] == 1:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    scale = kwargs.get("scaling")
    among = flash(query, key[:, :, past:], value[:, :, past:], scale, causal=True)
    # The heads that share a key head ride as extra query rows: each key block is read once for all of them.
    heads, shared = key.shape[1], query.shape[1] // key.shape[1]
    packed = query.reshape(query.shape[0], heads, shared * query.shape[2], query.shape[3])
    out, lse = flash(packed, key[:, :, :past], value[:, :, :past], scale)
    prefix = out.reshape(query.shape), lse.reshape(among[1].shape)
    return merged(among, prefix).transpose(1, 2).contiguous(), None


def flash(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None, causal: bool = False, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Output [B, H, m, D] and log-sum-exp [B, H, m] of torch's CPU flash attention.

    Args:
        mask: added to the logits, [B, 1, m, keys] in q's dtype; every row must see something.
    """
    return _KERNEL(q, k, v, 0.0, causal, attn_mask=mask, scale=scale)  # `kernel_for` has seen that it exists


def merged(one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> Tensor:
    """Attention over two sets of keys from the attention over each, as `flash` gives it.

    The softmax over both is the parts' outputs, weighted by their shares of the normaliser.
    """
    share = torch.sigmoid(other[1] - one[1]).unsqueeze(-1).to(one[0].dtype)
    return torch.lerp(one[0], other[0], share)
