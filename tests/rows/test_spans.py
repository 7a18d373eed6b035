from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from ridgefill.errors import SettingError
from ridgefill.rows import AttentionScore, Combined, OverlapScore, ProbeScore, SpanRows
from tests.rows.prompts import chosen_text, rows_prompt, text_prompt


@dataclass(frozen=True)
class Given:
    """A score that the test gives."""

    values: tuple[float, ...]
    query_aware = False
    attends = False
    probes = False

    def score(self, prompt):
        return torch.tensor(self.values)


def by(*values):
    return Given(tuple(float(v) for v in values))


@pytest.mark.parametrize(
    ("pool", "order"),
    [("mean", [2, 0, 1]), ("sum", [1, 0, 2]), ("max", [0, 2, 1])],
)
def test_spans_are_ranked_by_their_pooled_score(pool, order):
    score = by(9, 1, 0, 0, *[2] * 6, 5)
    spans = [range(0, 4), range(4, 10), range(10, 11)]
    ranked = SpanRows(score, pool=pool).ranked(text_prompt("ab.\ncdefg\nh", ""))
    assert ranked == [spans[i] for i in order]


def test_whole_spans_only_and_the_next_that_fits():
    prompt = text_prompt("Aaa. Bbbbbbbbb. Cc. Dd. ", "")
    score = by(*[3] * 5, *[4] * 11, *[1] * 4, *[2] * 4)
    assert chosen_text(prompt, SpanRows(score, 9).select(prompt)) == "Aaa. Dd. "
    assert chosen_text(prompt, SpanRows(score, 11).select(prompt)) == "Bbbbbbbbb. "
    assert chosen_text(prompt, SpanRows(score, 15).select(prompt)) == "Bbbbbbbbb. Dd. "
    assert SpanRows(score, 1.0).select(prompt).all()
    assert not SpanRows(score, 3).select(prompt).any()


def test_ties_go_to_the_earlier_span():
    assert SpanRows(by(*[1] * 9), 3, spans=3).select(rows_prompt(9)).nonzero().flatten().tolist() == [0, 1, 2]


def test_windows_lines_and_the_longest_span():
    prompt = text_prompt("One. Two.\nThree.", "")
    score = by(*[0] * 6, *[1] * 3, *[0] * 7)
    assert chosen_text(prompt, SpanRows(score, 10, spans="lines").select(prompt)) == "One. Two.\n"
    assert chosen_text(prompt, SpanRows(score, 5, spans="sentences", pool="max").select(prompt)).startswith(
        "Two."
    )
    assert chosen_text(prompt, SpanRows(score, 4, spans=4).select(prompt)) == " Two"
    assert all(len(span) <= 2 for span in SpanRows(score, longest=2).ranked(prompt))


def test_leading_rows_neither_count_nor_rank():
    score = by(*[99] * 4, *[0] * 2, *[1] * 6)
    assert not SpanRows(score, 1, spans=6).select(rows_prompt(12, leading=4)).any()
    chosen = SpanRows(score, 2, spans=3, pool="sum").select(rows_prompt(12, leading=4))
    assert chosen.nonzero().flatten().tolist() == [4, 5]
    ranked = SpanRows(score, spans=3).ranked(rows_prompt(12, leading=4))
    assert ranked == [range(6, 9), range(9, 12), range(4, 6)]
    assert not SpanRows(score, 12, spans=3).select(rows_prompt(12, leading=12)).any()


def test_it_needs_what_its_score_needs():
    assert SpanRows(ProbeScore()).probes and not SpanRows(AttentionScore()).probes
    assert SpanRows(AttentionScore()).attends and not SpanRows(OverlapScore()).attends
    assert SpanRows(Combined((OverlapScore(), ProbeScore()))).probes
    assert SpanRows(OverlapScore()).query_aware and not SpanRows(by(1)).query_aware
    with pytest.raises(SettingError, match="tokenizer"):
        SpanRows(by(*[1] * 9)).select(rows_prompt(9))


def test_an_empty_prefix():
    assert SpanRows(by()).select(text_prompt("", "x")).shape == (0,)


@pytest.mark.parametrize(
    "settings",
    [
        {"score": "attention"},
        {"budget": 1.5},
        {"spans": "words"},
        {"spans": 0},
        {"pool": "min"},
        {"longest": 0},
    ],
)
def test_bad_settings_are_refused(settings):
    with pytest.raises(SettingError, match="spans"):
        SpanRows(**{"score": OverlapScore(), **settings})


def test_the_sentence_that_answers():
    noise = "The grass is green. The sky is blue. The sun is yellow. "
    fact = "One of the special magic numbers for harbor is: 1234567. "
    prompt = text_prompt(noise * 8 + fact + noise * 4, "What is the special magic number for harbor?")
    assert chosen_text(prompt, SpanRows(OverlapScore(), 0.1).select(prompt)) == fact
