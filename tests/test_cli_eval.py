"""`ridgefill eval` and `report` on a tiny model's folder, end to end: every command, resumed, declared, refused."""

from __future__ import annotations

import json
import random
from pathlib import Path
from types import SimpleNamespace

import pytest

from ridgefill.ledger import Ledger
from tests.command import call
from tests.tiny import tiny_model, tiny_tokenizer

SMALL = ("--tail", "40", "--leading", "4")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("RIDGEFILL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "200")


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    root = tmp_path_factory.mktemp("world")
    tiny_model(seed=0, max_position_embeddings=2048).save_pretrained(root / "tiny")
    tiny_tokenizer().save_pretrained(root / "tiny")
    rng = random.Random(0)
    words = ["alpha", "beta", "gamma", "the", "of", "and", "42", "x = y\n", "delta", "house. The river"]
    for name, size in (("a", 300), ("held", 3000)):
        (root / name).mkdir()
        for i in range(8):
            text = " ".join(rng.choices(words, k=size))
            (root / name / f"{i}.txt").write_text(f"{text} words. Then more of it. " * 2, encoding="utf-8")
    w = SimpleNamespace(root=root, **{p.stem: str(p) for p in root.iterdir()})
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RIDGEFILL_CACHE", str(root / "cache"))
        fit = ("--splits", "3", "--tokens", "5000", "--length", "256")
        assert call("fit", w.tiny, "--texts", w.a, "-o", root / "maps", *fit) == 0
    w.maps = str(root / "maps" / "split-03")
    return w


def lines(folder):
    return [json.loads(line) for line in (folder / "items.jsonl").read_text().splitlines()]


def evaluate(kind, world, folder, *options):
    return call("eval", kind, world.tiny, world.maps, "-o", folder, *SMALL, *options)


@pytest.mark.parametrize(
    ("kind", "options", "metric", "items"),
    [
        (
            "loss",
            ("--tokens", "200", "--documents", "2", "--scored", "16", "--context", "60"),
            "novel_nll",
            2,
        ),
        ("agreement", ("--tokens", "160", "--documents", "2", "--continuation", "6"), "top1", 2),
        ("splice", ("--tokens", "160", "--documents", "2", "--scored", "16", "--context", "60"), "nll", 2),
    ],
)
def test_documents(world, tmp_path, capsys, kind, options, metric, items):
    options = ("--texts", world.held, *options)
    assert evaluate(kind, world, tmp_path / "run", *options) == 0
    first = lines(tmp_path / "run")
    arms = {line["arm"] for line in first}
    assert {"exact", "ridge"} < arms and len(first) == items * len(arms)
    assert all(metric in line["metrics"] for line in first)
    assert "report" in capsys.readouterr().out
    assert evaluate(kind, world, tmp_path / "run", *options) == 0
    assert lines(tmp_path / "run") == first


@pytest.mark.parametrize(
    ("kind", "options", "per_arm"),
    [("needles", ("--kinds", "single", "--count", "2"), 4), ("two-turn", ("--count", "1"), 4)],
)
def test_needles_in_noise_and_in_prose(world, tmp_path, kind, options, per_arm):
    given = ("--texts", world.held, "--tokens", "1700", "--arms", "ridge rows=random(0.1)", *options)
    assert evaluate(kind, world, tmp_path / "run", *given) == 0
    found = lines(tmp_path / "run")
    assert len(found) == 2 * per_arm and {line["arm"] for line in found} == {
        "exact",
        "ridge rows=random(0.1)",
    }
    assert call("report", tmp_path) == 0
    assert (tmp_path / "report.html").exists() and "random(0.1)" in (tmp_path / "report.md").read_text()


def test_needles_in_the_embedded_prose_alone(world, tmp_path, monkeypatch):
    # `prose` would fetch the speeches
    speech = Path(world.held, "0.txt").read_text()
    monkeypatch.setattr("ridgefill.eval.haystack.prose", lambda fitted: [speech])
    assert evaluate(
        "needles", world, tmp_path / "run", "--texts", "embedded", "--tokens", "1700", "--count", "1", "--kinds",
        "single", "--arms", "identity",
    ) == 0  # fmt: skip
    assert {line["stratum"] for line in lines(tmp_path / "run")} == {"noise-single", "prose-single"}


def test_ruler_and_longbench(world, tmp_path):
    pytest.importorskip("lm_eval")
    ruler = ("--tasks", "niah_single_1", "--lengths", "1400", "--count", "2", "--arms", "identity split=3")
    assert evaluate("ruler", world, tmp_path / "bad", *ruler, "--harness", "gen_kwargs") == 2
    told = ("--harness", '{"system_instruction": "Answer."}', "--chat-args", '{"mood": "plain"}')
    assert evaluate("ruler", world, tmp_path / "ruler", *ruler, *told) == 0
    assert len(lines(tmp_path / "ruler")) == 4
    sample = {
        "_id": "1", "domain": "d", "sub_domain": "s", "difficulty": "easy", "length": "short", "question": "Which?",
        "choice_A": "a", "choice_B": "b", "choice_C": "c", "choice_D": "d", "answer": "B", "context": "alpha " * 400,
    }  # fmt: skip
    (tmp_path / "data.json").write_text(json.dumps([sample]))
    given = ("--data", tmp_path / "data.json", "--max-length", "700", "--arms", "identity split=3")
    assert evaluate("longbench", world, tmp_path / "longbench", *given) == 0
    assert {line["stratum"] for line in lines(tmp_path / "longbench")} == {"short"}
    assert call("report", tmp_path, "-o", tmp_path / "page.html") == 0
    assert "niah_single_1" in (tmp_path / "page.html").read_text()


def test_a_declared_run_names_its_entry_and_an_edited_ledger_is_refused(world, tmp_path, capsys):
    entry = Ledger.open(tmp_path / "ledger.jsonl").declare("it is better", "by 0.1", {"tail": 40}, {})
    given = (
        "--texts",
        world.held,
        "--tokens",
        "160",
        "--documents",
        "1",
        "--scored",
        "16",
        "--context",
        "60",
    )
    declared = ("--ledger", tmp_path / "ledger.jsonl", "--entry", entry.hash[:8])
    assert evaluate("loss", world, tmp_path / "run", *given, *declared) == 0
    assert json.loads((tmp_path / "run" / "run.json").read_text())["ledger"] == entry.hash
    assert evaluate("loss", world, tmp_path / "other", *given, *declared[:2]) == 2
    text = (tmp_path / "ledger.jsonl").read_text()
    (tmp_path / "ledger.jsonl").write_text(text.replace("by 0.1", "by 0.2"))
    assert evaluate("loss", world, tmp_path / "run", *given, *declared) == 2
    said = capsys.readouterr().err
    assert "does not verify" in said and not (tmp_path / "other").exists()


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (("--tokens", "4000"), "context is 2048"),
        (("--tokens", "30"), "40"),
        (("--arms", "ridge tail=x"), "tail=x"),
        (("--texts", "nowhere"), "nowhere"),
    ],
)
def test_refusals_are_one_line(world, tmp_path, capsys, options, named):
    given = dict(zip(("--texts", "--tokens"), (world.held, "160"), strict=True))
    given |= dict([options])
    flat = [word for pair in given.items() for word in pair]
    assert evaluate("loss", world, tmp_path / "run", *flat, "--documents", "1") == 2
    said = capsys.readouterr().err.strip().splitlines()[-1]
    assert named in said and "Instead" in said


def test_another_run_in_the_folder_is_refused(world, tmp_path, capsys):
    given = (
        "--texts",
        world.held,
        "--tokens",
        "160",
        "--documents",
        "1",
        "--scored",
        "16",
        "--context",
        "60",
    )
    assert evaluate("loss", world, tmp_path / "run", *given) == 0
    assert evaluate("loss", world, tmp_path / "run", *given[:-1], "61") == 2
    assert "context was 60, now 61" in capsys.readouterr().err


def test_a_setting_file_runs(world, tmp_path, capsys):
    from ridgefill.maps import RidgeMaps
    from ridgefill.plan import make_plan
    from ridgefill.settings_file import SettingFile

    maps = RidgeMaps.load(world.maps)
    plan = make_plan(6, maps, tail=40, leading=4, rows="random(0.1)")
    SettingFile.of(plan, world.maps, maps, {}, min_tokens=50).write(tmp_path / "s.json")
    (tmp_path / "prompt.txt").write_text("alpha beta " * 60)
    given = ("run", world.tiny, "--setting", tmp_path / "s.json", "--prompt-file", tmp_path / "prompt.txt")
    assert call(*given, "--max-new-tokens", "2") == 0
    assert "ridge" in (said := capsys.readouterr().err) and "chosen to run exactly" in said
    assert call(*given, "--max-new-tokens", "2", "--rows", "none") == 0
    assert "chosen" not in capsys.readouterr().err
