from __future__ import annotations

import pytest
import torch

from ridgefill.errors import SettingError
from ridgefill.rows.attention import AttentionRows
from ridgefill.rows.base import top
from ridgefill.rows.ranking import readable_layers
from tests.rows.prompts import GivenAttention, rows_prompt


def attention(m, **layers):
    """Per layer [2 heads, m] random, for any query range."""
    generator = torch.Generator().manual_seed(3)

    class Any(dict):
        def __missing__(self, key):
            self[key] = torch.rand(2, m, generator=generator)
            return self[key]

    return {i: Any() for i in range(16)}


def test_the_rows_that_receive_most_over_layers_and_heads():
    early = attention(20)
    reader = GivenAttention(early)
    chosen = AttentionRows(0.25, window=3).select(rows_prompt(20, reader=reader))
    assert reader.asked == [((3, 7), range(21, 24))]
    assert torch.equal(chosen, top((early[3][24] + early[7][24]).sum(0), 5))


def test_leading_rows_run_anyway_and_take_no_place():
    early = attention(20)
    early[3][24] = torch.zeros(2, 20)
    early[3][24][:, :4] = 9.0
    early[3][24][:, 10] = 1.0
    prompt = rows_prompt(20, leading=4, reader=GivenAttention(early))
    assert AttentionRows(1, layers=(3,)).select(prompt).nonzero().flatten().tolist() == [10]
    assert int(AttentionRows(1.0, layers=(3,)).select(prompt).sum()) == 16


def test_the_question_can_be_pointed_at_or_hidden():
    early, question = attention(20), (21, 23)
    reader = GivenAttention(early)
    prompt = rows_prompt(20, question=question, reader=reader)
    AttentionRows(window=64).select(prompt)
    AttentionRows(window=5, hidden=True).select(prompt)
    assert [queries for _, queries in reader.asked] == [range(21, 23), range(16, 21)]


@pytest.mark.parametrize(
    ("split", "layers", "named", "expected"),
    [
        (12, range(16), None, (3, 7, 11)),
        (3, range(16), None, (0, 1, 2)),
        (14, (1, 5, 9, 13), None, (1, 5, 9, 13)),
        (14, (2, 5, 7, 15), None, (7,)),
        (9, range(16), (2, 8), (2, 8)),
    ],
)
def test_the_layers_that_are_read(split, layers, named, expected):
    reader = GivenAttention(split=split, attention_layers=tuple(layers))
    assert readable_layers(reader, "attention rows", named) == expected


@pytest.mark.parametrize("named", [(9,), (2, 12), (4,)])
def test_a_layer_that_cannot_be_read_is_refused(named):
    reader = GivenAttention(split=9, attention_layers=(2, 8, 9, 12))
    with pytest.raises(SettingError, match=r"layer .*below split 9 are 2, 8"):
        AttentionRows(layers=named).select(rows_prompt(20, reader=reader))


def test_a_model_without_attention_below_the_split_is_refused():
    reader = GivenAttention(split=3, attention_layers=(3, 7))
    with pytest.raises(SettingError, match="no attention layer below"):
        AttentionRows().select(rows_prompt(20, reader=reader))


def test_no_model_is_refused():
    with pytest.raises(SettingError, match="no model was given"):
        AttentionRows().select(rows_prompt(20))


def test_hiding_a_question_that_nobody_named_is_refused():
    with pytest.raises(SettingError, match="nobody said where"):
        AttentionRows(hidden=True).select(rows_prompt(20, reader=GivenAttention(attention(20))))
    with pytest.raises(SettingError, match="no row stands before it"):
        AttentionRows(hidden=True).select(
            rows_prompt(20, question=(0, 3), reader=GivenAttention(attention(20)))
        )


@pytest.mark.parametrize(
    "settings",
    [
        {"budget": 1.5},
        {"budget": -1},
        {"budget": True},
        {"budget": "x"},
        {"budget": float("nan")},
        {"window": 0},
        {"window": 2.5},
        {"window": True},
        {"layers": ()},
        {"layers": (1.5,)},
        {"layers": 3},
        {"hidden": 1},
    ],
)
def test_bad_settings_are_refused(settings):
    with pytest.raises(SettingError, match="attention rows"):
        AttentionRows(**settings)
