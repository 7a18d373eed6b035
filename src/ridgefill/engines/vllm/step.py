"""One step of vLLM's model runner with filled rows in it (paper Figure 5, in a batch).

The lower layers run for all rows of the step, as ever. Of each late layer, filled rows write their keys and values,
then the exact rows (leading and chosen rows, tails, decoding requests, prompts that are not filled) run it, as
requests of their own: one for each run of consecutive rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.config import CUDAGraphMode
from vllm.forward_context import get_forward_context, override_forward_context, set_forward_context
from vllm.v1.attention.backend import CommonAttentionMetadata

from ridgefill.engines.vllm.joint import Kept, seen
from ridgefill.engines.vllm.late import LateLayer
from ridgefill.engines.vllm.recurrent import LateRecurrent, Others
from ridgefill.engines.vllm.rows import Part, Run, runs_of
from ridgefill.engines.vllm.stacks import stacks
from ridgefill.maps import RidgeMaps
from ridgefill.reading import Follower


@dataclass(frozen=True)
class Group:
    """Late layers whose caches share one block table and one kind of attention metadata.

    Attributes:
        number: of the cache group.
        attention: vLLM's ``AttentionGroup``.
        names: of its late layers.
    """

    number: int
    attention: Any
    names: tuple[str, ...]


@dataclass
class Progress:
    """How far a request's prompt has been read.

    Attributes:
        follower: remembers the last row read, for maps that read the row before.
        reached: the row after it.
        kept: of a prompt that is filled as a whole, or None.
    """

    follower: Follower
    reached: int = 0
    kept: Kept | None = None


@dataclass(frozen=True)
class LateRows:
    """One request's rows in the late layers.

    Attributes:
        row: the request's row in the batch.
        filled: [f] positions; ``read`` [f, K] what maps read of them, ``h`` [f, d] their split states.
        exact: [e] positions; ``entering`` [e, d] their states.
        places: [e] theirs among the step's rows; -1 where an earlier step had them.
        own: [f] those of the filled rows, for recurrent layers.
        kept: what corrections measure on, or None.
    """

    row: int
    filled: Tensor
    read: Tensor
    h: Tensor
    exact: Tensor
    entering: Tensor
    places: Tensor
    own: Tensor
    kept: Kept | None = None


class SplitModel:
    """A loaded vLLM model, cut at the split.

    Args:
        model: a ``*ForCausalLM``.
        split: S.
        maps: or None, for the identity fill. Its maps are taken out of it: every rank cuts or folds its own.
        config: the ``VllmConfig``.
    """

    def __init__(self, model: Any, split: int, maps: RidgeMaps | None, config: Any) -> None:
        self.base, self.split, self.maps, self.config = model.model, split, maps, config
        self.layers = list(self.base.layers)
        gives = "inputs" if maps is None else maps.reading.gives
        held = {} if maps is None else maps.maps
        streamed = maps is not None and maps.streamed
        self.late: list[LateLayer | LateRecurrent] = []
        for i, layer in enumerate(self.layers[split:], split):
            if hasattr(layer, "linear_attn"):
                self.late.append(LateRecurrent(layer, held.pop(i, None), streamed))
            else:
                self.late.append(LateLayer(layer, held.pop(i, None), gives, streamed))
        self.wanted = () if maps is None else maps.reading.layers[:-1]
        self.below, self.above = stacks(self.base, split, self.wanted, config)
        # corrections need a layer's true rows before its filled ones are written, recurrent layers need both together
        self.in_one = not any(isinstance(layer, LateRecurrent) for layer in self.late)
        if maps is not None and maps.down is not None:
            where = next(self.layers[0].parameters())
            maps.down = maps.down.to(where.device, where.dtype)

    @property
    def reads_before(self) -> bool:
        """Whether maps read the row before, which must then have run in the same or an earlier step."""
        return self.maps is not None and bool(self.maps.reading.previous)

    def lower(self, ids: Tensor, positions: Tensor, hooked: bool = False) -> dict[int, Tensor]:
        """States that enter the layers that maps read, and the split: layer -> [n, d].

        Args:
            hooked: run layer by layer in Python, because compiled code calls no hooks (`joint.seen`).
        """
        run = self.below.forward if hooked else self.below
        states = run(self.base.embed_input_ids(ids), positions)
        return dict(zip((*self.wanted, self.split), states, strict=True))

    def warm_up(self, rows: int) -> None:
        """Runs both stacks once on ``rows`` rows of nothing, so that no request waits for their compilation."""
        weight = next(self.layers[0].parameters())
        h = weight.new_zeros(rows, self.config.model_config.get_hidden_size())
        positions = torch.zeros(rows, dtype=torch.long, device=weight.device)
        if self.config.model_config.uses_mrope:
            positions = positions.expand(3, -1).contiguous()
        with set_forward_context(None, self.config, num_tokens=rows):
            self.below(h, positions)
            if self.in_one:
                self.above(h, positions)

    def read(self, states: Mapping[int, Tensor], part: Part, progress: Progress) -> Tensor:
        """[part.read, K] what maps read of the part's first rows; ``progress`` goes on."""
        own = {i: t[None, part.first : part.first + part.read] for i, t in states.items()}
        progress.reached = part.start + part.read
        return progress.follower.of(own)[0]

    def forward(
        self,
        ids: Tensor,
        positions: Tensor,
        parts: list[Part],
        progress: Mapping[int, Progress],
        groups: list[Group],
        tables: Mapping[int, Any],
    ) -> Tensor:
        """The last layer's normed output [n, d] of the exact rows; zeros for all others, which nothing reads.

        Args:
            ids, positions: [n] of the step's rows, padding included.
            progress: row of the batch -> its request's.
            tables: cache group -> vLLM's ``BlockTable``.
        """
        # graphs were captured of the stock forward alone
        context = replace(
            get_forward_context(), cudagraph_runtime_mode=CUDAGraphMode.NONE, batch_descriptor=None
        )
        watched = [(k, p) for p in parts if p.whole and (k := progress[p.row].kept) is not None and k.layers]
        with override_forward_context(context), ExitStack() as stack:
            for kept, part in watched:
                stack.enter_context(seen(self.layers, kept, part))
            states = self.lower(ids, positions, hooked=bool(watched))
        late = [rows for part in parts if (rows := self._late(states, part, progress)) is not None]
        out = states[self.split].new_zeros(len(ids), states[self.split].shape[-1])
        if late:
            self._run(late, context, groups, tables, out, positions.ndim == 2)
        for rows in late:
            if rows.kept is not None:
                progress[rows.row].kept = None  # its rows are written, and their states wanted no more
        return out

    def _late(
        self, states: Mapping[int, Tensor], part: Part, progress: Mapping[int, Progress]
    ) -> LateRows | None:
        """The part's rows in the late layers; None while a prompt that is filled as a whole is not all there."""
        h = states[self.split][part.first : part.first + part.count]
        read = self.read(states, part, progress[part.row]) if part.read else h[:0]
        places = torch.arange(part.first, part.first + part.count)
        at = torch.arange(part.start, part.start + part.count)
        if part.whole and (kept := progress[part.row].kept) is not None:
            kept.add(h[: part.read], read)
            if not kept.complete:
                return None
            return self._whole(kept, part, h)
        exact, own = (torch.from_numpy(mask) for mask in (part.exact, ~part.exact))
        filled = own.nonzero()[:, 0].to(h.device)
        chosen = exact.nonzero()[:, 0].to(h.device)
        taken = read[filled] if part.read else read
        return LateRows(part.row, at[own], taken, h[filled], at[exact], h[chosen], places[exact], places[own])

    def _whole(self, kept: Kept, part: Part, h: Tensor) -> LateRows:
        """All late rows of a prompt whose last row is in this step, and what of it was generated since."""
        every, read = kept.joined()
        chosen = kept.choose(self)
        after = h[part.read :]
        n = len(every)
        exact = np.concatenate([np.flatnonzero(chosen), np.arange(n, n + len(after))])
        filled = torch.from_numpy(np.flatnonzero(~chosen))
        places = torch.from_numpy(np.where(exact >= part.start, exact - part.start + part.first, -1))
        at = torch.from_numpy(exact)
        entering = torch.cat([every, after])[at.to(h.device)]
        mine = filled.to(h.device)
        return LateRows(part.row, filled, read[mine], every[mine], at, entering, places, filled, kept)

    def _run(
        self,
        late: list[LateRows],
        context: Any,
        groups: list[Group],
        tables: Mapping[int, Any],
        out: Tensor,
        positions_by_kind: bool,
    ) -> None:
        """Runs the late layers, and writes their output into ``out`` [n, d].

        Args:
            context: vLLM's, of the whole step.
            positions_by_kind: rotary embeddings take three positions a token.
        """
        device = out.device
        rows = [r.row for r in late]
        filled, exact = [r.filled for r in late], [r.exact for r in late]
        at_filled, at_exact = (torch.cat(t).to(device) for t in (filled, exact))
        h = torch.cat([r.h for r in late])
        # requests without a filled row have read nothing, of whatever width
        read = torch.cat([r.read for r in late if len(r.read)]) if len(h) else h
        entering = torch.cat([r.entering for r in late])
        places = torch.cat([r.places for r in late]).to(device)
        others = Others(torch.cat([r.own for r in late]).to(device), places, len(out))
        runs = [run for r in late for run in runs_of(r.row, r.exact.numpy())]
        slots: dict[str, Tensor] = {}
        metadata, exact_slots = dict(context.attn_metadata), dict(context.slot_mapping)
        for group in groups:
            table = tables[group.number]
            own, theirs = (
                torch.cat([slots_of(table, row, at) for row, at in zip(rows, ats, strict=True)])
                for ats in (filled, exact)
            )
            slots |= dict.fromkeys(group.names, own)
            if runs:
                common = as_requests(runs, table.get_device_tensor(max(rows) + 1), theirs, at_exact)
                metadata |= dict.fromkeys(group.names, group.attention.build_metadata(common))
                exact_slots |= dict.fromkeys(group.names, theirs)
        exact_context = replace(context, attn_metadata=metadata, slot_mapping=exact_slots, is_padding=None)
        if positions_by_kind:  # time, height and width; text has the same in each
            at_filled, at_exact = (t.expand(3, -1) for t in (at_filled, at_exact))
        correcting = any(r.kept is not None and r.kept.plan.corrections for r in late)
        with override_forward_context(exact_context):
            if self.in_one and not correcting:
                for layer in self.late if len(h) else ():
                    if isinstance(layer, LateLayer):
                        layer.write(*layer.predicted(read, h, at_filled), slots[layer.name])
                done = self.above(entering, at_exact) if runs else entering
            else:
                done = self._by_layer(late, read, h, at_filled, slots, entering, at_exact, others)
        if runs:
            out[places[places >= 0]] = done[places >= 0]

    def _by_layer(
        self,
        late: list[LateRows],
        read: Tensor,
        h: Tensor,
        at_filled: Tensor,
        slots: Mapping[str, Tensor],
        entering: Tensor,
        at_exact: Tensor,
        others: Others,
    ) -> Tensor:
        """The late layers one by one, [e, d] of the exact rows; arguments as in `_run`."""
        rest = None
        for i, layer in enumerate(self.late, self.split):
            if isinstance(layer, LateRecurrent):
                entering, rest = layer.run(at_exact, entering, rest, layer.predicted(read, h), others)
                continue
            if len(h):
                keys, values = layer.predicted(read, h, at_filled)
                state = entering if rest is None else entering + rest
                layer.write(*corrected(late, layer, i, keys, values, state), slots[layer.name])
            if len(entering):
                entering, rest = layer.layer(positions=at_exact, hidden_states=entering, residual=rest)
        return self.base.norm(entering, rest)[0] if len(entering) else entering


def corrected(
    late: list[LateRows], layer: LateLayer, i: int, keys: Tensor, values: Tensor, entering: Tensor
) -> tuple[Tensor, Tensor]:
    """Layer i's filled keys and values [f, H_kv, D] as the plan's corrections leave them.

    Args:
        entering: [e, d] true states of the exact rows.
    """
    found, f, e = [], 0, 0
    for rows in late:
        own = slice(f, f + len(rows.filled))
        mine = keys[own], values[own]
        if rows.kept is not None:
            mine = rows.kept.corrected(layer, i, *mine, entering[e : e + len(rows.exact)], rows.exact)
        found.append(mine)
        f, e = own.stop, e + len(rows.exact)
    return torch.cat([k for k, _ in found]), torch.cat([v for _, v in found])


def slots_of(table: Any, row: int, positions: Tensor) -> Tensor:
    """[n] slots in a cache group of a request's ``positions`` [n].

    Args:
        table: vLLM's ``BlockTable``; ``row`` is the request's in it.
    """
    own = table.get_device_tensor(row + 1)[row]
    at = positions.to(own.device)
    return own[at // table.block_size].to(torch.int64) * table.block_size + at % table.block_size


def as_requests(runs: list[Run], table: Tensor, slots: Tensor, positions: Tensor) -> CommonAttentionMetadata:
    """Runs of exact rows as attention sees requests: each with its own queries, over its request's blocks."""
    counts = torch.tensor([run.count for run in runs], dtype=torch.int32)
    starts = torch.zeros(len(runs) + 1, dtype=torch.int32)
    starts[1:] = counts.cumsum(0)
    lengths = torch.tensor([run.length for run in runs], dtype=torch.int32)
    where = torch.tensor([run.row for run in runs])
    device = table.device
    return CommonAttentionMetadata(
        query_start_loc=starts.to(device),
        query_start_loc_cpu=starts,
        seq_lens=lengths.to(device),
        num_reqs=len(runs),
        num_actual_tokens=int(starts[-1]),
        max_query_len=int(counts.max()),
        max_seq_len=int(lengths.max()),
        block_table_tensor=table[where.to(device)].contiguous(),
        slot_mapping=slots,
        causal=True,
        positions=positions,
        is_prefilling=counts > 1,
        seq_lens_cpu_upper_bound=lengths,
    )
