"""llama.cpp's attention as row selectors read it, and the rows that they choose.

The tail's lower layers run in the second context too; the queries of its rows are projected by ggml from what entered
those layers, the keys of every row are in the state. Layer 0 is not read: its input is no layer's output.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from ridgefill.engines.llamacpp.late_rows import F32, LateRows, Recipe
from ridgefill.engines.llamacpp.self_check import unpacked
from ridgefill.engines.llamacpp.tokenizer import GgufTokenizer
from ridgefill.errors import SettingError
from ridgefill.rows.base import Prompt
from ridgefill.rows.reader import CAPTURED

if TYPE_CHECKING:
    from ridgefill.engines.llamacpp.engine import RidgeLlama
    from ridgefill.engines.llamacpp.state import SequenceState


class QueryRows(LateRows):
    """Queries and keys of layers from their own inputs, float32, turned as the cache's keys are."""

    def _layer(self, layer: int, recipe: Recipe, graph: int) -> tuple[int, int]:
        model, turn, outs = self.model, self.form.rotate_keys, []
        x = self._normed(layer, self._predict(recipe))
        for name, heads in (("attn_q", model.heads), ("attn_k", model.kv_heads)):
            y = self._turned(layer, self._project(layer, name, x), heads, f"{name}_norm")
            outs.append(self._out_as(graph, y, model.key_width * heads, turn, F32))
        return outs[0], outs[1]


@dataclass
class GgufReader:
    """One prompt's attention (`ridgefill.rows.base.Reader`).

    Attributes:
        state: rows of the whole prompt, whose keys are there up to the split layer's of the prefix.
        queries: layer -> [k, heads, width] of the prompt's last rows.
        split_keys: [k, kv heads, width], theirs in the split layer.
        prefix: rows before the tail, m.
        start: the first of the last rows.
    """

    llm: RidgeLlama
    state: SequenceState
    queries: dict[int, np.ndarray]
    split_keys: np.ndarray
    prefix: int
    start: int

    @property
    def split(self) -> int:
        """S."""
        return self.llm.plan.split

    @property
    def n_layers(self) -> int:
        """L."""
        return self.llm._gguf.layers

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """Layers whose attention reaches every earlier row: all, or the engine refuses to choose rows."""
        return tuple(range(1, self.n_layers))

    def lower(self, layers: Sequence[int], queries: range, peak: bool = False) -> Tensor:
        """[layers, heads, m]: attention of the prefix rows from the query rows, summed over the queries.

        Raises:
            SettingError: layers above the split, or query rows before those that were kept.
        """
        if not layers or any(i not in self.queries for i in layers):
            raise SettingError(
                f"attention of layers {', '.join(map(str, layers)) or 'none'}",
                f"layers 1 to {self.split} can be read",
                "name some of those",
            )
        if queries.start < self.start:
            raise SettingError(
                f"attention from row {queries.start} on llama.cpp",
                f"the tail's rows and the last {CAPTURED}, from {self.start} on, can be asked for",
                "use a longer tail or a shorter window",
            )
        return torch.stack([self._lower(i, queries, peak) for i in layers])

    def _lower(self, layer: int, queries: range, peak: bool) -> Tensor:
        model, m = self.llm._gguf, self.prefix
        order = np.argsort(self.state.cache_of(layer).positions)
        rows = unpacked(self.state.read(layer, "keys", order), self.llm._form.key_type)
        keys = torch.from_numpy(rows.reshape(len(order), model.kv_heads, -1).copy())
        if layer == self.split:
            keys[m:] = torch.from_numpy(self.split_keys[m - self.start :])
        asked = torch.from_numpy(self.queries[layer][queries.start - self.start : queries.stop - self.start])
        each = model.heads // model.kv_heads
        out = []
        for head in range(model.heads):
            scores = asked[:, head] @ keys[:, head // each].T / model.key_width**0.5
            later = torch.arange(len(keys))[None] > torch.arange(queries.start, queries.stop)[:, None]
            paid = scores.masked_fill(later, -torch.inf).softmax(-1)[:, :m]
            out.append(paid.amax(0) if peak else paid.sum(0))
        return torch.stack(out)

    def probe(self, queries: int) -> Tensor:
        """Not on llama.cpp: the late layers would have to be read.

        Raises:
            SettingError: always.
        """
        raise SettingError(
            "the probe on llama.cpp", "late attention is not read there", "use another selector"
        )


def choose(
    llm: RidgeLlama, state: SequenceState, ids: Sequence[int], inputs: dict[int, np.ndarray], prefix: int
) -> np.ndarray:
    """Positions of the prefix rows, beyond the leading ones, that run every layer by the plan's selector, ascending.

    Args:
        state: rows of the whole prompt.
        inputs: layer -> [k, d], what entered layers 1 to the split of the prompt's last rows; none where
            nothing reads attention.
        prefix: m.
    """
    plan, reader = llm.plan, None
    if plan.rows is None:
        return np.empty(0, np.int32)
    if inputs:
        start = len(ids) - len(inputs[plan.split])
        recipes = {i: Recipe(((i, None),)) for i in inputs}
        rows = QueryRows(llm._gguf, recipes, llm._form, llm.rope_type, llm.n_threads_batch)
        parts: dict[int, list[tuple[np.ndarray, np.ndarray]]] = {i: [] for i in inputs}
        for _, layer, q, k in rows.compute(inputs, np.arange(start, len(ids), dtype=np.int32)):
            parts[layer].append((q.view(np.float32), k.view(np.float32)))
        rows.close()
        count, width = len(ids) - start, llm._gguf.key_width
        asked = {i: np.concatenate([q for q, _ in p]).reshape(count, -1, width) for i, p in parts.items()}
        keys = np.concatenate([k for _, k in parts[plan.split]]).reshape(count, -1, width)
        reader = GgufReader(llm, state, asked, keys, prefix, start)
    prompt = Prompt(
        torch.tensor(list(ids)), prefix, plan.leading, GgufTokenizer(llm), plan.table, llm.question, reader
    )
    chosen = plan.rows.select(prompt)
    chosen[: plan.leading] = False
    return np.flatnonzero(chosen.numpy()).astype(np.int32)
