from __future__ import annotations

import pytest
import torch

import ridgefill
from ridgefill import measured
from ridgefill.errors import OutputError
from ridgefill.maps import AffineMap, RidgeMaps
from ridgefill.measured import recall, remember
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


def test_what_was_remembered_is_recalled_for_the_same_maps_plan_and_machine(cache, monkeypatch):
    maps = eye_maps()
    assert recall(maps, plan(maps), CPU) is None and not cache.exists()
    path = remember(maps, plan(maps), CPU, 500)
    assert path.is_file() and cache in path.parents
    assert recall(eye_maps(), plan(maps), CPU) == 500  # equal maps, read anew
    assert recall(eye_maps(0.5), plan(eye_maps(0.5)), CPU) is None
    assert recall(maps, plan(maps, tail=65), CPU) is None
    assert recall(maps, plan(maps, leading=0), CPU) is None
    assert recall(maps, make_plan(6, maps, tail=64, rows="random(0.5)"), CPU) is None
    assert recall(maps, make_plan(6, maps, tail=64, corrections="key_rescale"), CPU) is None
    remember(maps, plan(maps, tail=65), CPU, 600)
    assert recall(maps, plan(maps), CPU) == 500
    assert recall(maps, plan(maps, tail=65), CPU) == 600
    assert recall(maps, plan(maps, leading=0), CPU) is None
    monkeypatch.setattr(measured, "machine_key", lambda device: "another machine")
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
