"""Wide residual streams: what enters a layer's mixer (paper 2.2, "Size and cost", and 5.1).

A Gated Residual model keeps several residual streams of width d, here always laid end to end, W = streams * d wide.
Each layer mixes them down to d. The mix is *the layer's input*, what a map predicts:

    e_l = wide_l + embeddings_l(wide_l, tokens)      per-layer embeddings, in the layers that have them
    x_l = mean over streams of gate_l(norm(e_l)) * norm(e_l)

and x_l alone decides the keys, values, indexer keys or recurrent state that the layer writes. The normalisation is
part of the mix. A layer with per-layer embeddings keeps two more things, the last tokens and the state of a short
convolution; those come from the tokens and from wide_l.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ridgefill.errors import SettingError
from ridgefill.models.gathered import row_index

# Of some rows: ids [B, m], end of text on padding; [B, m] 0 on padding, or None.
Tokens = tuple[Tensor, Tensor | None]


def tokens_of(config: Any, ids: Tensor | None, real: Tensor | None) -> Tokens | None:
    """Ids [B, m] as per-layer embeddings read them; None where no layer has any, or the ids are not known.

    Args:
        real: [B, m] 0 on padding, or None.
    """
    if ids is None or not config.ple_layer_ids:
        return None
    if real is not None:
        end = config.eos_token_id
        ids = torch.where(real.bool(), ids, end[0] if isinstance(end, list) else end)
    return ids, real


def widen(config: Any, embedded: Tensor) -> Tensor:
    """Token embeddings [B, m, d] -> the wide state entering layer 0, [B, m, W]: every stream starts as a copy."""
    return embedded.repeat(1, 1, config.hc_count)


def layer_input(layer: Any, wide: Tensor, tokens: Tokens | None, cache: Any = None) -> Tensor:
    """x_l [B, m, d], the layer's own mix of the wide state that enters it, [B, m, W].

    Args:
        tokens: of the rows.
        cache: what earlier turns left; only read.

    Raises:
        SettingError: the layer has per-layer embeddings and the tokens are not known.
    """
    if layer.ple is not None:
        wide = wide + _embeddings(layer, wide, tokens, None if cache is None else _Unwritten(cache))
    return layer.attn_hyper_connection(wide)[0]


def write_embeddings(layer: Any, wide: Tensor | None, tokens: Tokens | None, cache: Any) -> None:
    """Carries the states of the layer's per-layer embeddings, if it has any, over the rows into ``cache``.

    The convolution reads values that were gated by the wide state and then normalised, which all but removes the
    gate: what it keeps is nearly the same from any wide state.

    Args:
        wide: [B, m, W] entering the layer, true or (in a filled row) the split layer's.

    Raises:
        SettingError: the layer has per-layer embeddings, and the tokens or the wide state are not known.
    """
    if layer.ple is not None:
        _embeddings(layer, wide, tokens, cache)


@contextmanager
def gathered(layer: Any, at: Tensor, wide: Tensor | None) -> Iterator[None]:
    """Inside, ``layer`` called on k kept rows reads its per-layer embeddings among all N rows.

    Args:
        at: [B, k] places of the kept rows among the N; a repeated place must hold the same row.
        wide: [B, N, W] for the other rows, as in `write_embeddings`.

    Raises:
        SettingError: as `write_embeddings`.
    """
    if layer.ple is None:
        yield
        return
    if wide is None:
        raise _unknown("the wide state of the filled rows is")
    every = wide

    def scatter(_: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
        kept = args[0]
        return (every.to(kept.dtype).scatter(1, row_index(at, kept), kept), *args[1:])

    handles = (
        layer.ple.register_forward_pre_hook(scatter),
        layer.ple.register_forward_hook(lambda _, __, out: out.gather(1, row_index(at, out))),
    )
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@dataclass(frozen=True)
class Normed:
    """A recurrent layer as `recurrent` sees it, where the layer's input comes normed already."""

    linear_attn: Any

    def input_layernorm(self, x: Tensor) -> Tensor:
        """x [B, m, d] itself."""
        return x


class _Unwritten:
    """A cache whose states are read and never written."""

    def __init__(self, cache: Any) -> None:
        self._cache = cache

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """The state that earlier turns left, or None."""
        return self._cache.get_conv_state(layer_idx, state_idx)

    def update_conv_state(self, states: Tensor, layer_idx: int, state_idx: int = 0, **_: Any) -> Tensor:
        """The state of earlier turns followed by ``states`` [B, c, m]."""
        past = self.get_conv_state(layer_idx, state_idx)
        return states if past is None else torch.cat([past, states], dim=-1)


def _embeddings(layer: Any, wide: Tensor | None, tokens: Tokens | None, cache: Any) -> Tensor:
    if wide is None:
        raise _unknown("the wide state of the rows is")
    if tokens is None:
        raise _unknown("the rows' tokens are")
    ids, real = tokens
    mask = None if real is None else real.to(wide.device)
    return layer.ple(wide, ids.to(wide.device), cache, conv_mask=mask)


def _unknown(what: str) -> SettingError:
    return SettingError(
        "the embeddings of a layer that looks its tokens up",
        f"{what} not known there",
        "give the prompt's token ids and its state at the split layer along with the rows",
    )
