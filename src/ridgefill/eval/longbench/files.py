"""LongBench samples from local files, or from the hub's copies of the official ones."""

from __future__ import annotations

import io
import json
import zipfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

from ridgefill.errors import CorpusError, SettingError
from ridgefill.eval.longbench import v1, v2
from ridgefill.eval.longbench.sample import Sample
from ridgefill.eval.longbench.tasks import EVEN, TASKS

HUB = {1: ("THUDM/LongBench", "data.zip"), 2: ("THUDM/LongBench-v2", "data.json")}

Row = tuple[str, str, Any]  # file stem, name for errors, what JSON said
Opener = Callable[[], BinaryIO]


def read_longbench(
    source: str | Path | None = None, *, tasks: Sequence[str] = (), limit: int | None = None
) -> list[Sample]:
    """Samples of LongBench v1, in the order of the files.

    Args:
        source: a JSONL file of the official form, a folder of them, or the official data.zip; None takes that
            from the hub.
        tasks: which to take, those of LongBench-E with "_e" behind their names; none named: all, of folders and
            archives without LongBench-E's.
        limit: the first so many of each task.

    Raises:
        SettingError: an unknown task, a limit below 1.
        CorpusError: no such file, no network, nothing in it, or a row that is not of the official form.
    """
    _check(tasks, limit)
    found: list[Sample] = []
    path = _source(source, 1)
    many = path.is_dir() or zipfile.is_zipfile(path)

    def wanted(task: str) -> bool:
        return task in tasks if tasks else not (many and task.endswith(EVEN))

    for stem, where, row in _rows(path, wanted):
        sample = v1.sample_of(_object(row, where), where, even=stem.endswith(EVEN))
        if wanted(sample.task):
            found.append(sample)
    missing = [task for task in tasks if task not in {sample.task for sample in found}]
    if missing or not found:
        why = f"it has no sample of {', '.join(missing)}" if missing else "it has no sample of LongBench v1"
        raise CorpusError(
            f"read {_shown(source, 1)}", why, "name other tasks, or a file in the official JSONL form"
        )
    return _first(found, limit)


def read_longbench_v2(
    source: str | Path | None = None, *, cot: bool = False, limit: int | None = None
) -> list[Sample]:
    """Samples of LongBench v2, in the order of the file.

    Args:
        source: the official data.json (a list of samples), or a JSONL file of such samples; None takes the
            official one from the hub.
        cot: reasoning first, as in the paper's Table 11.
        limit: the first so many.

    Raises:
        SettingError: a limit below 1.
        CorpusError: no such file, no network, nothing in it, or a row that is not of the official form.
    """
    _check((), limit)
    rows = _rows(_source(source, 2), lambda task: True)
    found = [v2.sample_of(_object(row, where), where, cot) for _, where, row in rows]
    if not found:
        raise CorpusError(
            f"read {_shown(source, 2)}",
            "it has no sample of LongBench v2",
            "name a file in the official form",
        )
    return _first(found, limit)


def _check(tasks: Sequence[str], limit: int | None) -> None:
    unknown = [task for task in tasks if task.removesuffix(EVEN) not in TASKS]
    if unknown:
        raise SettingError(
            f"the LongBench task {unknown[0]!r}",
            "there is none of that name",
            f"use {', '.join(TASKS)}, or one of these with {EVEN} for LongBench-E",
        )
    if limit is not None and limit < 1:
        raise SettingError(f"{limit} samples of each task", "that leaves none", "give 1 or more")


def _first(samples: Iterable[Sample], limit: int | None) -> list[Sample]:
    seen: Counter[str] = Counter()
    kept = []
    for sample in samples:
        seen[sample.task] += 1
        if limit is None or seen[sample.task] <= limit:
            kept.append(sample)
    return kept


def _source(source: str | Path | None, version: int) -> Path:
    if source is None:
        return _download(*HUB[version])
    path = Path(source).expanduser()
    if not path.exists():
        raise CorpusError(
            f"read {path.name}",
            "there is no such file or folder",
            f"check the path, or name none to take {HUB[version][0]} from the hub",
        )
    return path


def _shown(source: str | Path | None, version: int) -> str:
    return f"{HUB[version][0]} from the hub" if source is None else Path(source).name


def _download(repo: str, file: str) -> Path:
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(repo, file, repo_type="dataset"))
    except (OSError, ValueError, RuntimeError) as error:  # the hub's own errors are all of these kinds
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise CorpusError(
            f"read {repo}",
            f"no local file was named, and the hub did not give {file} ({lines[0].rstrip('.')})",
            "name a local file in the official form, or run it once with a network",
        ) from error


def _rows(path: Path, wanted: Callable[[str], bool]) -> Iterator[Row]:
    """The rows of every file but those named after a task that is not wanted."""
    for shown, opener in _files(path):
        stem = PurePosixPath(shown).stem
        if stem.removesuffix(EVEN) in TASKS and not wanted(stem):
            continue
        yield from ((stem, where, row) for where, row in _parsed(shown, opener))


def _files(path: Path) -> Iterator[tuple[str, Opener]]:
    if path.is_dir():
        for file in sorted(path.glob("*.jsonl")):
            yield file.name, lambda file=file: file.open("rb")  # type: ignore[misc]
    elif zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            for name in sorted(n for n in archive.namelist() if n.endswith(".jsonl")):
                member = PurePosixPath(name).name
                yield member, lambda name=name: archive.open(name)  # type: ignore[misc]
    else:
        yield path.name, lambda: path.open("rb")


def _parsed(shown: str, opener: Opener) -> Iterator[tuple[str, Any]]:
    """Each sample of a JSON list or of JSON lines, with its name for errors."""
    try:
        with opener() as raw, io.TextIOWrapper(raw, encoding="utf-8-sig") as file:
            if shown.endswith(".json"):
                whole = _loaded(file.read(), shown)
                yield from ((f"{shown} sample {i}", row) for i, row in enumerate(_list(whole, shown), 1))
                return
            for number, line in enumerate(file, 1):
                if line.strip():
                    where = f"{shown} line {number}"
                    yield where, _loaded(line, where)
    except (OSError, UnicodeDecodeError, zipfile.BadZipFile) as error:
        raise CorpusError(
            f"read {shown}", f"it cannot be read ({error})", "restore the file, or name another"
        ) from error


def _loaded(raw: str, where: str) -> Any:
    try:
        return json.loads(raw)
    except ValueError as error:
        raise CorpusError(f"read {where}", f"it is not JSON ({error})", "mend or restore the file") from error


def _list(whole: Any, shown: str) -> list[Any]:
    if not isinstance(whole, list):
        raise CorpusError(
            f"read {shown}", "it is not a list of samples", "give a JSON list, or one sample a line as .jsonl"
        )
    return whole


def _object(row: Any, where: str) -> dict[str, Any]:
    if not isinstance(row, dict):
        raise CorpusError(f"read {where}", "it is not an object with fields", "use the official form")
    return row
