"""Two settings' multiply-accumulates side by side, as JSON and as a table (paper 2.5, Figure 7).

What is counted stands in `count`, the settings in `setting`, models in `shape` and `layers`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table

from ridgefill.bench.count import layer_pass_ceiling, layer_pass_share, macs, macs_ceiling
from ridgefill.bench.crossing import LIMIT, crossing_tokens
from ridgefill.bench.setting import FILLS, MAPS, Setting, count_or_share, describe, parse_versus
from ridgefill.bench.shape import ModelShape
from ridgefill.errors import SettingError

__all__ = [
    "FILLS",
    "LIMIT",
    "MAPS",
    "CostReport",
    "LengthCost",
    "ModelShape",
    "Setting",
    "count_or_share",
    "crossing_tokens",
    "layer_pass_ceiling",
    "layer_pass_share",
    "macs",
    "macs_ceiling",
    "parse_versus",
    "report",
    "table",
]


@dataclass(frozen=True)
class LengthCost:
    """One prompt length's counts: ``tokens``, ``macs`` (ours) and ``macs_versus`` (theirs)."""

    tokens: int
    macs: int
    macs_versus: int

    @property
    def ratio(self) -> float:
        """Ours over theirs."""
        return self.macs / self.macs_versus

    def to_json(self) -> dict[str, Any]:
        """The counts and their ratio as a JSON object."""
        return asdict(self) | {"ratio": self.ratio}


@dataclass(frozen=True)
class CostReport:
    """Two settings' counts on one model at some lengths, and where they cross."""

    shape: ModelShape
    ours: Setting
    versus: Setting
    crossing_tokens: int | None
    lengths: tuple[LengthCost, ...]

    def to_json(self) -> dict[str, Any]:
        """One JSON object: crossing_tokens, lengths, setting, versus, model."""
        return {
            "crossing_tokens": self.crossing_tokens,
            "lengths": [length.to_json() for length in self.lengths],
            "setting": self.ours.to_json(),
            "versus": self.versus.to_json(),
            "model": self.shape.to_json(),
        }


def report(shape: ModelShape, lengths: Iterable[int], ours: Setting, versus: Setting) -> CostReport:
    """Counts both settings at each prompt length.

    Raises:
        SettingError: no length, a length < 1, or a split out of range.
    """
    ours, versus = ours.at(shape), versus.at(shape)
    counts = tuple(LengthCost(n, macs(shape, n, ours), macs(shape, n, versus)) for n in lengths)
    if not counts:
        raise SettingError(
            "a cost report", "no prompt length was given", "give one or more lengths in tokens"
        )
    return CostReport(shape, ours, versus, crossing_tokens(shape, ours, versus), counts)


def table(report: CostReport) -> Table:
    """The report as a table for the terminal, the crossing below it."""
    ours, theirs = describe(report.shape, report.ours), describe(report.shape, report.versus)
    crossing = report.crossing_tokens
    if crossing is None:
        caption = f"The first costs more than the second at {LIMIT:,} tokens."
    elif crossing == 1:
        caption = f"The first costs no more than the second at any length (up to {LIMIT:,} tokens)."
    else:
        caption = f"The first costs no more than the second from {crossing:,} tokens (up to {LIMIT:,})."
    drawn = Table(
        title=f"Multiply-accumulates of a prefill (10^12)\n{ours}\nagainst {theirs}", caption=caption
    )
    for heading in ("tokens", "ours", "theirs", "ours / theirs"):
        drawn.add_column(heading, justify="right")
    for row in report.lengths:
        counts = (f"{count / 1e12:,.3f}" for count in (row.macs, row.macs_versus))
        drawn.add_row(f"{row.tokens:,}", *counts, f"{row.ratio:.3f}")
    return drawn
