"""What filled rows write in the late layers: keys and values, computed by ggml itself from the source states.

x = A_l h + b_l        the layer's predicted input, by its recipe
x = norm(x)            the model's own rms norm, projections, biases, key norm and rotary embedding,
k = rope(W_k x)        on the file's own quantized weights
v = W_v x              and both cast to the cache's types
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import gguf
import numpy as np

from ridgefill.engines.llamacpp.gguf_model import GgufModel, Packed
from ridgefill.engines.llamacpp.native import InitParams, ggml
from ridgefill.engines.llamacpp.state import SequenceState
from ridgefill.errors import SettingError

F32, I32 = 0, 26  # ggml's numbers
# f16 is not among them: ggml would round the states to f16 as well, and Gemma's exceed its range.
WEIGHTS = ("f32", "packed")
_IS_HADAMARD = 1  # GGML_HINT_SRC0_IS_HADAMARD
CHUNK = 512  # rows of one pass through the graph
READ = -1  # the source that is what maps read of several states (`ridgefill.reading`)


@dataclass(frozen=True)
class Recipe:
    """How one late layer's input comes out of the source states: x = sum of A_s h_s, + b.

    Attributes:
        terms: (source layer s, A_s [d_out, d_in] float32, or None for h_s as it is); s is the layer that h_s enters,
            or `READ`.
        bias: b [d_out] float32, or None.
        values: where the maps give keys and values, the recipe of the values; this one is that of the keys, before
            their norm and rotary embedding, in the file's order.
    """

    terms: tuple[tuple[int, np.ndarray | None], ...]
    bias: np.ndarray | None = None
    values: Recipe | None = None


@dataclass(frozen=True)
class CacheForm:
    """The form in which llama.cpp keeps keys and values.

    Attributes:
        key_type, value_type: ggml's numbers.
        rotate_keys, rotate_values: width of the Hadamard rotation that quantized caches are turned by, or 0.
    """

    key_type: int
    value_type: int
    rotate_keys: int = 0
    rotate_values: int = 0


def _free(g: Any, allocator: int, buffer: int, work: int, weights: int, backend: int) -> None:
    g.gallocr_free(allocator)
    g.backend_buffer_free(buffer)
    g.free(work)
    g.free(weights)
    g.backend_free(backend)


class LateRows:
    """Keys and values of late layers as one ggml graph over ``CHUNK`` rows, built once.

    Args:
        model: whose weights project.
        recipes: late layer -> its recipe.
        form: of the cache that the rows are for.
        rope_type: llama.cpp's number of the model's rotary embedding (`llama_model_rope_type`).
        threads: ggml's.
        weights: "f32", fast: matrices and projections in fp32; or "packed", small: matrices in Q8_0, projections as
            the file has them, whose products then are llama.cpp's own to the bit.
    """

    def __init__(
        self,
        model: GgufModel,
        recipes: Mapping[int, Recipe],
        form: CacheForm,
        rope_type: int,
        threads: int,
        weights: str = "f32",
    ) -> None:
        if weights not in WEIGHTS:
            raise SettingError(
                f"weights={weights!r}", "there is no such form", f"use one of {', '.join(WEIGHTS)}"
            )
        self.model, self.form, self.rope_type = model, form, rope_type
        self._packed = weights == "packed"
        self.layers = sorted(recipes)
        self.sources = sorted({s for recipe in recipes.values() for s, _ in recipe.terms})
        self._ggml = g = ggml()
        self._backend = g.cpu_backend(threads)
        n = 64 + 48 * len(self.layers) + sum(len(r.terms) * 4 for r in recipes.values())
        self._weights = g.init(InitParams(n * g.tensor_overhead(), None, True))
        self._work = g.init(InitParams(n * g.tensor_overhead() + g.graph_overhead(), None, True))
        self._pending: list[tuple[int, np.ndarray]] = []
        widths = {s: m.shape[1] for recipe in recipes.values() for s, m in recipe.terms if m is not None}
        self._inputs = {s: self._input(F32, widths.get(s, model.width), CHUNK) for s in self.sources}
        self._positions = self._input(I32, CHUNK)
        self._factors = self._weight_named("rope_freqs.weight")
        self._rotations: dict[int, int] = {}
        graph = g.new_graph(self._work)
        self._out = {layer: self._layer(layer, recipes[layer], graph) for layer in self.layers}
        self._buffer = g.backend_alloc_ctx_tensors(self._weights, self._backend)
        for tensor, data in self._pending:
            g.backend_tensor_set(tensor, data.ctypes.data, 0, data.nbytes)
        self._pending = []
        self._allocator = g.gallocr_new(g.backend_get_default_buffer_type(self._backend))
        if not g.gallocr_alloc_graph(self._allocator, graph):
            raise MemoryError("no memory for the late rows' graph")
        self._graph = graph
        held = self._allocator, self._buffer, self._work, self._weights, self._backend
        self.close = weakref.finalize(self, _free, g, *held)  # once, at the latest when the process ends

    def compute(
        self, states: Mapping[int, np.ndarray], positions: np.ndarray
    ) -> Iterator[tuple[slice, int, np.ndarray, np.ndarray]]:
        """Keys and values of every late layer, a chunk of rows at a time.

        Args:
            states: source layer -> [m, d] float32, what enters that layer; of `READ`, [m, K].
            positions: [m] int32, of the prompt.

        Yields:
            (rows, layer, keys [rows, bytes] uint8, values [rows, bytes] uint8) in the cache's types.
        """
        g = self._ggml
        m = len(positions)
        for start in range(0, m, CHUNK):
            rows = slice(start, min(start + CHUNK, m))
            self._set(self._positions, positions[rows].astype(np.int32))
            for s in self.sources:
                self._set(self._inputs[s], states[s][rows])
            if g.backend_graph_compute(self._backend, self._graph) != 0:
                raise RuntimeError("ggml could not compute the late rows")
            for layer in self.layers:
                keys, values = (self._get(tensor, rows.stop - start) for tensor in self._out[layer])
                yield rows, layer, keys, values

    def write(self, state: SequenceState, states: Mapping[int, np.ndarray], positions: np.ndarray) -> None:
        """Writes the late layers of ``positions`` [m], ascending, into a sequence's state.

        Positions that a sliding window no longer holds are left out, as llama.cpp leaves them out.

        Args:
            states: as in `compute`.
        """
        places = [(cache, np.argsort(cache.positions, kind="stable")) for cache in state.caches]
        for rows, layer, keys, values in self.compute(states, positions):
            for cache, order in places:
                if layer not in cache.keys:
                    continue
                held = cache.positions[order]
                at = np.searchsorted(held, positions[rows])
                there = at < len(held)
                there[there] = held[at[there]] == positions[rows][there]
                if there.any():
                    cells = order[at[there]]
                    state.write(layer, "keys", cells, keys[there])
                    state.write(layer, "values", cells, values[there])

    def _layer(self, layer: int, recipe: Recipe, graph: int) -> tuple[int, int]:
        """The two tensors that a layer gives: keys and values in the cache's form."""
        model, form = self.model, self.form
        if recipe.values is None:
            x = self._normed(layer, self._predict(recipe))
            k, v = self._project(layer, "attn_k", x), self._project(layer, "attn_v", x)
        else:
            k, v = self._predict(recipe), self._predict(recipe.values)
        k = self._turned(layer, k, model.kv_heads, "attn_k_norm")
        return (
            self._out_as(graph, k, model.key_width * model.kv_heads, form.rotate_keys, form.key_type),
            self._out_as(graph, v, model.value_width * model.kv_heads, form.rotate_values, form.value_type),
        )

    def _turned(self, layer: int, x: int, heads: int, norm_name: str) -> int:
        """Keys or queries [heads x width, CHUNK] after their own norm, if any, and the rotary embedding."""
        g, ctx, model = self._ggml, self._work, self.model
        x = g.reshape_3d(ctx, x, model.key_width, heads, CHUNK)
        if (norm := self._weight_named(f"blk.{layer}.{norm_name}.weight")) is not None:
            x = g.mul(ctx, g.rms_norm(ctx, x, model.eps), norm)
        dims, base, scale = model.rope(layer)
        factors = self._factors if model.architecture == "llama" else None
        rest = (model.context, base, scale, 0, 1, 32, 1)  # no yarn
        return int(g.rope_ext(ctx, x, self._positions, factors, dims, self.rope_type, *rest))

    def _out_as(self, graph: int, x: int, width: int, rotate: int, kind: int) -> int:
        """A result [width, CHUNK] of the graph, in the cache's form."""
        g, ctx = self._ggml, self._work
        if rotate:
            x = g.reshape_2d(ctx, x, rotate, width * CHUNK // rotate)
            x = g.mul_mat(ctx, self._hadamard(rotate), x)
            g.mul_mat_set_hint(x, _IS_HADAMARD)  # the same fast kernel as llama.cpp's, so the same rounding
        x = g.cast(ctx, g.reshape_2d(ctx, x, width, CHUNK), kind)
        g.set_output(x)
        g.build_forward_expand(graph, x)
        return int(x)

    def _predict(self, recipe: Recipe) -> int:
        """What a recipe gives, [d, CHUNK]."""
        g, ctx, total = self._ggml, self._work, None
        for source, matrix in recipe.terms:
            h = self._inputs[source]
            if matrix is not None:
                h = g.mul_mat(ctx, self._matrix(matrix), h)
            total = h if total is None else g.add(ctx, total, h)
        if total is None:
            raise SettingError("a recipe", "it names no source", "name at least one")
        if recipe.bias is not None:
            total = g.add(ctx, total, self._constant(F32, np.ascontiguousarray(recipe.bias, np.float32)))
        return int(total)

    def _normed(self, layer: int, x: int) -> int:
        g, ctx = self._ggml, self._work
        norm = self._weight(self.model.needed(f"blk.{layer}.attn_norm.weight"))
        return int(g.mul(ctx, g.rms_norm(ctx, x, self.model.eps), norm))

    def _project(self, layer: int, name: str, x: int) -> int:
        """[heads x width, CHUNK] of a normed input [d, CHUNK], by the projection of that name."""
        g, ctx = self._ggml, self._work
        y = g.mul_mat(ctx, self._weight(self.model.needed(f"blk.{layer}.{name}.weight")), x)
        if (bias := self._weight_named(f"blk.{layer}.{name}.bias")) is not None:
            y = g.add(ctx, y, bias)
        return int(y)

    def _matrix(self, matrix: np.ndarray) -> int:
        plain = np.ascontiguousarray(matrix, np.float32)
        if not self._packed or matrix.shape[1] % 32:
            return self._constant(F32, plain)
        kind = gguf.GGMLQuantizationType.Q8_0
        return self._constant(int(kind), gguf.quantize(plain, kind), matrix.shape)

    def _hadamard(self, n: int) -> int:
        """Sylvester's matrix over sqrt(n), as llama.cpp builds it."""
        if n not in self._rotations:
            matrix = np.ones((1, 1), np.float32)
            while len(matrix) < n:
                matrix = np.block([[matrix, matrix], [matrix, -matrix]])
            self._rotations[n] = self._constant(F32, np.ascontiguousarray(matrix / np.sqrt(n), np.float32))
        return self._rotations[n]

    def _weight_named(self, name: str) -> int | None:
        found = self.model.tensor(name)
        return None if found is None else self._weight(found)

    def _weight(self, held: Packed) -> int:
        if self._packed:
            return self._constant(held.type, held.data, held.shape)
        return self._constant(F32, np.asarray(held.unpacked(), np.float32))

    def _constant(self, kind: int, data: np.ndarray, shape: tuple[int, ...] | None = None) -> int:
        g, shape = self._ggml, data.shape if shape is None else shape
        make: Any = g.new_tensor_1d if len(shape) == 1 else g.new_tensor_2d
        tensor = int(make(self._weights, kind, *reversed(shape)))
        self._pending.append((tensor, np.ascontiguousarray(data)))
        return tensor

    def _input(self, kind: int, *shape: int) -> int:
        make: Any = self._ggml.new_tensor_1d if len(shape) == 1 else self._ggml.new_tensor_2d
        tensor = int(make(self._work, kind, *shape))
        self._ggml.set_input(tensor)
        return tensor

    def _set(self, tensor: int, values: np.ndarray) -> None:
        values = np.ascontiguousarray(values)
        self._ggml.backend_tensor_set(tensor, values.ctypes.data, 0, values.nbytes)

    def _get(self, tensor: int, rows: int) -> np.ndarray:
        size = int(self._ggml.nbytes(tensor)) // CHUNK
        out = np.empty((rows, size), np.uint8)
        self._ggml.backend_tensor_get(tensor, out.ctypes.data_as(ctypes.c_void_p), 0, out.nbytes)
        return out
