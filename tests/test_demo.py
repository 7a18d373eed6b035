from __future__ import annotations

import io
import json
import math
import os
from dataclasses import replace

import pytest
import torch
from rich.console import Console

from ridgefill import demo
from ridgefill.answer import Answer
from ridgefill.bench.ttft import Ttft
from ridgefill.errors import MapsMismatchError, OutputError
from ridgefill.maps import RidgeMaps
from ridgefill.plan import FillPlan, make_plan
from tests.tiny import tiny_model, tiny_tokenizer


def screen():
    return Console(file=io.StringIO(), width=200)


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts")
    for i in range(12):
        (folder / f"{i}.txt").write_text(f"document {i}: " + f"as {i} was said before, " * 30)
    return folder


@pytest.fixture(scope="module")
def maps(texts, tmp_path_factory):
    return demo._maps(tiny_model(), tiny_tokenizer(), [texts], tmp_path_factory.mktemp("maps"), screen())


@pytest.fixture(scope="module")
def measured(maps):
    """(result, what was printed), measured on a tiny model."""
    plan = make_plan(6, maps, tail=64, leading=16)
    ids = torch.randint(256, (1, 400), generator=torch.Generator().manual_seed(0))
    console = screen()
    return demo._measure(tiny_model(), tiny_tokenizer(), plan, ids, "why?", console), console.file.getvalue()


def test_the_measurement_has_both_arms_and_their_cost(measured):
    result, said = measured
    assert result.prompt_tokens == 400 and result.filled_rows == 400 - 64 - 16
    assert result.question == "why?" and set(result.answers) == {"exact", "filled"}
    assert set(result.losses) == {"exact", "identity", "filled"}
    assert result.cost("exact") == 0 and result.cost("filled") != result.cost("identity") != 0
    assert len(result.timing.exact) == len(result.timing.filled) == demo.REPEATS
    assert "exact (" in said and "filled (" in said


def test_words_say_speed_ceiling_rows_and_cost():
    losses = {name: demo.TailLoss(0.0, 0.0, value) for name, value in
              (("exact", 2.0), ("identity", 2.75), ("filled", 2.125))}  # fmt: skip
    answers = {name: Answer("Lincoln", 2, 1.0, 2.0) for name in ("exact", "filled")}
    timing = Ttft(7500, 1.6, 1.78, exact=[30.0, 32.0, 31.0], filled=[20.0, 20.0, 19.0], stages={"lower": 9.0})
    plan = FillPlan(demo.Identity(), split=15, tail=1024, leading=16)
    result = demo.Result(plan, 7500, "who?", answers, timing, losses, 6460)
    said = " ".join(demo.words(result))
    for part in (
        "1.55 times sooner: 31.0 s exact, 20.0 s filled",
        "could have been: 1.60 by the count of multiply-accumulates, 1.78 by the count of layers",
        "6,460 of 7,500 prompt rows were filled from layer 15",
        "the last 1,024 and the first 16 ran exactly",
        "rose by +0.125 nats a token",
        "identity fill at the same place: +0.750",
        "The two answers are the same",
    ):
        assert part in said
    other = replace(result, answers={**answers, "filled": Answer("Grant", 2, 1.0, 2.0)})
    assert "The two answers are different" in " ".join(demo.words(other))


def test_json_holds_the_measurement(measured):
    result, _ = measured
    made = json.loads(json.dumps(result.to_json(tiny_model()), allow_nan=False))
    assert made["prompt_tokens"] == 400 and made["filled_rows"] == 320
    assert made["plan"] == {"fill": "ridge", "split": 3, "tail": 64, "leading": 16}
    (length,) = made["lengths"]
    assert length["speedup"] == result.timing.speedup
    assert length["macs_ceiling"] > 1 and length["layer_pass_ceiling"] > 1
    assert made["answers"]["filled"]["text"] == result.answers["filled"].text
    assert math.isclose(made["delta_nll"]["filled"]["all"], result.cost("filled"))
    assert made["delta_nll"]["exact"]["all"] == 0
    assert made["tail_loss"]["exact"]["all"] == result.losses["exact"].all


def test_the_picture_is_written_whole_or_not_at_all(measured, tmp_path):
    demo.picture(measured[0], tmp_path / "demo.png")
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError):
        demo.picture(measured[0], tmp_path / "file" / "demo.png")
    assert sorted(os.listdir(tmp_path)) == ["demo.png", "file"]


def test_maps_are_fitted_once(texts, tmp_path, monkeypatch):
    model, tokenizer, console = tiny_model(), tiny_tokenizer(), screen()
    first = demo._maps(model, tokenizer, [texts], tmp_path, console)
    assert first.split == 3 and os.listdir(tmp_path) == ["split-03"]
    assert "Already fitted" not in console.file.getvalue()
    monkeypatch.setattr(demo, "fit", lambda *_, **__: pytest.fail("fitted again"))
    again = demo._maps(model, tokenizer, [texts], tmp_path, console)
    assert "Already fitted" in console.file.getvalue()
    assert again.maps.keys() == first.maps.keys()
    assert all(torch.equal(again.maps[i].weight, first.maps[i].weight) for i in first.maps)
    with pytest.raises(MapsMismatchError):
        demo._maps(tiny_model(seed=1), tokenizer, [texts], tmp_path, console)
    assert RidgeMaps.load(tmp_path / "split-03").split == 3
