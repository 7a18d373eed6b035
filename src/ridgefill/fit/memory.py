"""What a fit will need in memory, said before it starts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import psutil  # type: ignore[import-untyped]  # comes with accelerate

from ridgefill.fit.capture import HELDOUT_ROWS
from ridgefill.fit.moments import Block, product_elements


@dataclass(frozen=True)
class Memory:
    """Bytes that a fit needs.

    Attributes:
        model: weights and buffers.
        moments: fp64 sums of every split and later layer.
        sample: held-out rows, at most.
        window: one window's activations and its fp64 copies.
        solve: one split's eigendecomposition and its finished maps (all splits' maps).
    """

    model: int
    moments: int
    sample: int
    window: int
    solve: int

    @property
    def total(self) -> int:
        """The most at one time: windows and solving come one after the other."""
        return self.model + self.moments + self.sample + max(self.window, self.solve)

    def line(self) -> str:
        """One line for the user."""
        parts = ("model", "moments", "sample", "window", "solve")
        words = ("model", "moments", "held-out rows", "window", "solving")
        each = ", ".join(
            f"{word} {show_bytes(getattr(self, part))}" for part, word in zip(parts, words, strict=True)
        )
        return f"Memory at most {show_bytes(self.total)}: {each}"


def estimate_memory(
    model: Any,
    splits: Sequence[int],
    *,
    length: int,
    heldout_rows: int = HELDOUT_ROWS,
    reads: Mapping[int, Sequence[Block]] | None = None,
    block: int = 0,
) -> Memory:
    """The memory a fit of ``model`` at layers ``splits`` needs, in bytes.

    Args:
        model: a loaded causal LM; its config and dtype decide.
        length: tokens of a window at most.
        heldout_rows: held-out rows at most.
        reads: split -> what is read there, where that is not the split layer's input (`Moments`).
        block: columns of each.
    """
    config, item = model.config, model.dtype.itemsize
    n_layers, d = config.num_hidden_layers, config.hidden_size
    fitted = [s for s in splits if s < n_layers - 1]
    read = {s: d if reads is None else block * len(reads[s]) for s in fitted}
    w, every = max(read.values(), default=d), sum(read.values())
    maps = sum((n_layers - 1 - s) * read[s] for s in fitted)  # columns of all of them
    # A layer holds about four rows of its state's width (residual, norm, attention) and three of the MLP's.
    activations = length * item * (4 * w + 3 * _mlp_width(config))
    if getattr(config, "_attn_implementation", None) == "eager":  # scores, softmax in fp32, and the mask
        activations += length * length * (config.num_attention_heads * (item + 4) + item)
    moments = product_elements(fitted, n_layers, d, reads, block)
    kept = d * (n_layers - min(fitted, default=n_layers)) + (0 if reads is None else every)
    return Memory(
        model=model.get_memory_footprint(),
        moments=8 * moments if fitted else 0,
        sample=heldout_rows * item * kept,
        window=activations + 8 * length * (every + 2 * d) + 8 * d * every,
        solve=(4 * 8 * w * w + 4 * d * maps + 24 * heldout_rows * w) if fitted else 0,
    )


def _mlp_width(config: Any) -> int:
    """The widest inner row of an MLP: of all the experts that a token runs, where there are some."""
    dense = getattr(config, "intermediate_size", None) or 0
    expert = getattr(config, "moe_intermediate_size", None) or dense
    return max(dense, expert * (getattr(config, "num_experts_per_tok", None) or 1))


def host_memory_available() -> int:
    """Bytes of host memory that are free for use."""
    return psutil.virtual_memory().available


def show_bytes(n: int) -> str:
    """Bytes in words.

    >>> show_bytes(98_400_000)
    '98.4 MB'
    """
    size, units = float(n), ["B", "kB", "MB", "GB", "TB"]
    while size >= 1000 and len(units) > 1:
        size /= 1000
        del units[0]
    return f"{size:.0f} {units[0]}" if units[0] == "B" or size >= 100 else f"{size:.1f} {units[0]}"
