"""What every evaluation says of itself, and its summary as a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from ridgefill.bench.cost import ModelShape
from ridgefill.bench.environment import environment
from ridgefill.errors import SettingError
from ridgefill.eval.results import METRICS, Run
from ridgefill.models.identity import tokenizer_sha256

if TYPE_CHECKING:
    from ridgefill.eval.arms import Arm
    from ridgefill.maps import RidgeMaps

PRECISION = {"score": 3, "score_filled": 3, "top1": 3}  # decimals in the terminal; losses have four


def open_run(
    folder: str | Path,
    kind: str,
    settings: Mapping[str, Any],
    model: Any,
    tokenizer: Any,
    arms: Sequence[Arm],
    maps: RidgeMaps | None,
    tokens: int,
    entry: str | None = None,
) -> Run:
    """Begins or goes on with a run, which names its arms, model, maps, tokenizer, ledger entry and environment.

    Args:
        tokens: prompt length at which plans and compute are written down; an arm may differ at others.
        entry: hash of the ledger entry that declared the run.

    Raises:
        SettingError, OutputError: as `Run.open`.
    """
    shape = ModelShape.from_config(model.config)
    about = {
        "arms": {
            arm.name: {
                "words": arm.words,
                "plan": arm.plan(tokens).to_json(),
                "macs_over_exact": arm.macs_over_exact(shape, tokens),
                "notes": arm.notes,
            }
            for arm in arms
        },
        "baseline": arms[0].name,
        "tokens": tokens,
        "layers": shape.layers,
        "model": Path(model.config._name_or_path).name,
        "maps": None if maps is None else maps.content_hash,
        "tokenizer": tokenizer_sha256(tokenizer),
        "ledger": entry,
        "environment": environment(model.device),
    }
    return Run.open(folder, kind, settings, about)


def declared(ledger: Path | None, entry: str | None) -> str | None:
    """The full hash of a ledger's entry, from its beginning; None if neither was named.

    Raises:
        SettingError: only one of the two, a ledger that was edited, or no such entry.
    """
    if ledger is None and entry is None:
        return None
    if ledger is None or entry is None:
        raise SettingError(
            "a declared run",
            "it needs both the ledger and the entry's hash",
            "name --ledger FILE and --entry HASH, or neither",
        )
    from ridgefill.ledger import Ledger

    opened = Ledger.open(ledger)
    problems = opened.verify()
    if problems:
        raise SettingError(
            f"a run declared in {ledger}",
            f"the ledger does not verify: {problems[0]}",
            "see `ridgefill ledger verify`",
        )
    return opened.find(entry).hash


def table(found: Mapping[str, Any]) -> Table:
    """All items' rows of a summary for a terminal: arms down, metrics across, differences with intervals."""
    rows = [row for row in found["rows"] if row["stratum"] == "all"]
    metrics = list(dict.fromkeys(row["metric"] for row in rows))
    drawn = Table(title=f"{found['kind']}, differences from {found['baseline']}", title_justify="left")
    drawn.add_column("arm")
    for metric in metrics:
        more = METRICS.get(metric.removesuffix("_filled"))
        drawn.add_column(metric + {True: " ↑", False: " ↓", None: ""}[more], justify="right")
    by = {(row["arm"], row["metric"]): row for row in rows}
    for arm in dict.fromkeys(row["arm"] for row in rows):
        drawn.add_row(arm, *(_cell(by.get((arm, metric))) for metric in metrics))
    return drawn


def _cell(row: Mapping[str, Any] | None) -> str:
    if row is None:
        return ""
    places = PRECISION.get(row["metric"], 4)
    difference = row.get("difference")
    if difference is None:
        return f"{row['mean']:.{places}f} (n {row['n']})"
    shown = f"{difference['mean']:+.{places}f}"
    if difference.get("low") is None:
        return shown
    return f"{shown} [{difference['low']:+.{places}f}, {difference['high']:+.{places}f}]"
