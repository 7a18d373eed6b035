from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
from datetime import UTC, datetime

import pytest

from ridgefill.errors import OutputError, SettingError
from ridgefill.ledger import START, Ledger, file_hashes

SHA = "ab" * 32


@pytest.fixture
def ledger(tmp_path):
    """Four entries: three claims, and a note on the second."""
    made = Ledger.open(tmp_path / "ledger.jsonl")
    for i in range(3):
        made.declare(f"claim {i}", f"prediction {i}", {"split": 15, "share": 0.1 * i}, {"texts.jsonl": SHA})
    made.note(made.entries()[1].hash, "holds: é, 0.4 points")
    return made


def lines(ledger):
    return ledger.path.read_bytes().splitlines(keepends=True)


def rewrite(ledger, changed):
    ledger.path.write_bytes(b"".join(changed))


def rehash(obj):
    """The entry with the hash that its contents give; plain JSON is canonical for what these tests hold."""
    fields = {k: v for k, v in obj.items() if k != "hash"}
    text = json.dumps(fields, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    fields["hash"] = hashlib.sha256(text.encode()).hexdigest()
    return json.dumps(fields, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode() + b"\n"


def first(ledger, **options):
    found = ledger.verify(**options)
    return found[0] if found else None


def test_entries_hold_what_was_said_and_the_hash_before(ledger):
    entries = ledger.entries()
    assert [e.index for e in entries] == [0, 1, 2, 3]
    assert [e.previous for e in entries] == [START, *(e.hash for e in entries[:3])]
    assert entries[1].said == {
        "claim": "claim 1",
        "prediction": "prediction 1",
        "configuration": {"split": 15, "share": 0.1},
        "files": {"texts.jsonl": SHA},
    }
    assert entries[3].is_note and entries[3].said == {"note": "holds: é, 0.4 points", "of": entries[1].hash}
    age = datetime.now(UTC) - datetime.fromisoformat(entries[3].time)
    assert -1 < age.total_seconds() < 60
    assert ledger.verify() == []


def test_the_hash_is_sha256_of_the_canonical_json_without_it(ledger):
    for raw in lines(ledger):
        assert rehash(json.loads(raw)) == raw


def test_declare_returns_the_entry_that_the_file_holds(ledger):
    entry = ledger.declare("c", "p")
    assert ledger.entries()[-1] == entry and entry.to_json() == json.loads(lines(ledger)[-1])
    assert entry.said["configuration"] == {} and entry.said["files"] == {}


@pytest.mark.parametrize(
    "field", ["claim", "prediction", "time", "index", "previous", "files", "configuration"]
)
def test_any_edit_is_found_in_its_entry(ledger, field):
    changed = lines(ledger)
    obj = json.loads(changed[1])
    obj[field] = {"split": 16} if isinstance(obj[field], dict) else obj[field] + type(obj[field])(1)
    changed[1] = json.dumps(obj, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode() + b"\n"
    rewrite(ledger, changed)
    found = ledger.verify()
    assert found[0].line == 2 and "it was edited" in found[0].what
    assert str(found[0]).startswith(f"entry {obj['index']} (line 2): ")


def test_an_edit_with_a_new_hash_breaks_the_chain_after_it(ledger):
    changed = lines(ledger)
    changed[1] = rehash(json.loads(changed[1]) | {"claim": "what came out"})
    rewrite(ledger, changed)
    found = first(ledger)
    assert (found.line, found.index) == (3, 2) and "does not continue the chain" in found.what


def test_an_edit_that_means_the_same_is_found_too(ledger):
    changed = lines(ledger)
    for edit in (
        changed[1].replace(b'"claim":', b'"claim": '),  # spacing
        changed[1].replace(
            b'{"claim":', b'{"claim":"another claim","claim":'
        ),  # a name twice: the last one counts
        changed[1].replace(b'"split":15', b'"split":15.0'),
    ):
        assert edit != changed[1]
        rewrite(ledger, [changed[0], edit, *changed[2:]])
        assert first(ledger).index == 1 and "not canonical" in first(ledger).what


def test_reordered_entries_are_found(ledger):
    a, b, c, d = lines(ledger)
    rewrite(ledger, [a, c, b, d])
    found = ledger.verify()
    assert (found[0].line, found[0].index) == (2, 2) and "should be entry 1" in found[0].what
    assert (found[1].index, found[1].what) == (1, "it stands after entry 2: entries were reordered")


@pytest.mark.parametrize(("gone", "index"), [(0, 1), (1, 2), (2, 3)])
def test_a_deletion_before_the_end_is_found(ledger, gone, index):
    changed = lines(ledger)
    del changed[gone]
    rewrite(ledger, changed)
    assert first(ledger).index == index and f"should be entry {gone}" in first(ledger).what


def test_a_duplicate_index_is_found(ledger):
    changed = lines(ledger)
    rewrite(ledger, [*changed, changed[1]])
    assert (first(ledger).line, first(ledger).what) == (5, "the index 1 stands twice")
    forged = rehash(json.loads(changed[2]) | {"claim": "another", "previous": json.loads(changed[2])["hash"]})
    rewrite(ledger, [*changed[:3], forged])
    assert (first(ledger).line, first(ledger).what) == (4, "the index 2 stands twice")


@pytest.mark.parametrize("cut", [1, 2, 40])
def test_a_torn_last_line_is_found(ledger, cut):
    ledger.path.write_bytes(ledger.path.read_bytes()[:-cut])
    assert first(ledger).line == 4 and "torn" in first(ledger).what


def test_a_torn_line_in_the_middle_is_found(ledger):
    changed = lines(ledger)
    rewrite(ledger, [changed[0], changed[1][:50] + b"\n", *changed[2:]])
    assert first(ledger).line == 2 and "torn" in first(ledger).what


def test_an_end_cut_off_shows_only_against_a_known_head(ledger):
    entries = ledger.entries()
    head = entries[3].hash
    assert ledger.verify(head=head) == ledger.verify(head=entries[0].hash[:8]) == []
    rewrite(ledger, lines(ledger)[:2])
    assert ledger.verify() == []
    assert f"the entry {head} is not here" in str(first(ledger, head=head))
    assert ledger.verify(head=entries[1].hash) == []


def test_a_chain_written_anew_shows_only_against_a_known_head(ledger):
    head = ledger.entries()[-1].hash
    previous, changed = START, []
    for i, raw in enumerate(lines(ledger)[:3]):
        obj = json.loads(raw) | {"previous": previous, "claim": f"better claim {i}"}
        changed.append(rehash(obj))
        previous = json.loads(changed[-1])["hash"]
    rewrite(ledger, changed)
    assert ledger.verify() == [] and first(ledger, head=head) is not None


def test_a_note_on_no_earlier_entry_and_unknown_fields_are_found(ledger):
    changed = lines(ledger)
    obj = json.loads(changed[3])
    rewrite(ledger, [*changed[:3], rehash(obj | {"of": SHA})])
    assert "a note on an entry that is not before it" in first(ledger).what
    for other in (obj | {"claim": "x"}, {k: v for k, v in obj.items() if k != "of"}, obj | {"index": True}):
        rewrite(ledger, [*changed[:3], rehash(other)])
        assert "not those of an entry" in first(ledger).what


@pytest.mark.parametrize("junk", [b"[]\n", b"\n", b"\xff\n", b'{"index":NaN}\n', b"[" * 100_000 + b"\n"])
def test_junk_lines_are_problems_not_tracebacks(ledger, junk):
    rewrite(ledger, [*lines(ledger), junk])
    assert first(ledger).line == 5


def test_nothing_is_appended_to_a_ledger_that_does_not_verify(ledger):
    rewrite(ledger, [x.replace(b"claim 1", b"claim 9") for x in lines(ledger)])
    before = ledger.path.read_bytes()
    head = json.loads(lines(ledger)[0])["hash"]
    for refused in (lambda: ledger.declare("c", "p"), lambda: ledger.note(head, "n"), ledger.entries):
        with pytest.raises(SettingError, match=r"does not verify: entry 1 \(line 2\): it was edited"):
            refused()
    assert ledger.path.read_bytes() == before


def test_find_takes_the_first_digits(ledger):
    entry = ledger.entries()[2]
    assert ledger.find(entry.hash[:6]) == ledger.find(entry.hash) == entry
    for wrong, why in (
        ("abc", "not 6 or more digits"),
        ("f" * 64, "no such entry"),
        ("X" * 8, "not 6 or more"),
    ):
        with pytest.raises(SettingError, match=why):
            ledger.find(wrong)


@pytest.mark.parametrize("number", [0.1, -0.0, 1e16, 1e21, 5e-324, 2**53 - 1, 123456789012345678.0])
def test_any_number_that_json_holds_can_be_declared(ledger, number):
    entry = ledger.declare("c", "p", {"x": number})
    assert entry.said["configuration"]["x"] == number and ledger.verify() == []


@pytest.mark.parametrize(
    "bad",
    [float("nan"), float("inf"), 2**60, {1, 2}, {3: "x"}, object(), "\ud800"],
    ids=lambda x: type(x).__name__,
)
def test_what_is_no_json_is_refused_and_no_file_made(tmp_path, bad):
    ledger = Ledger.open(tmp_path / "new.jsonl")
    with pytest.raises(SettingError, match="it is not JSON"):
        ledger.declare("c", "p", {"x": bad})
    assert not ledger.path.exists()


def test_empty_words_and_hashes_that_are_none_are_refused(ledger):
    before = ledger.path.read_bytes()
    for claim, prediction in ((" ", "p"), ("c", "")):
        with pytest.raises(SettingError, match="it is empty"):
            ledger.declare(claim, prediction)
    with pytest.raises(SettingError, match="it is empty"):
        ledger.note(ledger.entries()[0].hash, "\n")
    with pytest.raises(SettingError, match="is no sha256"):
        ledger.declare("c", "p", files={"a": "abc"})
    assert ledger.path.read_bytes() == before


def test_files_are_named_and_hashed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "a.txt").write_bytes(b"abc")
    assert file_hashes(["sub/a.txt"]) == {"sub/a.txt": hashlib.sha256(b"abc").hexdigest()}
    with pytest.raises(SettingError, match=r"hash the file none\.txt"):
        file_hashes(["none.txt"])


def test_a_missing_ledger_is_empty_and_a_folder_is_none(tmp_path):
    assert Ledger.open(tmp_path / "none.jsonl").verify() == []
    with pytest.raises(SettingError, match="no such file"):
        Ledger.open(tmp_path / "none.jsonl", new=False)
    with pytest.raises(SettingError, match="a folder"):
        Ledger.open(tmp_path)


def test_a_write_that_fails_leaves_the_ledger_as_it_was(ledger, monkeypatch):
    before = ledger.path.read_bytes()

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OutputError, match="No space left"):
        ledger.declare("c", "p")
    monkeypatch.undo()
    assert ledger.path.read_bytes() == before and list(ledger.path.parent.iterdir()) == [ledger.path]
    assert ledger.declare("c", "p").index == 4


def test_a_link_stays_a_link(ledger, tmp_path):
    link = tmp_path / "link.jsonl"
    link.symlink_to(ledger.path)
    Ledger.open(link).declare("c", "p")
    assert link.is_symlink() and len(ledger.entries()) == 5


def test_writers_at_once_lose_nothing(tmp_path):
    path = tmp_path / "shared.jsonl"
    code = (
        "import sys; from ridgefill.ledger import Ledger\n"
        "for i in range(15): Ledger.open(sys.argv[1]).declare(f'{sys.argv[2]} {i}', 'p')"
    )
    running = [subprocess.Popen([sys.executable, "-c", code, str(path), name]) for name in "abc"]
    assert [process.wait(60) for process in running] == [0, 0, 0]
    found = Ledger.open(path)
    assert found.verify() == []
    said = [e.said["claim"] for e in found.entries()]
    assert sorted(said) == sorted(f"{name} {i}" for name in "abc" for i in range(15))
    assert [p for p in tmp_path.iterdir() if not re.fullmatch(r"shared\.jsonl", p.name)] == []
