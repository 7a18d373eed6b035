"""`ridgefill bench ttft --engine llamacpp`: stock and filled first tokens, interleaved, on one context."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ridgefill.bench.environment import environment as _environment
from ridgefill.bench.ttft import Ttft, ceilings
from ridgefill.engines.llamacpp.measures import first_token, forget
from ridgefill.engines.llamacpp.native import llama_cpp
from ridgefill.errors import PromptError, SettingError
from ridgefill.load import load_config
from ridgefill.stats import PrefillStats

if TYPE_CHECKING:
    from ridgefill.engines.llamacpp.engine import RidgeLlama


class _Shape:
    """Only a config: what `bench.ttft.ceilings` counts from."""

    def __init__(self, config: Any) -> None:
        self.config = config


def measure(
    llm: RidgeLlama,
    ids: Sequence[int],
    lengths: Sequence[int],
    repeats: int = 3,
    warm_up: int = 1,
    tick: Callable[[], None] = lambda: None,
) -> list[Ttft]:
    """Times both arms at every length, one after the other in each repetition, each from an empty context.

    The exact arm is llama.cpp's own: the same `llama_cpp.Llama.eval`, on a context that has no callback.

    Args:
        ids: tokens of real text, as many as the longest length.
        tick: called after each repetition.

    Raises:
        PromptError, SettingError: a length that the text, the context or the plan does not allow.
    """
    for n in lengths:
        if n > min(llm.n_ctx(), len(ids)):
            why = f"the context holds {llm.n_ctx()} tokens, and the text has {len(ids)}"
            raise PromptError(f"measure a prompt of {n} tokens", why, "give a larger n_ctx or more text")
        if n < llm.plan.shortest:
            why = f"with a tail of {llm.plan.tail} nothing of it would be filled"
            raise SettingError(
                f"measure a prompt of {n} tokens",
                why,
                f"give {llm.plan.shortest} or more, or a shorter --tail",
            )
    shape, found = _Shape(load_config(llm._gguf.path)), []
    before, llm.min_tokens = llm.min_tokens, llm.plan.shortest
    try:
        for n in lengths:
            exact, filled, seen = [], [], []
            for repetition in range(warm_up + repeats):
                times = [first_token(llm, ids[:n], exact=e)[1] for e in (True, False)]
                tick()
                if repetition >= warm_up:
                    exact.append(times[0])
                    filled.append(times[1])
                    seen.append(llm.stats or PrefillStats())
            stages = {k: statistics.median(s.seconds[k] for s in seen) for k in seen[0].seconds}
            kept = round(statistics.median(s.exact for s in seen))
            found.append(Ttft(n, *ceilings(shape, llm.plan, n), exact, filled, stages, kept))
    finally:
        llm.min_tokens = before
        forget(llm)
    return found


def to_json(llm: RidgeLlama, rows: Sequence[Ttft]) -> dict[str, Any]:
    """The measurement with all that made it."""
    return {
        "model": llm._gguf.name,
        "plan": llm.plan.to_json(),
        "lengths": [r.to_json() for r in rows],
        "environment": environment(llm),
    }


def environment(llm: RidgeLlama) -> dict[str, Any]:
    """Versions, machine, command, and llama.cpp's own settings."""
    lib, params = llama_cpp(), llm.context_params
    names = (
        "n_ctx",
        "n_batch",
        "n_ubatch",
        "n_threads",
        "n_threads_batch",
        "type_k",
        "type_v",
        "flash_attn_type",
    )
    return {
        **_environment(torch.device("cpu")),
        "llama_cpp_python": lib.__version__,
        "llama_cpp": {name: int(getattr(params, name)) for name in names},
        "system": lib.llama_print_system_info().decode().strip(),
        "weights": llm._given["weights"],
    }
