"""Calibration and evaluation text: files, folders and data sets as documents that are read when needed."""

from __future__ import annotations

import codecs
import json
import os
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from ridgefill.errors import CorpusError

Text = str | list[dict[str, str]]  # plain text, or chat messages with `role` and `content`

HUB_DOCUMENTS = 2000  # documents streamed from a Hugging Face data set at most
_LINES = (".jsonl", ".ndjson")
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?(:[\w.-]+)?")


@dataclass(frozen=True)
class Document:
    """One document, read when asked for.

    Attributes:
        name: for messages; never an absolute path.
        chars: its length in characters.
        load: reads it.
        whole: reads the document that this is a part of, if it is one.
    """

    name: str
    chars: int
    load: Callable[[], Text] = field(repr=False)
    whole: Callable[[], Text] | None = field(default=None, repr=False)


@dataclass(frozen=True)
class Source:
    """The documents that one PATH names; ``skipped`` counts a folder's files that are not text."""

    name: str
    kind: str
    documents: tuple[Document, ...]
    skipped: int = 0


def read_sources(texts: Sequence[str | Path]) -> list[Source]:
    """Finds the documents that ``texts`` name; their text is read again when windows are drawn.

    Args:
        texts: text files, JSONL files (``text``, ``content`` or ``messages`` a line), folders (recursively;
            hidden files and files that are not UTF-8 text are skipped), or Hugging Face data sets
            (``owner/name`` or ``owner/name:config``), where no such path exists.

    Raises:
        CorpusError: nothing named, a path that is missing, unreadable, empty or not text, a bad JSONL line.
    """
    if not texts:
        raise CorpusError("read the text", "no text was named", "name a text file, a JSONL file or a folder")
    return [_read_source(str(t)) for t in ([texts] if isinstance(texts, str | Path) else texts)]


def _read_source(name: str) -> Source:
    if not name.strip():  # Path("") would be the working directory
        raise CorpusError(
            "read the text", "an empty name was given", "name a text file, a JSONL file or a folder"
        )
    path, skipped = Path(name).expanduser(), 0
    if path.is_dir():
        kind = "folder"
        documents, skipped = _read_folder(path)
    elif path.exists():
        kind = "jsonl" if path.suffix.lower() in _LINES else "text"
        documents = _read_file(path, path.name)
    else:
        kind, documents = "dataset", _read_dataset(name)
    if not documents:
        note = f"no document with text in it ({skipped} files are not text)" if skipped else "no text in it"
        raise CorpusError(f"read {path.name or name}", note, "name a file or folder that holds text")
    base = name if kind == "dataset" else path.resolve().name
    return Source(base, kind, tuple(documents), skipped)


def _read_folder(root: Path) -> tuple[list[Document], int]:
    documents: list[Document] = []
    skipped = 0
    for folder, below, files in os.walk(root):
        below[:] = sorted(b for b in below if not b.startswith("."))
        for name in sorted(f for f in files if not f.startswith(".")):
            path = Path(folder, name)
            shown = path.relative_to(root).as_posix()
            if path.suffix.lower() in _LINES:
                documents += _read_lines(path, shown)
                continue
            try:
                documents += _read_file(path, shown)
            except CorpusError:
                skipped += 1
    return documents, skipped


def _read_file(path: Path, shown: str) -> list[Document]:
    if path.suffix.lower() in _LINES:
        return _read_lines(path, shown)
    text = _decode(path, shown)
    return [Document(shown, len(text), lambda: _decode(path, shown))] if text.strip() else []


def _bytes(path: Path, shown: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise CorpusError(
            f"read {shown}", f"it cannot be read ({error.strerror})", "check its permissions"
        ) from error


def _decode(path: Path, shown: str) -> str:
    data = _bytes(path, shown)
    why = "it holds zero bytes, so it is binary" if b"\0" in data else "it is not UTF-8 text"
    try:
        if b"\0" not in data:
            return data.decode("utf-8-sig")
    except UnicodeDecodeError:
        pass
    raise CorpusError(f"read {shown}", why, "convert it to UTF-8 text, or leave it out")


def _read_lines(path: Path, shown: str) -> list[Document]:
    documents: list[Document] = []
    offset = 0
    for number, line in enumerate(_bytes(path, shown).splitlines(keepends=True), 1):
        start, offset = offset, offset + len(line)
        body = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
        if not body.strip():
            continue
        name = f"{shown} line {number}"
        text = _parse_line(body, name)
        size = _chars(text)
        if size:
            documents.append(Document(name, size, _line_loader(path, start, len(line), name)))
    return documents


def _line_loader(path: Path, start: int, size: int, name: str) -> Callable[[], Text]:
    def load() -> Text:
        try:
            with path.open("rb") as file:
                file.seek(start)
                line = file.read(size)
        except OSError as error:
            raise CorpusError(f"read {name}", str(error.strerror), "check its permissions") from error
        return _parse_line(line.removeprefix(codecs.BOM_UTF8), name)

    return load


def _parse_line(line: bytes, name: str) -> Text:
    try:
        record = json.loads(line.decode("utf-8"))
    except ValueError as error:  # bad JSON or bad UTF-8
        raise CorpusError(f"read {name}", f"it is not JSON ({error})", "mend or delete that line") from error
    return _text_of(record, name)


def _text_of(record: Any, name: str) -> Text:
    """The text of a JSONL line or data set row: its ``text``, ``content`` or chat ``messages``."""
    if isinstance(record, dict):
        for key in ("text", "content"):
            if isinstance(record.get(key), str):
                return record[key]
        messages = record.get("messages")
        if isinstance(messages, list) and all(isinstance(m, dict) and "content" in m for m in messages):
            return [{"role": str(m.get("role", "user")), "content": _content(m["content"])} for m in messages]
    raise CorpusError(
        f"read {name}",
        "it has no string field 'text' or 'content' and no chat field 'messages'",
        "give every line one of these fields",
    )


def _content(content: Any) -> str:
    if isinstance(content, list):  # parts of a message: keep the text ones
        return "".join(str(p.get("text", "")) for p in content if isinstance(p, dict))
    return "" if content is None else str(content)


def _chars(text: Text) -> int:
    plain = text if isinstance(text, str) else "".join(m["content"] for m in text)
    return len(plain) if plain.strip() else 0


def _read_dataset(name: str) -> list[Document]:
    if not _HUB_NAME.fullmatch(name) or Path(name.split(":")[0]).suffix.lower() in (".txt", ".md", *_LINES):
        raise CorpusError(f"read {Path(name).name}", "there is no such file or folder", "check the path")
    asked = f"read {name} (no such path, so taken as a Hugging Face data set)"
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise CorpusError(
            asked, "the package datasets is not installed", "pip install ridgefill[datasets]"
        ) from error
    repo, _, config = name.partition(":")
    try:
        rows = load_dataset(repo, config or None, split="train", streaming=True)
        return _documents_of(islice(rows, HUB_DOCUMENTS), name)
    except CorpusError:
        raise
    except Exception as error:  # the library lets its network, parsing and script errors all through
        first_line = next(iter(str(error).splitlines()), "")
        why = f"it cannot be loaded ({type(error).__name__}: {first_line})"
        raise CorpusError(asked, why, "check the name and the network, or use local files") from error


def _documents_of(rows: Iterable[Any], name: str) -> list[Document]:
    """A data set's rows as documents, held in memory."""
    documents = []
    for number, row in enumerate(rows, 1):
        shown = f"{name} row {number}"
        text = _text_of(row, shown)
        if _chars(text):
            documents.append(Document(shown, _chars(text), lambda text=text: text))  # type: ignore[misc]
    return documents
