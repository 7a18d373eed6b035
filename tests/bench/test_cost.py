from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from ridgefill.bench.cost import CostReport, Setting, crossing_tokens, macs, report, table
from ridgefill.errors import SettingError
from tests.bench.configs import LLAMA, paper


def test_a_report_as_json() -> None:
    made = report(LLAMA, [16384, 32768], paper(20, leading=16), Setting.pop(32))
    found = json.loads(json.dumps(made.to_json(), allow_nan=False))
    assert list(found) == ["crossing_tokens", "lengths", "setting", "versus", "model"]
    assert found["crossing_tokens"] == crossing_tokens(LLAMA, paper(20, leading=16), Setting.pop(32))
    assert [set(row) for row in found["lengths"]] == [{"tokens", "macs", "macs_versus", "ratio"}] * 2
    for row, n in zip(found["lengths"], (16384, 32768), strict=True):
        ours, theirs = macs(LLAMA, n, paper(20, leading=16)), macs(LLAMA, n, Setting.pop(32))
        assert row == {"tokens": n, "macs": ours, "macs_versus": theirs, "ratio": ours / theirs}
    assert (found["setting"]["split"], found["setting"]["tail"], found["setting"]["leading"]) == (
        20,
        4096,
        16,
    )
    assert (found["versus"]["split"], found["versus"]["fill"]) == (22, "identity")
    assert found["model"]["layers"] == 32


def test_a_report_names_the_layer_of_a_depth_and_nothing_for_exact() -> None:
    found = report(LLAMA, [100], Setting(split=0.5), Setting.exact()).to_json()
    assert found["setting"]["split"] == 16
    assert found["versus"]["fill"] == "exact"
    assert {value for key, value in found["versus"].items() if key != "fill"} == {None}


def drawn(made: CostReport) -> str:
    console = Console(width=160, file=io.StringIO(), record=True)
    console.print(table(made))
    return " ".join(console.export_text().split())


def test_a_report_as_a_table() -> None:
    text = drawn(report(LLAMA, [16384, 65536], paper(20, rows=0.1), Setting.pop(32)))
    assert "16,384" in text and "65,536" in text
    assert "POP from layer 22 of 32, tail 1" in text
    assert "ridge fill from layer 20 of 32, tail 4,096, 0.1 of the prefix exact" in text
    text = drawn(report(LLAMA, [65536], paper(20), Setting.pop(32)))
    assert "from 45,661 tokens" in text
    assert f"{macs(LLAMA, 65536, paper(20)) / 1e12:,.3f}" in text
    assert "0.980" in text
    assert "at any length" in drawn(report(LLAMA, [8192], paper(20), Setting.exact()))
    assert "costs more" in drawn(report(LLAMA, [8192], Setting.exact(), paper(20)))


def test_a_table_names_what_is_counted() -> None:
    ours = paper(20, rows=1300, probe=256, value_rescale=512, key_rescale=64, score_rows=65, score_layers=3)
    text = drawn(report(LLAMA, [16384], ours, Setting.pop(32)))
    for part in (
        "1,300 rows of the prefix exact",
        "probe of 256 rows",
        "3 lower layers scored from 65 rows",
        "values rescaled over 512 rows",
        "keys rescaled over 64 rows",
    ):
        assert part in text


def test_reports_that_cannot_be_are_named() -> None:
    with pytest.raises(SettingError, match="no prompt length"):
        report(LLAMA, [], paper(16), Setting.exact())
    with pytest.raises(SettingError, match="length"):
        report(LLAMA, [0], paper(16), Setting.exact())
