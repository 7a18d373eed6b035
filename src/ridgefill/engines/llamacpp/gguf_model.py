"""A GGUF file as the engine needs it: the model's shape, its rotary settings and single tensors, as ggml reads them.

The gguf library's own reader walks every token of the vocabulary in Python, 10 seconds for Gemma's 262,144; ggml's C
functions take a tenth of one.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

import gguf
import numpy as np

from ridgefill.engines.llamacpp.native import GgufParams, ggml
from ridgefill.errors import ModelFileError, UnsupportedModelError
from ridgefill.gguf_file import read_architecture
from ridgefill.models.identity import SKETCH_LAYERS, SKETCH_VALUES, ModelIdentity, _spread

# llama.cpp's architecture -> the model_type of transformers' configs, and every how many layers one attends to all.
_FAMILIES: dict[str, tuple[str, int | None]] = {
    "llama": ("llama", None),
    "qwen2": ("qwen2", None),
    "qwen3": ("qwen3", None),
    "gemma2": ("gemma2", 2),
    "gemma3": ("gemma3_text", 6),
}
_GEMMA3_LOCAL_ROPE = 10_000.0  # llama.cpp's default for layers with a sliding window


@dataclass(frozen=True)
class Packed:
    """A tensor as the file holds it.

    Attributes:
        type: ggml's number of its element type.
        shape: [rows, columns] or [columns], rows first as in numpy.
        data: its bytes, uint8.
    """

    type: int
    shape: tuple[int, ...]
    data: np.ndarray

    def unpacked(self) -> np.ndarray:
        """float32, of the same shape."""
        kind = gguf.GGMLQuantizationType(self.type)
        return gguf.dequantize(self.data.reshape(*self.shape[:-1], -1), kind).reshape(self.shape)


class GgufModel:
    """A GGUF file, open for reading until the object goes.

    Attributes:
        path: the file.
        architecture: llama.cpp's name of the family.
        layers: number of layers, L.
        width: of the hidden state, d.
        heads, kv_heads: of the attention.
        key_width, value_width: of one head.

    Raises:
        ModelFileError, UnsupportedModelError: no GGUF file, damaged, or a family whose late rows cannot be computed.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).expanduser()
        self.architecture = read_architecture(self.path)
        if self.architecture not in _FAMILIES:
            self._unsupported(
                f"llama.cpp's architecture {self.architecture!r} is not among {', '.join(_FAMILIES)}"
            )
        self._ggml = ggml()
        self._file = self._ggml.gguf_init_from_file(str(self.path).encode(), GgufParams(True, None))
        if not self._file:
            raise ModelFileError(f"load {self.path.name}", "ggml cannot read it", "fetch the file again")
        self.layers = int(self.number("block_count"))
        self.width = int(self.number("embedding_length"))
        self.heads = int(self.number("attention.head_count"))
        self.kv_heads = int(self.number("attention.head_count_kv", self.heads))
        self.key_width = int(self.number("attention.key_length", self.width // self.heads))
        self.value_width = int(self.number("attention.value_length", self.width // self.heads))
        self.softcap = self.number("attn_logit_softcapping", 0.0)
        self.eps = self.number("attention.layer_norm_rms_epsilon")
        self.context = int(self.number("context_length"))
        if self.tensor("blk.0.attn_k.weight") is None:
            self._unsupported("its layers have no key projection of their own (attn_k.weight)")
        kind = self.text("rope.scaling.type") or "none"
        if kind not in ("none", "linear"):
            self._unsupported(f"its rotary positions are stretched by {kind!r}")

    def __del__(self) -> None:
        if getattr(self, "_file", None):
            self._ggml.gguf_free(self._file)
            self._file = None

    @property
    def name(self) -> str:
        """The file's name without its ending."""
        return self.path.stem

    @cached_property
    def fingerprint(self) -> str:
        """sha256 over the file's size, metadata and a sample of its weights: all of them can take minutes."""
        start = self._ggml.gguf_get_data_offset(self._file)
        with self.path.open("rb") as file:
            digest = hashlib.sha256(file.read(start))
        digest.update(str(self.path.stat().st_size).encode())
        digest.update(repr(self._sketch()).encode())
        return digest.hexdigest()

    def number(self, key: str, default: float | None = None) -> float:
        """A number of the model's metadata, ``key`` without the architecture.

        Raises:
            ModelFileError: there is none, and no default; or it differs between layers.
        """
        found = self._value(f"{self.architecture}.{key}")
        if isinstance(found, np.ndarray) and len(set(found.tolist())) == 1:
            found = found[0].item()
        if found is None and default is not None:
            return default
        if isinstance(found, (int, float)):
            return found
        why = f"its {self.architecture}.{key} is " + ("missing" if found is None else "not one number")
        raise ModelFileError(
            f"load {self.path.name}", why, "convert the model again with a current llama.cpp"
        )

    def text(self, key: str) -> str | None:
        """A text of the model's metadata, or None."""
        found = self._value(f"{self.architecture}.{key}")
        return found if isinstance(found, str) else None

    @cached_property
    def window(self) -> int | None:
        """Rows that a layer with a sliding window attends to; None if all layers attend to all."""
        rows = int(self.number("attention.sliding_window", 4096 if self.architecture == "gemma2" else 0))
        return rows if rows and _FAMILIES[self.architecture][1] is not None else None

    @cached_property
    def windowed(self) -> tuple[bool, ...]:
        """Whether each layer has a sliding window."""
        every = _FAMILIES[self.architecture][1]
        if self.window is None or every is None:
            return (False,) * self.layers
        given = self._value(f"{self.architecture}.attention.sliding_window_pattern")
        if isinstance(given, np.ndarray):
            return tuple(bool(v) for v in given[: self.layers])
        every = every if given is None else int(given)
        return tuple(every == 0 or i % every < every - 1 for i in range(self.layers))

    @property
    def caches(self) -> list[list[int]]:
        """The layers in each of llama.cpp's caches: all; or those that attend to all, then those with a window."""
        if self.window is None:
            return [list(range(self.layers))]
        return [[i for i in range(self.layers) if self.windowed[i] is kind] for kind in (False, True)]

    def rope(self, layer: int) -> tuple[int, float, float]:
        """(rotated dimensions, base, scale) of a layer's rotary embedding."""
        base = self.number("rope.freq_base", 10_000.0)
        factor = self.number("rope.scaling.factor", 0.0) or self.number("rope.scale_linear", 0.0)
        scale = 1.0 / factor if factor else 1.0
        if self.windowed[layer]:
            local = _GEMMA3_LOCAL_ROPE if self.architecture == "gemma3" else base
            base, scale = self.number("rope.freq_base_swa", local), 1.0
        return int(self.number("rope.dimension_count", self.key_width)), base, scale

    def tensor(self, name: str) -> Packed | None:
        """A tensor by llama.cpp's name for it; None if the file has none."""
        at = self._ggml.gguf_find_tensor(self._file, name.encode())
        if at < 0:
            return None
        ne = self._ggml.gguf_get_tensor_ne(self._file, at)
        shape = [int(ne[i]) for i in range(4)]
        while len(shape) > 1 and shape[-1] == 1:
            shape.pop()
        start = self._ggml.gguf_get_data_offset(self._file) + self._ggml.gguf_get_tensor_offset(
            self._file, at
        )
        size = self._ggml.gguf_get_tensor_size(self._file, at)
        data = np.fromfile(self.path, np.uint8, size, offset=start)
        if len(data) != size:
            raise ModelFileError(f"load {self.path.name}", "the file is cut off", "fetch it again")
        return Packed(self._ggml.gguf_get_tensor_type(self._file, at), tuple(reversed(shape)), data)

    def needed(self, name: str) -> Packed:
        """A tensor that cannot be missing.

        Raises:
            UnsupportedModelError: it is.
        """
        if (found := self.tensor(name)) is None:
            self._unsupported(f"it has no tensor {name}")
        return found

    def embed(self, tokens: Sequence[int]) -> np.ndarray:
        """What enters layer 0, [len(tokens), d] float32."""
        table = self._embedding
        rows = table.data.reshape(table.shape[0], -1)[np.asarray(tokens)]
        found = gguf.dequantize(rows, gguf.GGMLQuantizationType(table.type))
        scale = self.width**0.5 if self.architecture.startswith("gemma") else 1.0
        return np.asarray(found * scale, np.float32)

    @cached_property
    def _embedding(self) -> Packed:
        return self.needed("token_embd.weight")

    def identity(self) -> ModelIdentity:
        """The identity that maps are compared with: shape and a sample of the weights, but no tokenizer."""
        return ModelIdentity(
            name=self.name,
            model_type=_FAMILIES[self.architecture][0],
            hidden=self.width,
            layers=self.layers,
            layer_types=None,
            heads=self.heads,
            kv_heads=self.kv_heads,
            head_dim=self.key_width,
            vocab=self.needed("token_embd.weight").shape[0],
            dtype="float32",  # what maps fitted on this file saw
            sketch=self._sketch(),
        )

    def _sketch(self) -> tuple[float, ...]:
        """The sample that `models.identity.sketch_weights` takes of the same model in transformers."""
        values: list[float] = []
        for i in _spread(self.layers, min(SKETCH_LAYERS, self.layers)):
            keys = self.needed(f"blk.{i}.attn_k.weight").unpacked()
            if self.architecture == "llama":  # converted files hold rotary pairs side by side
                keys = keys.reshape(self.kv_heads, -1, 2, keys.shape[1]).swapaxes(1, 2).reshape(keys.shape)
            for weight in (keys, self.needed(f"blk.{i}.ffn_down.weight").unpacked()):
                flat = weight.reshape(-1)
                values += [float(f"{flat[at]:.6g}") for at in _spread(flat.size, SKETCH_VALUES)]
        return tuple(values)

    def _value(self, key: str) -> Any:
        at = self._ggml.gguf_find_key(self._file, key.encode())
        if at < 0:
            return None
        kind = gguf.GGUFValueType(self._ggml.gguf_get_kv_type(self._file, at))
        if kind == gguf.GGUFValueType.STRING:
            return self._ggml.gguf_get_val_str(self._file, at).decode("utf-8", "replace")
        if kind == gguf.GGUFValueType.ARRAY:
            element = gguf.GGUFValueType(self._ggml.gguf_get_arr_type(self._file, at))
            if element not in _DTYPES:
                return None
            count = self._ggml.gguf_get_arr_n(self._file, at)
            return _array(self._ggml.gguf_get_arr_data(self._file, at), _DTYPES[element], count)
        return _array(self._ggml.gguf_get_val_data(self._file, at), _DTYPES[kind], 1)[0].item()

    def _unsupported(self, why: str) -> NoReturn:
        raise UnsupportedModelError(
            f"fill {self.path.name} on llama.cpp",
            why,
            "run it exactly with llama-cpp-python, or fill it in transformers",
        )


_DTYPES = {
    gguf.GGUFValueType.UINT8: np.uint8,
    gguf.GGUFValueType.INT8: np.int8,
    gguf.GGUFValueType.UINT16: np.uint16,
    gguf.GGUFValueType.INT16: np.int16,
    gguf.GGUFValueType.UINT32: np.uint32,
    gguf.GGUFValueType.INT32: np.int32,
    gguf.GGUFValueType.FLOAT32: np.float32,
    gguf.GGUFValueType.BOOL: np.bool_,
    gguf.GGUFValueType.UINT64: np.uint64,
    gguf.GGUFValueType.INT64: np.int64,
    gguf.GGUFValueType.FLOAT64: np.float64,
}


def _array(address: int, dtype: type, count: int) -> np.ndarray:
    size = count * np.dtype(dtype).itemsize
    return np.frombuffer(ctypes.string_at(address, size), dtype)
