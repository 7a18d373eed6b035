"""What selectors read of the model: equal to the attention that the stock model computes."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from ridgefill.compat import cache_kwarg, new_cache
from ridgefill.engines.transformers import filling
from ridgefill.errors import SettingError
from ridgefill.models.decoder import Decoder
from ridgefill.prefill import prefill
from ridgefill.rows.base import Prompt, Selector

from ..reference import CASES, TAIL, N, close, inputs_swapped, model_of, padded, prompt, random_maps
from ..test_walk import affine
from ..tiny import tiny_tokenizer

M, SPLIT = N - TAIL, 5
READ = [case for case in CASES if Decoder(model_of(case)).config.model_type not in ("gemma2", "gpt_oss")]


@dataclass(frozen=True)
class Spy(Selector):
    """Chooses nothing; keeps what the reader gave."""

    queries: range
    layers: tuple[int, ...] | None = None
    probe: int = 0
    peak: bool = False
    found: list[Tensor] = field(default_factory=list)

    query_aware = attends = True

    @property
    def probes(self) -> bool:
        return self.probe > 0

    def select(self, prompt: Prompt) -> Tensor:
        reader = prompt.reader
        below = tuple(i for i in reader.attention_layers if i < reader.split)
        got = (
            reader.probe(self.probe)
            if self.probe
            else reader.lower(self.layers or below, self.queries, self.peak)
        )
        self.found.append(got)
        return torch.zeros(prompt.prefix, dtype=torch.bool)


@torch.no_grad()
def attentions(model, ids: Tensor, hook=None) -> list[Tensor]:
    """[heads, n, n] of every attention layer of the stock model on ids [1, n], by its own eager code."""
    kind = model.config._attn_implementation
    model.set_attn_implementation("eager")
    found: dict[int, Tensor] = {}
    layers = [
        (i, layer.self_attn) for i, layer in enumerate(model.model.layers) if hasattr(layer, "self_attn")
    ]
    handles = [m.register_forward_hook(lambda m, a, o, i=i: found.__setitem__(i, o[1][0])) for i, m in layers]
    try:
        with hook or torch.no_grad():
            model(ids, use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
        model.set_attn_implementation(kind)
    return [found.get(i) for i in range(len(model.model.layers))]


@pytest.mark.parametrize("case", CASES)
def test_lower_attention_is_the_stock_models(case):
    model, ids = model_of(case), prompt()
    decoder = Decoder(model)
    below = [i for i in range(SPLIT) if not decoder.recurrent(i) and decoder.window(i) is None]
    spy = Spy(range(N - 12, N - 1))
    if not below:
        with pytest.raises(SettingError, match="layers up to the split"):
            prefill(model, ids, random_maps(model, SPLIT), tail=TAIL, rows=spy)
        return
    prefill(model, ids, random_maps(model, SPLIT), tail=TAIL, rows=spy)
    stock = attentions(model, ids)
    expected = torch.stack([stock[i][:, N - 12 : N - 1, :M].sum(1) for i in below])
    close(spy.found[0], expected)
    assert expected.sum() > 0
    peak = Spy(range(N - 12, N - 1), peak=True)
    prefill(model, ids, random_maps(model, SPLIT), tail=TAIL, rows=peak)
    close(peak.found[0], torch.stack([stock[i][:, N - 12 : N - 1, :M].amax(1) for i in below]))


@pytest.mark.parametrize("case", ["llama", "qwen3", "gemma3_text", "gpt_oss", "qwen3_next"])
def test_the_split_layer_can_be_read_too(case):
    """Its input is exact for every row, whatever is filled above."""
    model, ids = model_of(case), prompt()
    decoder = Decoder(model)
    split = max(i for i in range(5) if not decoder.recurrent(i) and decoder.window(i) is None)
    spy = Spy(range(N - 12, N - 1), layers=(split,), peak=True)
    prefill(model, ids, random_maps(model, split), tail=TAIL, leading=0, rows=spy)
    close(spy.found[0][0], attentions(model, ids)[split][:, N - 12 : N - 1, :M].amax(1))
    second = Spy(range(60, N - 1), layers=(split,))
    cache = new_cache(model)
    with filling(model, random_maps(model, split), tail=TAIL, rows=second, min_tokens=60) as f:
        model(ids[:, :40], use_cache=True, logits_to_keep=1, **cache_kwarg(cache))
        model(ids, use_cache=True, logits_to_keep=1, **cache_kwarg(cache))
        assert f.stats is not None and f.stats.filled > 0
    both = attentions(model, torch.cat([ids[:, :40], ids], 1))[split]
    close(second.found[0][0], both[:, 40 + 60 : 40 + N - 1, 40 : 40 + M].sum(1))


@pytest.mark.parametrize("case", ["llama", "qwen3", "qwen3_next"])
def test_each_sequence_of_a_padded_batch_reads_its_own_attention(case):
    model, (ids, mask) = model_of(case), padded((N, 60))
    spy = Spy(range(50, 58))
    maps = random_maps(model, SPLIT)
    prefill(model, ids, maps, tail=TAIL, rows=spy, attention_mask=mask, question=[(50, 58), (50, 58)])
    for b, n in enumerate((N, 60)):
        alone = Spy(range(50, 58))
        prefill(model, ids[b : b + 1, N - n :], maps, tail=TAIL, rows=alone, question=(50, 58))
        close(spy.found[b], alone.found[0])


@pytest.mark.parametrize("case", ["llama", "qwen3", "mistral", "qwen3_moe"])
def test_the_probe_is_the_late_layers_over_the_filled_cache(case):
    """The last rows see the filled prefix and one another; the rest of the tail has written nothing."""
    model, ids, q, split = model_of(case), prompt(), 9, 2
    maps, spy = random_maps(model, split), Spy(range(0), probe=q)
    prefill(model, ids, maps, tail=TAIL, leading=0, rows=spy)
    filled = torch.zeros(N - 1, dtype=torch.bool)
    filled[:M] = True
    decoder = Decoder(model)
    seen = torch.ones(N - 1, N - 1, dtype=torch.bool).tril()
    seen[:, M : N - 1 - q] = False
    seen.fill_diagonal_(True)
    mask = torch.zeros(N - 1, N - 1).masked_fill(~seen, torch.finfo(torch.float32).min)[None, None]
    hide = [
        layer.register_forward_pre_hook(lambda m, a, k: (a, {**k, "attention_mask": mask}), with_kwargs=True)
        for layer in list(model.model.layers)[split:]
    ]
    try:
        with inputs_swapped(model, filled, split, affine(maps, split)) as context:
            stock = attentions(model, ids[:, : N - 1], context)
    finally:
        for handle in hide:
            handle.remove()
    late = [i for i in range(split, decoder.n_layers)]
    close(spy.found[0], torch.stack([stock[i][:, -q:, :M].sum(1) for i in late]))


def test_what_was_not_kept_is_refused():
    model, ids = model_of("llama"), prompt()
    for spy, words in (
        (Spy(range(N - 9, N - 1), layers=(3, 7)), "layers up to the split"),
        (Spy(range(N - 9, N - 1), layers=(4, 99)), "99"),
    ):
        with pytest.raises(SettingError, match=words):
            prefill(model, ids, random_maps(model, SPLIT), tail=TAIL, rows=spy)
    long = prompt(700)
    with pytest.raises(SettingError, match="512 rows"):
        prefill(model, long, random_maps(model, SPLIT), tail=TAIL, rows=Spy(range(100, 110)))


@pytest.mark.parametrize("attends", [False, True])
def test_selectors_see_the_whole_prompt(attends):
    """Also where the walk has only a part of it: the question stands in the tail."""
    model, ids = model_of("llama"), prompt(batch=2)
    seen: list[Prompt] = []

    class Look(Selector):
        def select(self, prompt: Prompt) -> Tensor:
            seen.append(prompt)
            return torch.zeros(prompt.prefix, dtype=torch.bool)

    Look.attends = attends
    prefill(model, ids, random_maps(model, SPLIT), tail=TAIL, rows=Look(), question=(80, N))
    assert [torch.equal(p.ids, row) for p, row in zip(seen, ids, strict=True)] == [True, True]
    assert all((p.prefix, p.question) == (M, (80, N)) for p in seen)


@pytest.mark.parametrize("question", [(90, N + 1), (-3, 20), (50, 50), (60, 40)])
def test_a_question_outside_the_prompt_is_refused(question):
    model, ids = model_of("llama"), prompt()
    with pytest.raises(SettingError, match="question"):
        prefill(model, ids, random_maps(model, SPLIT), tail=TAIL, rows=Spy(range(1)), question=question)


@pytest.mark.parametrize("question", [None, (150, 170), (600, 640), (900, 1000)])
@pytest.mark.parametrize(
    "words",
    [
        "spans(peak, 0.2, spans=16)",
        "spans(attention(baseline=true), 0.2, spans=8)",
        "attention(0.2)",
        "probe(9)",
    ],
)
def test_the_question_may_stand_anywhere(words, question):
    model, ids = model_of("llama"), prompt(1000)
    cache = prefill(
        model, ids, random_maps(model, 2), tail=64, rows=words, question=question, tokenizer=tiny_tokenizer()
    )
    assert cache.stats.selected > 0
    if question is not None and "probe" not in words:
        hidden = words.replace("peak", "peak(hidden=true)").replace("(0.2)", "(0.2, hidden=true)")
        hidden = hidden.replace("baseline=true", "baseline=true, hidden=true")
        assert prefill(
            model,
            ids,
            random_maps(model, 2),
            tail=64,
            rows=hidden,
            question=question,
            tokenizer=tiny_tokenizer(),
        ).stats.selected


@pytest.mark.parametrize(
    "rows", ["attention(0.2, window=1)", "snapkv(0.2, window=1)", "spans(peak(window=1), 1.0)"]
)
def test_a_window_of_one_row_reads_the_row_before_the_last(rows):
    """The last row runs after the rows are chosen: asking with it alone must not ask with none."""
    model, ids = model_of("llama"), prompt(90)
    cache = prefill(model, ids, fill="identity", split=3, tail=24, rows=rows, tokenizer=tiny_tokenizer())
    assert cache.stats.selected > 0
