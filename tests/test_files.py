from __future__ import annotations

import hashlib
import json
import stat
from pathlib import Path

import pytest

from ridgefill.errors import OutputError
from ridgefill.files import cache_dir, sha256_file, whole, whole_folder, write_json, write_text
from tests.disk import small_files


def names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


def test_text_and_json_come_back(tmp_path):
    write_text(tmp_path / "new" / "a.txt", "größe\n")
    assert (tmp_path / "new" / "a.txt").read_bytes() == "größe\n".encode()
    write_json(tmp_path / "b.json", {"x": [1, 2.5, "é"]})
    assert json.loads((tmp_path / "b.json").read_text(encoding="utf-8")) == {"x": [1, 2.5, "é"]}
    assert names(tmp_path) == ["b.json", "new"] and names(tmp_path / "new") == ["a.txt"]


def test_json_that_is_none_leaves_the_old_file(tmp_path):
    write_json(tmp_path / "a.json", {"old": 1})
    with pytest.raises(ValueError):
        write_json(tmp_path / "a.json", {"x": float("nan")})
    assert json.loads((tmp_path / "a.json").read_text()) == {"old": 1}
    assert names(tmp_path) == ["a.json"]


def test_full_disk_leaves_the_old_file_and_nothing_else(tmp_path):
    write_text(tmp_path / "a.txt", "old")
    with pytest.raises(OutputError, match="free some space"), small_files():
        write_text(tmp_path / "a.txt", "x" * 10_000)
    assert (tmp_path / "a.txt").read_text() == "old"
    assert names(tmp_path) == ["a.txt"]


def test_whole_keeps_the_suffix_and_is_readable_by_others(tmp_path):
    write_text(tmp_path / "plain.txt", "")
    with whole(tmp_path / "p.png") as temporary:
        assert temporary.suffix == ".png" and temporary.parent == tmp_path
        temporary.write_bytes(b"\x89PNG")
        assert not (tmp_path / "p.png").exists()
    assert (tmp_path / "p.png").read_bytes() == b"\x89PNG"
    (tmp_path / "by_open").open("w").close()
    assert stat.S_IMODE((tmp_path / "p.png").stat().st_mode) == stat.S_IMODE(
        (tmp_path / "by_open").stat().st_mode
    )


def test_whole_removes_its_file_when_the_writer_fails(tmp_path):
    with pytest.raises(RuntimeError, match="stop"), whole(tmp_path / "p.png") as temporary:
        temporary.write_bytes(b"half")
        raise RuntimeError("stop")
    assert names(tmp_path) == []


def test_whole_folder(tmp_path):
    with whole_folder(tmp_path / "deep" / "f") as temporary:
        (temporary / "sub").mkdir()
        (temporary / "sub" / "a").write_text("1")
        assert not (tmp_path / "deep" / "f").exists()
    assert (tmp_path / "deep" / "f" / "sub" / "a").read_text() == "1"
    with whole_folder(tmp_path / "deep" / "f") as temporary:  # one that is there already is kept
        (temporary / "b").write_text("2")
    assert names(tmp_path / "deep") == ["f"] and names(tmp_path / "deep" / "f") == ["sub"]


def test_whole_folder_that_fails_leaves_nothing(tmp_path):
    with (
        pytest.raises(OutputError, match="free some space"),
        small_files(),
        whole_folder(tmp_path / "f") as temporary,
    ):
        (temporary / "a").write_bytes(b"1")
        (temporary / "b").write_bytes(b"x" * 10_000)
    with pytest.raises(OutputError, match="less free"), whole_folder(tmp_path / "f", needs=1 << 60):
        raise AssertionError("started without room")
    assert names(tmp_path) == []


def test_a_place_that_cannot_be_written_is_one_clear_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="name a file in a folder"):
        write_text(tmp_path / "file" / "a.txt", "x")
    (tmp_path / "folder").mkdir()
    with pytest.raises(OutputError):
        write_text(tmp_path / "folder", "x")
    assert names(tmp_path) == ["file", "folder"]


def test_sha256(tmp_path):
    (tmp_path / "a").write_bytes(b"abc" * 100_000)
    assert sha256_file(tmp_path / "a") == hashlib.sha256(b"abc" * 100_000).hexdigest()


def test_cache_dir_order(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("RIDGEFILL_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_dir() == tmp_path / ".cache" / "ridgefill"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "x"))
    assert cache_dir() == tmp_path / "x" / "ridgefill"
    monkeypatch.setenv("RIDGEFILL_CACHE", str(tmp_path / "own"))
    assert cache_dir() == tmp_path / "own"
