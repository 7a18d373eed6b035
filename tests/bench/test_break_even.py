from __future__ import annotations

import pytest
import torch

import ridgefill
from ridgefill.bench import break_even, ttft
from ridgefill.bench.break_even import FILLED_ROWS, measure_break_even, recall, remember, tried_lengths
from ridgefill.errors import OutputError
from ridgefill.maps import AffineMap, RidgeMaps
from ridgefill.plan import make_plan
from tests.tiny import tiny_model

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("RIDGEFILL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def eye_maps(scale=1.0):
    return RidgeMaps(3, {i: AffineMap(scale * torch.eye(64), torch.zeros(64)) for i in (4, 5)})


def plan(maps, tail=64, leading=16):
    return make_plan(6, maps, tail=tail, leading=leading)


def timed(monkeypatch, ratios):
    """Makes the timing answer filled / exact = ratios, by length; returns the lengths asked for."""
    asked = []

    def measure(model, plan, ids, lengths, repeats, tick):
        asked.extend(lengths)
        return [
            ttft.Ttft(n, 2.0, 2.0, exact=[9.0, 1.0, 1.0], filled=[0.1, r, r])
            for n, r in zip(lengths, ratios, strict=True)
        ]

    monkeypatch.setattr(ttft, "measure", measure)
    return asked


@pytest.mark.parametrize(
    ("ratios", "pays"),
    [
        ((0.9, 0.9, 0.8, 0.7, 0.6), 80 + 64),
        ((1.1, 1.0, 0.9, 0.7, 0.6), 80 + 256),
        ((0.9, 0.9, 1.2, 0.7, 0.6), 80 + 512),  # it must pay at every longer length tried
        ((1.4, 1.3, 1.2, 1.1, 0.97), 80 + 1024),
        ((1.4, 1.3, 1.2, 1.1, 0.99), None),  # a hundredth is noise
        ((0.5, 0.5, 0.5, 0.5, 1.0), None),
    ],
)
def test_it_pays_from_the_shortest_length_with_no_loss_above(monkeypatch, ratios, pays):
    asked = timed(monkeypatch, ratios)
    assert measure_break_even(None, plan(eye_maps()), torch.zeros(1, 5000)) == pays
    assert asked == [80 + rows for rows in FILLED_ROWS]


def test_only_lengths_within_the_text_are_tried(monkeypatch):
    asked = timed(monkeypatch, (1.1, 0.9))
    assert measure_break_even(None, plan(eye_maps()), torch.zeros(1, 80 + 255)) == 80 + 128
    assert asked == [144, 208]
    assert tried_lengths(plan(eye_maps()), 80 + 256) == [144, 208, 336]
    assert tried_lengths(plan(eye_maps()), 143) == []


def test_a_real_measurement_names_a_tried_length_or_none():
    ids = torch.randint(256, (1, 210))
    ticks = []
    found = measure_break_even(
        tiny_model(), make_plan(6, fill="identity", split=1, tail=64), ids, repeats=1, tick=lambda: ticks.append(1)
    )  # fmt: skip
    assert found in (None, 144, 208)
    assert len(ticks) == 2 * (1 + 1)  # two lengths, each warmed up once


def test_what_was_remembered_is_recalled_for_the_same_maps_plan_and_machine(cache, monkeypatch):
    maps = eye_maps()
    assert recall(maps, plan(maps), CPU) is None and not cache.exists()
    path = remember(maps, plan(maps), CPU, 500)
    assert path.is_file() and cache in path.parents
    assert recall(eye_maps(), plan(maps), CPU) == 500  # equal maps, read anew
    assert recall(eye_maps(0.5), plan(eye_maps(0.5)), CPU) is None
    assert recall(maps, plan(maps, tail=65), CPU) is None
    assert recall(maps, plan(maps, leading=0), CPU) is None
    remember(maps, plan(maps, tail=65), CPU, 600)
    remember(maps, plan(maps, leading=0), CPU, None)
    assert recall(maps, plan(maps), CPU) == 500
    assert recall(maps, plan(maps, tail=65), CPU) == 600
    assert recall(maps, plan(maps, leading=0), CPU) is None
    monkeypatch.setattr(break_even, "machine_key", lambda device: "another machine")
    assert recall(maps, plan(maps), CPU) is None
    remember(maps, plan(maps), CPU, 700)
    monkeypatch.undo()
    monkeypatch.setenv("RIDGEFILL_CACHE", str(cache))
    assert recall(maps, plan(maps), CPU) == 500
    assert [p.name for p in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize("content", ["", "{", "[1]", "\x00"])
def test_a_damaged_record_is_nothing_and_is_replaced(content):
    maps = eye_maps()
    path = remember(maps, plan(maps), CPU, 500)
    path.write_text(content)
    assert recall(maps, plan(maps), CPU) is None
    remember(maps, plan(maps), CPU, 400)
    assert recall(maps, plan(maps), CPU) == 400


def test_a_cache_that_cannot_be_written_is_refused(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("RIDGEFILL_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(OutputError):
        remember(eye_maps(), plan(eye_maps()), CPU, 500)


@pytest.mark.filterwarnings("ignore:.*nothing to compare with")  # these maps name no model
def test_filling_uses_what_was_measured():
    model, maps = tiny_model(), eye_maps()
    unmeasured = 64 + 16 + 256
    assert ridgefill.filling(model, maps, tail=64).min_tokens == unmeasured
    remember(maps, plan(maps), CPU, 150)
    assert ridgefill.filling(model, maps, tail=64).min_tokens == 150
    assert ridgefill.filling(model, maps, tail=64, min_tokens=99).min_tokens == 99
    assert ridgefill.filling(model, maps, tail=65).min_tokens == unmeasured + 1
    assert ridgefill.filling(model, maps, tail=64, fill="identity").min_tokens == unmeasured
    ids = torch.randint(256, (1, 150))
    with ridgefill.filling(model, maps, tail=64) as filling:
        model.generate(ids[:, 1:], max_new_tokens=1)
        assert filling.stats.filled == 0 and "150 tokens does not pay" in filling.stats.reason
        model.generate(ids, max_new_tokens=1)
        assert filling.stats.filled == 150 - 64 - 16 and filling.stats.reason is None
