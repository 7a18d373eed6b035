"""Retrieval of haystack items by arms: what is kept, what is refused, and that a killed run goes on."""

from __future__ import annotations

import dataclasses

import pytest

from ridgefill.errors import PromptError, SettingError
from ridgefill.eval.arms import Arm
from ridgefill.eval.haystack import Haystack
from ridgefill.eval.results import Run
from ridgefill.eval.retrieval import SPARE, answer_limit, measure_retrieval
from ridgefill.plan import make_plan
from tests.reference import model_of
from tests.tiny import tiny_tokenizer

TOKENIZER = tiny_tokenizer()
HAYSTACK = Haystack(tokens=600, tail=250, leading=16)


def arm_of(fill, **settings):
    plan = make_plan(6, fill=fill, split=3, tail=settings.pop("tail", 250), leading=16, **settings)
    return Arm(fill, lambda n: plan, fill)


ARMS = [arm_of("exact"), arm_of("identity")]


@pytest.fixture(scope="module")
def items():
    return [(f"single/{i}", f"depth {i}", item) for i, item in enumerate(HAYSTACK.items(TOKENIZER, 2))]


def run_in(folder):
    return Run.open(folder, "splice", {}, {"arms": {}})


def with_answers(item, *answers):
    return dataclasses.replace(item, answers=answers)


def test_every_arm_is_scored_on_its_own_words(tmp_path, items):
    model, run, ticks = model_of("llama"), run_in(tmp_path), []
    measure_retrieval(model, TOKENIZER, ARMS, items, run, new_tokens=6, tick=lambda: ticks.append(1))
    assert [(x["arm"], x["item"], x["stratum"]) for x in run.lines] == [
        (arm.name, name, stratum) for name, stratum, _ in items for arm in ARMS
    ]
    assert len(ticks) == 4 and all(x["metrics"] == {"score": 0.0} for x in run.lines)
    for line, (_, _, item), arm in zip(run.lines, [i for i in items for _ in ARMS], ARMS * 2, strict=True):
        out = arm.generate(model, TOKENIZER, item.ids, question=item.question, max_new_tokens=6)
        assert out.shape[1] <= 606
        assert line["answer"] == TOKENIZER.decode(out[0, 600:], skip_special_tokens=True).strip() != ""
        assert line["length"] == 600 and line["depth"] == item.depth and line["seconds"] > 0
    assert run.lines[0]["answer"] != run.lines[1]["answer"]
    # an answer that the exact arm gives, and one that nobody gives
    name, stratum, item = items[0]
    said = with_answers(item, run.lines[0]["answer"].upper(), "no such thing")
    again = run_in(tmp_path / "again")
    measure_retrieval(model, TOKENIZER, ARMS, [(name, stratum, said)], again, new_tokens=6)
    assert [x["metrics"]["score"] for x in again.lines] == [0.5, 0.0]


def test_a_killed_run_goes_on(tmp_path, items):
    model = model_of("llama")
    measure_retrieval(model, TOKENIZER, ARMS[:1], items, run_in(tmp_path), new_tokens=2)
    run, ticks = run_in(tmp_path), []
    measure_retrieval(model, TOKENIZER, ARMS, items, run, new_tokens=2, tick=lambda: ticks.append(1))
    assert [x["arm"] for x in run.lines] == ["exact", "exact", "identity", "identity"]
    assert len(ticks) == 4


def test_an_answer_has_room_for_all_values():
    assert answer_limit(TOKENIZER, ["1234567", "7654321"]) == len("1234567, 7654321") + SPARE


@pytest.mark.parametrize(
    ("change", "arms", "error", "why"),
    [
        (lambda items: [], ARMS, SettingError, "no item"),
        (lambda items: [items[0], items[0]], ARMS, SettingError, "two items"),
        (lambda items: items, [arm_of("identity", tail=584)], PromptError, "no row is filled"),
    ],
)
def test_what_cannot_be_measured_is_refused(tmp_path, items, change, arms, error, why):
    run = run_in(tmp_path)
    with pytest.raises(error, match=why):
        measure_retrieval(model_of("llama"), TOKENIZER, arms, change(items), run)
    assert run.lines == []


def test_prompts_beyond_the_context_are_refused_before_any_runs(tmp_path, items):
    run = run_in(tmp_path)
    with pytest.raises(PromptError, match="context is 4096"):
        measure_retrieval(model_of("llama"), TOKENIZER, ARMS, items, run, new_tokens=3497)
    assert run.lines == []
