"""What is measured on llama.cpp: first tokens and their time, logits, the loss of a prompt's tail."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ridgefill.engines.llamacpp.native import llama_cpp
from ridgefill.errors import PromptError

if TYPE_CHECKING:
    from ridgefill.engines.llamacpp.engine import RidgeLlama


def forget(llm: Any) -> None:
    """Empties a model's context, so that no prompt reuses another's rows."""
    lib = llama_cpp()
    llm.reset()
    lib.llama_memory_clear(lib.llama_get_memory(llm._ctx.ctx), False)


def last_logits(llm: Any) -> np.ndarray:
    """Logits [V] float32 after the last token that was decoded."""
    return np.ctypeslib.as_array(llm._ctx.get_logits(), shape=(llm.n_vocab(),)).copy()


def first_token(llm: RidgeLlama, ids: Sequence[int], *, exact: bool) -> tuple[np.ndarray, float]:
    """Logits [V] of the first token after ``ids``, from an empty context, and the seconds they took."""
    forget(llm)
    with llm.exactly() if exact else nullcontext():
        began = time.perf_counter()
        llm.eval(list(ids))
        logits = last_logits(llm)  # waits for llama.cpp
        return logits, time.perf_counter() - began


def kl(p: np.ndarray, q: np.ndarray) -> float:
    """KL(p || q) in nats, of two sets of logits [V]."""
    a, b = (torch.from_numpy(x).double().log_softmax(-1) for x in (p, q))
    return float((a.exp() * (a - b)).sum())


def tail_nll(llm: RidgeLlama, ids: Sequence[int], *, exact: bool) -> Tensor:
    """Nats [T - 1] float32 of a prompt's last T - 1 tokens, its prefix filled or (``exact``) not."""
    forget(llm)
    tail = llm.plan.tail
    prefix, rest = list(ids[:-tail]), list(ids[-tail:])
    if exact:
        with llm.exactly():
            llm.eval(prefix)
    else:
        llm.eval_prefix(prefix)
    nats = []
    for start in range(0, tail - 1, _AT_ONCE):
        part = rest[start : start + _AT_ONCE]
        logits = _decode_all(llm, part)
        targets = torch.tensor(rest[start + 1 : start + 1 + len(part)])
        rows = torch.from_numpy(logits[: len(targets)])
        nats.append(torch.nn.functional.cross_entropy(rows, targets, reduction="none"))
    return torch.cat(nats)


_AT_ONCE = 128  # rows whose logits exist at once


def _decode_all(llm: Any, tokens: Sequence[int]) -> np.ndarray:
    """Decodes tokens after what the context holds; their logits [k, V] float32."""
    lib = llama_cpp()
    batch = lib.llama_batch_init(len(tokens), 0, 1)
    try:
        batch.n_tokens = len(tokens)
        for i, token in enumerate(tokens):
            batch.token[i], batch.pos[i] = token, llm.n_tokens + i
            batch.n_seq_id[i], batch.seq_id[i][0], batch.logits[i] = 1, 0, 1
        if (code := lib.llama_decode(llm._ctx.ctx, batch)) != 0:
            raise PromptError(
                f"decode {len(tokens)} tokens",
                f"llama_decode returned {code}",
                "make the context larger (n_ctx)",
            )
        shape = (len(tokens), llm.n_vocab())
        logits = np.ctypeslib.as_array(llm._ctx.get_logits(), shape=shape).copy()
    finally:
        lib.llama_batch_free(batch)
    llm.input_ids[llm.n_tokens : llm.n_tokens + len(tokens)] = tokens
    llm.n_tokens += len(tokens)
    return logits
