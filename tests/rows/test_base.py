from __future__ import annotations

import pytest
import torch

from ridgefill.errors import SettingError
from ridgefill.rows import AttentionRows, DigitRows, LeadingRows, LongerTail, ProbeRows, Union
from ridgefill.rows.base import Prompt, top
from tests.rows.prompts import rows_prompt


@pytest.mark.parametrize("question", [(-1, 3), (3, 3), (5, 3), (10, 13), (12, 13)])
def test_a_question_outside_the_prompt_is_refused(question):
    with pytest.raises(SettingError, match="the prompt has 12 rows"):
        Prompt(torch.zeros(12), 8, question=question)
    Prompt(torch.zeros(12), 8, question=(9, 12))


def test_the_rows_that_ask():
    assert rows_prompt(8).queries(3) == range(9, 12)
    assert rows_prompt(8).queries(64) == range(0, 12)
    prompt = rows_prompt(8, question=(5, 10))
    assert prompt.queries(3) == range(7, 10) and prompt.queries(64) == range(5, 10)
    assert prompt.queries(3, hidden=True) == range(2, 5) and prompt.queries(64, hidden=True) == range(0, 5)


def test_budgets_are_counts_or_shares_of_the_prefix():
    prompt = rows_prompt(10)
    assert [prompt.count(b) for b in (0, 3, 30, 0.0, 0.25, 0.35, 1.0)] == [0, 3, 10, 0, 2, 4, 10]


def test_a_union_chooses_what_any_part_does():
    both = LeadingRows(2) | LongerTail(1) | LeadingRows(3)
    assert both.parts == (LeadingRows(2), LongerTail(1), LeadingRows(3))
    assert both.select(rows_prompt(6)).nonzero().flatten().tolist() == [0, 1, 2, 5]
    assert not (both.query_aware or both.attends or both.probes)
    assert isinstance(both, Union) and (both | ProbeRows()).probes
    assert (AttentionRows() | DigitRows()).query_aware and (AttentionRows() | DigitRows()).attends
    assert not (AttentionRows() | DigitRows()).probes


def test_ties_go_to_the_lower_position():
    assert top(torch.tensor([1.0, 2.0, 2.0, 2.0]), 2).tolist() == [False, True, True, False]
