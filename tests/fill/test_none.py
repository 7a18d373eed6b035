"""No fill: filled rows are hidden from the late layers of their own cache, and of no other."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from ridgefill.compat import cache_kwarg
from ridgefill.fill.hidden import _mask_out
from ridgefill.prefill import prefill

from ..reference import (
    CASES,
    LEADING,
    TAIL,
    N,
    close,
    filled_rows,
    generate,
    hooks_of,
    model_of,
    prompt,
    reference_logits,
)

each_case = pytest.mark.parametrize("case", CASES)


def no_fill(model, ids, leading=LEADING, tail=TAIL, split=3):
    return prefill(model, ids, fill="none", split=split, tail=tail, leading=leading)


def expected(model, tokens, n=N, leading=LEADING, tail=TAIL, split=3):
    rows = filled_rows(n, len(tokens) - 1, tail, leading)
    return reference_logits(model, tokens[:-1], rows, split, "none", None)[n - 1 :]


@each_case
@pytest.mark.parametrize(("leading", "tail", "split"), [(0, 1, 1), (4, 40, 5), (LEADING, 8, 3)])
def test_equals_the_slow_reference(case, leading, tail, split):
    model, settings = model_of(case), {"leading": leading, "tail": tail, "split": split}
    cache = no_fill(model, prompt(), **settings)
    tokens, logits = generate(model, prompt(), **cache_kwarg(cache))
    close(logits[0], expected(model, tokens[0], **settings))


@each_case
def test_decoding_far_beyond_the_window(case):
    """Hidden rows slide out of the windowed layers and stay hidden in the full ones."""
    model = model_of(case)
    tokens, logits = generate(model, prompt(), 50, **cache_kwarg(no_fill(model, prompt())))
    close(logits[0], expected(model, tokens[0]))


@pytest.mark.parametrize("case", ["llama", "gemma3_text", "gemma3-eager"])
def test_what_the_hidden_slots_hold_does_not_matter(case):
    model = model_of(case)
    a, b = no_fill(model, prompt()), no_fill(model, prompt())
    for layer in b.layers[3:]:
        first = (N - TAIL) - layer.keys.shape[2]
        layer.keys[:, :, max(0, LEADING - first) :] = 9.0
        layer.values[:, :, max(0, LEADING - first) :] = 9.0
    one, two = (generate(model, prompt(), **cache_kwarg(cache)) for cache in (a, b))
    assert torch.equal(one[0], two[0])
    close(one[1], two[1])


@pytest.mark.parametrize("case", ["llama", "gemma3_text"])
def test_caches_hide_only_their_own_rows(case):
    """Two caches of the same model in turn, with different plans, and the stock model between them."""
    model, ids = model_of(case), prompt()
    stock = generate(model, ids)[1]
    a, b = no_fill(model, ids), no_fill(model, ids, leading=0, tail=40)
    again = generate(model, ids)[1]
    tokens_b, logits_b = generate(model, ids, **cache_kwarg(b))
    tokens_a, logits_a = generate(model, ids, **cache_kwarg(a))
    assert torch.equal(stock, again)
    close(logits_a[0], expected(model, tokens_a[0]))
    close(logits_b[0], expected(model, tokens_b[0], leading=0, tail=40))


def test_hooks_go_with_the_cache():
    model = model_of("llama")
    before = hooks_of(model)
    cache = no_fill(model, prompt())
    generate(model, prompt(), **cache_kwarg(cache))
    alive = weakref.ref(cache)
    assert hooks_of(model) == before + 3  # one for each late layer
    del cache
    gc.collect()
    assert alive() is None and hooks_of(model) == before


def test_a_model_without_a_mask_gets_one():
    """A single query sees every key, so the model leaves its mask out."""
    cache = no_fill(model_of("llama"), prompt())
    hidden = torch.zeros(1, N - TAIL, dtype=torch.bool)
    hidden[:, 3:5] = True
    mask = _mask_out(None, torch.zeros(1, 1, 64), cache, 4, hidden)
    assert mask.shape == (1, 1, 1, N - TAIL + 1)
    assert (mask[0, 0, 0] < 0).nonzero().flatten().tolist() == [3, 4]
