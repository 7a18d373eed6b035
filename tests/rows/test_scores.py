from __future__ import annotations

import math

import pytest
import torch

from ridgefill.errors import SettingError
from ridgefill.rows import AttentionScore, Combined, OverlapScore, ProbeScore
from tests.rows.prompts import GivenAttention, rows_prompt, text_prompt

LATE = torch.tensor([[[1.0, 2.0, 3.0], [5.0, 0.0, 0.0]]])
NOW = torch.tensor([[6.0, 2.0, 0.0], [0.0, 2.0, 4.0]])
BEFORE = torch.tensor([[4.0, 0.0, 2.0], [2.0, 0.0, 2.0]])


def prompt(**more):
    reader = GivenAttention(
        {3: {7: NOW, 5: BEFORE, 6: BEFORE}, 7: {7: 0 * NOW, 5: 0 * NOW, 6: 0 * NOW}}, LATE
    )
    return rows_prompt(3, reader=reader, **more)


def test_attention_over_heads():
    assert AttentionScore(window=2).score(prompt()).tolist() == [3.0, 2.0, 2.0]
    assert AttentionScore(window=2, heads="max").score(prompt()).tolist() == [3.0, 1.0, 2.0]


def test_attention_above_what_earlier_rows_pay():
    given = prompt()
    assert AttentionScore(window=2, baseline=True).score(given).tolist() == [0.0, 2.0, 0.0]
    assert [queries for _, queries in given.reader.asked] == [range(5, 7), range(3, 5)]
    # Head by head, before the largest is taken; layer 7 pays nothing.
    assert AttentionScore(window=2, heads="max", baseline=True).score(given).tolist() == [1.0, 1.0, 1.0]


def test_the_baseline_stands_before_the_question():
    given = prompt(question=(5, 7))
    AttentionScore(window=1, baseline=True).score(given)
    assert [queries for _, queries in given.reader.asked] == [range(6, 7), range(4, 5)]
    with pytest.raises(SettingError, match="no row stands before"):
        AttentionScore(baseline=True).score(prompt(question=(0, 7)))


def test_a_shorter_baseline_is_weighed_per_row():
    given = rows_prompt(3, reader=GivenAttention({3: {7: NOW, 2: BEFORE}}, split=4))
    found = AttentionScore(window=5, baseline=True).score(given)
    assert torch.allclose(found, (NOW / 5 - BEFORE / 2).sum(0))


def test_the_probe():
    assert ProbeScore(queries=4).score(prompt()).tolist() == [1.5, 0.5, 0.75]
    assert ProbeScore(queries=1, heads="max").score(prompt()).tolist() == [5.0, 2.0, 3.0]


def test_overlap_is_worth_the_words_rarity():
    given = text_prompt(
        "A red cat. A red dog. A blue cow. A Bird is. A red fox. ", "is a bird red, or a cow?"
    )
    score = OverlapScore(window=24).score(given)
    text = "".join(given.pieces)
    once = math.log((5 - 1 + 0.5) / (1 + 0.5))
    for word in ("cow", "Bird"):
        at = text.index(word)
        assert torch.allclose(score[at : at + len(word)], torch.tensor(once))
    assert score[text.index("red")] == 0  # in three of five spans
    assert score[text.index("cat")] == 0  # not asked for
    assert float(score.sum()) == pytest.approx(once * len("cowBirdis"))


def test_overlap_counts_a_span_once():
    given = text_prompt("Cow cow cow. Dog. Cat. Fox. ", "cow?")
    assert float(OverlapScore(window=4).score(given)[0]) == pytest.approx(math.log(3.5 / 1.5))


def test_overlap_reads_only_the_question():
    given = text_prompt("Red cat. Blue dog. Old cow. ", "red? blue?", question=(33, 38))
    found = OverlapScore(window=5).score(given)
    assert found[:3].sum() == 0 and found[9:13].min() > 0
    hidden = OverlapScore(window=5, hidden=True).score(given)
    assert hidden[:3].min() > 0 and hidden[9:13].sum() == 0


def test_scores_are_added_on_one_scale():
    given = prompt(leading=1)
    attention, probe = AttentionScore(window=2), ProbeScore(queries=4)
    z = Combined((attention, probe), (1, 3)).score(given)
    assert torch.allclose(z, torch.tensor([0.0, 0.0 - 3.0, 0.0 + 3.0]))  # attention is equal on both rows
    rank = Combined((ProbeScore(queries=4),), norm="rank").score(prompt())
    assert rank.tolist() == [1.0, 0.0, 0.5]


def test_z_scores_have_mean_0_and_deviation_1():
    found = Combined((ProbeScore(),)).score(prompt())
    assert float(found.mean()) == pytest.approx(0, abs=1e-6)
    assert float(found.std(correction=0)) == pytest.approx(1)


def test_equal_scores_share_their_rank():
    reader = GivenAttention({3: {9: torch.tensor([[0.0, 0.0, 5.0, 0.0, 9.0]])}}, split=4)
    given = rows_prompt(5, reader=reader)
    assert Combined((AttentionScore(),), norm="rank").score(given).tolist() == [0.25, 0.25, 0.75, 0.25, 1.0]


def test_a_sum_needs_what_its_parts_need():
    assert Combined((OverlapScore(), ProbeScore())).probes
    assert Combined((OverlapScore(), AttentionScore())).attends
    plain = Combined((OverlapScore(),))
    assert plain.query_aware and not plain.attends and not plain.probes


def test_what_is_missing_is_named():
    for score, message in (
        (AttentionScore(), "no model"),
        (ProbeScore(), "no model"),
        (OverlapScore(), "token"),
    ):
        with pytest.raises(SettingError, match=message):
            score.score(rows_prompt(5))


@pytest.mark.parametrize(
    "make",
    [
        lambda: AttentionScore(heads="mean"),
        lambda: AttentionScore(window=0),
        lambda: AttentionScore(layers=()),
        lambda: AttentionScore(baseline=1),
        lambda: ProbeScore(queries=0),
        lambda: ProbeScore(heads=3),
        lambda: OverlapScore(window=-1),
        lambda: Combined(()),
        lambda: Combined((OverlapScore(),), (1, 2)),
        lambda: Combined((OverlapScore(),), ("x",)),
        lambda: Combined(("overlap",)),
        lambda: Combined((OverlapScore(),), norm="max"),
    ],
)
def test_bad_settings_are_refused(make):
    with pytest.raises(SettingError):
        make()
