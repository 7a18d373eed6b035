from __future__ import annotations

import pytest
import torch

from ridgefill.bench import break_even, ttft
from ridgefill.bench.break_even import FILLED_ROWS, measure_break_even, tried_lengths
from ridgefill.maps import AffineMap, RidgeMaps
from ridgefill.plan import make_plan
from tests.tiny import tiny_model


def eye_maps(scale=1.0):
    return RidgeMaps(3, {i: AffineMap(scale * torch.eye(64), torch.zeros(64)) for i in (4, 5)})


def plan(maps, tail=64, leading=16):
    return make_plan(6, maps, tail=tail, leading=leading)


def timed(monkeypatch, ratios):
    """Makes the timing answer filled / exact = ratios, by length; returns the lengths asked for."""
    asked = []

    def measure(model, plan, ids, lengths, repeats, tick, tokenizer):
        asked.extend(lengths)
        return [
            ttft.Ttft(n, 2.0, 2.0, exact=[9.0, 1.0, 1.0], filled=[0.1, r, r])
            for n, r in zip(lengths, ratios, strict=True)
        ]

    monkeypatch.setattr(break_even, "measure", measure)
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
