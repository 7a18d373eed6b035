"""One step of vLLM's model runner with filled rows in it (paper Figure 5, in a batch).

The lower layers run for all rows of the step, as ever. Of each late layer, filled rows write their keys and values,
then the exact rows (leading and chosen rows, tails, decoding requests, prompts that are not filled) run it, as requests
of their own: one for each run of consecutive rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.config import CUDAGraphMode
from vllm.forward_context import get_forward_context, override_forward_context
from vllm.v1.attention.backend import CommonAttentionMetadata

from ridgefill.engines.vllm.late import LateLayer
from ridgefill.engines.vllm.rows import Division, Part, Run
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
    """How far a request's prefix has been read.

    Attributes:
        follower: remembers the last row read, for maps that read the row before.
        reached: the row after it.
    """

    follower: Follower
    reached: int = 0


class SplitModel:
    """A loaded vLLM model, cut at the split.

    Args:
        model: a ``*ForCausalLM``.
        split: S.
        maps: or None, for the identity fill.
    """

    def __init__(self, model: Any, split: int, maps: RidgeMaps | None) -> None:
        self.base, self.split, self.maps = model.model, split, maps
        self.layers = list(self.base.layers)
        gives = "inputs" if maps is None else maps.reading.gives
        held = {} if maps is None else maps.maps
        streamed = maps is not None and maps.streamed
        self.late = [
            LateLayer(self.layers[i], held.get(i), gives, streamed) for i in range(split, len(self.layers))
        ]
        if maps is not None:
            maps.maps = {}  # every rank has cut or folded its own
            where = next(self.layers[0].parameters())
            maps.down = None if maps.down is None else maps.down.to(where.device, where.dtype)

    @property
    def reads_before(self) -> bool:
        """Whether maps read the row before, which must then have run in the same or an earlier step."""
        return self.maps is not None and bool(self.maps.reading.previous)

    def names(self) -> list[str]:
        """The late layers' names in vLLM's dictionaries."""
        return [late.attention.attn.layer_name for late in self.late]

    def lower(self, ids: Tensor, positions: Tensor) -> dict[int, Tensor]:
        """States that enter the layers that maps read, and the split: layer -> [n, d]."""
        wanted = () if self.maps is None else self.maps.reading.layers
        h, rest, states = self.base.embed_input_ids(ids), None, {}
        for i, layer in enumerate(self.layers[: self.split]):
            if i in wanted:
                states[i] = h if rest is None else h + rest
            h, rest = layer(positions, h, rest)
        states[self.split] = h if rest is None else h + rest
        return states

    def read(self, states: Mapping[int, Tensor], parts: list[Part], progress: Mapping[int, Progress]) -> Tensor:
        """[f, K] what maps read of the filled rows.

        Args:
            progress: row of the batch -> how far its request's prefix has been read; goes on.
        """
        found = []
        for part in parts:
            if not part.prefix:
                continue
            own = {i: t[None, part.first : part.first + part.prefix] for i, t in states.items()}
            done = progress[part.row]
            given = done.follower.of(own)[0]
            done.reached = part.start + part.prefix
            found.append(given[torch.from_numpy(~part.exact[: part.prefix]).to(given.device)])
        return torch.cat(found)

    def forward(
        self,
        ids: Tensor,
        positions: Tensor,
        parts: list[Part],
        division: Division,
        progress: Mapping[int, Progress],
        groups: list[Group],
        tables: Mapping[int, Tensor],
    ) -> Tensor:
        """The last layer's normed output [n, d] of the exact rows; zeros for filled rows, which nothing reads.

        Args:
            ids, positions: [n] of the step's rows, padding included.
            tables: cache group -> [requests, blocks] its block table.
        """
        context = get_forward_context()
        states = self.lower(ids, positions)
        filled, exact = (torch.from_numpy(t).to(ids.device) for t in (division.filled, division.exact))
        h = states[self.split]
        read, h_filled, at_filled = self.read(states, parts, progress), h[filled], positions[filled]
        h_exact, at_exact, rest = h[exact], positions[exact], None
        late_context = exact_context(context, groups, division.runs, tables, exact, at_exact)
        with override_forward_context(late_context):
            for late in self.late:
                slots = context.slot_mapping[late.attention.attn.layer_name]
                late.write(read, h_filled, at_filled, slots[filled])
                if division.runs:
                    h_exact, rest = late.layer(at_exact, h_exact, rest)
        out = h.new_zeros(len(ids), h.shape[-1])
        if division.runs:
            out[exact], _ = self.base.norm(h_exact, rest)
        return out


def exact_context(
    context: Any,
    groups: list[Group],
    runs: tuple[Run, ...],
    tables: Mapping[int, Tensor],
    exact: Tensor,
    positions: Tensor,
) -> Any:
    """The forward context in which late layers see the exact rows alone.

    Args:
        context: vLLM's, of the whole step.
        tables: cache group -> [requests, blocks] its block table.
        exact, positions: [e] the rows' places in the step, and in their requests.
    """
    slots: dict[str, Any] = dict(context.slot_mapping)
    metadata: dict[str, Any] = dict(context.attn_metadata)
    for group in groups if runs else ():
        own = slots[group.names[0]][exact]
        built = group.attention.build_metadata(as_requests(runs, tables[group.number], own, positions))
        for name in group.names:
            slots[name], metadata[name] = own, built
    return replace(
        context,
        attn_metadata=metadata,
        slot_mapping=slots,
        cudagraph_runtime_mode=CUDAGraphMode.NONE,
        batch_descriptor=None,
        is_padding=None,
    )


def as_requests(
    runs: tuple[Run, ...], table: Tensor, slots: Tensor, positions: Tensor
) -> CommonAttentionMetadata:
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
