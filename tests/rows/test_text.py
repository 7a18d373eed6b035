from __future__ import annotations

import random

import pytest

from ridgefill.rows.text import token_pieces, words
from tests.rows.prompts import sentencepiece_tokenizer
from tests.tiny import tiny_tokenizer

TEXT = "  Hello, world!\n\n\tna\u00efve \u65e5\u672c\u8a9e \U0001f642\U0001f643 \ufffd\ufffd 3.14 <turn>end "
TOKENIZERS = {"byte-level": tiny_tokenizer(), "sentencepiece": sentencepiece_tokenizer()}


def decoded(tokenizer, ids):
    return tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)


@pytest.mark.parametrize("name", TOKENIZERS)
def test_pieces_are_the_decoded_text(name):
    tokenizer = TOKENIZERS[name]
    ids = tokenizer.encode(TEXT, add_special_tokens=False)
    pieces = token_pieces(tokenizer, ids)
    assert len(pieces) == len(ids)
    assert "".join(pieces) == decoded(tokenizer, ids)
    assert "\u65e5\u672c\u8a9e" in "".join(pieces)


@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_character_of_several_tokens_stands_in_the_first(name):
    tokenizer = TOKENIZERS[name]
    pieces = token_pieces(tokenizer, tokenizer.encode("a\u65e5\u00e9b", add_special_tokens=False)[-7:])
    assert pieces == ["a", "\u65e5", "", "", "\u00e9", "", "b"]


@pytest.mark.parametrize("name", TOKENIZERS)
def test_tokens_that_are_no_text_still_add_up(name):
    tokenizer, rng = TOKENIZERS[name], random.Random(0)
    for _ in range(200):
        ids = [rng.randrange(len(tokenizer)) for _ in range(rng.randrange(1, 30))]
        pieces = token_pieces(tokenizer, ids)
        assert len(pieces) == len(ids) and "".join(pieces) == decoded(tokenizer, ids)


def test_byte_fallback_shows_a_run_with_a_bad_byte_sign_by_sign():
    tokenizer = TOKENIZERS["sentencepiece"]
    names = ("a", "<0xE4>", "<0xBD>", "<0xA0>", "<0xFF>", "<0x62>", "c")
    pieces = token_pieces(tokenizer, [tokenizer.convert_tokens_to_ids(name) for name in names])
    assert pieces == ["a", *["\ufffd"] * 5, "c"]


def test_the_first_space_is_dropped_once_and_no_other():
    tokenizer = TOKENIZERS["sentencepiece"]
    ids = [tokenizer.convert_tokens_to_ids(p) for p in ("\u2581", "a", "\u2581", "b", "\u2581")]
    assert token_pieces(tokenizer, ids) == ["", "a", " ", "b", " "]


def test_no_tokens():
    assert token_pieces(tiny_tokenizer(), []) == []


def test_words_with_their_rows():
    assert words([" He", "llo", ",", " wor", "ld's ", "foo_", "bar", "\u2014"]) == [
        ("hello", 0, 2),
        ("world's", 3, 5),
        ("foo", 5, 6),
        ("bar", 6, 7),
    ]


def test_characters_are_words_in_scripts_without_spaces():
    assert [w.text for w in words(["\u4f60\u597dabc \u0e2a\u0e27\u0e31"])] == [
        "\u4f60",
        "\u597d",
        "abc",
        "\u0e2a",
        "\u0e27\u0e31",
    ]


def test_marks_belong_to_their_word():
    assert [w.text for w in words(["\u0939\u093f\u0928\u094d\u0926\u0940 cafe\u0301"])] == [
        "\u0939\u093f\u0928\u094d\u0926\u0940",
        "cafe\u0301",
    ]


def test_a_words_rows_go_on_to_the_end_of_its_last_character():
    assert words(["a\u00e9", "", " b"]) == [("a\u00e9", 0, 2), ("b", 2, 3)]
