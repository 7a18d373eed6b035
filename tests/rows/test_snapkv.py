"""SnapKV's choice against the stock model's whole attention matrix."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ridgefill.errors import SettingError
from ridgefill.prefill import prefill
from ridgefill.rows.snapkv import PooledAttentionRows, pooled
from tests.reference import TAIL, N, model_of, prompt, random_maps
from tests.rows.prompts import GivenAttention, rows_prompt
from tests.rows.test_reader import attentions
from tests.test_walk import Noting

M, BUDGET = N - TAIL, 9


def slow(received: Tensor, kernel: int, pool: str) -> list[float]:
    """Row by row; what lies beyond the ends counts as zero in a mean."""
    half, found = kernel // 2, []
    for j in range(len(received)):
        around = received[max(0, j - half) : j + half + 1]
        found.append(float(around.max() if pool == "max" else around.sum() / kernel))
    return found


@pytest.mark.parametrize(
    ("case", "split", "layer"),
    [("llama", 3, 3), ("qwen3", 2, 2), ("gemma3_text", 3, 2), ("qwen3_next", 5, 5), ("qwen3_next", 4, 2)],
)
@pytest.mark.parametrize(("window", "kernel", "pool"), [(8, 7, "max"), (5, 3, "avg")])
def test_the_rows_are_those_of_the_whole_attention_matrix(case, split, layer, window, kernel, pool):
    """Also in the split layer itself; a hybrid or windowed model has its last full-attention layer up to it read."""
    model, ids = model_of(case), prompt()
    noting = Noting(PooledAttentionRows(BUDGET, window, kernel, pool), [])
    prefill(model, ids, random_maps(model, split), tail=TAIL, leading=2, rows=noting)
    stock = attentions(model, ids)[layer]
    score = slow(stock[:, N - 1 - window : N - 1, :M].sum((0, 1)), kernel, pool)
    ranked = sorted(range(2, M), key=lambda j: (-score[j], j))
    assert noting.chosen == sorted(ranked[:BUDGET])


def test_neighbours_come_with_the_peak():
    score = torch.zeros(12)
    score[5] = 1.0
    assert pooled(score, 5, "max").nonzero().flatten().tolist() == [3, 4, 5, 6, 7]
    assert pooled(score, 5, "avg")[[2, 3, 7]].tolist() == [0.0, pytest.approx(0.2), pytest.approx(0.2)]
    assert torch.equal(pooled(score, 1, "max"), score)
    assert len(pooled(score[:0], 5, "max")) == 0


def test_the_window_ends_before_the_row_that_has_not_run():
    """Query rows are the question's where it is named; a prompt's last row is not among them."""
    reader = GivenAttention(dict.fromkeys([4], dict.fromkeys(range(30), torch.rand(2, 20))), split=4)
    for question, asked in ((None, range(17, 23)), ((10, 15), range(10, 15)), ((20, 24), range(19, 23))):
        PooledAttentionRows(3, window=6).select(rows_prompt(20, question=question, reader=reader))
        assert reader.asked.pop() == ((4,), asked)


def test_a_model_without_full_attention_up_to_the_split_is_refused():
    reader = GivenAttention(split=3, attention_layers=(4, 8))
    with pytest.raises(SettingError, match="no full-attention layer up to it"):
        PooledAttentionRows().select(rows_prompt(20, reader=reader))
    model = model_of("qwen3_next")
    rows = PooledAttentionRows(layer=3)
    with pytest.raises(SettingError, match="layers up to the split"):
        prefill(model, prompt(), random_maps(model, 4), tail=TAIL, rows=rows)


@pytest.mark.parametrize(
    "settings",
    [{"budget": 1.5}, {"window": 0}, {"kernel": 4}, {"kernel": 0}, {"pool": "sum"}, {"layer": -1}],
)
def test_bad_settings_are_refused(settings):
    with pytest.raises(SettingError, match="pooled attention rows"):
        PooledAttentionRows(**settings)
