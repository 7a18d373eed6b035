"""A prompt's rows on disk, so that another process starts where this one was.

    8 bytes   "RIDGEFPC"
    u64       length of the header
    header    JSON: format, what the rows are (model, maps, split, cache), tokens, filled rows, sha256 of the rest
    state     llama.cpp's sequence state, as it gave it

The state is no stable format and llama.cpp checks little of it, so everything is compared before it is handed on.
"""

from __future__ import annotations

import hashlib
import json
import struct
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ridgefill.engines.llamacpp.native import llama_cpp
from ridgefill.engines.llamacpp.state import SequenceState
from ridgefill.engines.llamacpp.stopped import get_state, set_state
from ridgefill.errors import PromptError, RidgeFillError
from ridgefill.files import whole

if TYPE_CHECKING:
    from ridgefill.engines.llamacpp.engine import RidgeLlama

MAGIC = b"RIDGEFPC"
FORMAT = 1
_WORDS = {
    "model": "another model",
    "fill": "other maps, another split or other leading rows",
    "cache": "another cache type, or flash attention switched",
    "llama_cpp": "another llama-cpp-python",
}


class PromptCacheError(RidgeFillError):
    """A prompt cache file is missing, damaged or does not match."""


def save(llm: RidgeLlama, path: str | Path) -> Path:
    """Writes the context's rows (`RidgeLlama.save_prompt`)."""
    n = llm.n_tokens
    if n == 0:
        raise PromptError("save a prompt", "the context is empty", "run a prompt first")
    llm._ctx.kv_cache_seq_rm(-1, n, -1)  # rows of an earlier prompt may lie behind
    state = get_state(llm._ctx.ctx)
    body = state.tobytes()
    header = {
        "format": FORMAT,
        **_what(llm),
        "tokens": llm.input_ids[:n].tolist(),
        "filled": _runs(llm._filled[:n]),
        "bytes": len(body),
        "sha256": hashlib.sha256(body).hexdigest(),
    }
    text = json.dumps(header).encode()
    with whole(path) as temporary, temporary.open("wb") as file:
        file.write(MAGIC + struct.pack("<Q", len(text)) + text)
        file.write(body)
    return Path(path)


def load(llm: RidgeLlama, path: str | Path) -> int:
    """Puts saved rows into the context (`RidgeLlama.load_prompt`)."""
    asked = f"load the prompt cache {Path(path).name}"
    again = "save the prompt again with these settings"
    try:
        data = Path(path).expanduser().read_bytes()
    except OSError as error:
        raise PromptCacheError(asked, error.strerror or str(error), "name a file of save_prompt") from error
    try:
        if data[:8] != MAGIC:
            raise ValueError("it is no prompt cache of ridgefill's")
        (length,) = struct.unpack("<Q", data[8:16])
        header = json.loads(data[16 : 16 + length])
        body = data[16 + length :]
        if header["format"] != FORMAT:
            raise ValueError(f"its format is {header['format']}, and this version reads {FORMAT}")
        if len(body) != header["bytes"] or hashlib.sha256(body).hexdigest() != header["sha256"]:
            raise ValueError("it is cut off or was altered")
        tokens, runs = [int(t) for t in header["tokens"]], [(int(a), int(b)) for a, b in header["filled"]]
    except (ValueError, KeyError, TypeError, struct.error) as error:
        raise PromptCacheError(asked, str(error) or "it is damaged", again) from error
    own = _what(llm)
    if other := [words for key, words in _WORDS.items() if header.get(key) != own[key]]:
        raise PromptCacheError(asked, f"it is of {' and of '.join(other)}", again)
    if len(tokens) > llm.n_ctx():
        raise PromptCacheError(
            asked,
            f"it has {len(tokens)} tokens, and the context holds {llm.n_ctx()}",
            "make the context larger (n_ctx)",
        )
    state = np.frombuffer(body, np.uint8)
    parsed = SequenceState(state, llm._gguf.caches)
    if any(int(c.positions.max()) != len(tokens) - 1 for c in parsed.caches):
        raise PromptCacheError(asked, "its rows are not those of its tokens", again)
    set_state(llm._ctx.ctx, state)
    llm.input_ids[: len(tokens)] = tokens
    llm._filled[:] = False
    for first, stop in runs:
        llm._filled[first:stop] = True
    llm.n_tokens, llm._requires_eval = len(tokens), True
    return len(tokens)


def _what(llm: RidgeLlama) -> dict[str, Any]:
    """What two contexts must share for their rows to be interchangeable."""
    params, gguf = llm.context_params, llm._gguf
    return {
        "model": gguf.fingerprint,
        "fill": llm.fill_key(),
        "cache": [int(params.type_k), int(params.type_v), int(params.flash_attn_type)],
        "llama_cpp": llama_cpp().__version__,
    }


def _runs(filled: np.ndarray) -> list[tuple[int, int]]:
    """Filled rows [n] bool as runs [first, stop)."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], filled, [False]]).astype(np.int8)))
    return [(int(a), int(b)) for a, b in edges.reshape(-1, 2)]
