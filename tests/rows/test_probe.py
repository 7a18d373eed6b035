from __future__ import annotations

import pytest
import torch

from ridgefill.errors import SettingError
from ridgefill.rows import AttentionRows, DigitRows, LeadingRows, ProbeRows, ProtectedRows
from ridgefill.rows.base import top
from ridgefill.rows.token_table import TokenTable
from tests.rows.prompts import GivenAttention, rows_prompt, text_prompt
from tests.tiny import tiny_tokenizer

LATE = torch.rand(3, 2, 20, generator=torch.Generator().manual_seed(1))


def test_the_rows_that_the_late_layers_attend_to():
    reader = GivenAttention(late=LATE)
    chosen = ProbeRows(0.2, queries=7).select(rows_prompt(20, reader=reader))
    assert reader.asked == [7]
    assert torch.equal(chosen, top(LATE.sum((0, 1)), 4))


def test_rows_within_come_first_and_count():
    late = LATE.clone()
    late[..., :3] += 1  # they would be the best too
    prompt = rows_prompt(20, reader=GivenAttention(late=late))
    best = LATE.sum((0, 1)).clone()
    best[:3] = -1
    chosen = ProbeRows(5, within=LeadingRows(3)).select(prompt)
    assert int(chosen.sum()) == 5 and torch.equal(chosen, (torch.arange(20) < 3) | top(best, 2))
    more = ProbeRows(2, within=LeadingRows(3)).select(prompt)
    assert more.nonzero().flatten().tolist() == [0, 1, 2]


def base_prompt():
    tokenizer = tiny_tokenizer()
    counts = torch.arange(len(tokenizer))
    early = torch.zeros(2, 20)
    early[:, 4:9] = torch.arange(5).float()
    return text_prompt(
        "abC 12 dEf 3 gh!! ij",
        "tail",
        tokenizer,
        table=TokenTable.of(tokenizer, counts),
        reader=GivenAttention({3: {24: early}, 7: {24: early}}, late=LATE),
    )


@pytest.mark.parametrize("factor", [0.5, 1.0, 1.3, 10.0])
def test_the_27b_count_is_that_of_the_base_rules(factor):
    prompt = base_prompt()
    parts = [rule.select(prompt) for rule in (ProtectedRows(0.5), DigitRows(), AttentionRows(0.2))]
    union = parts[0] | parts[1] | parts[2]
    assert all(part.any() for part in parts) and int(union.sum()) < sum(int(part.sum()) for part in parts)
    expected = min(20, round(factor * int(union.sum())))
    assert torch.equal(ProbeRows(factor=factor).select(prompt), top(LATE.sum((0, 1)), expected))


@pytest.mark.parametrize(
    ("lacks", "message"), [("reader", "no model"), ("table", "table"), ("tokenizer", "token")]
)
def test_what_the_27b_count_lacks_is_named(lacks, message):
    from dataclasses import replace

    prompt = replace(base_prompt(), **{lacks: None})
    with pytest.raises(SettingError, match=message):
        ProbeRows().select(prompt)


@pytest.mark.parametrize(
    "settings",
    [
        {"budget": "9b"},
        {"budget": 1.01},
        {"queries": 0},
        {"factor": -1},
        {"factor": float("nan")},
        {"within": 3},
    ],
)
def test_bad_settings_are_refused(settings):
    with pytest.raises(SettingError, match="probe rows"):
        ProbeRows(**settings)
