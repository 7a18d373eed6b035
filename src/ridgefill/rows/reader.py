"""The model's attention as selectors read it: a few query rows at a time, never an n x n matrix (paper 2.4)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ridgefill.errors import SettingError
from ridgefill.models.gathered import (
    Places,
    ReadOnly,
    Scatter,
    gather_rows,
    join_rows,
    kept,
    one_sequence,
    row_index,
    run_gathered,
)

if TYPE_CHECKING:
    from ridgefill.models.decoder import Decoder, Rows
    from ridgefill.plan import FillPlan
    from ridgefill.rows.request import Request
    from ridgefill.walk import Prefix

CAPTURED = 512  # rows before the question's beginning, its end and the prompt's, whose lower states are kept


@dataclass
class Capture:
    """States that enter the lower attention layers, of the rows that selectors may ask with.

    Attributes:
        places: [B, c] places among the walk's rows.
        layers: the layers that are kept.
        states: layer -> [B, c, d].
    """

    places: Tensor
    layers: tuple[int, ...]
    states: dict[int, Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, decoder: Decoder, plan: FillPlan, n: int, padding: Tensor, request: Request) -> Capture:
        """For walks of n rows, which the prompt may exceed; without a question its end stands for it."""
        whole = n if request.ids is None else request.ids.shape[1]
        rows = []
        for b, pad in enumerate(padding.tolist()):
            question = request.of(b).question_in(whole - pad)
            ends = [whole] if question is None else [pad + question[0], pad + question[1], whole]
            wanted = {row for end in ends for row in range(max(pad, end - CAPTURED), min(end, n))}
            rows.append(torch.tensor(sorted(wanted)))
        c = max(map(len, rows))
        padded = [torch.cat([r, r[-1:].expand(c - len(r))]) for r in rows]
        layers = tuple(i for i in attention_layers(decoder) if i < plan.split)
        return cls(torch.stack(padded).to(padding.device), layers)

    def see(self, i: int, h: Tensor, start: int) -> None:
        """Keeps what is wanted of layer i's input h [B, m, d], the walk's rows from ``start`` on."""
        if i not in self.layers:
            return
        if i not in self.states:
            self.states[i] = h.new_zeros(*self.places.shape, h.shape[-1])
        here = (self.places >= start) & (self.places < start + h.shape[1])
        taken = h.gather(1, row_index((self.places - start).clamp(0, h.shape[1] - 1), h))
        self.states[i] = torch.where(here[..., None].to(h.device), taken, self.states[i].to(h.device))


def attention_layers(decoder: Decoder) -> tuple[int, ...]:
    """Layers whose attention reaches every earlier row."""
    return tuple(i for i in range(decoder.n_layers) if not decoder.recurrent(i) and decoder.window(i) is None)


@dataclass
class ModelReader:
    """One sequence of a walk, for selectors.

    Attributes:
        b: which sequence.
    """

    prefix: Prefix
    b: int
    capture: Capture | None

    @property
    def split(self) -> int:
        """S."""
        return self.prefix.plan.split

    @property
    def n_layers(self) -> int:
        """L."""
        return self.prefix.decoder.n_layers

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """Layers whose attention reaches every earlier row."""
        return attention_layers(self.prefix.decoder)

    @property
    def _pad(self) -> int:
        return int(self.prefix.padding[self.b])

    def lower(self, layers: Sequence[int], queries: range, peak: bool = False) -> Tensor:
        """[layers, heads, m]: attention of the prefix rows from the query rows, summed over the queries.

        The prompt's last row is left out: it runs in the model's own forward, after the rows are chosen. If it alone
        is asked for, the row before it stands for it.

        Args:
            layers: attention layers up to the split layer, whose own input is exact for every row.
            peak: the largest over the queries instead of the sum.

        Raises:
            SettingError: layers or rows that were not kept.
        """
        capture = self.capture
        able = tuple(i for i in self.attention_layers if i <= self.split)
        if capture is None or not layers or any(i not in able for i in layers):
            raise SettingError(
                f"attention of layers {', '.join(map(str, layers)) or 'none'}",
                f"the layers up to the split whose attention reaches the whole prompt are "
                f"{', '.join(map(str, able)) or 'none'}",
                "name some of those, or use a selector that reads no attention",
            )
        places = capture.places[self.b].tolist()
        where = {place - self._pad: j for j, place in reversed(list(enumerate(places)))}
        walked = self.prefix.h_split.shape[1] + self.prefix.tail - self._pad
        queries = range(queries.start, min(queries.stop, walked)) or range(walked - 1, walked)
        if any(row not in where for row in queries):
            raise SettingError(
                f"attention from rows {queries.start} to {queries.stop}",
                f"only the {CAPTURED} rows before the question's beginning, its end and the prompt's are kept",
                "use a shorter window",
            )
        at = torch.tensor([where[row] for row in queries], device=capture.places.device)
        place = capture.places[self.b, at]
        rows = self._rows(place)
        return torch.stack([self._lower(i, at, place, rows, capture, peak) for i in layers])

    def _lower(self, i: int, at: Tensor, place: Tensor, rows: Rows, capture: Capture, peak: bool) -> Tensor:
        """[heads, m] in layer i, from the captured rows ``at`` [q], which stand at ``place`` [q] in the walk."""
        if i == self.split:
            buffers, h = self._at_split()
            h = h[:, place]
        else:
            buffers = tuple(t[self.b : self.b + 1] for t in kept(self.prefix.cache.layers[i]))
            h = capture.states[i][self.b, at][None]
        m = self.prefix.h_split.shape[1]
        past = buffers[0].shape[-2] - m - self.prefix.tail
        first_key = self.prefix.hidden[self.b : self.b + 1]
        received, _ = self._attend(i, h, rows, ReadOnly(buffers, place[None] + past), first_key, peak)
        return received[:, past + self._pad : past + m]

    def _at_split(self) -> tuple[tuple[Tensor, ...], Tensor]:
        """What layer S keeps of every row, written from their exact states, and those states."""
        prefix, one, i = self.prefix, slice(self.b, self.b + 1), self.split
        parts = [(prefix.h_split, prefix.rows)]
        parts += [(prefix.after.h, prefix.after.rows)] if prefix.after is not None else []
        written, states = [], []
        for h, rows in parts:
            own = one_sequence(rows, self.b)
            states.append(h[one])
            written.append(prefix.decoder.writes(i, prefix.decoder.layer_input(i, h[one], own), own))
        layer = prefix.cache.layers[i]
        if layer.is_initialized:
            written.insert(0, tuple(t[one] for t in kept(layer)))
        return tuple(torch.cat(t, -2) for t in zip(*written, strict=True)), torch.cat(states, 1)

    def _attend(
        self, i: int, h: Tensor, rows: Rows, cache: Scatter, first_key: Tensor, peak: bool = False
    ) -> tuple[Tensor, Tensor]:
        """What the queries h [1, q, d] pay every slot in layer i, [heads, slots] on the host; the layer's output."""
        heads = self.prefix.decoder.config.num_attention_heads
        received = h.new_zeros(1, heads, cache.get_seq_length(), dtype=torch.float32)
        places = Places(cache.slots, 0, first_key, received=received, peak=peak)
        out = run_gathered(self.prefix.decoder, i, h, rows, places, cache)
        return received[0].cpu(), out

    def _rows(self, place: Tensor) -> Rows:
        """Positions and rotary embeddings of the walk's rows at the given places [q]."""
        prefix = self.prefix
        rows = one_sequence(prefix.rows, self.b)
        if prefix.after is not None:
            rows = join_rows(rows, one_sequence(prefix.after.rows, self.b))
        return gather_rows(rows, place[None])

    def probe(self, queries: int) -> Tensor:
        """[late attention layers, heads, m]: the last rows through the real late layers over the filled cache.

        Gated DeltaNet layers start from an empty state, as the paper has them (2.4, "Two sweeps"). Earlier turns are
        not read.
        """
        prefix, b = self.prefix, slice(self.b, self.b + 1)
        m, pad = prefix.h_split.shape[1], self._pad
        if prefix.after is None:
            raise SettingError("the probe", "the tail did not run with the prefix", "use a plan with a tail")
        q = min(queries, prefix.tail)
        h = prefix.after.h[b, -q:]
        place = torch.arange(m + prefix.tail - q, m + prefix.tail, device=h.device)
        rows, scratch, found = self._rows(place), prefix.empty_cache(), []
        for i in prefix.late_layers:
            if prefix.decoder.recurrent(i):
                h = prefix.decoder.run_layer(i, h, rows, scratch)
                continue
            room = tuple(
                torch.cat([t[b, ..., pad:, :], t.new_zeros(1, *t.shape[1:-2], q, t.shape[-1])], -2)
                for t in prefix.written[i]
            )
            slots = torch.arange(m - pad, m - pad + q, device=h.device)[None]
            received, h = self._attend(i, h, rows, Scatter(room, slots), slots.new_zeros(1))
            if prefix.decoder.window(i) is None:
                found.append(received[:, : m - pad])
        if not found:
            raise SettingError(
                "the probe",
                "no layer from the split up has attention that reaches the whole prompt",
                "use another selector",
            )
        return torch.stack(found)
