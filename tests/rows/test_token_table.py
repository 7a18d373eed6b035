from __future__ import annotations

import math
import time

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from ridgefill.errors import SettingError
from ridgefill.rows.token_table import CLASSES, TokenTable, token_class
from tests.tiny import tiny_tokenizer


def vocabulary(words, added=(), special=()):
    """A tokenizer whose vocabulary is ``words``, in this order."""
    core = Tokenizer(BPE({word: i for i, word in enumerate(words)}, []))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core)
    tokenizer.add_tokens(list(added))
    tokenizer.add_special_tokens({"additional_special_tokens": list(special)})
    return tokenizer


def kinds(table):
    return [CLASSES[code] for code in table.classes.tolist()]


def zeros(n):
    return torch.zeros(n, dtype=torch.int64)


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("", "space"),
        (" \t ", "space"),
        (" \n ", "newline"),
        ("7", "number"),
        (" 3.14", "number"),
        ("(2)", "number"),
        ("٣", "number"),
        (".", "punct"),
        (" ),", "punct"),
        ("—", "mixed"),  # punctuation, but not of ASCII
        (" the", "word-start"),
        ("\tthe", "word-start"),
        ("\nthe", "word-start"),
        ("the ", "word-piece"),
        (" The", "word-start-cap"),
        ("The", "word-piece-cap"),
        ("\u00a0The", "word-piece-cap"),  # white space, but not one that starts a word
        (" tHE", "word-start"),
        ("été", "word-piece"),
        (" Été", "word-start-cap"),
        ("中文", "word-piece"),
        ("v2", "mixed"),
        (" don't", "mixed"),
        ("a b", "mixed"),
        ("\ufffd", "mixed"),
        (None, "mixed"),
    ],
)
def test_class_of_a_text(text, kind):
    assert token_class(text) == kind


def test_byte_level_tokens_are_read_as_their_bytes():
    words = ["a", "ĠThe", "Ċ", "Ġ", "ĊĠ", "Ã©", "Ã", "ä¸Ń", "Ġä¸", "ĉx", "ĠÃīt", "12", "Ġ..."]
    table = TokenTable.of(vocabulary(words), zeros(len(words)))
    assert kinds(table) == [
        "word-piece",
        "word-start-cap",
        "newline",
        "space",
        "newline",
        "word-piece",  # é
        "mixed",  # the first byte of é
        "word-piece",  # 中
        "mixed",  # a space and two of its three bytes
        "word-start",
        "word-start-cap",  # " Ét"
        "number",
        "punct",
    ]
    assert not table.special.any()


def test_sentencepiece_tokens_are_read_with_their_spaces_and_bytes():
    words = ["▁The", "▁the", "ing", "▁", "▁▁", "\n", "<0xC3>", "<0x0A>", "<0x41>", "é", "Ġ", "▁3", ",", "▁Ã"]
    table = TokenTable.of(vocabulary(words), zeros(len(words)))
    assert kinds(table) == [
        "word-start-cap",
        "word-start",
        "word-piece",
        "space",
        "space",
        "newline",
        "mixed",  # a byte that is no text alone
        "newline",
        "word-piece-cap",
        "word-piece",
        "word-piece-cap",  # a letter of Maltese, not a space
        "number",
        "punct",
        "word-start-cap",  # a letter, not half of one
    ]


def test_every_byte_of_a_byte_level_vocabulary():
    table = TokenTable.of(tiny_tokenizer(), zeros(320))
    tokenizer = tiny_tokenizer()
    for byte in range(256):
        (number,) = tokenizer.encode(chr(byte), add_special_tokens=False) if byte < 0x80 else (None,)
        if number is not None:
            assert kinds(table)[number] == token_class(chr(byte))
    blank = len("\t\n\v\f\r\x1c\x1d\x1e\x1f")
    assert kinds(table)[:256].count("mixed") == 128 + 33 - blank  # no text, and the other control characters
    assert table.special.tolist() == [
        i >= 256 for i in range(320)
    ]  # pad, bos, eos, and numbers without token


def test_only_some_classes_are_eligible_and_never_special_or_added_tokens():
    words = ["ĠThe", "The", "ing", "v2", "Ġthe", "7", ".", "Ġ", "Ċ", "Ã"]
    tokenizer = vocabulary(words, added=["Add", "<x>"], special=["<|Sys|>", "Spec"])
    table = TokenTable.of(tokenizer, zeros(16))
    expected = [True, True, True, True, False, False, False, False, False, True] + 6 * [False]
    assert table.eligible(torch.arange(16)).tolist() == expected
    assert table.special.tolist() == [i >= 10 for i in range(16)]
    assert table.eligible(torch.tensor([4, 0, 0])).tolist() == [False, True, True]


def test_added_tokens_do_not_decide_how_a_vocabulary_is_spelled():
    words = ["ĠThe", "Ã"]
    table = TokenTable.of(vocabulary(words, special=["<｜begin▁of▁sentence｜>"]), zeros(3))
    assert kinds(table)[:2] == ["word-start-cap", "mixed"]


def test_rarity_is_minus_the_log_of_the_add_one_frequency():
    counts = zeros(10)
    counts[3], counts[4] = 5, 1
    table = TokenTable.of(tiny_tokenizer(), counts)
    found = table.rarity(torch.tensor([3, 4, 0, 3], dtype=torch.int32))
    assert table.total == 6 and found.dtype == torch.float32
    expected = [-math.log(n / 16) for n in (6, 2, 1, 6)]
    assert found.tolist() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("ids", [[0, 10], [-1]])
def test_an_id_outside_the_vocabulary_is_refused(ids):
    table = TokenTable.of(tiny_tokenizer(), zeros(10))
    for look in (table.rarity, table.eligible):
        with pytest.raises(SettingError, match="vocabulary of 10"):
            look(torch.tensor(ids))
        assert look(torch.tensor([], dtype=torch.long)).shape == (0,)


def test_tensors_make_the_table_again():
    counts = torch.arange(320)
    table = TokenTable.of(tiny_tokenizer(), counts)
    again = TokenTable.from_tensors(table.tensors())
    assert torch.equal(again.counts, counts) and torch.equal(again.classes, table.classes)
    good = table.tensors()
    with pytest.raises(KeyError):
        TokenTable.from_tensors({"counts": counts})
    for name, wrong in (
        ("counts", counts[:-1]),
        ("counts", counts.float()),
        ("counts", counts - 1),
        ("classes", good["classes"] + 20),
        ("special", good["special"][None]),
    ):
        with pytest.raises(ValueError):
            TokenTable.from_tensors({**good, name: wrong})


def test_a_vocabulary_of_many_thousands_takes_seconds():
    words = [f"{'Ġ' if i % 2 else ''}w{'abcdefghij'[i % 10]}{i}" for i in range(130_000)]
    tokenizer = vocabulary(words)
    start = time.process_time()
    table = TokenTable.of(tokenizer, zeros(len(words)))
    assert time.process_time() - start < 8  # about one
    assert set(kinds(table)) == {"mixed"}
