from __future__ import annotations

import io
import sys
from types import SimpleNamespace
from typing import Annotated

import pytest
import typer

from ridgefill import console, embedded
from ridgefill.answer import Answer
from ridgefill.errors import CorpusError, RidgeFillError, SettingError
from ridgefill.prefill import PrefillStats

GIVEN = Answer("text", tokens=7, first_token_seconds=1.234, seconds=5.678)


def one_line(said):
    assert said.endswith("\n") and said.count("\n") == 1
    return said[:-1]


def command_line(body, *argv, monkeypatch):
    """The exit code of a small command line of one command that runs ``body``."""
    app = typer.Typer(pretty_exceptions_enable=False)

    @app.command()
    def command(count: Annotated[int, typer.Option(min=1)] = 1) -> None:
        """A command."""
        body()

    monkeypatch.setattr(sys, "argv", ["tool", *argv])
    return console.guarded(app)


def raises(error):
    def body():
        raise error

    return body


@pytest.mark.parametrize(
    ("error", "named"),
    [
        (RidgeFillError("fit x", "it is\nbroken", "mend it"), "fit x: it is broken. Instead: mend it."),
        (SettingError("a [red]setting[/red]", "no", "yes"), "a [red]setting[/red]: no. Instead: yes."),
        (MemoryError(), "Out of memory. Instead: "),
        (OSError(28, "No space left on device"), "No space left on device"),
    ],
)
def test_a_refusal_is_one_line_on_stderr(monkeypatch, capsys, error, named):
    assert command_line(raises(error), monkeypatch=monkeypatch) == 2
    said = capsys.readouterr()
    assert named in one_line(said.err) and said.out == ""


def test_long_refusals_are_not_folded(capsys):
    assert console.refuse("word " * 100, 3) == 3
    assert len(one_line(capsys.readouterr().err)) >= 499


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (["--count", "x"], "--count"),
        (["--count", "0"], "--count"),
        (["--size", "1"], "No such option"),
        (["more"], "more"),
    ],
)
def test_misuse_is_one_line_too(monkeypatch, capsys, argv, named):
    assert command_line(lambda: pytest.fail("it ran"), *argv, monkeypatch=monkeypatch) == 2
    said = one_line(capsys.readouterr().err)
    assert named in said and "Instead: see `" in said and "--help`." in said


def test_exit_codes(monkeypatch, capsys):
    assert command_line(lambda: None, monkeypatch=monkeypatch) == 0
    assert command_line(raises(typer.Exit(5)), monkeypatch=monkeypatch) == 5
    assert command_line(raises(KeyboardInterrupt()), monkeypatch=monkeypatch) != 0
    with pytest.raises(ZeroDivisionError):  # a mistake of ours is not dressed up as a refusal
        command_line(raises(ZeroDivisionError()), monkeypatch=monkeypatch)


def test_numbers_keep_layers_and_depths_apart():
    assert console.numbers("15", "--splits") == [15] and isinstance(console.numbers("15", "-")[0], int)
    found = console.numbers("0.25, 3,1e-3", "--splits")
    assert found == [0.25, 3, 0.001] and [type(n) for n in found] == [float, int, float]


@pytest.mark.parametrize("text", ["", "x", "1,,2", "0.5,", "nan", "inf", "1;2", "0x10"])
def test_no_numbers_are_refused(text):
    with pytest.raises(SettingError, match="--splits"):
        console.numbers(text, "--splits")


def test_whole_numbers():
    assert console.whole_number(5, "-") == 5 and console.whole_number(1e3, "-") == 1000
    assert isinstance(console.whole_number(1e3, "-"), int)
    for wrong in (0, -1, 2.5, float("inf"), float("nan")):
        with pytest.raises(SettingError, match="--lengths"):
            console.whole_number(wrong, "--lengths")


def test_the_prompt_and_the_question_after_it(tmp_path, monkeypatch):
    path = tmp_path / "p.txt"
    path.write_text("déjà vu \n\n", encoding="utf-8")
    assert console.read_prompt(path, None) == "déjà vu \n\n"
    assert console.read_prompt(path, "why?") == "déjà vu\n\nwhy?"
    for place in (None, console.Path("-")):
        monkeypatch.setattr(sys, "stdin", io.StringIO("from a pipe"))
        assert console.read_prompt(place, None) == "from a pipe"


def test_prompts_that_cannot_be_read(tmp_path):
    (tmp_path / "empty").write_text(" \n")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    for name, named in (
        ("empty", "it is empty"),
        ("binary", "utf-8"),
        ("gone", "No such file"),
        ("", "director"),
    ):
        with pytest.raises(CorpusError, match=named):
            console.read_prompt(tmp_path / name, None)
    assert console.read_prompt(tmp_path / "empty", "why?").strip() == "why?"  # fmt: skip


def test_what_ran_says_what_was_filled_or_why_not():
    stats = PrefillStats(
        tokens=5000, filled=4000, exact=1000, fill="ridge", seconds={"lower": 0.5, "tail": 0.25}
    )
    said = console.what_ran(SimpleNamespace(stats=stats), GIVEN)
    assert said == (
        "[ridge: 4,000 of 5,000 rows filled; first token after 1.23 s, 7 tokens in 5.68 s; "
        "lower 0.50 s, tail 0.25 s]"
    )
    exact = SimpleNamespace(stats=PrefillStats(reason="too short"))
    assert console.what_ran(exact, GIVEN).startswith("[exact (too short): first token after 1.23 s")
    assert console.what_ran(None, GIVEN).startswith("[exact: first token after 1.23 s")


def test_embedded_stands_for_the_embedded_texts(monkeypatch, tmp_path):
    monkeypatch.setattr(embedded, "texts", lambda: {"plays": tmp_path / "plays", "code": tmp_path / "code"})
    monkeypatch.setattr(embedded, "held_out", lambda: [tmp_path / "speech.txt"])
    monkeypatch.setattr(embedded, "doc_texts", lambda: tmp_path / "docs")
    monkeypatch.setattr(embedded, "code_texts", lambda: tmp_path / "code")
    calibration = console.calibration_texts(["mine", "embedded", "yours"])
    assert calibration == ["mine", tmp_path / "plays", tmp_path / "code", "yours"]
    assert console.held_out_texts(["mine", "embedded"]) == ["mine", tmp_path / "speech.txt"]
    assert (
        console.held_out_texts(None) == console.held_out_texts([]) == [tmp_path / "docs", tmp_path / "code"]
    )
