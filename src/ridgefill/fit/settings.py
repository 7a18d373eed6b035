"""The numbers of a fit, checked before anything runs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ridgefill.errors import SettingError
from ridgefill.fit.windows import MIN_WINDOW_ROWS
from ridgefill.plan import layer_of

LAMBDA_GRID = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1, 1.0)
ENCODINGS = ("fp32", "bf16", "int8")
TERMINAL_EVERY = 2048  # paper 2.3


@dataclass(frozen=True)
class Settings:
    """The numbers of a fit, checked; see `fit`."""

    tokens: int
    length: int
    holdout: float
    lambda_grid: tuple[float, ...]
    leading: int
    chat_share: float
    seed: int
    terminal_every: int = TERMINAL_EVERY

    def __post_init__(self) -> None:
        shortest = self.leading + MIN_WINDOW_ROWS
        grid = self.lambda_grid
        checks = (
            (self.leading >= 0, f"leading={self.leading}", "it counts rows", "give 0 or more"),
            (
                self.length >= shortest,
                f"length={self.length}",
                "windows would be shorter than the rows they need",
                f"give {shortest} or more",
            ),
            (
                self.tokens >= 2 * shortest,
                f"tokens={self.tokens}",
                "it is less than two windows",
                f"give {2 * shortest} or more",
            ),
            (0 < self.holdout <= 0.5, f"holdout={self.holdout}", "it is a share", "give one up to 0.5"),
            (0 <= self.chat_share <= 1, f"chat_share={self.chat_share}", "it is a share", "give 0 to 1"),
            (
                self.terminal_every >= 1,
                f"terminal_every={self.terminal_every}",
                "it counts tokens",
                "give 1 or more",
            ),
            (
                bool(grid) and all(0 < v < math.inf for v in grid),
                f"lambda_grid={grid}",
                "penalties are positive numbers",
                "give one or more, such as 0.01,0.03,0.1",
            ),
        )
        for fine, asked, why, instead in checks:
            if not fine:
                raise SettingError(f"fit with {asked}", why, instead)

    def to_json(self) -> dict[str, Any]:
        """The settings as JSON values."""
        return {k: list(v) if isinstance(v, tuple) else v for k, v in vars(self).items()}


def split_layers(splits: Sequence[int | float], n_layers: int) -> list[int]:
    """Layers of splits given as layers or depths, ascending, each once.

    Raises:
        SettingError: none was named, or one is no layer of the model.
    """
    given = [splits] if isinstance(splits, int | float) else list(splits)
    if not given:
        raise SettingError("fit", "no split was named", "name layers or depths, such as 0.25,0.5")
    for split in given:
        if isinstance(split, bool) or not isinstance(split, int | float) or not math.isfinite(split):
            raise SettingError(f"a split at {split!r}", "it is no number", "name a layer, or a depth as 0.25")
    return sorted({layer_of(s, n_layers) for s in given})
