"""Rivals: what they keep, at what cost, and that they run as their methods do."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from ridgefill.bench.cost import ModelShape, Setting, macs
from ridgefill.bench.ttft import setting_of
from ridgefill.errors import PromptError, SettingError
from ridgefill.eval.arms import _Base
from ridgefill.eval.rivals import RIVALS, rival
from ridgefill.models.decoder import Decoder
from tests.reference import generate, model_of, prompt, random_maps
from tests.rows.test_reader import attentions
from tests.tiny import tiny_tokenizer

LENGTHS = (60, 100, 257, 1000, 4096, 1 << 17)


def base_of(case="llama", split=3, maps=True):
    """What arms are compared to: the ridge fill with random maps, or the identity fill."""
    model = model_of(case)
    return _Base(Decoder(model), random_maps(model, split) if maps else None, split, 24, 4)


def arm_of(words, case="llama", **settings):
    kind, *fields = words.split()
    return rival(kind, words, words, base_of(case, **settings), dict(field.split("=", 1) for field in fields))


def reference(case="llama", **settings):
    return base_of(case, **settings).reference(), ModelShape.from_config(model_of(case).config)


def counted(shape, n, plan, k, layer):
    """Of a plan that drops rows: the late layers over k chosen rows, and what choosing them reads."""
    total = macs(shape, n, setting_of(replace(plan, rows=None), shape, k))
    last = range(n - min(plan.rows.window, n), n)
    per_key = shape.costs[layer].reads[0][0] // 2  # scores, without the values
    total += sum(per_key * (i + 1) for i in last)
    if layer == plan.split:
        total += shape.costs[layer].value * (n - plan.tail - plan.leading - k)
    return total


@pytest.mark.parametrize("case", ["llama", "qwen3_next", "qwen3_moe"])
@pytest.mark.parametrize(("kind", "at_split"), [("snapkv", True), ("fastkv", False)])
def test_one_more_row_would_cost_more_than_the_reference(case, kind, at_split):
    split = 5
    ridge, shape = reference(case, split=split)
    arm = arm_of(kind, case, split=split)
    below = 2 if case == "qwen3_next" else 4
    for n in LENGTHS:
        budget, plan = macs(shape, n, setting_of(ridge, shape)), arm.plan(n)
        assert plan.rows.layer == (split if at_split else below)
        k = plan.rows.budget
        assert 0 < k < n - plan.tail - plan.leading
        assert counted(shape, n, plan, k, plan.rows.layer) <= budget
        assert counted(shape, n, plan, k + 1, plan.rows.layer) > budget
        assert arm.macs_over_exact(shape, n) <= budget / macs(shape, n, Setting.exact()) + 1e-9


@pytest.mark.parametrize("case", ["llama", "qwen3_next"])
def test_gemfilter_pays_for_filtering_and_the_short_prompt(case):
    ridge, shape = reference(case, split=4)
    arm, layer = arm_of("gemfilter", case, split=4), 4 if case == "llama" else 2
    below = replace(shape, costs=shape.costs[:layer])
    for n in LENGTHS[1:]:
        budget, k = macs(shape, n, setting_of(ridge, shape)), arm.compact.rows(n)
        reads = n * (shape.costs[layer].value + shape.costs[layer].reads[0][0] // 2)
        cost = [
            macs(below, n, Setting.exact()) + reads + macs(shape, rows, Setting.exact())
            for rows in (k, k + 1)
        ]
        assert 1 < k < n and cost[0] <= budget < cost[1]
        assert arm.macs_over_exact(shape, n) == cost[0] / macs(shape, n, Setting.exact())


@pytest.mark.parametrize("kind", RIVALS)
def test_where_the_reference_fills_nothing_nothing_is_dropped(kind):
    arm, shape, ids = arm_of(kind), reference()[1], prompt(20)
    assert arm.macs_over_exact(shape, 20) == 1.0
    model, tokenizer = model_of("llama"), tiny_tokenizer()
    ours = arm.generate(model, tokenizer, ids, max_new_tokens=4, eos_token_id=None)
    assert torch.equal(ours, generate(model, ids, 4)[0])


@pytest.mark.parametrize("case", ["llama", "gemma3_text", "qwen3_next"])
@pytest.mark.parametrize("kind", RIVALS)
def test_every_rival_generates(case, kind):
    """With as many rows as it may have, and with the question pointed at."""
    model, ids = model_of(case), prompt(200)
    arm = arm_of(kind, case, split=5)
    out = arm.generate(model, tiny_tokenizer(), ids, question=(180, 200), max_new_tokens=3, eos_token_id=None)
    assert out.shape == (1, 203) and torch.equal(out[:, :200], ids)
    if arm.compact is None:
        with arm.on(model, 200) as filling, torch.no_grad():
            model(ids, use_cache=True, logits_to_keep=1)
        assert filling.stats.selected == arm.plan(200).rows.budget > 0
        assert filling.stats.filled == 200 - filling.stats.exact > 0


def test_fastkv_keeps_the_window_and_spends_the_rest_on_chosen_rows():
    plans = {kind: arm_of(kind).plan(1000) for kind in ("snapkv", "fastkv")}
    assert (plans["snapkv"].tail, plans["snapkv"].leading) == (24, 4)
    assert (plans["fastkv"].tail, plans["fastkv"].leading) == (8, 0)
    assert plans["fastkv"].rows.budget > plans["snapkv"].rows.budget + 16
    named = arm_of("fastkv split=2 tail=11 leading=3").plan(1000)
    assert (named.split, named.tail, named.leading, named.rows.layer) == (2, 11, 3, 1)


@pytest.mark.parametrize(("case", "layer"), [("llama", 3), ("qwen3", 3), ("gemma3_text", 2), ("gpt_oss", 2)])
def test_gemfilter_reads_the_last_rows_products(case, layer):
    """log p = product * scale - a constant of the head, for every key: summed over heads, all but a constant."""
    model, ids = model_of(case), prompt()
    filter_ = arm_of("gemfilter", case).compact
    assert filter_.layer == layer
    with torch.no_grad():
        ours = filter_.products(Decoder(model), ids)
    stock = attentions(model, ids)[layer][:, -1].double().log().sum(0)
    apart = ours.double() * model.model.layers[layer].self_attn.scaling - stock
    assert ours.std() > 0.5
    torch.testing.assert_close(apart, apart[:1].expand_as(apart), rtol=0, atol=1e-3)
    assert model.config._attn_implementation != "ridgefill_products"


@pytest.mark.parametrize("tail", [1, 6])
def test_gemfilter_runs_what_it_keeps_as_a_prompt_of_its_own(tail):
    model, tokenizer, ids = model_of("llama"), tiny_tokenizer(), prompt(300)
    arm = arm_of("gemfilter")
    kept = arm.compact.keep(model, tokenizer, ids, tail=tail)
    assert len(kept) == arm.compact.rows(300) and torch.equal(kept, kept.unique())
    first = 300 - tail
    assert kept[-tail:].tolist() == list(range(first, 300))
    score = arm.compact.products(Decoder(model), ids[:, : first + 1]).tolist()
    around = [sum(score[max(0, j - 2) : j + 3]) / 5 for j in range(first + 1)]
    ranked = sorted(range(first), key=lambda j: (-around[j], j))
    assert kept[:-tail].tolist() == sorted(ranked[: len(kept) - tail])
    if tail == 1:
        out = arm.generate(model, tokenizer, ids, max_new_tokens=5, eos_token_id=None)
        assert torch.equal(out[:, 300:], generate(model, ids[:, kept], 5)[0][:, len(kept) :])


def test_the_reference_is_the_identity_fill_without_maps():
    identity, shape = reference(maps=False)
    arm = arm_of("snapkv", maps=False)
    assert identity.fill.name == "identity"
    budget = macs(shape, 1000, setting_of(identity, shape)) / macs(shape, 1000, Setting.exact())
    assert arm.macs_over_exact(shape, 1000) <= budget
    assert 0 < arm.plan(1000).rows.budget < arm_of("snapkv").plan(1000).rows.budget


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("snapkv rows=random", "has no rows="),
        ("gemfilter correct=value", "has no correct="),
        ("fastkv tail=matched", "counts tokens"),
    ],
)
def test_fields_that_a_rival_has_not_are_refused(words, says):
    with pytest.raises(SettingError, match=says):
        arm_of(words)


@pytest.mark.parametrize("kind", RIVALS)
def test_a_model_without_full_attention_up_to_the_split_is_refused(kind):
    with pytest.raises(SettingError, match="no full-attention layer up to it"):
        arm_of(kind, "qwen3_next", split=1)


def test_what_the_reference_does_not_pay_for_is_refused():
    with pytest.raises(SettingError, match=r"with 0 chosen rows it takes .* ridge fill"):
        arm_of("snapkv tail=900").plan(1000)
    with pytest.raises(SettingError, match="with 1 chosen rows"):
        arm_of("gemfilter split=5").plan(1000), arm_of("gemfilter split=5").compact.rows(1000)
    model, arm = model_of("llama"), arm_of("gemfilter")
    with pytest.raises(SettingError, match="its last 200 rows are to remain"):
        arm.compact.keep(model, None, prompt(300), tail=200)
    with pytest.raises(PromptError, match="one prompt"):
        arm.compact.keep(model, None, prompt(300, batch=2))
