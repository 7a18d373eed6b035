"""What a fit tells its user: remarks, progress bars, and the closing lines."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from ridgefill.maps import RidgeMaps

log = logging.getLogger("ridgefill.fit")


class Report:
    """Remarks and progress bars on stderr; remarks go to the log as well."""

    def __init__(self, show: bool) -> None:
        self.show, self.console = show, Console(stderr=True)
        self.progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.completed:,.0f}/{task.total:,.0f}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=self.console,
            disable=not (show and self.console.is_terminal),
        )

    def __enter__(self) -> Report:
        self.progress.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self.progress.stop()

    def say(self, line: str) -> None:
        """One line for the user."""
        log.info(line)
        if self.show:
            self.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def warn(self, line: str) -> None:
        """One line about something that may disappoint."""
        log.warning(line)

    def bar(self, name: str, total: int) -> Callable[[float], None]:
        """A new bar; call the result with what was done."""
        task = self.progress.add_task(name, total=total)
        return lambda done: self.progress.advance(task, done)

    def close(self, maps: dict[int, RidgeMaps]) -> None:
        """What was fitted, a line a split, and what it took."""
        last: dict[str, Any] = {}
        for split, each in maps.items():
            p = each.provenance
            if not each.maps:
                self.say(
                    f"Split {split}: the last layer, whose input is the split state itself; no map needed."
                )
                continue
            last = p
            self.say(
                f"Split {split}: {len(each.maps)} maps, lambda_rel {p['lambda_rel']:g}, held-out cosine "
                f"{p['heldout_mean']:.4f} (identity fill {p['heldout_identity_mean']:.4f})."
            )
        if last:
            s = last["seconds"]
            self.say(
                f"Forward passes {s['forward']:.1f} s, moments {s['moments']:.1f} s "
                f"({last['moments_ratio']:.2f} times the forward passes together), "
                f"checkpoints {s['checkpoint']:.1f} s, solving {s['solve']:.1f} s "
                f"({last['total_ratio']:.2f} times in all)."
            )
