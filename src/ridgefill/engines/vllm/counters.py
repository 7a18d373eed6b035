"""Prometheus counters of the workers.

vLLM's `/metrics` shows them where the processes share a folder: set PROMETHEUS_MULTIPROC_DIR to an empty one before
the server starts.
"""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import Counter

from ridgefill.engines.vllm.rows import Part

ROWS = Counter(
    "ridgefill_prompt_rows", "Prompt rows, by whether their late layers ran (exact) or were filled.", ["kind"]
)
PROMPTS = Counter("ridgefill_prompts", "Prompts, by whether they are filled or run exactly.", ["kind"])


def count(parts: Iterable[Part]) -> None:
    """Adds the prompt rows of a step."""
    for part in parts:
        ROWS.labels("filled").inc(part.fills)
        ROWS.labels("exact").inc(part.count - part.fills)


def count_prompt(filled: bool) -> None:
    """Adds a prompt."""
    PROMPTS.labels("filled" if filled else "exact").inc()
