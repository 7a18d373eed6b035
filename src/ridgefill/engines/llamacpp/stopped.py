"""A llama.cpp context whose graphs can be stopped at a layer, and whose layers' outputs can be read.

It stands beside the user's context, on the same weights: theirs stays llama.cpp's own, with no callback in it. The
evaluation callback is asked about every tensor of a graph; where it ends one, the tensors after it are not computed,
`llama_decode` returns as usual, and the keys and values of the layers before are in the cache.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from ridgefill.engines.llamacpp.native import ggml, llama_cpp
from ridgefill.errors import PromptError, RidgeFillError


class StoppedContext:
    """A context of its own, for one prompt; use it in a ``with`` block.

    Args:
        model: llama.cpp's model pointer.
        params: `llama_context_params` of the user's context, from which all but the length is taken.
        rows: prompt rows that it must hold.
        sequences: 2 where rows are to be put into the middle of the prompt (`replace_rows`).
        width: of the hidden state, d.

    Raises:
        PromptError: no memory for it.
    """

    def __init__(self, model: Any, params: Any, rows: int, width: int, sequences: int = 1) -> None:
        self._lib, self._ggml, self.width = llama_cpp(), ggml(), width
        mine = type(params).from_buffer_copy(params)
        mine.n_ctx = -(-rows // 256) * 256
        mine.embeddings = False
        mine.n_seq_max, mine.kv_unified = sequences, sequences > 1  # one buffer: rows can belong to both
        # One graph a call: whatever part of it is asked about after the stop belongs to that graph.
        self._batch_size = min(int(mine.n_ubatch), mine.n_ctx)
        mine.n_batch = mine.n_ubatch = self._batch_size
        # ctypes needs the callback object for as long as the context lives
        self._callback = self._lib.llama_cpp.ggml_backend_sched_eval_callback(self._see)
        mine.cb_eval = self._callback
        self._context = self._lib.llama_init_from_model(model, mine)
        if not self._context:
            raise PromptError(
                f"a second context of {rows} rows on llama.cpp",
                "it could not be made, probably for want of memory",
                "give a shorter prompt or a smaller cache type, or run exactly (fill='exact')",
            )
        self._batch = self._lib.llama_batch_init(self._batch_size, 0, 1)
        self._wanted: dict[bytes, np.ndarray] = {}
        self._seen: dict[bytes, int] = {}  # rows read of each; -1 where one had another size
        self._stop: bytes | None = None
        self._stopped = False
        self._error: BaseException | None = None

    def __enter__(self) -> StoppedContext:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Frees the context."""
        if self._context:
            self._lib.llama_batch_free(self._batch)
            self._lib.llama_free(self._context)
            self._context = None

    def decode(self, tokens: Sequence[int], first: int) -> None:
        """Runs every layer for tokens at positions ``first``, ``first`` + 1, ..."""
        self._run(tokens, first)

    def inputs_of(
        self, layers: Iterable[int], tokens: Sequence[int], first: int, stop: bool = True
    ) -> dict[int, np.ndarray]:
        """What enters ``layers`` (from 1 up): layer -> [len(tokens), d] float32.

        Args:
            first: position of the first token.
            stop: end each graph there: no layer from the last of ``layers`` up is computed or cached.

        Raises:
            RidgeFillError: the model's graph has no such tensor.
        """
        found = {i: np.full((len(tokens), self.width), np.nan, np.float32) for i in layers}
        self._wanted = {f"l_out-{i - 1}".encode(): rows for i, rows in found.items()}
        self._stop = f"l_out-{max(found) - 1}".encode() if stop else None
        try:
            self._run(tokens, first)
        finally:
            self._wanted, self._stop = {}, None
        for i, rows in found.items():
            if self._seen.get(f"l_out-{i - 1}".encode(), 0) != len(tokens) or bool(np.isnan(rows[-1]).any()):
                raise RidgeFillError(
                    f"read what enters layer {i}",
                    "llama.cpp's graph of this model has no such tensor, or one of another size",
                    "run exactly (fill='exact'), and report the model",
                )
        return found

    def state(self) -> np.ndarray:
        """The sequence's state, [bytes] uint8 (`state.SequenceState`)."""
        return get_state(self._context)

    def set_state(self, data: np.ndarray) -> None:
        """Puts a sequence's state, [bytes] uint8, in place of its own."""
        set_state(self._context, data)

    def replace_rows(self, tokens: Sequence[int], chosen: np.ndarray) -> None:
        """Runs every layer for some rows in the middle of what the context holds, in place of those that are there.

        llama.cpp decodes a sequence in order of its positions only. So each run of chosen rows is decoded in a second
        sequence, which shares the cells before it, and whose new cells then take the places of the old ones.

        Args:
            tokens: of all rows that are held, from position 0 on.
            chosen: their positions, ascending.
        """
        lib, memory, done = self._lib, self._lib.llama_get_memory(self._context), 0
        lib.llama_memory_seq_rm(memory, 0, len(tokens), -1)
        for run in np.split(chosen, np.flatnonzero(np.diff(chosen) != 1) + 1) if len(chosen) else ():
            for first in range(int(run[0]), int(run[-1]) + 1, self._batch_size):
                stop = min(first + self._batch_size, int(run[-1]) + 1)
                lib.llama_memory_seq_cp(memory, 0, 1, done, first)
                self._run(tokens[first:stop], first, sequence=1)
                lib.llama_memory_seq_rm(memory, 0, first, stop)
                lib.llama_memory_seq_cp(memory, 1, 0, first, stop)
                done = stop
        lib.llama_memory_seq_rm(memory, 1, -1, -1)

    def _run(self, tokens: Sequence[int], first: int, sequence: int = 0) -> None:
        self._seen, batch = {}, self._batch
        for start in range(0, len(tokens), self._batch_size):
            part = tokens[start : start + self._batch_size]
            batch.n_tokens = len(part)
            for i, token in enumerate(part):
                batch.token[i], batch.pos[i] = token, first + start + i
                batch.n_seq_id[i], batch.seq_id[i][0], batch.logits[i] = 1, sequence, 0
            self._stopped = False
            code = self._lib.llama_decode(self._context, batch)
            if self._error is not None:
                error, self._error = self._error, None
                raise error
            if code != 0:
                raise PromptError(
                    f"decode {len(part)} tokens from position {first + start}",
                    f"llama_decode returned {code}",
                    "give a shorter prompt, or run exactly (fill='exact')",
                )

    def _see(self, tensor: int, ask: bool, _: Any) -> bool:
        """The evaluation callback: whether the tensor is wanted (``ask``), then whether to go on after it."""
        try:
            name = self._ggml.get_name(tensor)
            if ask:
                return self._stopped or name in self._wanted
            if self._stopped:
                return False  # a later part of the same graph, on another backend
            rows, done = self._wanted[name], self._seen.get(name, 0)
            n = int(self._ggml.nelements(tensor)) // self.width
            if done + n > len(rows) or self._ggml.nbytes(tensor) != n * self.width * 4:
                self._seen[name] = -1
            elif done >= 0:
                target = rows[done : done + n]
                self._ggml.backend_tensor_get(tensor, target.ctypes.data, 0, target.nbytes)
                self._seen[name] = done + n
            self._stopped = name == self._stop
            return not self._stopped
        except BaseException as error:  # ctypes would print it and go on
            self._error = error
            return False


def get_state(context: Any) -> np.ndarray:
    """Sequence 0's state of a llama.cpp context, [bytes] uint8."""
    lib = llama_cpp()
    size = lib.llama_state_seq_get_size(context, 0)
    data = np.empty(size, np.uint8)
    done = lib.llama_state_seq_get_data(context, data.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8)), size, 0)
    if done != size:
        raise RidgeFillError(
            "read llama.cpp's state", f"it gave {done} of {size} bytes", "run exactly (fill='exact')"
        )
    return data


def set_state(context: Any, data: np.ndarray) -> None:
    """Replaces sequence 0 of a llama.cpp context by a state, [bytes] uint8.

    Raises:
        PromptError: llama.cpp refused it; most often the context is too small.
    """
    lib = llama_cpp()
    pointer = data.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
    if lib.llama_state_seq_set_data(context, pointer, len(data), 0) != len(data):
        raise PromptError(
            "put a filled state into the context",
            "llama.cpp refused it (its log says why)",
            "make the context larger (n_ctx), or run exactly (fill='exact')",
        )
