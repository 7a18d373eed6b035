"""Dropped rows: the late layers run for the kept rows alone, which see no other (SnapKV, FastKV; paper section 7)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ridgefill.errors import UnsupportedModelError
from ridgefill.fill.hidden import hide
from ridgefill.models.gathered import Places, Scatter, commit, run_gathered

if TYPE_CHECKING:
    from ridgefill.walk import ExactRows, Prefix


def write_kept(prefix: Prefix, exact: ExactRows) -> None:
    """Runs the exact rows, which see one another and no dropped row, and reserves and hides the others' slots.

    The rows that run are laid side by side, run, and put back into their places among empty slots, which stay hidden
    from whatever comes later.

    Raises:
        UnsupportedModelError: a model with several residual streams.
    """
    if prefix.decoder.wide:
        raise UnsupportedModelError(
            "no fill with chosen rows",
            "rows cannot be dropped from a model with several residual streams",
            "compare with another arm, or leave the rows out",
        )
    hidden, places = ~prefix.exact_mask(), _among_kept(prefix, exact)
    for i in prefix.late_layers:
        if prefix.decoder.recurrent(i):
            prefix.write_exact_only(i)
        else:
            _run_kept(prefix, exact, i, places)
            hide(prefix.decoder.layers[i], i, prefix.cache, hidden)


@dataclass(frozen=True)
class _AmongKept(Places):
    """Slots of the kept rows alone, side by side; a sliding window still counts the rows of the whole prompt.

    Attributes:
        held: [B, slots] the prompt row in each slot, ascending; -1 in a slot that no row needs.
    """

    held: Tensor | None = None

    def mask(self, rows: slice, keys: slice) -> Tensor:
        """[B, 1, rows, keys] True where a row may look."""
        seen = super().mask(rows, keys)
        if self.window is None or self.held is None:
            return seen
        row = self.held.gather(1, self.slots[:, rows])
        return seen & (self.held[:, None, keys] > row[:, :, None] - self.window)[:, None]


def _among_kept(prefix: Prefix, e: ExactRows) -> _AmongKept:
    """A slot for each kept row. A row that repeats (`ExactRows`) has one, and the first slots are then empty."""
    chosen = e.at[:, : e.chosen]
    new = torch.ones_like(chosen, dtype=torch.bool)
    new[:, 1:] = chosen[:, 1:] != chosen[:, :-1]
    unneeded = e.chosen - new.sum(1, keepdim=True)
    tail = torch.arange(e.chosen, e.at.shape[1], device=e.at.device).expand(len(e.at), -1)
    slots = torch.cat([new.cumsum(1) - 1 + unneeded, tail], 1)
    held = torch.full_like(e.at, -1).scatter(1, slots, e.at)
    first_key = (held < prefix.padding[:, None]).sum(1)  # padding, and slots that hold nothing
    return _AmongKept(slots, prefix.tail, first_key, held=held)


def _run_kept(prefix: Prefix, e: ExactRows, i: int, places: _AmongKept) -> None:
    """Attention layer i for the kept rows, over one another; what they write goes to their places in the cache."""
    decoder, rows = prefix.decoder, prefix.h_split.shape[1] + prefix.tail
    like = decoder.writes(i, e.h.new_zeros(len(e.h), 1, decoder.width_out), prefix.rows)
    room = tuple(t.new_zeros(*t.shape[:-2], places.slots.shape[1], t.shape[-1]) for t in like)
    e.h = run_gathered(decoder, i, e.h, e.rows, places, Scatter(room, places.slots))
    whole = Scatter(tuple(t.new_zeros(*t.shape[:-2], rows, t.shape[-1]) for t in like), e.at)
    for which, t in enumerate(room):
        slots = places.slots.to(t.device).view(len(t), *[1] * (t.ndim - 3), -1, 1)
        whole.put(which, t.gather(-2, slots.expand(t.shape)))
    commit(prefix.cache.layers[i], whole.buffers, rows)
