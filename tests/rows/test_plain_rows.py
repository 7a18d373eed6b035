"""Leading, tail, random, special, protected and digit rows."""

from __future__ import annotations

import pytest
import torch

from ridgefill.errors import SettingError
from ridgefill.rows import DigitRows, LeadingRows, LongerTail, ProtectedRows, RandomRows, SpecialRows
from ridgefill.rows.base import Prompt, top
from ridgefill.rows.token_table import TokenTable
from tests.rows.prompts import chosen_text, rows_prompt, sentencepiece_tokenizer, text_prompt
from tests.tiny import tiny_tokenizer


def places(chosen):
    return chosen.nonzero().flatten().tolist()


def test_leading_rows():
    assert places(LeadingRows(3).select(rows_prompt(10))) == [0, 1, 2]
    assert LeadingRows(30).select(rows_prompt(10)).all()
    assert not LeadingRows(0).select(rows_prompt(10)).any()


def test_a_longer_tail():
    assert places(LongerTail(0.25).select(rows_prompt(10))) == [8, 9]  # 2.5, half to even
    assert places(LongerTail(3).select(rows_prompt(10))) == [7, 8, 9]
    assert places(LongerTail(1.0).select(rows_prompt(10, leading=4))) == [4, 5, 6, 7, 8, 9]


def test_random_rows_are_evenly_drawn_and_the_same_again():
    prompt = rows_prompt(400, leading=16)
    chosen = RandomRows(0.25, seed=5).select(prompt)
    assert int(chosen.sum()) == 100 and not chosen[:16].any()
    assert torch.equal(chosen, RandomRows(0.25, seed=5).select(prompt))
    assert not torch.equal(chosen, RandomRows(0.25, seed=6).select(prompt))
    often = sum(RandomRows(0.25, seed=s).select(prompt).float() for s in range(200))[16:]
    assert abs(float(often[:192].mean()) - float(often[192:].mean())) < 2
    assert float(often.min()) > 20  # of 52 expected


def test_special_rows_are_control_and_added_tokens():
    tokenizer = sentencepiece_tokenizer()
    prompt = text_prompt("<turn>ab\n\ncd<unk>", "<turn>x", tokenizer)
    assert [p for p, c in zip(prompt.pieces, SpecialRows().select(prompt), strict=False) if c] == [
        "<turn>",
        "\n\n",
        "<unk>",
    ]


def test_special_rows_by_the_table_of_the_maps():
    tokenizer = tiny_tokenizer()
    table = TokenTable.of(tokenizer, torch.zeros(300, dtype=torch.long))
    ids = torch.tensor([65, tokenizer.bos_token_id, 66, 299, 1000, 7])
    assert places(SpecialRows().select(Prompt(ids, 5, table=table))) == [1, 3]
    with pytest.raises(SettingError, match="neither a tokenizer"):
        SpecialRows().select(Prompt(ids, 5))


def test_the_rarest_share_of_the_eligible_rows():
    tokenizer = tiny_tokenizer()
    table = TokenTable.of(tokenizer, torch.arange(len(tokenizer)).flip(0))
    prompt = text_prompt("aZ b!! 9 cYx wv", "zzzz", tokenizer, table=table)
    ids = prompt.ids[: prompt.prefix]
    matches = table.eligible(ids)
    assert 0 < int(matches.sum()) < len(ids)
    for share in (0.0, 0.25, 0.5, 1.0):
        chosen = ProtectedRows(share).select(prompt)
        score = table.rarity(ids).masked_fill(~matches, -1)
        assert torch.equal(chosen, top(score, round(share * int(matches.sum()))))


def test_equally_rare_rows_go_to_the_lower_position():
    tokenizer = tiny_tokenizer()
    table = TokenTable.of(tokenizer, torch.zeros(len(tokenizer), dtype=torch.long))
    prompt = text_prompt("!aaaaaaaaaa", "x", tokenizer, table=table)  # ten matches
    assert places(ProtectedRows(0.25).select(prompt)) == [1, 2]  # 2.5, half to even
    assert places(ProtectedRows(0.35).select(prompt)) == [1, 2, 3, 4]  # 3.5


def test_protected_rows_need_the_table():
    with pytest.raises(SettingError, match="token table"):
        ProtectedRows().select(rows_prompt(5))


def test_digit_rows():
    prompt = text_prompt("a1 b\uff13c 42", "7")
    chosen = DigitRows().select(prompt)
    assert chosen_text(prompt, chosen) == "1\uff1342"
    assert int(chosen.sum()) == 6  # the wide digit is three rows
    with pytest.raises(SettingError, match="tokenizer"):
        DigitRows().select(rows_prompt(5))


@pytest.mark.parametrize(
    "make",
    [
        lambda: LeadingRows(-1),
        lambda: LeadingRows(0.5),
        lambda: LongerTail(1.2),
        lambda: LongerTail(-0.1),
        lambda: RandomRows(2.0),
        lambda: RandomRows(0.1, seed=-1),
        lambda: RandomRows(0.1, seed=0.5),
        lambda: ProtectedRows(1.1),
        lambda: ProtectedRows("x"),
        lambda: ProtectedRows(True),
    ],
)
def test_bad_settings_are_refused(make):
    with pytest.raises(SettingError):
        make()


def test_a_prompt_without_prefix_rows():
    for rows in (LeadingRows(), LongerTail(), RandomRows()):
        assert rows.select(rows_prompt(0)).shape == (0,)
