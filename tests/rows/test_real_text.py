"""Rows by their text with a real tokenizer and real prose (`make test-real`)."""

from __future__ import annotations

import time

import pytest
import torch

import ridgefill
from ridgefill import embedded
from ridgefill.answer import as_prompt
from ridgefill.rows import LexicalRows, OverlapScore, Prompt, SpanRows
from ridgefill.rows.content import content_rows
from ridgefill.rows.text import token_pieces

pytestmark = pytest.mark.real
KEYS = ("harbor", "lantern", "meadow", "orchard")


@pytest.fixture(scope="module")
def tokenizer():
    return ridgefill.load_model(embedded.default_model())[1]


@pytest.fixture(scope="module")
def prose():
    return embedded.held_out()[0].read_text(encoding="utf-8")[:60_000]


def asking(tokenizer, prose, key, start):
    """2,000 tokens of prose with a fact in it, and a question for it, in chat form."""
    hay = prose[start : start + 9000]
    at = hay.index(". ", 3000) + 2
    fact = f"One of the special magic numbers for {key} is: 1234567."
    question = f"What is the special magic number for {key} mentioned in the text?"
    text = as_prompt(tokenizer, f"{hay[:at]}{fact} {hay[at:]}\n\n{question}")
    coded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    ids, at = torch.tensor(coded["input_ids"]), text.index(question)
    rows = [i for i, (a, b) in enumerate(coded["offset_mapping"]) if a < at + len(question) and b > at]
    return Prompt(ids, len(ids) - 256, leading=16, tokenizer=tokenizer, question=(rows[0], rows[-1] + 1))


def test_pieces_are_the_text_and_take_no_time(tokenizer, prose):
    text = prose + "\u65e5\u672c\u8a9e \U0001f642 \u0e2a\u0e27\u0e31\u0e2a\u0e14\u0e35 <|im_start|>" * 200
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    start = time.perf_counter()
    pieces = token_pieces(tokenizer, ids)
    assert time.perf_counter() - start < 2
    assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=False) == text


def test_template_words_are_no_content(tokenizer, prose):
    prompt = asking(tokenizer, prose, "harbor", 0)
    content = "".join(p for p, c in zip(prompt.pieces, content_rows(prompt), strict=True) if c)
    assert content.endswith("mentioned in the text?") and "assistant" not in content[-60:]


@pytest.mark.parametrize("key", KEYS)
def test_the_facts_sentence_is_found_by_its_words(tokenizer, prose, key):
    prompt = asking(tokenizer, prose, key, 9000 * KEYS.index(key))
    best = SpanRows(OverlapScore(), pool="sum").ranked(prompt)[0]
    assert "1234567" in "".join(prompt.pieces[best.start : best.stop])
    chosen = LexicalRows(run=3).select(prompt)  # "special magic number" is no run of four with "numbers"
    assert "1234567" in "".join(p for p, c in zip(prompt.pieces, chosen.tolist(), strict=False) if c)
