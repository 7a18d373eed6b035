"""The tiny Gated DeltaNet hybrid with real weights: fills are correct on it, and exact rows bring facts back."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ridgefill.check import compare_with_stock
from ridgefill.compat import cache_kwarg
from ridgefill.load import load_model
from ridgefill.models.decoder import Decoder
from ridgefill.prefill import prefill
from tests.reference import generate

HYBRID = Path(__file__).parent / "data" / "hybrid"


@pytest.fixture(scope="module")
def loaded():
    return load_model(HYBRID, device="cpu", dtype="float32")


def text_ids(tokenizer, words: str, tokens: int) -> torch.Tensor:
    ids = tokenizer(words, return_tensors="pt")["input_ids"]
    return ids.repeat(1, tokens // ids.shape[1] + 1)[:, :tokens]


@pytest.mark.parametrize("split", [2, 4])
def test_it_is_filled_correctly_bit_for_bit(loaded, split):
    model, tokenizer = loaded
    ids = text_ids(tokenizer, "The people of the United States have a right to know. ", 400)
    assert all(verdict.holds for verdict in compare_with_stock(Decoder(model), split, ids))


def test_every_row_exact_is_exact(loaded):
    model, tokenizer = loaded
    ids = text_ids(tokenizer, "What is this quintessence of dust? Man delights not me. ", 300)
    stock, _ = generate(model, ids, new=8)
    filled = prefill(model, ids, fill="identity", split=2, tail=50, rows="tail(1.0)", tokenizer=tokenizer)
    assert filled.stats.filled == 0
    ours, _ = generate(model, ids, new=8, **cache_kwarg(filled))
    assert torch.equal(ours, stock)
