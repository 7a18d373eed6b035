from __future__ import annotations

import io
import json
import math
import statistics

import pytest
import torch
from rich.console import Console

from ridgefill.bench import ttft
from ridgefill.bench.cost import ModelShape, Setting, macs
from ridgefill.correct import KeyRescale, ValueRescale
from ridgefill.errors import OutputError, PromptError, SettingError
from ridgefill.fill import Exact, Identity, TrueInputs
from ridgefill.plan import FillPlan
from ridgefill.rows import (
    AttentionRows,
    AttentionScore,
    Combined,
    LexicalRows,
    OverlapScore,
    ProbeRows,
    ProbeScore,
    RandomRows,
    SpanRows,
)
from tests.tiny import FAMILIES, tiny_model, tiny_tokenizer

SHAPE = ModelShape.from_config(tiny_model().config)
PLAN = FillPlan(Identity(), split=2, tail=64, leading=16)


@pytest.fixture(scope="module")
def ids():
    return torch.randint(256, (1, 400), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def rows(ids):
    return ttft.measure(tiny_model(), PLAN, ids, [150, 300], repeats=3)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_first_token_is_the_models_own(family, ids):
    model = tiny_model(family)
    token, seconds = ttft.first_token(model, ids)
    with torch.no_grad():
        assert token == int(model(ids).logits[0, -1].argmax())
    assert 0 < seconds < 60


def test_both_arms_are_interleaved_after_a_warm_up(ids):
    model, seen, ticks = tiny_model(), [], []
    model.model.layers[5].register_forward_pre_hook(lambda _, args: seen.append(args[0].shape[1]))
    (row,) = ttft.measure(model, PLAN, ids, [200], repeats=3, warm_up=2, tick=lambda: ticks.append(len(seen)))
    assert (
        seen == [200, 16, 64] * 5
    )  # exact: all rows in the last layer; filled: the leading ones and the tail
    assert len(ticks) == 5
    assert len(row.exact) == len(row.filled) == 3
    assert getattr(model, "_ridgefill", None) is None


def test_what_is_measured(rows):
    assert [r.tokens for r in rows] == [150, 300]
    for row in rows:
        assert min(row.exact + row.filled) > 0
        assert {"lower", "fill", "tail"} <= set(row.stages)
        assert sum(row.stages.values()) < 3 * max(row.filled)
        assert row.speedup == statistics.median(row.exact) / statistics.median(row.filled)


def test_speedup_is_of_medians():
    row = ttft.Ttft(100, 2.0, 2.0, exact=[3.0, 1.0, 100.0], filled=[2.0, 1.0, 50.0])
    assert row.speedup == 1.5
    assert row.counted == 0.5
    assert row.measured_over_counted == pytest.approx((2 / 3) / 0.5)
    made = row.to_json()
    assert (made["exact_median_s"], made["filled_median_s"]) == (3.0, 2.0)
    assert made["speedup_each"] == [1.5, 1.0, 2.0]


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_the_ceilings_are_the_counts_of_the_plan(family):
    model = tiny_model(family)
    shape = ModelShape.from_config(model.config)
    by_macs, by_layers = ttft.ceilings(model, PLAN, 300)
    assert by_layers == pytest.approx(300 * 6 / ((300 - 64) * 2 + 64 * 6))
    ours = Setting(2, 64, leading=16, fill="identity")
    assert by_macs == macs(shape, 300, Setting.exact()) / macs(shape, 300, ours) > 1
    assert ttft.ceilings(model, FillPlan(Exact(), 2, 64), 300)[0] == 1.0


def test_the_setting_counts_no_map_in_the_split_layer():
    assert ttft.setting_of(PLAN, SHAPE) == Setting(2, 64, leading=16, fill="identity", map_at_split=False)
    assert ttft.setting_of(FillPlan(TrueInputs(), 2, 64), SHAPE).fill == "exact"


LEXICAL = LexicalRows()
SCORE = Combined((AttentionScore(24, baseline=True), OverlapScore(9)))


@pytest.mark.parametrize(
    ("rows", "counted"),
    [
        (RandomRows(0.1) | LEXICAL, {}),
        (AttentionRows(5), {"score_rows": 64, "score_layers": 1}),  # of layers 3, 7, 11, 15 one lies below
        (AttentionRows(5, window=9, layers=(0, 2)), {"score_rows": 9, "score_layers": 2}),
        (SpanRows(SCORE, 0.05), {"score_rows": 2 * 24, "score_layers": 1}),
        (ProbeRows(5, queries=32, within=LEXICAL), {"probe": 32}),
        (ProbeRows("27b"), {"probe": 256, "score_rows": 64, "score_layers": 1}),
        (AttentionRows(5) | SpanRows(ProbeScore(7)), {"probe": 7, "score_rows": 64, "score_layers": 1}),
    ],
)
def test_the_setting_counts_what_selectors_read(rows, counted):
    plan = FillPlan(Identity(), 4, 64, rows=rows)
    expected = Setting(4, 64, 30, leading=16, fill="identity", map_at_split=False, **counted)
    assert ttft.setting_of(plan, SHAPE, selected=30) == expected


def test_without_reference_layers_below_the_split_all_are_counted():
    plan = FillPlan(Identity(), 2, 64, rows=AttentionRows(5))
    assert ttft.setting_of(plan, SHAPE).score_layers == 2


def test_the_setting_counts_corrections_that_do_something():
    plan = FillPlan(Identity(), 2, 64, corrections=(ValueRescale(30), KeyRescale(7)))
    found = ttft.setting_of(plan, SHAPE)
    assert (found.value_rescale, found.key_rescale) == (30, 7)
    plan = FillPlan(Identity(), 2, 64, corrections=(ValueRescale(30, strength=0), KeyRescale(7)))
    assert (ttft.setting_of(plan, SHAPE).value_rescale, ttft.setting_of(plan, SHAPE).key_rescale) == (0, 7)


@pytest.mark.parametrize(
    ("rows", "counted"),
    [
        (RandomRows(20), {}),
        (AttentionRows(20, window=8), {"score_rows": 8, "score_layers": 2}),
        (ProbeRows(20, queries=16), {"probe": 16}),
    ],
)
def test_the_rows_that_ran_are_counted(ids, rows, counted):
    plan = FillPlan(Identity(), 2, 64, rows=rows, corrections=(ValueRescale(32),))
    model = tiny_model()
    (row,) = ttft.measure(model, plan, ids, [300], repeats=2)
    assert row.exact_rows == 64 + 16 + 20
    ours = Setting(2, 64, 20, 16, "identity", map_at_split=False, value_rescale=32, **counted)
    assert row.macs_ceiling == macs(SHAPE, 300, Setting.exact()) / macs(SHAPE, 300, ours)
    assert row.macs_ceiling < ttft.ceilings(model, PLAN, 300)[0]
    made = json.loads(json.dumps(row.to_json()))
    assert made["exact_rows"] == 100
    assert made["counted"] == pytest.approx(macs(SHAPE, 300, ours) / macs(SHAPE, 300, Setting.exact()))
    time = made["filled_median_s"] / made["exact_median_s"]
    assert made["measured_over_counted"] == pytest.approx(time / made["counted"])
    plan_as_json = ttft.to_json(model, plan, [row])["plan"]
    assert plan_as_json["rows"] == str(rows) and "value_rescale" in plan_as_json["corrections"]


def test_a_selector_that_reads_text_gets_the_tokenizer(ids):
    plan = FillPlan(Identity(), 2, 64, rows=LEXICAL)
    with pytest.raises(SettingError, match="tokenizer"):
        ttft.measure(tiny_model(), plan, ids, [200], repeats=1)
    text = torch.randint(97, 123, (1, 200), generator=torch.Generator().manual_seed(0))
    (row,) = ttft.measure(tiny_model(), plan, text, [200], repeats=1, tokenizer=tiny_tokenizer())
    assert row.exact_rows >= 64 + 16


@pytest.mark.parametrize(
    ("lengths", "kind", "named"),
    [
        ([5000], PromptError, "context is 4096"),
        ([80], SettingError, "nothing of it would be filled"),
        ([200, 401], PromptError, "the text has only 400"),
    ],
)
def test_lengths_that_cannot_be_measured_are_refused_before_any_runs(ids, lengths, kind, named):
    model = tiny_model()
    model.register_forward_pre_hook(lambda *_: pytest.fail("the model ran"))
    with pytest.raises(kind, match=named):
        ttft.measure(model, PLAN, ids, lengths)


def test_the_shortest_length_with_a_filled_row_is_measured(ids):
    (row,) = ttft.measure(tiny_model(), PLAN, ids, [81], repeats=1, warm_up=0)
    assert row.stages["fill"] > 0


def test_a_table(rows):
    out = io.StringIO()
    Console(file=out, width=120).print(ttft.table(rows))
    lines = [line.split() for line in out.getvalue().splitlines()]
    for row in rows:
        (cells,) = [line for line in lines if str(row.tokens) in line]
        assert f"{row.speedup:.2f}x" in cells
        assert f"{row.measured_over_counted:.2f}" in cells and "80" in cells
        assert f"{row.macs_ceiling:.2f}x" in cells and f"{row.layer_pass_ceiling:.2f}x" in cells


def test_the_json_says_what_was_measured_and_with_what(rows):
    made = json.loads(json.dumps(ttft.to_json(tiny_model(), PLAN, rows), allow_nan=False))
    assert made["plan"] == {"fill": "identity", "split": 2, "tail": 64, "leading": 16}
    assert [n["tokens"] for n in made["lengths"]] == [150, 300]
    for n in made["lengths"]:
        assert n["exact_median_s"] == statistics.median(n["exact_s"])
        assert math.isclose(n["speedup"], n["exact_median_s"] / n["filled_median_s"])
        assert n["macs_ceiling"] > 1 and n["layer_pass_ceiling"] > 1
    assert made["environment"]["threads"] == torch.get_num_threads()


def test_a_picture_is_written_whole_or_not_at_all(rows, tmp_path):
    ttft.picture(rows, tmp_path / "new" / "ttft.png", "title")
    assert (tmp_path / "new" / "ttft.png").read_bytes().startswith(b"\x89PNG")
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError):
        ttft.picture(rows, tmp_path / "file" / "ttft.png", "title")
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["file", "new", "ttft.png"]
