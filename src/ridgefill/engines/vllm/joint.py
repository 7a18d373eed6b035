"""Prompts that are filled as a whole: something reads the tail before the late layers are written (paper 2.3, 2.4).

vLLM prefills in chunks, and the tail comes in the last of them. So the lower layers run chunk by chunk, the split
states are kept, and everything late happens in the step that has the prompt's last row. Such a prompt neither reads
the prefix cache nor can another read its blocks before they are written (`scheduler.py`).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from vllm.distributed import get_tensor_model_parallel_world_size, tensor_model_parallel_all_gather

from ridgefill.engines.vllm.late import LateLayer, turned
from ridgefill.engines.vllm.rows import Part
from ridgefill.errors import RidgeFillError, SettingError
from ridgefill.plan import FillPlan
from ridgefill.rows.base import Prompt
from ridgefill.rows.reader import CAPTURED

if TYPE_CHECKING:
    from ridgefill.engines.vllm.step import SplitModel

log = logging.getLogger("vllm.ridgefill")


@dataclass
class Kept:
    """What is kept of a prompt until all of it is there.

    Attributes:
        plan: the operator's.
        tail: of this request.
        ids: [n] its prompt.
        layers: lower layers whose queries and keys are kept, because a selector reads attention.
        tokenizer, table: for selectors.
        h, read: of each chunk, [c, d] and [c, K].
        keys: layer -> of each chunk [c, H_kv, D]; ``queries`` of the prompt's last rows alone, [*, H, D].
    """

    plan: FillPlan
    tail: int
    ids: Tensor
    layers: tuple[int, ...] = ()
    tokenizer: Any = None
    table: Any = None
    h: list[Tensor] = field(default_factory=list)
    read: list[Tensor] = field(default_factory=list)
    keys: dict[int, list[Tensor]] = field(default_factory=dict)
    queries: dict[int, list[Tensor]] = field(default_factory=dict)

    @property
    def prefix(self) -> int:
        """m."""
        return len(self.ids) - self.tail

    @property
    def first_query(self) -> int:
        """The first row whose queries are kept."""
        return max(0, len(self.ids) - CAPTURED - 1)  # the last row does not ask

    @property
    def complete(self) -> bool:
        """Whether every row of the prompt is there."""
        return sum(map(len, self.h)) == len(self.ids)

    def add(self, h: Tensor, read: Tensor) -> None:
        """The next rows' split states [c, d] and what maps read of them [c, K]."""
        self.h.append(h.clone())
        same = (
            read.shape == h.shape and read.data_ptr() == h.data_ptr()
        )  # plain maps read the split state itself
        self.read.append(self.h[-1] if same else read.clone())

    def joined(self) -> tuple[Tensor, Tensor]:
        """Split states [n, d] and what maps read [n, K], of the whole prompt; put together once."""
        if len(self.h) > 1:
            same = self.read[0] is self.h[0]
            self.h = [torch.cat(self.h)]
            self.read = list(self.h) if same else [torch.cat(self.read)]
        return self.h[0], self.read[0]

    def choose(self, model: SplitModel) -> np.ndarray:
        """[n] True on the rows that run every layer; all of them where the selector refuses, which the log says."""
        chosen = np.zeros(len(self.ids), bool)
        chosen[: self.plan.leading] = chosen[self.prefix :] = True
        if self.plan.rows is not None:
            reader = AttentionReader(self, model)
            prompt = Prompt(
                self.ids, self.prefix, self.plan.leading, self.tokenizer, self.table, reader=reader
            )
            try:
                chosen[: self.prefix] |= self.plan.rows.select(prompt).numpy()
            except RidgeFillError as error:
                log.warning("this prompt runs exactly: %s", error)
                chosen[:] = True
        return chosen

    def corrected(
        self, layer: LateLayer, i: int, keys: Tensor, values: Tensor, entering: Tensor, exact: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Layer i's filled keys and values [f, H_kv, D] as the plan's corrections leave them.

        Args:
            entering: [e, d] true states of the exact rows, at positions ``exact`` [e].
        """
        written = tuple(t.transpose(0, 1)[None] for t in (keys, values))
        for correction in self.plan.corrections:
            written = correction.written(_Tail(self, layer, entering, exact), i, written)  # type: ignore[arg-type]
        keys, values = (t[0].transpose(0, 1) for t in written)
        return keys, values


@dataclass
class _Tail:
    """What corrections read of a prompt: stands in for `walk.Prefix`."""

    kept: Kept
    layer: LateLayer
    entering: Tensor
    exact: Tensor

    def tail_writes(self, i: int, window: int) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]] | None:
        """What layer i writes of the first tail rows, from true inputs and from predicted ones, [1, H_kv, t, D]."""
        kept = self.kept
        if i == kept.plan.split:
            return None
        first = int(torch.searchsorted(self.exact, kept.prefix))
        t = min(window, kept.tail - 1)  # the prompt's last row runs by itself elsewhere, and is not measured
        rows = slice(kept.prefix, kept.prefix + t)
        positions = torch.arange(rows.start, rows.stop, device=self.entering.device)
        every, read = kept.joined()
        true = self.layer.true(self.entering[first : first + t], positions)
        predicted = self.layer.predicted(read[rows], every[rows], positions)
        by_head = [tuple(x.transpose(0, 1)[None] for x in both) for both in (true, predicted)]
        return by_head[0], by_head[1]


@dataclass
class AttentionReader:
    """A prompt's attention (`ridgefill.rows.base.Reader`)."""

    kept: Kept
    model: SplitModel

    @property
    def split(self) -> int:
        """S."""
        return self.model.split

    @property
    def n_layers(self) -> int:
        """L."""
        return len(self.model.layers)

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """Layers whose attention reaches every earlier row: all, or such a plan is refused."""
        return tuple(range(self.n_layers))

    def lower(self, layers: Sequence[int], queries: range, peak: bool = False) -> Tensor:
        """[layers, heads, m]: attention of the prefix rows from the query rows, summed over the queries.

        The prompt's last row does not ask, as in `rows.reader.ModelReader`.

        Raises:
            SettingError: layers above the split, or rows that were not kept.
        """
        kept, last = self.kept, len(self.kept.ids) - 1
        if not layers or any(i > self.split for i in layers):
            raise SettingError(
                f"attention of layers {', '.join(map(str, layers)) or 'none'}",
                f"layers 0 to {self.split} can be read",
                "name some of those",
            )
        queries = range(queries.start, min(queries.stop, last)) or range(last - 1, last)
        if queries.start < kept.first_query:
            raise SettingError(
                f"attention from row {queries.start} in vLLM",
                f"the queries of rows from {kept.first_query} on are kept",
                "use a shorter window",
            )
        found = torch.stack([self._lower(i, queries, peak) for i in layers])
        if get_tensor_model_parallel_world_size() > 1:
            found = tensor_model_parallel_all_gather(found, dim=1)
        return found.cpu()

    def _lower(self, i: int, queries: range, peak: bool) -> Tensor:
        """[this rank's heads, m] in layer i."""
        attention = self.model.layers[i].self_attn
        if i == self.split:
            asked, keys = self._at_split(attention, queries)
        else:
            first = self.kept.first_query
            asked = torch.cat(self.kept.queries[i])[queries.start - first : queries.stop - first]
            keys = torch.cat(self.kept.keys[i])
        rows = torch.arange(queries.start, queries.stop, device=keys.device)
        later = torch.arange(len(keys), device=keys.device)[None] > rows[:, None]
        shared, out = asked.shape[1] // keys.shape[1], []
        for head in range(asked.shape[1]):
            scores = asked[:, head].float() @ keys[:, head // shared].float().T * attention.scaling
            paid = scores.masked_fill(later, -torch.inf).softmax(-1)[:, : self.kept.prefix]
            out.append(paid.amax(0) if peak else paid.sum(0))
        return torch.stack(out)

    def _at_split(self, attention: Any, queries: range) -> tuple[Tensor, Tensor]:
        """Queries of the query rows and keys of every row in the split layer, whose inputs are exact."""
        h, _ = self.kept.joined()
        qkv, _ = attention.qkv_proj(self.model.layers[self.split].input_layernorm(h))
        positions = torch.arange(len(h), device=h.device)
        own = slice(queries.start, queries.stop)
        asked = turned(attention, qkv[own, : attention.q_size], positions[own], "q_norm")
        keys = qkv[:, attention.q_size : attention.q_size + attention.kv_size]
        return asked, turned(attention, keys, positions, "k_norm")

    def probe(self, queries: int) -> Tensor:
        """Refused when the server starts (docs/decisions/0021).

        Raises:
            SettingError: always.
        """
        raise SettingError("the probe in vLLM", "late attention is not read there", "use another selector")


@contextmanager
def seen(layers: Sequence[Any], kept: Kept, part: Part) -> Iterator[None]:
    """Within the block, what the lower layers' attention is given of the part's prompt rows is kept."""
    rows = slice(part.first, part.first + part.read)
    skipped = max(0, kept.first_query - part.start)  # rows whose queries nobody asks with

    def keep(i: int, module: Any, given: tuple[Tensor, ...]) -> None:
        query, key = given[0][rows], given[1][rows]
        kept.keys.setdefault(i, []).append(key.unflatten(-1, (module.num_kv_heads, -1)).clone())
        own = query[skipped:].unflatten(-1, (module.num_heads, -1)).clone()
        kept.queries.setdefault(i, []).append(own)

    handles = [
        layers[i].self_attn.attn.register_forward_pre_hook(lambda m, given, i=i: keep(i, m, given))
        for i in kept.layers
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
