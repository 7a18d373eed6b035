from __future__ import annotations

import json
import re

import pytest
import typer

from ridgefill.cli_ledger import ledger
from ridgefill.console import guarded
from ridgefill.ledger import Ledger

app = typer.Typer()
app.add_typer(ledger, name="ledger")


@pytest.fixture(autouse=True)
def wide(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")


@pytest.fixture
def call(tmp_path, monkeypatch, capfd):
    """Exit code, stdout and stderr of `ridgefill ledger ...`, in a folder of its own."""
    monkeypatch.chdir(tmp_path)

    def run(*argv):
        code = guarded(lambda **options: app(["ledger", *map(str, argv)], **options))
        caught = capfd.readouterr()
        return code, caught.out, caught.err

    return run


@pytest.fixture
def declared(call, tmp_path):
    """The hash that declaring printed."""
    (tmp_path / "run.json").write_text('{"split": 15}')
    (tmp_path / "texts.txt").write_text("abc")
    asked = ("--claim", "rows [help]", "--prediction", "within 2 points", "--config", "run.json")
    code, said, _ = call("declare", "l.jsonl", *asked, "--file", "texts.txt", "--file", "run.json")
    assert code == 0
    return re.fullmatch(r"Entry 0: ([0-9a-f]{64})\n", said).group(1)


def test_declare_keeps_claim_settings_and_hashes(call, declared, tmp_path):
    (entry,) = Ledger.open(tmp_path / "l.jsonl").entries()
    assert entry.hash == declared and entry.said["configuration"] == {"split": 15}
    assert (entry.said["claim"], entry.said["prediction"]) == ("rows [help]", "within 2 points")
    assert set(entry.said["files"]) == {"texts.txt", "run.json"}


def test_note_list_and_show(call, declared):
    code, said, _ = call("note", "l.jsonl", declared[:8], "holds")
    assert code == 0 and said.startswith("Entry 1: ")
    code, listed, _ = call("list", "l.jsonl")
    assert code == 0 and declared[:12] in listed and "rows [help]" in listed
    assert f"on {declared[:12]}: holds" in listed
    code, shown, _ = call("show", "l.jsonl", declared[:8])
    found = json.loads(shown)
    assert code == 0 and found["hash"] == declared and [n["note"] for n in found["notes"]] == ["holds"]


def test_verify_of_a_whole_ledger(call, declared):
    code, said, _ = call("verify", "l.jsonl")
    assert code == 0 and "Whole: 1 entry" in said and declared in said and "--head" in said
    code, said, _ = call("verify", "l.jsonl", "--head", declared)
    assert code == 0 and "--head" not in said


def test_verify_names_the_first_bad_entry_and_exits_1(call, declared, tmp_path):
    call("note", "l.jsonl", declared, "holds")
    path = tmp_path / "l.jsonl"
    path.write_text(path.read_text().replace("within 2 points", "within 9 points"))
    code, said, told = call("verify", "l.jsonl")
    assert code == 1 and said == ""
    assert "entry 0 (line 1): it was edited: its contents do not give its hash" in told
    code, _, told = call("note", "l.jsonl", declared, "again")
    assert code == 2 and "does not verify: entry 0" in told and "Instead:" in told


def test_verify_misses_a_known_head(call, declared, tmp_path):
    (tmp_path / "l.jsonl").write_bytes(b"")
    assert call("verify", "l.jsonl")[0] == 0
    code, _, told = call("verify", "l.jsonl", "--head", declared)
    assert code == 1 and f"the entry {declared} is not here" in told


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (("list", "none.jsonl"), "no such file"),
        (("note", "none.jsonl", "abcdef", "x"), "no such file"),
        (("verify", "none.jsonl"), "no such file"),
        (("show", "l.jsonl", "abc"), "not 6 or more digits"),
        (("verify", "l.jsonl", "--head", "what"), "not 6 or more digits"),
        (("declare", "l.jsonl", "--claim", "", "--prediction", "p"), "it is empty"),
        (("declare", "l.jsonl", "--claim", "c"), "--prediction"),
        (("declare", "l.jsonl", "--claim", "c", "--prediction", "p", "--file", "no.txt"), "no.txt"),
        (
            ("declare", "l.jsonl", "--claim", "c", "--prediction", "p", "--config", "list.json"),
            "no JSON object",
        ),
        (("declare", "l.jsonl", "--claim", "c", "--prediction", "p", "--config", "texts.txt"), "texts.txt"),
    ],
)
def test_refusals_are_named_on_one_line(call, declared, tmp_path, argv, named):
    (tmp_path / "list.json").write_text("[1]")
    before = (tmp_path / "l.jsonl").read_bytes()
    code, said, told = call(*argv)
    assert code == 2 and said == "" and named in told and "Instead:" in told and told.count("\n") == 1
    assert (tmp_path / "l.jsonl").read_bytes() == before and not (tmp_path / "none.jsonl").exists()


def test_every_command_has_an_example(call):
    for command in ((), ("declare",), ("note",), ("list",), ("show",), ("verify",)):
        code, said, _ = call(*command, "--help")
        assert code == 0 and f"Example: ridgefill ledger {' '.join(command)}" in said
