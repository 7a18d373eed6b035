"""Prefill of a cache, for every family: off is exact, true inputs are exact, fills equal the slow reference."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import (
    Gemma3Config,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForSequenceClassification,
    LlamaModel,
    PhiConfig,
    PhiForCausalLM,
)

from ridgefill.compat import cache_kwarg
from ridgefill.errors import MapsMismatchError, PromptError, SettingError, UnsupportedModelError
from ridgefill.maps import RidgeMaps
from ridgefill.models.decoder import refuse_unsupported
from ridgefill.prefill import prefill

from .reference import (
    CASES,
    LEADING,
    N_LAYERS,
    SPLITS,
    TAIL,
    WINDOWS,
    N,
    assert_same_cache,
    close,
    filled_rows,
    generate,
    held,
    hooks_of,
    is_recurrent,
    logits_with_inputs,
    model_of,
    padded,
    prompt,
    random_maps,
    reference_logits,
    stock_cache,
)
from .tiny import tiny_model

M = N - TAIL
each_case = pytest.mark.parametrize("case", CASES)


# (a), (b): bit for bit


@each_case
def test_off_equals_stock_bit_for_bit(case):
    model, ids = model_of(case), prompt(batch=2)
    ours, stock = prefill(model, ids, fill="exact", split=3, tail=TAIL), stock_cache(model, ids[:, :M])
    assert_same_cache(ours, stock)
    assert (ours.stats.filled, ours.stats.exact, ours.stats.fill) == (0, 2 * N, "exact")
    (a, a_logits), (b, b_logits) = (generate(model, ids, **cache_kwarg(c)) for c in (ours, stock))
    assert torch.equal(a, b) and torch.equal(a_logits, b_logits)
    assert_same_cache(ours, stock)  # after generation too
    assert hooks_of(model) == 0


@each_case
@pytest.mark.parametrize("split", SPLITS)
def test_true_inputs_equal_exact_bit_for_bit(case, split):
    model, ids = model_of(case), prompt(batch=2)
    ours = prefill(model, ids, fill="true", split=split, tail=TAIL, leading=0)
    stock = stock_cache(model, ids[:, :M])
    assert_same_cache(ours, stock)
    assert (ours.stats.filled, ours.stats.exact) == (2 * M, 2 * TAIL)
    if case in WINDOWS:
        assert any(layer.keys.shape[2] == 31 for layer in ours.layers)
    (a, a_logits), (b, b_logits) = (generate(model, ids, **cache_kwarg(c)) for c in (ours, stock))
    assert torch.equal(a, b) and torch.equal(a_logits, b_logits)
    assert_same_cache(ours, stock)


@each_case
@pytest.mark.parametrize("n", [64, N])
def test_true_inputs_with_leading_rows_equal_exact_to_rounding(case, n):
    model, ids = model_of(case), prompt(n)
    ours = prefill(model, ids, fill="true", split=3, tail=TAIL, leading=LEADING)
    for a, b in zip(ours.layers, stock_cache(model, ids[:, : n - TAIL]).layers, strict=True):
        for mine, theirs in zip(held(a), held(b), strict=True):
            close(mine, theirs)


@pytest.mark.parametrize("case", ["llama", "gemma3_text"])
def test_true_inputs_in_bfloat16(case):
    model, ids = tiny_model(case).to(torch.bfloat16), prompt()
    stock = stock_cache(model, ids[:, :M])
    for fill in ("exact", "true"):
        assert_same_cache(prefill(model, ids, fill=fill, split=3, tail=TAIL, leading=0), stock)


@each_case
def test_a_padded_batch_from_true_inputs_equals_stock_bit_for_bit(case):
    model, ids, mask = model_of(case), *padded((N, 60))
    stock = stock_cache(model, ids[:, :M], mask[:, :M])
    for fill in ("exact", "true"):
        ours = prefill(model, ids, fill=fill, split=3, tail=TAIL, leading=0, attention_mask=mask)
        assert_same_cache(ours, stock)
    ours, _ = generate(model, ids, attention_mask=mask, **cache_kwarg(ours))
    assert torch.equal(ours, generate(model, ids, attention_mask=mask, **cache_kwarg(stock))[0])


# leading rows


@each_case
@pytest.mark.parametrize("fill", ["ridge", "identity"])
@pytest.mark.parametrize("n", [64, N])
def test_leading_rows_are_exact_and_no_others(case, fill, n):
    model, ids, m = model_of(case), prompt(n), n - TAIL
    maps = random_maps(model, 3)
    ours = prefill(model, ids, maps, fill=fill, tail=TAIL, leading=LEADING)
    stock = stock_cache(model, ids[:, :m])
    for i, (a, b) in enumerate(zip(ours.layers, stock.layers, strict=True)):
        same = [torch.equal(mine, theirs) for mine, theirs in zip(held(a), held(b), strict=True)]
        if i < 3:
            assert all(same)
            continue
        if is_recurrent(b):  # one state for all rows: exact below the split and in its layer, nowhere else
            gap = (held(a)[1] - held(b)[1]).abs().max()
            assert gap < 1e-5 if i == 3 else gap > 1e-3
            continue
        assert a.keys.shape == b.keys.shape and a.get_seq_length() == m
        first = m - a.keys.shape[2]  # a window has forgotten the rows before it
        lead = max(0, LEADING - first)
        close(a.keys[:, :, :lead], b.keys[:, :, :lead])
        close(a.values[:, :, :lead], b.values[:, :, :lead])
        if i > 3:  # the split layer's true input is the split state
            differ = (a.values - b.values).abs().amax((0, 1, 3)) > 1e-3
            assert differ[lead:].all(), i
    assert ours.stats.exact == TAIL + LEADING and ours.stats.filled == m - LEADING


# the slow reference


@each_case
@pytest.mark.parametrize("fill", ["ridge", "identity", "none"])
@pytest.mark.parametrize(("split", "leading"), [(3, LEADING), (1, 0), (5, LEADING)])
def test_fill_equals_the_slow_reference(case, fill, split, leading):
    model, ids = model_of(case), prompt()
    maps = random_maps(model, split)
    cache = prefill(model, ids, maps, fill=fill, tail=TAIL, leading=leading)
    tokens, logits = generate(model, ids, **cache_kwarg(cache))
    rows = filled_rows(N, tokens.shape[1] - 1, leading=leading)
    expected = reference_logits(model, tokens[0, :-1], rows, split, fill, maps)[N - 1 :]
    close(logits[0], expected)
    exact = reference_logits(model, tokens[0, :-1], torch.zeros_like(rows), split, "identity", None)[N - 1 :]
    if fill == "none" or split != N_LAYERS - 1:  # the last layer's true input is the split state
        assert (logits[0] - exact).abs().max() > 1e-3  # the fill does change the logits


@pytest.mark.parametrize("case", WINDOWS)
@pytest.mark.parametrize("fill", ["ridge", "none"])
def test_more_leading_rows_than_a_window_holds(case, fill):
    model, ids = model_of(case), prompt()
    maps = random_maps(model, 3)
    cache = prefill(model, ids, maps, fill=fill, tail=TAIL, leading=50)
    tokens, logits = generate(model, ids, **cache_kwarg(cache))
    rows = filled_rows(N, tokens.shape[1] - 1, leading=50)
    close(logits[0], reference_logits(model, tokens[0, :-1], rows, 3, fill, maps)[N - 1 :])


@each_case
def test_pop_equals_the_slow_reference(case):
    model, ids = model_of(case), prompt()
    cache = prefill(model, ids, fill="pop")
    assert cache.get_seq_length() == N - 1
    assert (cache.stats.filled, cache.stats.exact) == (N - 1, 1)
    tokens, logits = generate(model, ids, **cache_kwarg(cache))
    rows = filled_rows(N, tokens.shape[1] - 1, tail=1, leading=0)
    close(logits[0], reference_logits(model, tokens[0, :-1], rows, 4, "identity", None)[N - 1 :])


@each_case
@pytest.mark.parametrize("fill", ["ridge", "none"])
def test_one_uncached_row(case, fill):
    model, ids = model_of(case), prompt()
    maps = random_maps(model, 3)
    cache = prefill(model, ids, maps, fill=fill, tail=1, leading=LEADING)
    assert cache.get_seq_length() == N - 1
    tokens, logits = generate(model, ids, **cache_kwarg(cache))
    rows = filled_rows(N, tokens.shape[1] - 1, tail=1)
    close(logits[0], reference_logits(model, tokens[0, :-1], rows, 3, fill, maps)[N - 1 :])


def test_maps_for_the_split_layer_are_used():
    """Wider maps have one for the split layer too; then even its input is predicted."""
    model, ids = model_of("llama"), prompt()
    maps = random_maps(model, 2)
    own = RidgeMaps(3, {i: maps.maps[i] for i in (3, 4, 5)}, identity=maps.identity)
    cache = prefill(model, ids, own, tail=TAIL)
    tokens, logits = generate(model, ids, 1, **cache_kwarg(cache))
    expected = logits_with_inputs(
        model, tokens[0, :-1], filled_rows(N, N), 3, lambda i, h: h @ own.maps[i].weight.T + own.maps[i].bias
    )
    close(logits[0], expected[N - 1 :])


# batches


@each_case
@pytest.mark.parametrize("fill", ["ridge", "identity", "none"])
def test_each_row_of_a_padded_batch_is_as_alone(case, fill):
    """Also a sequence with fewer prefix rows than leading ones, and one shorter than the tail."""
    lengths = (N, 60, 30, 14)
    model, (ids, mask) = model_of(case), padded(lengths)
    maps = random_maps(model, 3)
    settings = {"maps": maps, "fill": fill, "tail": TAIL, "leading": LEADING}
    cache = prefill(model, ids, attention_mask=mask, **settings)
    assert cache.stats.tokens == sum(lengths)
    assert cache.stats.exact == 2 * (TAIL + LEADING) + 30 + 14
    assert cache.stats.filled == cache.stats.tokens - cache.stats.exact
    tokens, logits = generate(model, ids, attention_mask=mask, **cache_kwarg(cache))
    assert logits.isfinite().all()
    for b, n in enumerate(lengths):
        own = tokens[b, N - n : -1]
        rows = filled_rows(n, len(own))
        close(logits[b], reference_logits(model, own, rows, 3, fill, maps)[n - 1 :])
        alone = prefill(model, ids[b : b + 1, N - n :], **settings)
        assert (alone.stats.reason is None) == (n > TAIL + LEADING)
        alone_tokens, alone_logits = generate(model, ids[b : b + 1, N - n :], **cache_kwarg(alone))
        assert torch.equal(alone_tokens[0], tokens[b, N - n :])
        close(alone_logits[0], logits[b])


def test_a_copy_of_a_filled_cache_serves_another_continuation():
    model, ids = model_of("gemma3_text"), prompt()
    cache = prefill(model, ids, fill="identity", split=3, tail=TAIL)
    other = torch.cat([ids[:, :M], prompt(TAIL, seed=9)], 1)
    found = [generate(model, i, **cache_kwarg(copy.deepcopy(cache)))[1] for i in (ids, other, ids)]
    assert cache.get_seq_length() == M
    assert torch.equal(found[0], found[2]) and not torch.equal(found[0], found[1])


def test_a_mask_of_ones_is_no_mask():
    model, ids = model_of("gemma3_text"), prompt(batch=2)
    settings = {"fill": "identity", "split": 3, "tail": TAIL}
    assert_same_cache(
        prefill(model, ids, attention_mask=torch.ones(2, N), **settings), prefill(model, ids, **settings)
    )


# (c): what cannot be filled


@each_case
def test_a_prompt_shorter_than_the_tail_runs_exactly_and_says_why(case):
    model, ids = model_of(case), prompt(TAIL + LEADING)
    cache = prefill(model, ids, fill="identity", split=3, tail=TAIL, leading=LEADING)
    assert cache.get_seq_length() == 0
    assert cache.stats.reason == "the prompt has 40 tokens, and filling needs 41"
    assert (cache.stats.tokens, cache.stats.exact, cache.stats.filled) == (40, 40, 0)
    assert cache.stats.fill == "exact"
    a, a_logits = generate(model, ids, **cache_kwarg(cache))
    b, b_logits = generate(model, ids)
    assert torch.equal(a, b) and torch.equal(a_logits, b_logits)


@each_case
def test_one_row_to_fill(case):
    model, ids = model_of(case), prompt(TAIL + LEADING + 1)
    cache = prefill(model, ids, fill="identity", split=3, tail=TAIL, leading=LEADING)
    assert cache.stats.reason is None and cache.stats.filled == 1


@each_case
def test_an_empty_prompt(case):
    for shape in ((1, 0), (0, 5)):
        with pytest.raises(PromptError, match="the prompt is empty"):
            prefill(model_of(case), torch.zeros(shape, dtype=torch.long), fill="identity", split=3)


@each_case
def test_maps_of_another_model(case):
    model, ids = model_of(case), prompt()
    settings = {k: v for k, v in CASES[case].items() if k != "attn_implementation"}
    with pytest.raises(MapsMismatchError, match="other weights"):
        prefill(model, ids, random_maps(tiny_model(**settings, seed=1), 3), tail=TAIL)
    other = "qwen3" if case == "llama" else "llama"
    with pytest.raises(MapsMismatchError, match="another architecture"):
        prefill(model, ids, random_maps(model_of(other), 3), tail=TAIL)


def test_maps_that_lack_a_layer():
    model = model_of("llama")
    maps = random_maps(model, 3)
    del maps.maps[5]
    with pytest.raises(MapsMismatchError, match="none for layers 5"):
        prefill(model, prompt(), maps, tail=TAIL)


def test_a_prompt_longer_than_the_context():
    model = tiny_model(max_position_embeddings=64)
    assert prefill(model, prompt(64), fill="identity", split=3, tail=TAIL).get_seq_length() == 40
    with pytest.raises(PromptError, match="65 tokens: the model's context is 64"):
        prefill(model, prompt(65), fill="identity", split=3, tail=TAIL)


@pytest.mark.parametrize(
    ("mask", "words"),
    [
        ([1] * 90 + [0] * 10, "padding is on the left"),
        ([1] * 40 + [0] * 10 + [1] * 50, "padding is on the left"),
        ([0] * N, "padding is on the left"),
        ([1] * 90, "attention mask of shape"),
        ([0] * 10 + [1] * 80, "attention mask of shape"),
    ],
)
def test_masks_that_cannot_be_filled(mask, words):
    with pytest.raises(PromptError, match=words):
        prefill(
            model_of("llama"),
            prompt(),
            fill="identity",
            split=3,
            tail=TAIL,
            attention_mask=torch.tensor([mask]),
        )


def gpt2():
    return GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=2, n_head=2, vocab_size=320))


def phi():
    return PhiForCausalLM(
        PhiConfig(
            hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, vocab_size=320
        )
    )


def headless(kind):
    return kind(
        LlamaConfig(
            hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, vocab_size=320
        )
    )


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (gpt2, r"GPT2LMHeadModel \(model_type 'gpt2'\): this architecture is not supported.*llama, mistral"),
        (phi, r"PhiForCausalLM \(model_type 'phi'\)"),
        (lambda: headless(LlamaModel), r"LlamaModel.*ForCausalLM"),
        (lambda: headless(LlamaForSequenceClassification), r"LlamaForSequenceClassification.*ForCausalLM"),
    ],
)
def test_other_models_are_refused_by_name(make, words):
    with pytest.raises(UnsupportedModelError, match=words):
        prefill(make(), prompt(), fill="identity", split=1, tail=TAIL)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (Gemma3Config(), "images.*Gemma3ForCausalLM"),
        (Gemma3TextConfig(use_bidirectional_attention=True), "bidirectional"),
    ],
)
def test_what_a_config_gives_away_is_refused(config, words):
    with pytest.raises(UnsupportedModelError, match=words):
        refuse_unsupported(config, "it")


def test_settings_are_refused_before_anything_runs():
    model = model_of("llama")
    with pytest.raises(SettingError, match="needs maps"):
        prefill(model, prompt())
    with pytest.raises(SettingError, match="1 to 5"):
        prefill(model, prompt(), fill="identity", split=N_LAYERS)


# stats


def test_stats_count_every_row_and_time_every_stage():
    model, ids = model_of("llama"), prompt(batch=3)
    stats = prefill(model, ids, fill="identity", split=3, tail=TAIL, leading=LEADING).stats
    assert (stats.tokens, stats.filled, stats.exact) == (3 * N, 3 * (M - LEADING), 3 * (TAIL + LEADING))
    assert stats.fill == "identity" and stats.reason is None
    assert set(stats.seconds) == {"lower", "select", "fill"} and min(stats.seconds.values()) > 0
