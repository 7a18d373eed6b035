"""One evaluation's folder: what was run, every item as it came, and the summary. A killed run goes on from it."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ridgefill.errors import OutputError, SettingError
from ridgefill.files import write_json

if TYPE_CHECKING:
    from ridgefill.eval.arms import Arm

FORMAT = 1
RUN, ITEMS, SUMMARY = "run.json", "items.jsonl", "summary.json"
# metric -> whether more is better
METRICS = {
    "score": True,
    "nll": False,
    "nll_first": False,
    "nll_last": False,
    "novel_nll": False,
    "novel_nll_first": False,
    "novel_nll_last": False,
    "key_nll": False,
    "kl": False,
    "kl_median": False,
    "top1": True,
}


@dataclass
class Run:
    """An evaluation in progress.

    Attributes:
        folder: holds run.json, items.jsonl and, at the end, summary.json.
        about: what run.json says.
        lines: the items so far, in the order they came.
    """

    folder: Path
    about: dict[str, Any]
    lines: list[dict[str, Any]] = field(default_factory=list)
    _done: set[tuple[str, str]] = field(default_factory=set)

    @classmethod
    def open(
        cls, folder: str | Path, kind: str, settings: Mapping[str, Any], about: Mapping[str, Any]
    ) -> Run:
        """Begins a run in ``folder``, or goes on with it.

        Args:
            kind: "loss", "needles", "ruler", "longbench", "splice", "agreement" or "two-turn".
            settings: everything that decides what the items are; a folder of other settings is refused.
            about: arms, model, maps, tokenizer, ledger entry, environment. Arms may be added to a folder; one
                that is there must be the same.

        Raises:
            SettingError: the folder holds another run, by what differs.
            OutputError: it cannot be written or read.
        """
        folder = Path(folder)
        new = {"format": FORMAT, "kind": kind, "settings": dict(settings), **about}
        new = json.loads(json.dumps(new))  # as it will be read back
        if (folder / RUN).exists():
            old = _read_run(folder)
            _same(folder, old, new)
            new["arms"] = old["arms"] | new["arms"]
        write_json(folder / RUN, new)
        lines = list(_whole_lines(folder / ITEMS))
        return cls(folder, new, lines, {(line["arm"], line["item"]) for line in lines})

    def done(self, arm: str, item: str) -> bool:
        """Whether this arm has run this item."""
        return (arm, item) in self._done

    def missing(self, arms: Sequence[Arm], items: Sequence[str]) -> int:
        """How many runs of an arm on an item are still to do."""
        return sum(not self.done(arm.name, item) for arm in arms for item in items)

    def add(self, arm: str, item: str, stratum: str, metrics: Mapping[str, float], **facts: Any) -> None:
        """Keeps one arm's result on one item, at once.

        Raises:
            SettingError: a metric that is not a number: it would spoil every mean.
            OutputError: the disk is full, or the place is not writable.
        """
        bad = [name for name, value in metrics.items() if not math.isfinite(value)]
        if bad:
            raise SettingError(
                f"keep {', '.join(bad)} of arm {arm!r} on {item}",
                "it is not a finite number",
                "run the model in float32, or leave this arm out",
            )
        line = {"arm": arm, "item": item, "stratum": stratum, "metrics": dict(metrics), **facts}
        _append(self.folder / ITEMS, json.dumps(line, ensure_ascii=False, allow_nan=False))
        self.lines.append(line)
        self._done.add((arm, item))

    def finish(self, **options: Any) -> dict[str, Any]:
        """Writes the summary of all items, and returns it.

        Args:
            options: of `ridgefill.eval.summary.summarise`.
        """
        from ridgefill.eval.summary import summarise

        found = summarise(self.about, self.lines, **options)
        write_json(self.folder / SUMMARY, found)
        return found


def read(folder: str | Path) -> tuple[dict[str, Any], list[dict[str, Any]], dict[str, Any] | None]:
    """What a finished or unfinished run left: run.json, its items, and the summary if there is one.

    Raises:
        SettingError: the folder holds no run.
    """
    folder = Path(folder)
    about = _read_run(folder)
    summary = folder / SUMMARY
    return (
        about,
        list(_whole_lines(folder / ITEMS)),
        json.loads(summary.read_text()) if summary.exists() else None,
    )


def _read_run(folder: Path) -> dict[str, Any]:
    try:
        about = json.loads((folder / RUN).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SettingError(
            f"read the run in {folder}",
            f"it has no readable {RUN}",
            "name a folder that `ridgefill eval` wrote",
        ) from error
    if not isinstance(about, dict) or about.get("format") != FORMAT:
        raise SettingError(
            f"read the run in {folder}",
            f"its format is {about.get('format') if isinstance(about, dict) else 'unknown'}, not {FORMAT}",
            "read it with the version that wrote it",
        )
    return about


def _same(folder: Path, old: Mapping[str, Any], new: Mapping[str, Any]) -> None:
    """Raises SettingError unless items of the two runs can stand side by side."""
    differ = [k for k in ("kind", "settings", "model", "tokenizer", "ledger") if old.get(k) != new.get(k)]
    differ += [
        f"arm {name!r}"
        for name, arm in new["arms"].items()
        if name in old["arms"] and old["arms"][name] != arm
    ]
    if differ:
        shown = "; ".join(_difference(k, old.get(k), new.get(k)) for k in differ)
        raise SettingError(
            f"go on with the run in {folder}", f"it is another run: {shown}", "name another folder with -o"
        )


def _difference(key: str, old: Any, new: Any) -> str:
    if isinstance(old, dict) and isinstance(new, dict):
        names = [k for k in old.keys() | new.keys() if old.get(k) != new.get(k)]
        return ", ".join(f"{k} was {old.get(k)!r}, now {new.get(k)!r}" for k in sorted(names))
    return f"the {key} differs" if old is None and new is None else f"the {key} was {old!r}, now {new!r}"


def _whole_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The lines of a JSONL file; a last one that a killed run left torn is cut off the file."""
    if not path.exists():
        return
    kept = 0
    with path.open("rb") as file:
        for raw in file:
            try:
                line = json.loads(raw)
            except ValueError:
                line = None
            if line is None or not raw.endswith(b"\n"):
                break
            kept += len(raw)
            yield line
        rest = file.read()
    if rest:
        raise OutputError(
            f"read {path}", "a line in its middle is not JSON", "restore the file, or begin in another folder"
        )
    if path.stat().st_size > kept:
        os.truncate(path, kept)


def _append(path: Path, line: str) -> None:
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise OutputError(
            f"write {path}", error.strerror or str(error), "free some space, then run it again"
        ) from error
