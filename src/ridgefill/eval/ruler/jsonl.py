"""Samples in the official JSONL form: written, and read from our own files or those of the official scripts."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ridgefill.errors import CorpusError, MapsMismatchError
from ridgefill.eval.ruler.draft import Span
from ridgefill.eval.ruler.tasks import TASKS, known
from ridgefill.files import write_json, write_text

FILE, SETTINGS = "validation.jsonl", "set.json"
_ROUND = 1024


@dataclass(frozen=True)
class Sample:
    """One sample.

    Attributes:
        task: official name.
        index: place in its set, from 0.
        wanted: length in tokens that its set was asked for.
        length: its own: prompt, answer prefix and the answer's budget, as the official scripts count it.
        input: the prompt without the answer's prefix.
        answer_prefix: how the answer begins.
        outputs: the references.
        gold: characters of ``input`` that hold the answer, where the maker told.
    """

    task: str
    index: int
    wanted: int
    length: int
    input: str
    answer_prefix: str
    outputs: tuple[str, ...]
    gold: tuple[Span, ...] | None = None

    @property
    def item(self) -> str:
        """Its name in results."""
        return f"{self.task}/{self.wanted}/{self.index}"

    def to_json(self, **more: Any) -> dict[str, Any]:
        """The official fields, and ``more``."""
        line = {
            "index": self.index,
            "input": self.input,
            "outputs": list(self.outputs),
            "length": self.length,
            "answer_prefix": self.answer_prefix,
        }
        return line | ({} if self.gold is None else {"gold": [list(span) for span in self.gold]}) | more


def write_set(folder: Path, lines: Sequence[Mapping[str, Any]], settings: Mapping[str, Any]) -> None:
    """Writes one task's samples to ``folder``/validation.jsonl, and what they were made with beside them.

    Raises:
        OutputError: no space, or not writable.
    """
    write_json(folder / SETTINGS, dict(settings))
    write_text(folder / FILE, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))


def read_jsonl(
    folder: str | Path,
    tasks: Sequence[str] | None = None,
    *,
    wanted: int | None = None,
    tokenizer: str | None = None,
) -> list[Sample]:
    """Reads a folder of sets as the official scripts leave it: ``<task>/validation.jsonl``.

    Samples are numbered by their lines: the official niah script writes a character's place into "index".

    Args:
        tasks: which; None: all that are there.
        wanted: length that the sets were asked for; None: what our own sets say, else the folder's name where it
            is a number, else the longest sample rounded up to a multiple of 1024.
        tokenizer: sha256 of the model's tokenizer, against the one that our own sets were made with.

    Raises:
        CorpusError: no such folder or task in it, a line that is not JSON, lacks a field or has a wrong one.
        MapsMismatchError: the sets were made with another tokenizer.
    """
    folder = Path(folder).expanduser()
    names = [name for name in TASKS if (folder / name / FILE).is_file()]
    if tasks is not None:
        names = [task.name for task in known(tasks)]
    if not names:
        raise CorpusError(
            f"read RULER samples from {folder.name or folder}",
            f"it holds no <task>/{FILE} of a known task",
            "name the folder that holds niah_single_1 and the like",
        )
    return [sample for name in names for sample in _read_task(folder, name, wanted, tokenizer)]


def read_set(folder: Path) -> tuple[list[dict[str, Any]], dict[str, Any] | None]:
    """The lines of one task's folder, checked, and its settings if it is one of ours.

    Raises:
        CorpusError: as `read_jsonl`.
    """
    path = folder / FILE
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        settings = folder / SETTINGS
        made = json.loads(settings.read_text(encoding="utf-8")) if settings.exists() else None
    except OSError as error:
        raise CorpusError(
            f"read {folder.name}/{FILE}",
            error.strerror or str(error),
            "make the set first, or check the path",
        ) from error
    except ValueError as error:
        raise CorpusError(f"read {folder.name}/{SETTINGS}", "it is not JSON", "make the set again") from error
    return [_line(folder.name, i, line) for i, line in enumerate(lines, 1) if line.strip()], made


def _read_task(folder: Path, name: str, wanted: int | None, tokenizer: str | None) -> list[Sample]:
    lines, made = read_set(folder / name)
    if not lines:
        raise CorpusError(f"read {name}/{FILE}", "it is empty", "make the set again")
    theirs = (made or {}).get("tokenizer")
    if None not in (theirs, tokenizer) and theirs != tokenizer:
        raise MapsMismatchError(
            f"run the RULER samples in {folder.name}",
            "they were made with another tokenizer than the model's, so their lengths are not what they say",
            "make a set with this model",
        )
    if wanted is None:
        wanted = (made or {}).get("wanted") or _length_of(folder, max(line["length"] for line in lines))
    return [to_sample(name, i, wanted, line) for i, line in enumerate(lines)]


def to_sample(task: str, index: int, wanted: int, line: Mapping[str, Any]) -> Sample:
    """A sample from its JSON fields."""
    gold = line.get("gold")
    return Sample(
        task,
        index,
        wanted,
        line["length"],
        line["input"],
        line["answer_prefix"],
        tuple(line["outputs"]),
        None if gold is None else tuple((int(a), int(b)) for a, b in gold),
    )


def _length_of(folder: Path, longest: int) -> int:
    for name in (folder.name, folder.parent.name):  # official runs write <length>/data/<task>
        if name.isdecimal():
            return int(name)
    return -(-longest // _ROUND) * _ROUND


def _line(task: str, number: int, text: str) -> dict[str, Any]:
    where = f"read {task}/{FILE} line {number}"
    try:
        line = json.loads(text)
    except ValueError:
        raise CorpusError(where, "it is not JSON", "make the set again, or restore the file") from None
    if not isinstance(line, dict):
        raise CorpusError(where, "it is not an object", "write one JSON object a line")
    wrong = _wrong(line)
    if wrong is not None:
        raise CorpusError(
            where, wrong, "write index, input, outputs, length and answer_prefix, as the official scripts do"
        )
    return line


def _wrong(line: Mapping[str, Any]) -> str | None:
    """What is wrong with a line's fields, or None."""
    kinds = {"index": int, "input": str, "outputs": list, "length": int, "answer_prefix": str}
    for name, kind in kinds.items():
        if name not in line:
            return f"it has no field {name!r}"
        if not isinstance(line[name], kind) or isinstance(line[name], bool):
            return f"its field {name!r} is {line[name]!r:.40}, not a {kind.__name__}"
    outputs = line["outputs"]
    if not outputs or not all(isinstance(output, str) and output for output in outputs):
        return "its field 'outputs' is not a list of answers"
    return None
