"""Splices: what is exact is exact bit for bit, what stays filled is the fill's, and the loss goes with it."""

from __future__ import annotations

import pytest
import torch

from ridgefill.correct import KeyRescale, TerminalState, ValueRescale
from ridgefill.errors import PromptError, SettingError
from ridgefill.eval.arms import Arm
from ridgefill.eval.losses import Document, measure_losses
from ridgefill.eval.results import Run
from ridgefill.eval.splice import PARTS, Spliced, removed, splice_arms
from ridgefill.fill import Identity, NoFill, Ridge
from ridgefill.models.decoder import Decoder
from ridgefill.plan import FillPlan, make_plan
from ridgefill.prefill import fill_prefix, prefill
from tests.models.test_qwen4 import model_of as qwen4_model
from tests.models.test_qwen4 import needs_it
from tests.models.test_qwen4_prefill import random_maps as qwen4_maps
from tests.reference import (
    LEADING,
    N_LAYERS,
    TAIL,
    assert_same_cache,
    close,
    held,
    is_recurrent,
    model_of,
    padded,
    prompt,
    random_maps,
)

SPLIT = 2
PLAIN = {"split": SPLIT, "tail": TAIL, "leading": 0}
each_part = pytest.mark.parametrize("part", PARTS)


def fill(case, splice=None, layers=None, ids=None, **settings):
    """The cache of the case's ridge fill, spliced if asked."""
    model = model_of(case)
    ridge = Ridge(random_maps(model, SPLIT))
    arm = ridge if splice is None else Spliced(ridge, splice, layers)
    return prefill(model, prompt(batch=2) if ids is None else ids, fill=arm, **{**PLAIN, **settings})


@pytest.mark.parametrize("case", ["llama", "qwen3", "gemma3_text", "mistral-window", "qwen3_moe", "gpt_oss"])
def test_exact_keys_and_values_are_the_exact_cache_bit_for_bit(case):
    exact = prefill(model_of(case), prompt(batch=2), fill="exact", **PLAIN)
    spliced = fill(case, "both")
    assert_same_cache(spliced, exact)
    assert spliced.stats.fill == "ridge+exact keys and values" and spliced.stats.filled > 0


@each_part
@pytest.mark.parametrize("case", ["llama", "gemma3_text", "qwen3_next", "olmo_hybrid"])
def test_the_spliced_part_is_exact_and_the_rest_is_the_fills_bit_for_bit(case, part):
    exact = prefill(model_of(case), prompt(batch=2), fill="exact", **PLAIN)
    filled, spliced = fill(case), fill(case, part)
    attention = [i for i in range(SPLIT + 1, N_LAYERS) if not is_recurrent(exact.layers[i])]
    assert attention
    for i in range(SPLIT, N_LAYERS):
        ours, theirs = held(spliced.layers[i]), held(filled.layers[i])
        if i not in attention:  # the split layer is exact anyway, a recurrent state stays filled
            assert all(map(torch.equal, ours, theirs))
            continue
        for place in (0, 1):
            true = held(exact.layers[i])[place]
            assert not torch.equal(theirs[place], true)
            assert torch.equal(ours[place], true if place in PARTS[part] else theirs[place])


def test_only_the_named_layers_are_spliced():
    exact = prefill(model_of("llama"), prompt(batch=2), fill="exact", **PLAIN)
    filled, spliced = fill("llama"), fill("llama", "both", (3, 5))
    for i in range(SPLIT, N_LAYERS):
        source = exact if i in (3, 5) else filled
        assert all(map(torch.equal, held(spliced.layers[i]), held(source.layers[i])))
    assert not torch.equal(spliced.layers[4].keys, exact.layers[4].keys)


@needs_it
def test_an_indexers_keys_stay_filled():
    model, ids = qwen4_model(), prompt(90)
    ridge = Ridge(qwen4_maps(model, SPLIT))
    filled, spliced, exact = (prefill(model, ids, fill=f, **PLAIN) for f in (ridge, Spliced(ridge), "exact"))
    last = N_LAYERS - 1  # attention with an indexer
    assert torch.equal(spliced.layers[last].keys, exact.layers[last].keys)
    assert torch.equal(spliced.layers[last].values, exact.layers[last].values)
    assert torch.equal(spliced.layers[last].indexer_keys, filled.layers[last].indexer_keys)
    assert not torch.equal(spliced.layers[last].indexer_keys, exact.layers[last].indexer_keys)


@pytest.mark.parametrize("rows", ["", "random(0.2)", "attention(0.2)", "probe(0.2)"])
def test_among_exact_rows_too_the_whole_splice_is_exact_to_rounding(rows):
    spliced = fill("llama", "both", leading=LEADING, rows=rows)
    assert spliced.stats.filled > 0 and bool(spliced.stats.selected) == bool(rows)
    stock = prefill(model_of("llama"), prompt(batch=2), fill="exact", **PLAIN)
    for ours, theirs in zip(spliced.layers, stock.layers, strict=True):
        m = theirs.keys.shape[2]
        close(ours.keys[:, :, :m], theirs.keys)
        close(ours.values[:, :, :m], theirs.values)


def test_a_hybrids_filled_rows_get_exact_parts_among_exact_rows():
    exact = prefill(model_of("qwen3_next"), prompt(batch=2), fill="exact", **PLAIN)
    spliced = fill("qwen3_next", "keys", leading=LEADING, rows="random(0.2)")
    filled = fill("qwen3_next", leading=LEADING, rows="random(0.2)")
    i = N_LAYERS - 1  # its exact rows have read filled states below, so theirs alone differ from exact
    same = [(cache.layers[i].keys == exact.layers[i].keys).all(-1).all(1) for cache in (spliced, filled)]
    same = [rows[:, LEADING:] for rows in same]
    assert same[0].sum() == spliced.stats.filled and not same[1].any()


def test_a_probe_chooses_the_same_rows_as_without_the_splice():
    settings = {"leading": LEADING, "rows": "probe(0.2)"}
    plain, spliced = fill("llama", **settings), fill("llama", "keys", **settings)
    i = SPLIT + 1  # the first layer whose input is predicted: its filled values tell which rows are filled
    exact = prefill(model_of("llama"), prompt(batch=2), fill="exact", **PLAIN).layers[i].values
    m = exact.shape[2]
    kept = [(c.layers[i].values[:, :, :m] - exact).abs().amax((1, 3)) < 1e-5 for c in (plain, spliced)]
    assert torch.equal(*kept) and 0 < kept[0].sum() < kept[0].numel()


def test_padding_is_no_obstacle():
    ids, mask = padded((100, 60))
    exact = prefill(model_of("llama"), ids, fill="exact", attention_mask=mask, **PLAIN)
    assert_same_cache(fill("llama", "both", ids=ids, attention_mask=mask), exact)


@pytest.mark.parametrize(("correction", "part"), [(ValueRescale(8), 0), (KeyRescale(8), 1)])
def test_corrections_act_on_what_stays_filled(correction, part):
    exact = prefill(model_of("llama"), prompt(batch=2), fill="exact", **PLAIN)
    both = {"corrections": (correction,)}
    rescaled, spliced = fill("llama", **both), fill("llama", ("keys", "values")[part], **both)
    i, m = SPLIT + 1, exact.layers[0].keys.shape[2]
    ours, theirs = (held(c.layers[i])[1 - part][:, :, :m] for c in (spliced, rescaled))
    assert torch.equal(ours, theirs) and not torch.equal(theirs, held(fill("llama").layers[i])[1 - part])
    close(held(spliced.layers[i])[part][:, :, :m], held(exact.layers[i])[part])


def test_what_is_exact_is_not_corrected():
    exact = prefill(model_of("llama"), prompt(batch=2), fill="exact", **PLAIN)
    spliced = fill("llama", "both", corrections=(ValueRescale(8), KeyRescale(8)))
    for ours, theirs in zip(spliced.layers, exact.layers, strict=True):
        for mine, true in zip(held(ours), held(theirs), strict=True):
            close(mine[:, :, : true.shape[2]], true)


# refusals


@pytest.mark.parametrize("bad", [lambda: Spliced(Identity(), "queries"), lambda: Spliced(NoFill())])
def test_what_cannot_be_spliced_is_refused(bad):
    with pytest.raises(SettingError):
        bad()


@pytest.mark.parametrize("layers", [(1,), (3, 9), ()])
def test_layers_that_are_not_filled_are_refused(layers):
    with pytest.raises(SettingError, match=r"from split 2 up are \[2, 3, 4, 5\]"):
        fill("llama", "both", layers)


def test_a_recurrent_layer_is_no_place_for_a_splice():
    with pytest.raises(SettingError, match=r"are \[2, 5\]"):
        fill("qwen3_next", "both", (3,))


def test_a_later_turn_is_refused():
    model, ids = model_of("llama"), prompt()
    plan = FillPlan(Spliced(Identity()), SPLIT, TAIL, 0)
    cache = prefill(model, ids, fill="identity", **PLAIN)
    positions = torch.arange(76, 140)[None]
    with pytest.raises(PromptError, match="later turn"):
        fill_prefix(Decoder(model), plan, prompt(64), positions, None, cache)


# arms and their loss


def arm_of(fill="ridge", name=None, **settings):
    plan = make_plan(
        N_LAYERS,
        random_maps(model_of("llama"), SPLIT),
        fill=fill,
        tail=TAIL,
        leading=0,
        **settings,
    )
    return Arm(name or fill, lambda n: plan, fill)


def test_the_arms_are_the_rows_of_the_table():
    arms = splice_arms(arm_of(name="mine", corrections="value_rescale(8)"))
    parts = ["exact keys", "exact values", "exact keys and values", "key scale (tail)", "value scale (tail)"]
    assert [arm.name for arm in arms] == ["mine", *(f"mine + {part}" for part in parts)]
    plans = [arm.plan(1000) for arm in arms]
    assert [getattr(plan.fill, "part", None) for plan in plans] == [
        None,
        "keys",
        "values",
        "both",
        None,
        None,
    ]
    assert plans[4].corrections == (ValueRescale(8), KeyRescale(512))
    assert plans[5].corrections == (ValueRescale(512),)  # in the place of its own, not twice
    assert all(plan.to_json()["tail"] == TAIL for plan in plans)
    assert plans[1].to_json()["fill"] == "ridge+exact keys"
    some = splice_arms(arm_of(), layers=[3])
    assert [arm.name for arm in some[1:]] == [f"ridge + {part} in 3" for part in parts[:3]]


def test_arms_that_fill_nothing_are_refused():
    for arm in (arm_of("exact"), arm_of("none")):
        with pytest.raises(SettingError):
            splice_arms(arm)


def test_a_terminal_state_still_finds_its_maps():
    plan = FillPlan(Ridge(random_maps(model_of("llama"), SPLIT)), SPLIT, TAIL, 0)
    with pytest.raises(SettingError, match="terminal"):
        FillPlan(Spliced(plan.fill), SPLIT, TAIL, 0, corrections=(TerminalState(),))
    assert Spliced(plan.fill).maps is plan.fill.maps
    assert not hasattr(Spliced(Identity()), "maps")


def test_all_of_the_loss_goes_with_exact_keys_and_values(tmp_path):
    arms = [arm_of("exact"), *splice_arms(arm_of(), window=8)]
    run = Run.open(tmp_path, "splice", {}, {"arms": {arm.name: {} for arm in arms}})
    documents = [Document(f"d{i}", "ab"[i % 2], prompt(150, seed=i)) for i in range(4)]
    ticks = []
    measure_losses(
        model_of("llama"), None, arms, documents, run, tail=TAIL, context=64, tick=lambda: ticks.append(1)
    )
    assert len(ticks) == len(run.lines) == 4 * 7
    shares = removed(run.lines, "ridge", "kl")
    assert list(shares) == [arm.name for arm in arms[2:]]
    whole, keys = shares["ridge + exact keys and values"], shares["ridge + exact keys"]
    assert whole.mean == pytest.approx(1, abs=1e-4) and whole.low > 0.999
    assert keys.mean < 0.99
    mean = {arm.name: sum(x["metrics"]["kl"] for x in run.lines if x["arm"] == arm.name) for arm in arms}
    assert keys.mean == pytest.approx(1 - mean["ridge + exact keys"] / mean["ridge"])


def test_shares_need_the_fill_and_exact():
    line = {"arm": "ridge", "item": "a", "stratum": "s", "metrics": {"score": 0.5}}
    assert removed([line], "ridge", "score") == {}
    lines = [line | {"arm": "exact", "metrics": {"score": 1.0}}, line, line | {"arm": "other", "item": "b"}]
    assert removed(lines, "ridge", "score") == {}  # no item that all three have


def test_an_arm_without_an_input_to_predict_has_no_scales():
    class Writes:
        name = "direct"

    arm = Arm("direct", lambda n: FillPlan(Writes(), SPLIT, TAIL, 0))
    assert len(splice_arms(arm)) == 4
