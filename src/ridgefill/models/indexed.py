"""Attention with an indexer: what a filled row writes, and how scattered rows run (paper 2.1 and 5.1).

Beside keys and values every row leaves an indexer key, from which later queries choose the blocks of rows that they
attend to. It is kept as projected: blocks are averaged, normalised and rotated when they are read. The rows'
positions are kept once for all layers, in the first one that has an indexer.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ridgefill.models.gathered import Places, Scatter

Ropes = tuple[Tensor, Tensor]


def index_keys(layer: Any, x: Tensor) -> Tensor:
    """The indexer keys [B, m, index_head_dim] that ``layer`` writes from its input x [B, m, d]."""
    indexer = layer.self_attn.indexer
    # The whole product, as the model computes it: fewer columns may be rounded differently.
    return indexer.index_qk_proj(x)[..., indexer.index_n_heads * indexer.index_head_dim :]


def settle(cache_layer: Any, positions: Tensor) -> None:
    """Appends the positions of the rows whose keys ``cache_layer``, the first indexed one, has got since they came.

    Args:
        positions: [B, m] of the last rows written; nothing is appended twice.
    """
    past = cache_layer.indexer_position_ids
    new = cache_layer.get_seq_length() - (0 if past is None else past.shape[-1])
    if new > 0:
        rows = positions[:, -new:].expand(cache_layer.keys.shape[0], -1)[None].expand(3, -1, -1)
        cache_layer.indexer_position_ids = rows if past is None else torch.cat([past, rows], dim=-1)


def seen_positions(cache_layer: Any, positions: Tensor) -> Tensor:
    """Positions [B, past + m] of everything that rows at ``positions`` [B, m] can see, themselves included."""
    past = cache_layer.indexer_position_ids
    return positions if past is None else torch.cat([past[0], positions.expand(past.shape[1], -1)], dim=-1)


# --- rows gathered among filled ones ------------------------------------------------------------------------


class IndexedScatter:
    """A `Scatter` that takes an indexer's keys as well, into the third of its buffers."""

    is_compileable = False

    def __init__(self, scatter: Scatter) -> None:
        self._scatter = scatter
        self.update = scatter.update

    def update_indexer(self, keys: Tensor, *_: Any, **__: Any) -> Tensor:
        """Puts keys [B, k, index_head_dim] into their slots; returns all of them."""
        return self._scatter.put(2, keys)


@dataclass(frozen=True)
class IndexedPlaces(Places):
    """Places that an indexer can read as it reads a boolean mask [B, 1, k, slots], and can narrow.

    Their ``tail`` is 0: no row may be taken to see everything before it.

    Attributes:
        length: slots.
        narrowed: [B, 1, k, slots] True on what the indexer chose, or None before it has.
    """

    length: int = 0
    narrowed: Tensor | None = None

    @classmethod
    def of(cls, places: Places, length: int) -> IndexedPlaces:
        """The places of rows that look at ``length`` slots."""
        return cls(
            slots=places.slots,
            tail=0,
            first_key=places.first_key,
            window=places.window,
            received=places.received,
            length=length,
        )

    def mask(self, rows: slice, keys: slice) -> Tensor:
        """[B, 1, rows, keys] True where a row may look."""
        seen = super().mask(rows, keys)
        return seen if self.narrowed is None else seen & self.narrowed[:, :, rows, keys]

    # What an indexer asks of a mask:

    @property
    def dtype(self) -> torch.dtype:
        """A boolean mask's."""
        return torch.bool

    @property
    def device(self) -> torch.device:
        """Where the places are."""
        return self.slots.device

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Of the mask that this stands for."""
        return (len(self.slots), 1, self.slots.shape[1], self.length)

    def __getitem__(self, at: tuple[int, int, int]) -> Tensor:
        """[slots] True where row ``at`` = (sequence, 0, row) may look; padding sees itself."""
        b, _, row = at
        key = torch.arange(self.length, device=self.device)
        own = self.slots[b, row]
        return ((key <= own) & (key >= self.first_key[b])) | (key == own)

    def __and__(self, chosen: Tensor) -> IndexedPlaces:
        """Narrowed to ``chosen`` [B, 1, k, slots]."""
        return replace(self, narrowed=chosen)


def key_positions(mask: Places | Tensor, length: int) -> Tensor:
    """[B, slots] of cached rows among which gathered ones run: padding stands on the left only.

    Args:
        mask: the places, or the mask [B, 1, k, slots] in a float dtype that was made of them.
    """
    # The last row sees everything of its sequence before it.
    first = (mask[:, 0, -1] == 0).int().argmax(-1) if isinstance(mask, Tensor) else mask.first_key
    return (torch.arange(length, device=first.device) - first[:, None]).clamp(min=0)


def behind(seen: Ropes, own: Ropes) -> Ropes:
    """Rotary embeddings with which the stock layer runs rows that are not the last ones.

    It rotates indexer keys by a slot's place from the start, and queries and keys by the last entries, one a row: so
    the rows' own stand behind everybody's.

    Args:
        seen: cos, sin [B, slots, r].
        own: cos, sin [B, k, r].

    Returns:
        cos, sin [B, slots + k, r].
    """
    cos, sin = (torch.cat([a.expand(len(b), -1, -1), b], dim=1) for a, b in zip(seen, own, strict=True))
    return cos, sin
