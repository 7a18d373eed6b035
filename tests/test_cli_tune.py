"""`ridgefill tune` on a tiny model's folder: the answer, its exit code, and refusals in one line."""

from __future__ import annotations

import json
import random
import sys

import pytest
import typer

from ridgefill.cli_tune import tune
from ridgefill.console import guarded
from ridgefill.fit import fit
from ridgefill.settings_file import SettingFile
from tests.tiny import tiny_model, tiny_tokenizer

SMALL = (
    "--tokens",
    300,
    "--tails",
    "40",
    "--rows",
    "none;random(0.10)",
    "--documents",
    4,
    "--fit-tokens",
    4000,
)


@pytest.fixture(autouse=True)
def wide(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    root = tmp_path_factory.mktemp("world")
    tiny_model(seed=1).save_pretrained(root / "tiny")
    tiny_tokenizer().save_pretrained(root / "tiny")
    rng = random.Random(0)
    (root / "texts").mkdir()
    for i in range(16):
        words = (rng.choice("abcdefgh") + str(rng.randint(0, 999)) for _ in range(300))
        (root / "texts" / f"{i}.txt").write_text(" ".join(words), encoding="utf-8")
    return root


def call(*argv):
    """The exit code of the command, as `ridgefill` runs it."""
    app = typer.Typer(rich_markup_mode="rich")
    app.command()(tune)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["ridgefill tune", *map(str, argv)])
        return guarded(app)


def test_it_answers_and_writes_the_setting_file(world, capsys):
    given = (world / "tiny", "--texts", world / "texts", "-o", world / "out", "--splits", "2,5", *SMALL)
    code = call(*given, "--max-novel-nll", 0.00001)
    said = capsys.readouterr()
    setting = SettingFile.read(world / "out" / "ridgefill-setting.json")
    assert code == 0 and setting.split in (2, 5)
    assert "The fastest setting that holds, by counted compute: split" in said.out
    assert "split 2, tail 40, rows random" in said.out and "≤ 1e-05" in said.out
    assert f"--setting {world / 'out' / 'ridgefill-setting.json'}" in said.out
    assert call(*given, "--max-novel-nll", 0, "--seconds", 0) == 1
    said = capsys.readouterr()
    assert "No setting was tried" in said.out and "Time did not allow 4 of 4 settings" in said.out
    assert json.loads((world / "out" / "tune.json").read_text())["result"]["setting"] is None


def test_given_maps_and_a_limit_that_all_keep(world, capsys):
    fitted = fit(tiny_model(seed=1), tiny_tokenizer(), [world / "texts"], (2, 5), world / "maps", tokens=4000,
                 length=300, progress=False)  # fmt: skip
    maps = [part for split in fitted for part in ("--maps", world / "maps" / f"split-{split:02d}")]
    code = call(
        world / "tiny", "--texts", world / "texts", "-o", world / "two", *maps, *SMALL, "--max-novel-nll", 9
    )
    assert code == 0 and SettingFile.read(world / "two" / "ridgefill-setting.json").split == 2
    assert not (world / "two" / "maps").exists()


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (("--max-novel-nll", 0.1), "no text was named"),
        (("--texts", "texts"), "no limit was given"),
        (("--texts", "texts", "--min-retrieval", 2), "a share of what exact retrieves"),
        (("--texts", "texts", "--max-key-nll", 0.1, "--tails", "0.5"), "it counts tokens"),
        (("--texts", "texts", "--max-key-nll", 0.1, "--splits", "half"), "not a list of numbers"),
        (("--texts", "texts", "--max-key-nll", 0.1, "--tails", "512"), "leave nothing to fill"),
    ],
)
def test_refusals_are_one_line(world, capsys, argv, said):
    argv = [world / a if a == "texts" else a for a in argv]
    assert call(world / "tiny", "--tokens", 300, "-o", world / "none", *argv) == 2
    line = capsys.readouterr().err
    assert said in line and line.count("\n") == 1 and "Traceback" not in line
    assert not (world / "none").exists()


def test_help_teaches(capsys):
    assert call("--help") == 0
    shown = capsys.readouterr().out
    for words in (
        "--max-key-nll",
        "--min-retrieval",
        "ridgefill tune MODEL --texts",
        "goes on where it stopped",
    ):
        assert words in shown
