"""Facts planted in filled rows: they lie where they should, and what finds them is told from what does not."""

import random

import pytest
import torch

from ridgefill.eval import needle as probing
from ridgefill.eval.needle import find_needles, plant
from ridgefill.fill import Identity, TrueInputs
from ridgefill.plan import FillPlan
from tests.tiny import tiny_model, tiny_tokenizer

PLAN = FillPlan(Identity(), split=3, tail=300, leading=16)


@pytest.fixture(scope="module")
def document():
    words = random.Random(0).choices(["river", "stone", "and", "the", "winter", "road"], k=400)
    return tiny_tokenizer()(" ".join(words), return_tensors="pt")["input_ids"][:, :1200]


@pytest.mark.parametrize("chat", [True, False])
@pytest.mark.parametrize("depth", [0.0, 0.5, 0.99])
def test_the_fact_lies_wholly_in_filled_rows_and_is_asked_for_in_the_tail(document, depth, chat):
    tokenizer = tiny_tokenizer(chat)
    ids = plant(tokenizer, PLAN, document, depth, "harbor", "1234567")
    text = tokenizer.decode(ids[0])
    assert text.count("1234567") == 1
    at, end = text.index("1234567"), text.index("1234567") + 7  # the tiny tokenizer has one token a byte
    assert PLAN.leading <= at and end < ids.shape[1] - PLAN.tail
    assert document.shape[1] - 20 <= ids.shape[1] <= document.shape[1]
    assert text.rindex("harbor") > ids.shape[1] - PLAN.tail
    assert text.endswith("The special magic number for harbor mentioned in the text is")


def test_deeper_means_later(document):
    tokenizer = tiny_tokenizer()
    places = [
        tokenizer.decode(plant(tokenizer, PLAN, document, depth, "harbor", "1234567")[0]).index("1234567")
        for depth in (0.1, 0.4, 0.9)
    ]
    assert places == sorted(places) and places[0] < places[2] - 200


def test_a_document_that_is_too_short_gives_no_prompt(document):
    assert plant(tiny_tokenizer(), PLAN, document[:, :330], 0.5, "harbor", "1234567") is None
    assert find_needles(tiny_model(), tiny_tokenizer(), PLAN, [document[:, :330]], 3) == []


def test_both_arms_are_asked_and_told_apart(document, monkeypatch):
    """A copying model cannot be had at this size: the answers are given, who is filling is real."""
    asked = []

    def answer(model, tokenizer, ids, max_new_tokens):
        filling = getattr(model, "_ridgefill", None) is not None
        asked.append(filling)
        number = tokenizer.decode(ids[0]).split("is: ")[1][:7]
        return probing_answer("lost" if filling and len(asked) > 2 else number)

    def probing_answer(text):
        return type("Answer", (), {"text": text})

    monkeypatch.setattr(probing, "answer", answer)
    found = find_needles(tiny_model(), tiny_tokenizer(), PLAN, [document], 2)
    assert asked == [False, True, False, True]
    assert [(n.exact, n.filled) for n in found] == [(True, True), (True, False)]
    assert [n.depth for n in found] == [0.25, 0.75]


def test_the_real_walk_runs_and_the_seed_decides(document):
    model, tokenizer = tiny_model(), tiny_tokenizer()
    plan = FillPlan(TrueInputs(), split=3, tail=300, leading=0)
    ticks = []
    with torch.no_grad():
        first = find_needles(model, tokenizer, plan, [document], 2, tick=ticks.append)
    assert ticks == [1, 2] and len(first) == 2
    assert all(n.exact == n.filled for n in first)  # filled from true inputs: the same answers
