"""Rows in the middle of a prompt that run every layer: placed soundly, and chosen as in transformers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from ridgefill.errors import SettingError
from ridgefill.rows.base import Prompt, Selector

from ...gguf_maker import write
from . import needs_llama_cpp
from .test_engine import IDS, LEADING, TAIL, llama, logits

pytestmark = [*needs_llama_cpp, pytest.mark.filterwarnings("ignore::ridgefill.errors.RidgeFillWarning")]


@dataclass(frozen=True)
class Fixed(Selector):
    """Named runs of rows."""

    runs: tuple[tuple[int, int], ...]

    def select(self, prompt: Prompt) -> torch.Tensor:
        chosen = torch.zeros(prompt.prefix, dtype=torch.bool)
        for first, stop in self.runs:
            chosen[first:stop] = True
        return chosen


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    made = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write(made)
    return made


@pytest.mark.parametrize(
    "cache", [{}, {"flash_attn": True}, {"type_k": "f32"}, {"n_ubatch": 32, "n_batch": 64}]
)
def test_with_every_row_chosen_nothing_is_filled(path, cache):
    m = len(IDS) - TAIL
    runs = ((LEADING, 40), (40, 41), (41, m))
    llm = llama(path, rows=Fixed(runs), **cache)
    chosen = logits(llm, IDS)
    assert llm.stats.filled == 0 and llm.stats.selected == m - LEADING
    assert np.allclose(chosen, logits(llm, IDS, exact=True), atol=2e-3)


def test_chosen_rows_are_not_counted_as_filled(path):
    llm = llama(path, rows=Fixed(((10, 20), (30, 31))))
    logits(llm, IDS)
    assert llm.stats.selected == 11 and not llm._filled[10:20].any() and llm._filled[20:30].all()


def test_the_more_rows_are_chosen_the_nearer_exact(path):
    exact = logits(llama(path), IDS, exact=True)
    m = len(IDS) - TAIL
    off = [
        float(np.abs(logits(llama(path, rows=Fixed(runs) if runs else None), IDS) - exact).max())
        for runs in ((), ((m // 3, m),), ((LEADING, m),))
    ]
    assert off[0] > off[1] > off[2]


def test_both_engines_choose_the_same_rows_and_fill_alike(path):
    """Attention of layer 1, the split, is read in both."""
    import ridgefill
    from ridgefill.engines.llamacpp.measures import kl
    from ridgefill.rows import parse_rows

    rows = "spans(peak(layers=(1,)), 0.2, spans=8)"
    model, tokenizer = ridgefill.load_model(path)
    with (
        torch.no_grad(),
        ridgefill.filling(
            model,
            fill="identity",
            split=1,
            tail=TAIL,
            leading=LEADING,
            min_tokens=1,
            rows=rows,
            tokenizer=tokenizer,
        ) as f,
    ):
        theirs = model(torch.tensor([IDS]), use_cache=True, logits_to_keep=1).logits[0, -1].numpy()
    llm = llama(path, rows=parse_rows(rows))
    ours = logits(llm, IDS)
    assert llm.stats.selected == f.stats.selected > 0
    assert kl(theirs, ours) < 1e-3


def test_a_question_far_before_the_tail_is_refused(path, monkeypatch):
    llm = llama(path, rows="spans(peak(layers=(1,), hidden=true), 0.2, spans=8)")
    monkeypatch.setattr("ridgefill.engines.llamacpp.engine.CAPTURED", TAIL)
    llm.question = (60, 70)
    with pytest.raises(SettingError, match="the tail's rows"):
        logits(llm, IDS)


def test_the_probe_is_refused(path):
    with pytest.raises(SettingError, match="late attention is not read"):
        llama(path, rows="probe(0.1)")
