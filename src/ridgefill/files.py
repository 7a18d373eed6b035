"""Files written whole or not at all, and where fetched and converted ones are kept."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ridgefill.errors import OutputError


@contextmanager
def whole(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A temporary sibling to write to, which takes the name ``path`` at exit, and is removed on failure.

    Whatever lay at ``path`` before stays until the new file is complete and on the disk. Missing parent
    folders are created.

    Yields:
        An empty file in the same folder and with the same suffix (writers of pictures choose by suffix).

    Raises:
        OutputError: the disk is full, or the place is not writable.
    """
    path = Path(path)
    temporary: Path | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=f".{path.stem}.", suffix=path.suffix, dir=path.parent)
        os.close(handle)
        temporary = Path(name)
        yield temporary
        _flush(temporary)
        os.chmod(temporary, 0o666 & ~_umask())  # mkstemp makes files that only their owner can read
        os.replace(temporary, path)
    except OSError as error:
        raise OutputError(f"write {path}", error.strerror or str(error), _advice(error)) from error
    finally:
        if temporary is not None:
            temporary.unlink(missing_ok=True)


@contextmanager
def whole_folder(folder: str | os.PathLike[str], needs: int = 0) -> Iterator[Path]:
    """A temporary sibling folder to fill, which takes the name ``folder`` at exit, and is removed on failure.

    Where ``folder`` exists by then (another process was faster), it is kept and the new one dropped.

    Args:
        folder: the folder to make.
        needs: bytes that it will take; refused before any are written if the disk has fewer free.

    Raises:
        OutputError: the disk is full, or the place is not writable.
    """
    folder = Path(folder)
    temporary: Path | None = None
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        if needs > shutil.disk_usage(folder.parent).free:
            raise OSError(errno.ENOSPC, f"it takes {needs / 1e9:.1f} GB, and the disk has less free")
        temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
        yield temporary
        for file in temporary.rglob("*"):
            if file.is_file():
                _flush(file)
        os.chmod(temporary, 0o777 & ~_umask())
        if not folder.is_dir():
            os.rename(temporary, folder)
    except OSError as error:
        raise OutputError(f"write {folder}", error.strerror or str(error), _advice(error)) from error
    finally:
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Writes ``text`` as UTF-8, whole or not at all.

    Raises:
        OutputError: the disk is full, or the place is not writable.
    """
    with whole(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: str | os.PathLike[str], obj: Any) -> None:
    """Writes ``obj`` as indented JSON with a final newline, whole or not at all.

    Raises:
        OutputError: the disk is full, or the place is not writable.
        TypeError, ValueError: ``obj`` cannot be written as strict JSON (NaN and infinity included).
    """
    write_text(path, json.dumps(obj, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def sha256_file(path: str | os.PathLike[str]) -> str:
    """SHA-256 of a file's bytes, in hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def cache_dir() -> Path:
    """Where fetched and converted files are kept; it need not exist yet.

    ``$RIDGEFILL_CACHE``, else ``$XDG_CACHE_HOME/ridgefill``, else ``~/.cache/ridgefill``.
    """
    if own := os.environ.get("RIDGEFILL_CACHE"):
        return Path(own).expanduser()
    if shared := os.environ.get("XDG_CACHE_HOME"):
        return Path(shared).expanduser() / "ridgefill"
    return Path.home() / ".cache" / "ridgefill"


def _flush(path: Path) -> None:
    """Makes sure that the bytes are on the disk before the name points at them."""
    with open(path, "rb+") as file:
        os.fsync(file.fileno())


def _umask() -> int:
    """The process's umask; it can only be read by setting it."""
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _advice(error: OSError) -> str:
    if isinstance(error, PermissionError):
        return "choose a folder that you may write to"
    if isinstance(error, (IsADirectoryError, NotADirectoryError, FileExistsError)):
        return "name a file in a folder, not a folder or a file inside a file"
    return "free some space or choose another disk, then run it again"
