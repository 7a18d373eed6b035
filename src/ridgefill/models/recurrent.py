"""Gated DeltaNet layers: a filled row carries the states of the convolution and of the recurrence on (paper 2.1)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from accelerate.utils import align_module_device
from torch import Tensor

from ridgefill.models.gathered import row_index

if TYPE_CHECKING:
    from ridgefill.models.decoder import Decoder, Rows


class OneLayer:
    """A cache as one of its layers is to see it.

    In older transformers every layer of olmo_hybrid asks whether the *last* recurrent one has a state. While a cache
    is filled layer by layer it has none yet, and a layer's second part would start from nothing.
    """

    def __init__(self, cache: Any, i: int) -> None:
        self._cache, self._i = cache, i

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)

    def has_previous_state(self, layer_idx: int | None = None, **kwargs: Any) -> bool:
        """Whether the layer named, or else this one, has a state."""
        return self._cache.has_previous_state(self._i if layer_idx is None else layer_idx, **kwargs)


def write_state(layer: Any, x: Tensor, mask: Tensor | None, cache: Any) -> None:
    """Carries both states of ``layer`` over the rows of ``x`` in order, into its part of ``cache``; nothing else.

    Args:
        layer: a decoder layer with ``input_layernorm`` and ``linear_attn``.
        x: [B, m, d] input of the layer, true or predicted.
        mask: [B, m] with 0 on padding rows, or None.
        cache: a transformers cache; the layer goes on from what it holds.
    """
    with _output_rows(layer.linear_attn, lambda rows: rows[:, :0]):
        # by position: the cache's name there changed with transformers 5.24
        layer.linear_attn(layer.input_layernorm(x), OneLayer(cache, layer.linear_attn.layer_idx), mask)


@contextmanager
def gathered(layer: Any, at: Tensor, x: Tensor) -> Iterator[None]:
    """Inside, ``layer`` called on k kept rows carries its states over all N rows, the others entering as ``x``.

    Args:
        at: [B, k] places of the kept rows among the N; a repeated place must hold the same row.
        x: [B, N, d] inputs of the layer; the rows at kept places are ignored.
    """
    every = layer.input_layernorm(x)

    def scatter(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        kept = args[0] if args else kwargs["hidden_states"]
        rows = every.to(kept.dtype).scatter(1, row_index(at, kept), kept)
        return ((rows, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": rows})

    handle = layer.linear_attn.register_forward_pre_hook(scatter, with_kwargs=True)
    try:
        with _output_rows(layer.linear_attn, lambda rows: rows.gather(1, row_index(at, rows))):
            yield
    finally:
        handle.remove()


def run_apart(decoder: Decoder, i: int, h: Tensor, keep: Tensor, rows: Rows, cache: Any) -> Tensor:
    """Recurrent layer i, whole, on rows of h [B, k, W] as if they followed one another; gives [B, k, W].

    Args:
        keep: [B, k] False on rows that are left out: they change no state, and their outputs mean nothing.
    """
    if bool(keep.all()):
        return decoder.run_layer(i, h, replace(rows, masks=None), cache)
    # What is left out goes first: there it is padding, which the layer passes over.
    order = keep.to(torch.long).argsort(dim=1, stable=True)
    mask = keep.gather(1, order).to(torch.long)
    out = decoder.run_layer(i, h.gather(1, row_index(order, h)), replace(rows, masks=mask), cache)
    return out.gather(1, row_index(order.argsort(dim=1), out))


def gates(layer: Any, x: Tensor, mask: Tensor | None) -> Tensor:
    """Logarithms of the forget gates, g = -exp(A_log) * softplus(a + dt_bias); the state keeps exp(g) at each row.

    Args:
        x: [B, m, d] input of the layer, true or predicted.
        mask: [B, m] with 0 on padding rows, which enter as zeros, or None.

    Returns:
        [B, m, H_v] fp32, at most 0.
    """
    mixer, h = layer.linear_attn, layer.input_layernorm(x)
    if mask is not None:
        h = h * mask[:, :, None].to(h.dtype)
    a = _step(mixer, h).float()
    with align_module_device(mixer):  # an offloaded layer's own parameters rest elsewhere between calls
        return -mixer.A_log.float().exp() * F.softplus(a + mixer.dt_bias)


def _step(mixer: Any, h: Tensor) -> Tensor:
    """The projection ``a`` [B, m, H_v] of the normed input, before its bias."""
    for name in ("in_proj_a", "a_proj"):
        if hasattr(mixer, name):
            return getattr(mixer, name)(h)
    each = mixer.num_v_heads // mixer.num_k_heads  # b and a lie side by side, key head by key head
    both = mixer.in_proj_ba(h).view(*h.shape[:-1], mixer.num_k_heads, 2 * each)
    return both[..., each:].flatten(-2)


@contextmanager
def _output_rows(mixer: Any, choose: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Inside, only the rows that ``choose`` leaves of [B, N, width] pass the mixer's output projection."""
    projection = mixer.out_proj if hasattr(mixer, "out_proj") else mixer.o_proj
    handle = projection.register_forward_pre_hook(lambda _, args: (choose(args[0]), *args[1:]))
    try:
        yield
    finally:
        handle.remove()
