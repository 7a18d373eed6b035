"""Before any prompt: does this llama.cpp keep its rows as the engine will write them, for this model?

A few tokens run through every layer in a context of its own. Their state must parse completely, hold the layers where
they are expected and survive being put back, and the late rows that the engine computes from the layers' true inputs
must be the rows that llama.cpp itself has written. So a change of layout, of rotary settings or of a projection is
refused by name, before anything is written.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import gguf
import numpy as np

from ridgefill.engines.llamacpp.late_rows import CacheForm, LateRows, Recipe
from ridgefill.engines.llamacpp.native import llama_cpp
from ridgefill.engines.llamacpp.settings import cache_form
from ridgefill.engines.llamacpp.state import SEQ_VERSIONS, SequenceState, StateLayoutError
from ridgefill.engines.llamacpp.stopped import StoppedContext
from ridgefill.errors import UnsupportedModelError

if TYPE_CHECKING:
    from ridgefill.engines.llamacpp.engine import RidgeLlama

ROWS = 24
# A wrong layer, norm or rotation gives differences near 1. The rows come out equal on a CPU; rounding of another
# kernel on a GPU, and of 8-bit caches, stays far below this.
TOLERANCE = 0.02


def self_check(llm: RidgeLlama) -> CacheForm:
    """The form of the cache's rows, found and proven on ``ROWS`` tokens.

    Raises:
        StateLayoutError: the state is laid out otherwise.
        UnsupportedModelError: llama.cpp writes other rows than the engine would.
    """
    lib, model = llama_cpp(), llm._gguf
    version = getattr(lib, "LLAMA_STATE_SEQ_VERSION", None)
    if version not in SEQ_VERSIONS:
        known = ", ".join(map(str, SEQ_VERSIONS))
        raise StateLayoutError(
            "use this llama.cpp",
            f"its sequence states are of version {version}, and version {known} was read and tested",
            "install a llama-cpp-python of the tested range (docs/llamacpp.md), or run exactly (fill='exact')",
        )
    tokens = [i % llm.n_vocab() for i in range(100, 100 + ROWS)]
    first = max(0, llm.n_ctx() - ROWS)  # late positions, where a wrong rotation shows most
    positions = np.arange(first, first + ROWS, dtype=np.int32)
    late = list(range(llm.plan.split, model.layers))
    with StoppedContext(llm._model.model, llm.context_params, ROWS, model.width) as context:
        inputs = context.inputs_of(late, tokens, first, stop=False)
        data = context.state()
        state = SequenceState(data, model.caches)
        types = state.types()
        if len(types) != 1 or any(sorted(c.positions.tolist()) != positions.tolist() for c in state.caches):
            raise StateLayoutError(
                "read the state of this llama.cpp",
                "its cells or their types are not those of the tokens that were run",
                "run exactly (fill='exact')",
            )
        context.set_state(data)
        if not np.array_equal(context.state(), data):
            raise StateLayoutError(
                "put a state back into this llama.cpp", "it came out otherwise", "run exactly (fill='exact')"
            )
    form = cache_form(model, *next(iter(types)))
    _compare(llm, state, form, inputs, positions)
    return form


def _compare(
    llm: RidgeLlama,
    state: SequenceState,
    form: CacheForm,
    inputs: dict[int, np.ndarray],
    positions: np.ndarray,
) -> None:
    rows = LateRows(
        llm._gguf,
        {i: Recipe(((i, None),)) for i in inputs},
        form,
        llm.rope_type,
        llm.n_threads_batch,
        "packed",
    )
    for _, layer, keys, values in rows.compute(inputs, positions):
        order = np.argsort(state.cache_of(layer).positions)
        for what, ours, kind in (("keys", keys, form.key_type), ("values", values, form.value_type)):
            stock = unpacked(state.read(layer, what, order), kind)
            norm = max(float(np.linalg.norm(stock)), 1e-9)
            gap = float(np.linalg.norm(unpacked(ours, kind) - stock)) / norm
            if not gap <= TOLERANCE:
                raise UnsupportedModelError(
                    f"fill {llm._gguf.path.name} on llama.cpp",
                    f"llama.cpp writes other {what} in layer {layer} than the fill would (they differ by {gap:.2f})",
                    "run exactly (fill='exact'), or fill it in transformers; and report the model",
                )
    rows.close()


def unpacked(rows: np.ndarray, kind: int) -> np.ndarray[Any, Any]:
    """Cache rows [n, bytes] uint8 of ggml's type ``kind`` as float32 [n, width]."""
    return np.asarray(
        gguf.dequantize(np.ascontiguousarray(rows), gguf.GGMLQuantizationType(kind)), np.float32
    )
