"""Arms: read from words, equal to the plans they name, and generating as `filling` does."""

from __future__ import annotations

import pytest
import torch

from ridgefill.bench.cost import ModelShape, Setting, macs
from ridgefill.bench.ttft import setting_of
from ridgefill.errors import PromptError, RidgeFillError, SettingError
from ridgefill.eval.arms import Arm, expected_rows, parse_arms
from ridgefill.models.decoder import Decoder
from ridgefill.plan import FillPlan, make_plan
from tests.reference import generate, model_of, prompt, random_maps
from tests.tiny import tiny_tokenizer

SPLIT, TAIL, LEADING = 3, 24, 4


@pytest.fixture(scope="module")
def model():
    return model_of("llama")


def parse(model, text, maps=True, **settings):
    given = {"tail": TAIL, "leading": LEADING} | settings
    return parse_arms(text, Decoder(model), random_maps(model, SPLIT) if maps else None, **given)


def test_exact_comes_first_named_or_not(model):
    for text in ("ridge", "ridge; exact", "exact; ridge", " ; ridge;"):
        exact, ridge = parse(model, text)
        assert (exact.name, ridge.name) == ("exact", "ridge")
        assert exact.is_exact and not ridge.is_exact


def test_fields_say_what_the_plan_is(model):
    text = "mine: ridge rows=attention(0.10) | special correct=value_rescale(8) tail=30 leading=2"
    plan = parse(model, text)[1].plan(100)
    maps = random_maps(model, SPLIT)
    made = make_plan(
        6, maps, rows="attention(0.10) | special", corrections="value_rescale(8)", tail=30, leading=2
    )
    assert plan.to_json() == made.to_json()
    assert parse(model, text)[1].name == "mine"


def test_arms_without_a_field_take_the_shared_settings(model):
    for arm in parse(model, "ridge; identity; none"):
        plan = arm.plan(100)
        assert (plan.split, plan.tail, plan.leading) == (SPLIT, TAIL, LEADING)


def test_pop_and_presets_keep_their_own_settings(model):
    pop, quality = parse(model, "pop; identity preset=reference")[1:]
    assert pop.plan(99).to_json() == make_plan(6, fill="pop").to_json()
    assert quality.plan(99).tail == make_plan(6, preset="reference", fill="identity", split=SPLIT).tail


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("ridge tail=1k", "tail=1k"),
        ("ridge tail=30 tail=31", "tail twice"),
        ("ridge extra stuff", "extra stuff"),
        ("ridge; ridge", "'ridge'"),
        ("fancy", "fancy"),
        ("identity split=x", "split=x"),
        ("swiftkv", "CHECKPOINT_FOLDER"),
        ("gemfilter rows=special", "rows="),
    ],
)
def test_what_cannot_be_read_is_refused_by_name(model, text, named):
    with pytest.raises(RidgeFillError) as refusal:
        for arm in parse(model, text):
            arm.plan(200)
    assert named in str(refusal.value)


def test_ridge_without_maps_is_refused(model):
    with pytest.raises(SettingError, match="needs maps"):
        parse(model, "ridge", maps=False)


def test_a_matched_tail_is_the_longest_that_the_fill_pays_for(model):
    shape = ModelShape.from_config(model.config)
    ridge, none = parse(model, "ridge; none tail=matched")[1:]
    for n in (64, 200, 1000, 5000):
        budget = macs(shape, n, setting_of(ridge.plan(n), shape))
        plan = none.plan(n)
        assert macs(shape, n, setting_of(plan, shape)) <= budget
        longer = FillPlan(plan.fill, plan.split, plan.tail + 1, plan.leading)
        assert plan.tail == n or macs(shape, n, setting_of(longer, shape)) > budget


def test_compute_is_counted_with_the_rows_that_a_selector_will_take(model):
    shape = ModelShape.from_config(model.config)
    exact, plain, rows, special = parse(model, "ridge; ridge rows=random(0.5); ridge rows=special")
    assert expected_rows(rows.plan(124), 124) == 50
    counted = macs(shape, 124, setting_of(plain.plan(124), shape, 50)) / macs(shape, 124, Setting.exact())
    assert rows.macs_over_exact(shape, 124) == counted > plain.macs_over_exact(shape, 124)
    assert special.macs_over_exact(shape, 124) is None  # only a run knows
    assert exact.macs_over_exact(shape, 124) == 1


@pytest.mark.parametrize("words", ["ridge", "identity rows=random(0.2)", "none rows=attention(0.2)", "pop"])
def test_it_generates_as_the_fill_does(model, words):
    ids, tokenizer = prompt(90, seed=3), tiny_tokenizer()
    arm = parse(model, words)[1]
    found = arm.generate(model, tokenizer, ids, max_new_tokens=5, min_new_tokens=5)
    with arm.on(model, 90, tokenizer) as filling:
        expected, _ = generate(model, ids, 5)
        assert filling.stats.filled > 0
    assert torch.equal(found[:, -5:], expected[:, -5:])


def test_exact_is_the_stock_model(model):
    ids, tokenizer = prompt(90, seed=3), tiny_tokenizer()
    found = parse(model, "ridge")[0].generate(model, tokenizer, ids, max_new_tokens=5, min_new_tokens=5)
    assert torch.equal(found[:, -5:], generate(model, ids, 5)[0][:, -5:])


def test_a_compact_arm_answers_from_what_remains_and_gives_back_the_whole(model):
    class Ends:
        def keep(self, model, tokenizer, ids, question=None, tail=1):
            return torch.tensor([0, 1, 2, *range(ids.shape[1] - 20, ids.shape[1])])

    ids, tokenizer = prompt(90, seed=3), tiny_tokenizer()
    exact = parse(model, "ridge")[0]
    arm = Arm("ends", exact.make, compact=Ends())
    found = arm.generate(model, tokenizer, ids, max_new_tokens=5, min_new_tokens=5)
    short = torch.cat([ids[:, :3], ids[:, -20:]], 1)
    assert torch.equal(found[:, :90], ids)
    assert torch.equal(found[:, 90:], generate(model, short, 5)[0][:, -5:])
    assert not arm.is_exact


def test_a_prompt_longer_than_the_context_is_refused(model):
    long = prompt(model.config.max_position_embeddings + 1)
    with pytest.raises(PromptError):
        parse(model, "ridge")[1].generate(model, tiny_tokenizer(), long, max_new_tokens=1)
