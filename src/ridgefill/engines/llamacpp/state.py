"""llama.cpp's sequence state: the bytes of `llama_state_seq_get_data`, parsed, and late rows written into them.

The layout is no stable interface. It is parsed completely before anything is written, and bytes that do not come out
even are refused by name::

    u32 magic, i32 sequence, then per cache (one; two where some layers have a sliding window, theirs second):
    u32 streams (1), u32 cells;  per cell: i32 position, u32 sequences (1), i32 sequence
    u32 v_trans, u32 layers
    keys of every layer:    i32 type, u64 bytes of a row, [cells] rows
    values of every layer:  the same where v_trans is 0 (flash attention);
                            else i32 type, u32 bytes of an element, u32 width, [width][cells] elements
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ridgefill.errors import RidgeFillError

MAGIC = 0xAF143CD8  # `io_magic` in llama-context.cpp
SEQ_VERSIONS = (3,)  # LLAMA_STATE_SEQ_VERSION of the layouts that were read and tested
_CELL = np.dtype([("position", "<i4"), ("sequences", "<u4"), ("sequence", "<i4")])


class StateLayoutError(RidgeFillError):
    """The bytes of a llama.cpp state are not laid out as this version knows them."""


@dataclass(frozen=True)
class Rows:
    """One layer's keys or values among a state's bytes.

    Attributes:
        type: ggml's number of the element type.
        start: offset of the first byte.
        row_bytes: bytes of one cell's row; of one element where ``transposed``.
        width: elements per cell where ``transposed``, else 0.
        transposed: laid out as [width, cells].
    """

    type: int
    start: int
    row_bytes: int
    width: int = 0
    transposed: bool = False


@dataclass(frozen=True)
class Cache:
    """One key/value cache of a state.

    Attributes:
        positions: [cells] int32, the prompt position of every cell, in the cells' order.
        keys, values: model layer -> where its rows lie.
    """

    positions: np.ndarray
    keys: Mapping[int, Rows]
    values: Mapping[int, Rows]


class SequenceState:
    """A sequence's state as bytes that can be read and written by layer and position.

    Args:
        data: [bytes] uint8, writable; it is kept, not copied.
        layers: the model's layers in each cache, in the order in which llama.cpp keeps the caches.

    Raises:
        StateLayoutError: another magic, a stream count, a layer count or a length that does not fit.
    """

    def __init__(self, data: np.ndarray, layers: Sequence[Sequence[int]]) -> None:
        self.data = data
        reader = _Reader(data)
        magic = reader.take("<I")
        if magic != MAGIC:
            raise _refusal(f"it starts with {magic:#010x}, not {MAGIC:#010x}")
        reader.take("<i")
        self.caches = [_cache(reader, held) for held in layers]
        if reader.at != len(data):
            raise _refusal(f"{len(data) - reader.at} bytes are left over after {len(layers)} cache(s)")

    def layers(self) -> list[int]:
        """Every layer that has keys in it."""
        return sorted(layer for cache in self.caches for layer in cache.keys)

    def cache_of(self, layer: int) -> Cache:
        """The cache that holds a layer's keys and values."""
        return next(cache for cache in self.caches if layer in cache.keys)

    def types(self) -> set[tuple[int, int]]:
        """(key type, value type) as ggml numbers them, of every layer."""
        return {(c.keys[i].type, c.values[i].type) for c in self.caches for i in c.keys}

    def read(self, layer: int, what: str, cells: np.ndarray | None = None) -> np.ndarray:
        """The bytes of a layer's ``what`` ("keys" or "values"), [cells, bytes] uint8, rows whatever the layout."""
        cache = self.cache_of(layer)
        rows = getattr(cache, what)[layer]
        n = len(cache.positions)
        if rows.transposed:
            view = self._view(rows.start, rows.width * n * rows.row_bytes).reshape(rows.width, n, -1)
            out = view.transpose(1, 0, 2).reshape(n, -1)
        else:
            out = self._view(rows.start, n * rows.row_bytes).reshape(n, rows.row_bytes)
        return out.copy() if cells is None else out[cells]

    def write(self, layer: int, what: str, cells: np.ndarray, rows: np.ndarray) -> None:
        """Writes rows [n, bytes] uint8 into the ``cells`` [n] of a layer's ``what`` ("keys" or "values")."""
        cache = self.cache_of(layer)
        place = getattr(cache, what)[layer]
        n = len(cache.positions)
        if place.transposed:
            view = self._view(place.start, place.width * n * place.row_bytes)
            view = view.view(f"V{place.row_bytes}").reshape(place.width, n)
            view[:, _index(cells)] = rows.view(f"V{place.row_bytes}").reshape(len(cells), place.width).T
        else:
            view = self._view(place.start, n * place.row_bytes).reshape(n, place.row_bytes)
            view[_index(cells)] = rows

    def _view(self, start: int, count: int) -> np.ndarray:
        return self.data[start : start + count]


def _index(cells: np.ndarray) -> np.ndarray | slice:
    """Cells as a slice where they are consecutive, which copies whole blocks."""
    if len(cells) and int(cells[-1]) - int(cells[0]) == len(cells) - 1 and bool((np.diff(cells) == 1).all()):
        return slice(int(cells[0]), int(cells[-1]) + 1)
    return cells


class _Reader:
    """Takes numbers off the front of a state's bytes."""

    def __init__(self, data: np.ndarray) -> None:
        self.data, self.at = data, 0

    def take(self, layout: str) -> int:
        size = struct.calcsize(layout)
        piece = self.skip(size)
        return int(struct.unpack(layout, self.data[piece : piece + size].tobytes())[0])

    def skip(self, count: int) -> int:
        """The offset of ``count`` bytes that are passed over."""
        start = self.at
        if start + count > len(self.data):
            raise _refusal(f"it ends after {len(self.data)} bytes, within something that it announced")
        self.at += count
        return start


def _cache(reader: _Reader, layers: Sequence[int]) -> Cache:
    if (streams := reader.take("<I")) != 1:
        raise _refusal(f"it has {streams} streams where one sequence has one")
    n = reader.take("<I")
    if n == 0:
        return Cache(np.empty(0, np.int32), {}, {})
    start = reader.skip(n * _CELL.itemsize)
    cells = reader.data[start : reader.at].view(_CELL)
    if not (cells["sequences"] == 1).all():
        raise _refusal("a cell belongs to another number of sequences than one")
    v_trans, n_layers = reader.take("<I"), reader.take("<I")
    if v_trans > 1 or n_layers != len(layers):
        raise _refusal(f"a cache has {n_layers} layers (v_trans {v_trans}), and {len(layers)} were expected")
    keys = {layer: _rows(reader, n) for layer in layers}
    values = {layer: (_columns if v_trans else _rows)(reader, n) for layer in layers}
    return Cache(np.array(cells["position"]), keys, values)


def _rows(reader: _Reader, n: int) -> Rows:
    kind, size = reader.take("<i"), reader.take("<Q")
    return Rows(kind, reader.skip(n * size), size)


def _columns(reader: _Reader, n: int) -> Rows:
    kind, size, width = reader.take("<i"), reader.take("<I"), reader.take("<I")
    return Rows(kind, reader.skip(n * size * width), size, width, transposed=True)


def _refusal(why: str) -> StateLayoutError:
    return StateLayoutError(
        "read the state of this llama.cpp",
        f"{why}: its layout is not one that this version of ridgefill knows",
        "run exactly (fill='exact'), or install a llama-cpp-python of the tested range (docs/llamacpp.md)",
    )
