"""A hash-chained log of what was claimed before it was run (paper, Registration).

One JSON object per line. An entry's hash is the sha256 of the RFC 8785 canonical JSON of all its other fields, and
each entry carries the hash of the one before it: none can be edited, moved or taken out without breaking the chain.
Two things a chain alone cannot show: entries taken off its end, and a chain that was written anew from some entry on.
Both show against a hash kept elsewhere, such as in a run's results: `Ledger.verify(head=...)`.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import rfc8785

from ridgefill.errors import OutputError, SettingError
from ridgefill.files import sha256_file, whole

START = "0" * 64  # what the first entry carries in place of a hash before it
CHAIN = {"index": int, "time": str, "previous": str, "hash": str}
DECLARED = {"claim": str, "prediction": str, "configuration": dict, "files": dict}
NOTED = {"note": str, "of": str}
_HASH = re.compile(r"[0-9a-f]{64}")
_SHORTEST = 6  # digits of a hash that name an entry


@dataclass(frozen=True)
class Entry:
    """One line of the ledger: a declaration, or a note on an earlier one.

    Attributes:
        index: from 0.
        time: when it was appended, UTC, ISO 8601.
        previous: hash of the entry before it, 64 zeros for the first.
        hash: its own, in hexadecimal.
        said: "claim", "prediction", "configuration" and "files" ({name: sha256}); or "note", and "of" (the hash of
            the entry that it speaks of).
    """

    index: int
    time: str
    previous: str
    hash: str
    said: Mapping[str, Any]

    @property
    def is_note(self) -> bool:
        """Whether it is a note."""
        return "note" in self.said

    def to_json(self) -> dict[str, Any]:
        """The object that its line holds."""
        chain = {name: getattr(self, name) for name in CHAIN}
        return chain | dict(self.said)


@dataclass(frozen=True)
class Problem:
    """What is wrong with a ledger, and where.

    Attributes:
        line: from 1; 0 for the ledger as a whole.
        index: of the entry, as it says itself; None where that cannot be read.
        what: in words.
    """

    line: int
    index: int | None
    what: str

    def __str__(self) -> str:
        if not self.line:
            return self.what
        where = f"line {self.line}" if self.index is None else f"entry {self.index} (line {self.line})"
        return f"{where}: {self.what}"


@dataclass(frozen=True)
class Ledger:
    """A ledger's file. Nothing of it is kept in memory: each call reads what is there."""

    path: Path

    @classmethod
    def open(cls, path: str | os.PathLike[str], *, new: bool = True) -> Ledger:
        """The ledger at ``path``.

        Args:
            new: whether there may be none yet; the first entry makes the file.

        Raises:
            SettingError: there is none and ``new`` is False, or it is a folder.
        """
        found = Path(path)
        if found.is_dir():
            raise SettingError(f"open the ledger {path}", "it is a folder", "name a file: ledger.jsonl")
        if not new and not found.exists():
            raise SettingError(f"open the ledger {path}", "there is no such file", "declare a first entry")
        return cls(found)

    def declare(
        self,
        claim: str,
        prediction: str,
        configuration: Mapping[str, Any] | None = None,
        files: Mapping[str, str] | None = None,
    ) -> Entry:
        """Appends a claim and what is predicted, before the run that tests it.

        Args:
            claim: what is claimed, in words.
            prediction: what will be seen if it holds, and the rule that decides.
            configuration: the run's settings, a JSON object.
            files: name -> sha256 of each file that the run goes by, see `file_hashes`.

        Returns:
            The entry; its ``hash`` is what results name.

        Raises:
            SettingError: the claim or prediction is empty, something is no JSON, or the ledger does not verify.
            OutputError: it cannot be written; it is then as it was.
        """
        _worded("claim", claim)
        _worded("prediction", prediction)
        named = {name: str(digest) for name, digest in (files or {}).items()}
        for name, digest in named.items():
            if not _HASH.fullmatch(digest):
                raise SettingError(f"declare the file {name}", f"{digest!r} is no sha256", "hash the file")
        said = {"claim": claim, "prediction": prediction, "files": named}
        return self._append(said | {"configuration": dict(configuration or {})})

    def note(self, of: str, text: str) -> Entry:
        """Appends what came of an earlier entry.

        Args:
            of: its hash, or the first digits of it.
            text: the note.

        Raises:
            SettingError: no entry or several begin so, an empty note, or the ledger does not verify.
            OutputError: as `declare`.
        """
        _worded("note", text)
        return self._append({"note": text, "of": self.find(of).hash})

    def entries(self) -> list[Entry]:
        """All entries, oldest first.

        Raises:
            SettingError: the ledger does not verify, by its first problem.
        """
        raw = self._read()
        _refuse(f"read the ledger {self.path}", _problems(raw))
        return [_entry(line) for line in raw.splitlines()]

    def find(self, prefix: str) -> Entry:
        """The entry whose hash begins with ``prefix``, 6 digits or more.

        Raises:
            SettingError: no entry or several do, it is too short, or the ledger does not verify.
        """
        asked = f"find the entry {prefix!r} in {self.path}"
        _check_prefix(asked, prefix)
        found = [entry for entry in self.entries() if entry.hash.startswith(prefix)]
        if len(found) != 1:
            why = "several entries begin so" if found else "there is no such entry"
            raise SettingError(asked, why, "see `ledger list`, and give more digits")
        return found[0]

    def verify(self, head: str | None = None) -> list[Problem]:
        """What is wrong with the ledger, the first bad entry first; empty if nothing is.

        Args:
            head: hash of an entry (or the first digits of it) that is known to have been here; without it, entries
                taken off the end are not seen.

        Raises:
            SettingError: the file cannot be read, or ``head`` is not a hash.
        """
        raw = self._read()
        found = list(_problems(raw))
        if head is not None:
            _check_prefix(f"verify {self.path} against {head!r}", head)
            lines = [line for line in map(_object, raw.split(b"\n")) if line is not None]
            if not any(str(line.get("hash")).startswith(head) for line in lines):
                gone = "entries at the end are gone, or the chain was written anew"
                found.append(Problem(0, None, f"the entry {head} is not here: {gone}"))
        return found

    def _append(self, said: dict[str, Any]) -> Entry:
        """Adds one entry: the whole file is written anew beside the old one, which it then replaces."""
        asked = f"append to the ledger {self.path}"
        try:
            json_said = _loads(rfc8785.dumps(said))  # refused before a file is made
        except (rfc8785.CanonicalizationError, ValueError, RecursionError) as error:
            raise SettingError(
                asked, f"it is not JSON: {error}", "give text, finite numbers and lists"
            ) from error
        with _locked(self.path) as path:
            raw = path.read_bytes()
            _refuse(asked, _problems(raw))
            lines = raw.splitlines()
            fields = {
                "index": len(lines),
                "time": datetime.now(UTC).isoformat(timespec="seconds"),
                "previous": _entry(lines[-1]).hash if lines else START,
            } | json_said
            fields["hash"] = _digest(fields)
            with whole(path) as temporary:
                temporary.write_bytes(raw + rfc8785.dumps(fields) + b"\n")
        return _entry(rfc8785.dumps(fields))

    def _read(self) -> bytes:
        try:
            return self.path.read_bytes()
        except FileNotFoundError:
            return b""
        except OSError as error:
            raise SettingError(
                f"read the ledger {self.path}", error.strerror or str(error), "name a file that you may read"
            ) from error


def file_hashes(paths: Iterable[str | os.PathLike[str]]) -> dict[str, str]:
    """Name -> sha256 of each file, named as given, with forward slashes.

    Raises:
        SettingError: one cannot be read.
    """
    found = {}
    for path in paths:
        try:
            found[Path(path).as_posix()] = sha256_file(path)
        except OSError as error:
            raise SettingError(
                f"hash the file {path}", error.strerror or str(error), "name files that you may read"
            ) from error
    return found


def _check_prefix(asked: str, prefix: str) -> None:
    if not re.fullmatch(rf"[0-9a-f]{{{_SHORTEST},64}}", prefix):
        raise SettingError(asked, f"it is not {_SHORTEST} or more digits of a hash", "see `ledger list`")


def _worded(name: str, text: str) -> None:
    if not text.strip():
        raise SettingError(f"append a {name}", "it is empty", "say it in words")


def _refuse(asked: str, problems: Iterator[Problem]) -> None:
    first = next(problems, None)
    if first is not None:
        raise SettingError(
            asked, f"it does not verify: {first}", "restore it from a copy, or begin another ledger"
        )


def _problems(raw: bytes) -> Iterator[Problem]:
    """Each line on its own, then against the line before it, so that one edit is told once and where it is."""
    before: dict[str, Any] | None = None
    hashes: set[str] = set()
    indices: set[int] = set()
    lines = raw.split(b"\n")
    for number, line in enumerate(lines, 1):
        if number == len(lines) and not line:
            return  # after the last line's end
        obj = _object(line)
        index = obj.get("index") if obj and isinstance(obj.get("index"), int) else None
        what = _shape(line, obj, torn=number == len(lines))
        if obj is not None and what is None:
            what = _link(obj, before, indices) or _subject(obj, hashes)
        if what is not None:
            yield Problem(number, index, what)
        if obj is not None:
            before = obj
            hashes.add(str(obj.get("hash")))
        if index is not None:
            indices.add(index)


def _shape(line: bytes, obj: dict[str, Any] | None, torn: bool) -> str | None:
    """What is wrong with a line as it stands."""
    if torn:
        return "the line is torn: its end is missing"
    if obj is None:
        return "the line is not a JSON object: it is torn or was edited"
    wanted = CHAIN | (NOTED if "note" in obj else DECLARED)
    bad = [name for name in wanted.keys() | obj.keys() if type(obj.get(name)) is not wanted.get(name)]
    if bad:
        return f"its fields {', '.join(sorted(bad))} are not those of an entry"
    fields = {name: value for name, value in obj.items() if name != "hash"}
    try:
        if _digest(fields) != obj["hash"]:
            return "it was edited: its contents do not give its hash"
        # The hash is of what the line means; a name written twice, or other spacing, means the same.
        return None if rfc8785.dumps(obj) == line else "it was edited: the line is not canonical JSON"
    except (rfc8785.CanonicalizationError, ValueError):
        return "it was edited: it holds what canonical JSON cannot"


def _link(obj: dict[str, Any], before: dict[str, Any] | None, indices: set[int]) -> str | None:
    """What is wrong between a line and the one before it."""
    last = -1 if before is None else before.get("index")
    linked = START if before is None else before.get("hash")
    if isinstance(last, int) and obj["index"] != last + 1:
        if obj["index"] in indices:
            return f"the index {obj['index']} stands twice"
        if obj["index"] < last:
            return f"it stands after entry {last}: entries were reordered"
        return f"it should be entry {last + 1}: an entry before it is gone or was moved"
    if obj["previous"] != linked:
        return "it does not continue the chain: it names another entry before it"
    return None


def _subject(obj: dict[str, Any], hashes: set[str]) -> str | None:
    if "of" in obj and obj["of"] not in hashes:
        return "it is a note on an entry that is not before it"
    return None


def _loads(text: bytes) -> Any:
    """JSON as RFC 8785 reads it: a number that no float64 holds as an integer was written from a float."""
    return json.loads(text, parse_int=lambda digits: int(digits) if len(digits) < 16 else _big(digits))


def _big(digits: str) -> int | float:
    number = float(digits)
    return int(digits) if abs(number) < 2**53 else number


def _object(line: bytes) -> dict[str, Any] | None:
    try:
        found = _loads(line)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _entry(line: bytes) -> Entry:
    obj = _loads(line)
    said = {name: value for name, value in obj.items() if name not in CHAIN}
    return Entry(obj["index"], obj["time"], obj["previous"], obj["hash"], said)


def _digest(fields: Mapping[str, Any]) -> str:
    return hashlib.sha256(rfc8785.dumps(dict(fields))).hexdigest()


@contextmanager
def _locked(path: Path) -> Iterator[Path]:
    """Holds the ledger alone; made if it is not there.

    Whoever held it before has put a new file in its place: a lock on the old one is then worth nothing, and is
    taken again.

    Yields:
        The file itself, where ``path`` is a link.
    """
    try:
        import fcntl
    except ImportError as error:
        raise OutputError(
            f"write the ledger {path}", "this system has no file locks", "keep it on Linux or macOS"
        ) from error
    path = path.resolve()
    while True:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:
            raise OutputError(
                f"write the ledger {path}", error.strerror or str(error), "name a file that you may write"
            ) from error
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            if _is(path, handle):
                yield path
                return
        finally:
            os.close(handle)


def _is(path: Path, handle: int) -> bool:
    """Whether the open file still goes by that name."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(handle))
    except FileNotFoundError:
        return False
