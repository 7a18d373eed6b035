"""Dropped rows: the kept ones see one another and nothing else, in prefill and in decoding."""

from __future__ import annotations

import pytest
import torch

from ridgefill.compat import cache_kwarg
from ridgefill.errors import SettingError
from ridgefill.fill.none import NoFill
from ridgefill.prefill import prefill
from tests.reference import (
    LEADING,
    TAIL,
    N,
    close,
    filled_rows,
    generate,
    logits_with_hidden_rows,
    model_of,
    padded,
    prompt,
)
from tests.test_walk import Fixed

PLACES = (20, 21, 33, 50, 74)
# biases, windows as masks and in the attention, sinks, experts, recurrent layers
FEW = ["llama", "qwen2-window", "mistral-window", "gemma3-eager", "gpt_oss", "qwen3_next"]


@pytest.mark.parametrize("case", FEW)
@pytest.mark.parametrize(("attends", "leading"), [(True, LEADING), (True, 0), (False, LEADING)])
def test_equals_the_slow_reference(case, attends, leading):
    model, ids = model_of(case), prompt()
    rows = Fixed(PLACES, attends)
    cache = prefill(model, ids, fill=NoFill(), split=3, tail=TAIL, leading=leading, rows=rows)
    assert cache.stats.selected == len(PLACES)
    tokens, logits = generate(model, ids, 40, **cache_kwarg(cache))
    hidden = filled_rows(N, N + 39, TAIL, leading)
    hidden[list(PLACES)] = False
    close(logits[0], logits_with_hidden_rows(model, tokens[0, :-1], hidden, 3)[N - 1 :])


@pytest.mark.parametrize("case", ["llama", "gemma3_text", "qwen3_next"])
def test_a_padded_batch_is_as_each_alone(case):
    """The second sequence keeps fewer rows than the first, the third keeps none of its prefix."""
    lengths = (N, 60, 14)
    model, (ids, mask) = model_of(case), padded(lengths)
    settings = {"fill": NoFill(), "split": 3, "tail": TAIL, "leading": 0, "rows": Fixed((9, 33, 70), True)}
    cache = prefill(model, ids, attention_mask=mask, **settings)
    tokens, logits = generate(model, ids, attention_mask=mask, **cache_kwarg(cache))
    assert logits.isfinite().all()
    for b, n in enumerate(lengths):
        alone = prefill(model, ids[b : b + 1, N - n :], **settings)
        alone_tokens, alone_logits = generate(model, ids[b : b + 1, N - n :], **cache_kwarg(alone))
        assert torch.equal(alone_tokens[0], tokens[b, N - n :])
        close(alone_logits[0], logits[b])


def test_without_kept_rows_it_is_no_fill():
    model, ids = model_of("llama"), prompt()
    found = []
    for fill in (NoFill(), "none"):
        cache = prefill(model, ids, fill=fill, split=3, tail=TAIL, leading=0)
        found.append(generate(model, ids, **cache_kwarg(cache))[1])
    assert torch.equal(*found)


def test_attention_that_takes_no_mask_is_refused():
    model = model_of("llama")
    kind = model.config._attn_implementation

    class Switch(Fixed):
        """The lower layers have run when rows are chosen: only what writes sees the other attention."""

        def select(self, given):
            model.config._attn_implementation = "flash_attention_2"
            return super().select(given)

    try:
        with pytest.raises(SettingError, match="no fill with flash_attention_2"):
            prefill(model, prompt(), fill=NoFill(), split=3, tail=TAIL, rows=Switch(PLACES))
    finally:
        model.config._attn_implementation = kind
