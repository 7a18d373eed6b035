"""Lower layers for every row, then the late layers: filled rows, exact rows among them, the tail (paper Figure 5)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import DynamicCache

from ridgefill.compat import new_cache
from ridgefill.fill.base import SplitRows, predicting
from ridgefill.models import attention, recurrent
from ridgefill.models.decoder import Decoder, Rows
from ridgefill.models.gathered import (
    Places,
    Scatter,
    commit,
    gather_rows,
    join_rows,
    kept,
    row_index,
    run_gathered,
)
from ridgefill.models.tail_attention import tail_attention
from ridgefill.reading import Follower
from ridgefill.rows.base import Prompt
from ridgefill.rows.reader import Capture, ModelReader
from ridgefill.stats import PrefillStats

if TYPE_CHECKING:
    from ridgefill.plan import FillPlan
    from ridgefill.rows.request import Request


@dataclass
class ExactRows:
    """The rows that run every layer inside the walk, all together: chosen prefix rows, then the tail.

    Attributes:
        at: [B, k] their places among the walk's rows, ascending; a sequence with fewer repeats its last.
        chosen: r, how many of the k are prefix rows.
        h: [B, k, d] their states, entering the next late layer.
        rows: their positions and rotary embeddings.
    """

    at: Tensor
    chosen: int
    h: Tensor
    rows: Rows


@dataclass
class Prefix:
    """The prompt at the split layer: all an arm needs to write the late layers.

    Attributes:
        h_split: h_S of the m prefix rows, [B, m, d].
        rows: positions, masks and rotary embeddings of the prefix rows.
        cache: the cache to write; the layers below the split are written already.
        read: [B, m, K] what the arm's maps read of the prefix rows; h_split itself where they read no more.
        after: the t tail rows at the split, if the tail runs in the walk.
        exact: the rows that run every layer, or None.
        padding: [B] rows of padding before each sequence, among the walk's rows.
        hidden: [B] the same among all rows, those of earlier turns in the cache counted.
        written: attention layers' writes, kept between the first sweep and the second.
        sweep: 1 while the attention layers are filled for the probe, 2 otherwise.
    """

    decoder: Decoder
    plan: FillPlan
    h_split: Tensor
    rows: Rows
    cache: Any
    padding: Tensor
    hidden: Tensor
    read: Tensor
    after: SplitRows | None = None
    exact: ExactRows | None = None
    written: dict[int, tuple[Tensor, ...]] = field(default_factory=dict)
    sweep: int = 2

    @property
    def late_layers(self) -> range:
        """Layers S .. L-1."""
        return range(self.plan.split, self.decoder.n_layers)

    @property
    def tail(self) -> int:
        """t, the number of tail rows that run in the walk."""
        return 0 if self.after is None else self.after.h.shape[1]

    def first_read(self, i: int) -> int:
        """The first prefix row that a later token reads in layer i; rows before it need not be written."""
        # An exact row in mid-prompt reads what its own window holds; leading rows read only one another.
        if self.plan.rows is not None or self.decoder.recurrent(i):
            return 0
        return self.decoder.first_read(i, self.h_split.shape[1])

    def split_state(self, i: int) -> Tensor:
        """h_S of the rows that layer i must write, [B, m - first_read(i), d]."""
        return self.h_split[:, self.first_read(i) :]

    def at_split(self, i: int) -> SplitRows:
        """The rows that layer i must write, as the split knows them."""
        first = self.first_read(i)
        return SplitRows(self.h_split[:, first:], self.read[:, first:], self.rows, self.cache)

    def exact_mask(self) -> Tensor:
        """[B, m] True on the prefix rows that run every layer."""
        mask = torch.zeros(self.h_split.shape[:2], dtype=torch.bool, device=self.h_split.device)
        if self.exact is not None:
            mask.scatter_(1, self.exact.at[:, : self.exact.chosen], True)
        return mask

    def real_mask(self) -> Tensor:
        """[B, m] False on padding."""
        m = self.h_split.shape[1]
        return torch.arange(m, device=self.h_split.device) >= self.padding[:, None]

    def empty_cache(self) -> DynamicCache:
        """A scratch cache, for walks that must leave the real one alone."""
        return new_cache(self.decoder.model)

    # --- what arms call, once a layer, in layer order ---------------------------------------------------

    def write(self, i: int, inputs: Callable[[], Tensor], state: Tensor | None = None) -> None:
        """Writes what layer i keeps of the prefix, then runs the layer for the exact rows.

        Args:
            inputs: gives the filled rows' inputs of the layer, [B, m - first_read(i), d]; not called if an
                earlier sweep has written the layer.
            state: [B, m, d_in] that enters the layer, for per-layer embeddings; by default the split state.
        """
        if self.decoder.recurrent(i):
            if self.sweep == 2:  # the state is carried in order, once, when every row's input is known
                self._write_state(i, inputs(), self.h_split if state is None else state)
        else:
            self.write_ready(i, lambda: self._writes(i, inputs()))

    def write_ready(self, i: int, made: Callable[[], tuple[Tensor, ...]]) -> None:
        """As `write`, for arms that make what attention layer i keeps rather than its input.

        Args:
            made: gives keys at their positions and values of the filled rows, [B, H, m - first_read(i), D] each,
                and an indexer's keys where the layer has one; not called if an earlier sweep has written the layer.
        """
        if self.sweep == 1:
            self.written[i] = made()
        else:
            self._write_attention(i, self.written.pop(i) if i in self.written else made())

    def write_exact_only(self, i: int) -> None:
        """Writes nothing for filled rows: zeros where a slot is needed, the exact rows' own where there are any."""
        if not self.decoder.recurrent(i):
            h = self.split_state(i)
            self.write(i, lambda: h.new_zeros(*h.shape[:2], self.decoder.width_out))
        elif self.exact is not None:
            e, r = self.exact, self.exact.chosen
            parts = []
            if r:
                at = e.at[:, :r]
                new = torch.cat([torch.ones_like(at[:, :1], dtype=torch.bool), at[:, 1:] != at[:, :-1]], 1)
                keep = new & (at >= self.padding[:, None])
                out = recurrent.run_apart(
                    self.decoder, i, e.h[:, :r], keep, gather_rows(self.rows, at), self.cache
                )
                own = (new.cumsum(1) - 1)[..., None].expand_as(out)  # a repeated row is its first again
                parts.append(out.gather(1, own))
            if self.after is not None:
                parts.append(self.decoder.run_layer(i, e.h[:, r:], self.after.rows, self.cache))
            e.h = torch.cat(parts, 1)

    def tail_writes(self, i: int, window: int) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]] | None:
        """What layer i writes of the first tail rows, from their true inputs and from predicted ones.

        Returns:
            (true, predicted), keys and values first; None where the two inputs are the same.
        """
        fill, e, after = predicting(self.plan.fill), self.exact, self.after
        if i == self.plan.split or fill is None or e is None or after is None:
            return None
        t = min(window, self.tail)
        rows = gather_rows(
            e.rows, torch.arange(e.chosen, e.chosen + t, device=e.h.device).expand(len(e.h), -1)
        )
        true = self.decoder.writes(
            i, self.decoder.layer_input(i, e.h[:, e.chosen : e.chosen + t], rows), rows
        )
        return true, fill.writes(i, SplitRows(after.h[:, :t], after.read[:, :t], rows), self.decoder)

    # --- one layer --------------------------------------------------------------------------------------

    def _writes(self, i: int, x: Tensor) -> tuple[Tensor, ...]:
        return self.decoder.writes(i, x, self.rows)

    def _write_attention(self, i: int, written: tuple[Tensor, ...]) -> None:
        for correction in self.plan.corrections:
            written = correction.written(self, i, written)
        m = self.h_split.shape[1]
        if self.exact is None:
            attention.append(self.cache.layers[i], written, m)
            return
        e = self.exact
        buffers, past = self._buffers(i, written)
        slots = e.at + past
        # what a window has forgotten of earlier turns has no slot
        first_key = (self.hidden + past - self._past(i)).clamp(min=0)
        places = Places(slots, self.tail, first_key)
        e.h = run_gathered(self.decoder, i, e.h, e.rows, places, Scatter(buffers, slots))
        commit(self.cache.layers[i], buffers, m + self.tail)

    def _buffers(self, i: int, written: tuple[Tensor, ...]) -> tuple[tuple[Tensor, ...], int]:
        """Room for every row of layer i with the filled ones in place, and how many earlier rows come first."""
        layer, m, first = self.cache.layers[i], self.h_split.shape[1], self.first_read(i)
        held = layer.keys.shape[-2] if layer.is_initialized else 0
        if not held and not first and not self.tail:
            return written, 0
        buffers = []
        earlier = kept(layer) if held else (None,) * len(written)
        for old, new in zip(earlier, written, strict=True):
            room = new.new_zeros(*new.shape[:-2], held + m + self.tail, new.shape[-1])
            if old is not None:
                room[..., :held, :] = old
            room[..., held + first : held + m, :] = new
            buffers.append(room)
        return tuple(buffers), held

    def _past(self, i: int) -> int:
        """Rows of earlier turns, those included that a window has forgotten."""
        return self.cache.layers[i].get_seq_length()

    def _write_state(self, i: int, x: Tensor, state: Tensor) -> None:
        e, d = self.exact, self.decoder
        if e is None or not e.chosen:
            d.write_state(i, x, self.rows, self.cache, state)
            chosen = None if e is None else e.h[:, :0]
        else:
            chosen = e.h[:, : e.chosen]
            at = e.at[:, : e.chosen]
            if self.plan.corrections:  # they read what every row's update comes from
                true = d.layer_input(i, chosen, self.rows, self.cache, at, state)
                x = x.scatter(1, row_index(at, true), true)
            chosen = d.run_gathered_recurrent(i, chosen, at, x, self.rows, self.cache, state)
        for correction in self.plan.corrections:
            correction.state(self, i, x)
        if e is not None and chosen is not None:
            if self.after is not None:
                tail = d.run_layer(i, e.h[:, e.chosen :], self.after.rows, self.cache)
                chosen = torch.cat([chosen, tail], 1)
            e.h = chosen


def walk(
    decoder: Decoder,
    plan: FillPlan,
    ids: Tensor,
    positions: Tensor,
    mask: Tensor | None,
    cache: Any,
    request: Request,
    tail: int = 0,
) -> tuple[PrefillStats, Tensor | None]:
    """Writes ``cache`` for the rows of ``ids``: lower layers exactly, late layers by the plan (Figure 5).

    Args:
        ids: [B, m + tail]; they follow what the cache holds from earlier turns.
        positions: [B, m + tail].
        mask: [B, past + m + tail], 0 on padding, or None.
        cache: a transformers DynamicCache built for this model's config.
        request: what selectors may read beside the model.
        tail: how many of the rows belong to the tail.

    Returns:
        Stats, and the tail's output of the last layer [B, tail, d] (None without a tail).
    """
    stats = PrefillStats(fill=plan.fill.name)
    past = cache.get_seq_length()
    hidden = torch.zeros(len(ids), dtype=torch.long, device=ids.device)
    if mask is not None:
        hidden = (mask == 0).sum(1).to(ids.device)
    padding = (hidden - past).clamp(min=0)
    attends = plan.rows is not None and plan.rows.attends and not plan.fill_is_exact
    capture = Capture.of(decoder, plan, ids.shape[1], padding, request) if attends else None
    with stats.stage("lower", ids.device):
        parts = _lower(decoder, plan, ids, positions, mask, cache, tail, capture)
    first, after = parts[0], parts[1] if tail else None
    prefix = Prefix(decoder, plan, first.h, first.rows, cache, padding, hidden, first.read, after)
    if not plan.fill_is_exact:
        if plan.rows is not None and plan.rows.probes:
            with stats.stage("fill", ids.device):
                prefix.sweep = 1
                plan.fill.write(prefix)
                prefix.sweep = 2
        with stats.stage("select", ids.device):
            leading = 0 if past else plan.leading  # later turns have their sink in the cache
            chosen = _choose(prefix, capture, ids, request, leading)
            stats.selected = sum(map(len, chosen)) - int(_leading(prefix, leading).sum())
            prefix.exact = _exact(prefix, chosen)
    with stats.stage("fill", ids.device):
        plan.fill.write(prefix)
        decoder.settle(cache, positions)
    real = ids.numel() if mask is None else int(mask[:, past:].sum())
    behind = tail * len(ids) if mask is None else int(mask[:, mask.shape[1] - tail :].sum())
    stats.tokens = real
    stats.exact = int((prefix.exact_mask() & prefix.real_mask()).sum()) + behind
    if plan.fill.name == "exact":
        stats.exact = real
    stats.filled = real - stats.exact
    return stats, None if prefix.exact is None or not tail else prefix.exact.h[:, -tail:]


def _lower(
    decoder: Decoder,
    plan: FillPlan,
    ids: Tensor,
    positions: Tensor,
    mask: Tensor | None,
    cache: Any,
    tail: int,
    capture: Capture | None,
) -> list[SplitRows]:
    """Layers 0 .. S-1 for the prefix, then for the tail, as the stock model would: what the split knows of each."""
    past, m = cache.get_seq_length(), ids.shape[1] - tail
    fill, parts = predicting(plan.fill), []
    follower = Follower(getattr(fill, "maps", None))
    for start, stop in ((0, m), (m, m + tail)):
        if start == stop:
            continue
        with tail_attention(decoder.model, on=start > 0):
            h = decoder.embed(ids[:, start:stop])
            seen = None if mask is None else mask[:, : past + stop]
            rows = decoder.rows(h, positions[:, start:stop], seen, cache, ids[:, start:stop])
            states = {}
            for i in range(plan.split):
                if capture is not None:
                    capture.see(i, h, start)
                if i in follower.layers:
                    states[i] = h
                h = decoder.run_layer(i, h, rows, cache)
        parts.append(SplitRows(h, follower.of(states | {plan.split: h}), rows, cache))
    return parts


def _leading(prefix: Prefix, count: int) -> Tensor:
    """[B, m] True on the first rows of every sequence."""
    place = torch.arange(prefix.h_split.shape[1], device=prefix.padding.device) - prefix.padding[:, None]
    return (place >= 0) & (place < count)


def _choose(
    prefix: Prefix, capture: Capture | None, ids: Tensor, request: Request, leading: int
) -> list[Tensor]:
    """Places of the prefix rows that run exactly, ascending, for each sequence."""
    chosen = _leading(prefix, leading)
    m, rows = prefix.h_split.shape[1], prefix.plan.rows
    whole = ids if request.ids is None else request.ids
    if rows is not None:
        for b, pad in enumerate(prefix.padding.tolist()):
            if pad >= m:  # shorter than the tail
                continue
            reader = ModelReader(prefix, b, capture)
            given = request.of(b)
            prompt = Prompt(
                whole[b, pad:].cpu(),
                m - pad,
                leading,
                given.tokenizer,
                given.table,
                given.question_in(whole.shape[1] - pad),
                reader,
            )
            with torch.no_grad():
                chosen[b, pad:] |= rows.select(prompt).to(chosen.device)
    return [row.nonzero()[:, 0] for row in chosen]


def _exact(prefix: Prefix, chosen: list[Tensor]) -> ExactRows | None:
    """The chosen rows and the tail, gathered; None if there are none."""
    r, m = max(map(len, chosen)), prefix.h_split.shape[1]
    if not r and not prefix.tail:
        return None
    # A sequence with fewer repeats its last one, which writes the same twice; one with none runs its last row.
    last = [c[-1:] if len(c) else c.new_tensor([m - 1]) for c in chosen]
    at = torch.stack([torch.cat([c, e.expand(r - len(c))]) for c, e in zip(chosen, last, strict=True)])
    h = prefix.h_split.gather(1, row_index(at, prefix.h_split))
    rows = gather_rows(prefix.rows, at)
    if prefix.after is not None:
        behind = torch.arange(m, m + prefix.tail, device=at.device).expand(len(at), -1)
        at = torch.cat([at, behind], 1)
        h = torch.cat([h, prefix.after.h], 1)
        rows = join_rows(rows, prefix.after.rows)
    return ExactRows(at, r, h, rows)
