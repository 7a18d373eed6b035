"""Exact rows among filled ones, for every family: gathered, in order, and no other row runs (paper 2.4)."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from ridgefill.compat import cache_kwarg, new_cache
from ridgefill.correct import KeyRescale, ValueRescale
from ridgefill.engines.transformers import filling
from ridgefill.errors import SettingError
from ridgefill.models.decoder import Decoder
from ridgefill.plan import make_plan
from ridgefill.prefill import prefill
from ridgefill.rows.attention import AttentionRows
from ridgefill.rows.base import Prompt, Selector
from ridgefill.rows.probe import ProbeRows

from .reference import (
    CASES,
    N_LAYERS,
    TAIL,
    N,
    close,
    generate,
    inputs_swapped,
    model_of,
    padded,
    prompt,
    random_maps,
    stock_cache,
)

M = N - TAIL
SPLIT = 3
SCATTERED = (0, 1, 5, 17, 18, 19, 40, 41, 63, M - 1)
each_case = pytest.mark.parametrize("case", CASES)


@dataclass(frozen=True)
class Fixed(Selector):
    """Rows by their places; ``attends`` makes the tail run with the prefix."""

    places: tuple[int, ...]
    attends: bool = False

    def select(self, prompt: Prompt) -> Tensor:
        chosen = torch.zeros(prompt.prefix, dtype=torch.bool)
        chosen[[p for p in self.places if p < prompt.prefix]] = True
        return chosen


def every(attends: bool = False) -> Fixed:
    return Fixed(tuple(range(M)), attends)


@torch.no_grad()
def mixed_cache(model, ids: Tensor, filled: Tensor, split: int, maps) -> object:
    """The stock model's cache of ids [n] when the filled rows enter each late layer as the maps predict."""
    cache = new_cache(model)
    with inputs_swapped(model, filled, split, affine(maps, split)):
        model(ids[None], use_cache=True, logits_to_keep=1, **cache_kwarg(cache))
    return cache


def affine(maps, split):
    def predict(i: int, h: Tensor) -> Tensor:
        return h if i == split else h @ maps.maps[i].weight.T + maps.maps[i].bias

    return predict


def tensors(layer) -> list[Tensor]:
    names = ("keys", "values", "conv_states", "recurrent_states")
    found = [getattr(layer, name) for name in names if hasattr(layer, name)]
    return [t for part in found for t in (part.values() if isinstance(part, dict) else [part])]


def assert_close_cache(ours, theirs, atol: float = 3e-5) -> None:
    for i, (a, b) in enumerate(zip(ours.layers, theirs.layers, strict=True)):
        for x, y in zip(tensors(a), tensors(b), strict=True):
            assert x.shape == y.shape, i
            close(x, y, atol)


@each_case
@pytest.mark.parametrize("attends", [False, True])
def test_with_every_row_selected_the_result_is_exact(case, attends):
    model, ids = model_of(case), prompt(batch=2)
    maps = random_maps(model, SPLIT)
    ours = prefill(model, ids, maps, tail=TAIL, leading=0, rows=every(attends))
    length = N - 1 if attends else M
    assert ours.get_seq_length() == length
    assert_close_cache(ours, stock_cache(model, ids[:, :length]))
    assert (ours.stats.filled, ours.stats.selected, ours.stats.exact) == (0, 2 * M, 2 * N)
    (a, a_logits), (b, b_logits) = generate(model, ids, **cache_kwarg(ours)), generate(model, ids)
    assert torch.equal(a, b)
    close(a_logits, b_logits)


@each_case
@pytest.mark.parametrize("split", [1, SPLIT, N_LAYERS - 1])
@pytest.mark.parametrize("attends", [False, True])
def test_selected_rows_write_what_they_write_over_the_mixed_cache(case, split, attends):
    model, ids = model_of(case), prompt()
    maps = random_maps(model, split)
    ours = prefill(model, ids, maps, tail=TAIL, leading=0, rows=Fixed(SCATTERED, attends))
    filled = torch.zeros(N, dtype=torch.bool)
    filled[:M] = True
    filled[list(SCATTERED)] = False
    length = N - 1 if attends else M
    assert_close_cache(ours, mixed_cache(model, ids[0, :length], filled[:length], split, maps))
    assert ours.stats.filled == M - len(SCATTERED)


@each_case
@pytest.mark.parametrize("fill", ["ridge", "identity"])
def test_a_padded_batch_chooses_for_each_sequence_and_is_as_alone(case, fill):
    lengths = (N, 60, 30, 14)
    model, (ids, mask) = model_of(case), padded(lengths)
    maps = random_maps(model, SPLIT)
    for attends in (False, True):
        settings = {"maps": maps, "fill": fill, "tail": TAIL, "leading": 2}
        settings["rows"] = Fixed((9, 11, 33, 70), attends)
        cache = prefill(model, ids, attention_mask=mask, **settings)
        assert cache.stats.selected == 4 + 3 + 0 + 0
        tokens, logits = generate(model, ids, attention_mask=mask, **cache_kwarg(cache))
        assert logits.isfinite().all()
        for b, n in enumerate(lengths[:3]):
            alone = prefill(model, ids[b : b + 1, N - n :], **settings)
            alone_tokens, alone_logits = generate(model, ids[b : b + 1, N - n :], **cache_kwarg(alone))
            if b != 2:  # the third has a row to run in the batch and none alone
                assert torch.equal(alone_tokens[0], tokens[b, N - n :])
                close(alone_logits[0], logits[b])


@pytest.mark.parametrize("case", ["llama", "gemma3_text", "qwen3_moe", "qwen3_next"])
@pytest.mark.parametrize("attends", [False, True])
def test_no_other_row_runs_a_late_layer(case, attends):
    model, ids = model_of(case), prompt()
    rows: list[int] = []
    late = [layer.mlp for layer in model.model.layers[SPLIT:]]
    handles = [m.register_forward_hook(lambda m, a, o: rows.append(a[0].numel() // 64)) for m in late]
    try:
        prefill(model, ids, random_maps(model, SPLIT), tail=TAIL, leading=3, rows=Fixed(SCATTERED, attends))
    finally:
        for handle in handles:
            handle.remove()
    kept = len({0, 1, 2, *SCATTERED}) + (TAIL - 1 if attends else 0)
    assert sum(rows) == kept * (N_LAYERS - SPLIT)


@pytest.mark.parametrize("case", ["llama", "gemma3_text", "mistral-window", "qwen3_next", "gpt_oss"])
@pytest.mark.parametrize("attends", [False, True])
def test_a_second_turn_has_exact_rows_of_its_own(case, attends):
    model, first, second = model_of(case), prompt(50, seed=3), prompt(N, seed=4)
    maps = random_maps(model, SPLIT)
    rows = Fixed(SCATTERED, attends)
    both = torch.cat([first, second], 1)
    with filling(model, maps, tail=TAIL, leading=0, rows=rows, min_tokens=1) as f:
        cache = new_cache(model)
        model(first, use_cache=True, logits_to_keep=1, **cache_kwarg(cache))
        out = model(second, use_cache=True, logits_to_keep=1, **cache_kwarg(cache))
        assert f.stats is not None and f.stats.selected == len(SCATTERED)
    filled = torch.zeros(50 + N, dtype=torch.bool)
    head = 50 - TAIL
    filled[[r for r in range(head) if r not in SCATTERED]] = True
    filled[[50 + r for r in range(M) if r not in SCATTERED]] = True
    with torch.no_grad(), inputs_swapped(model, filled, SPLIT, affine(maps, SPLIT)):
        theirs = model(both, use_cache=False).logits[:, -1:]
    close(out.logits, theirs)


@pytest.mark.parametrize("case", ["llama", "gemma3_text", "mistral-window", "qwen3_next"])
@pytest.mark.parametrize("rows", [Fixed(SCATTERED), Fixed(SCATTERED, attends=True), AttentionRows(9)])
def test_padding_of_an_earlier_turn_stays_hidden(case, rows):
    model, (first, mask) = model_of(case), padded((50, 20))
    second = prompt(N, batch=2, seed=4)
    split = 4 if case == "qwen3_next" else SPLIT
    if isinstance(rows, AttentionRows) and case in ("gemma3_text", "mistral-window"):
        pytest.skip("no full attention below the split")
    settings = {"tail": TAIL, "leading": 0, "rows": rows, "min_tokens": N}
    with filling(model, random_maps(model, split), **settings) as f:
        cache = new_cache(model)
        model(
            first,
            attention_mask=mask,
            position_ids=(mask.cumsum(1) - 1).clamp(min=0),
            use_cache=True,
            **cache_kwarg(cache),
        )
        both = torch.cat([mask, torch.ones_like(second)], 1)
        positions = (both.cumsum(1) - 1)[:, 50:]
        out = model(
            second,
            attention_mask=both,
            position_ids=positions,
            use_cache=True,
            logits_to_keep=1,
            **cache_kwarg(cache),
        )
        assert f.stats is not None and f.stats.filled > 0, f.stats
        for b, n in enumerate((50, 20)):
            cache = new_cache(model)
            model(first[b : b + 1, 50 - n :], use_cache=True, logits_to_keep=1, **cache_kwarg(cache))
            alone = model(second[b : b + 1], use_cache=True, logits_to_keep=1, **cache_kwarg(cache))
            close(alone.logits[0], out.logits[b])


@dataclass(frozen=True)
class Noting(Selector):
    """The rows of another selector, and which they were."""

    inner: Selector
    chosen: list[int]

    query_aware = attends = probes = True

    def select(self, prompt: Prompt) -> Tensor:
        rows = self.inner.select(prompt)
        self.chosen[:] = rows.nonzero()[:, 0].tolist()
        return rows


@pytest.mark.parametrize(
    "case", ["llama", "gemma3_text", "qwen3_moe", "qwen3_next", "qwen3_5_text", "olmo_hybrid"]
)
def test_two_sweeps_leave_what_one_would(case):
    """The probe reads the filled cache; the second sweep reuses it and carries recurrent states once (Figure 5)."""
    model, ids = model_of(case), prompt()
    maps, noting = random_maps(model, 2), Noting(ProbeRows(9, queries=7), [])
    two = prefill(model, ids, maps, tail=TAIL, rows=noting, corrections=[ValueRescale(5)])
    assert len(noting.chosen) == 9 and min(noting.chosen) >= 16
    one = prefill(
        model,
        ids,
        maps,
        tail=TAIL,
        rows=Fixed(tuple(noting.chosen), attends=True),
        corrections=[ValueRescale(5)],
    )
    for a, b in zip(two.layers, one.layers, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(tensors(a), tensors(b), strict=True))
    filled = torch.ones(N - 1, dtype=torch.bool)
    filled[[*range(16), *noting.chosen, *range(M, N - 1)]] = False
    plain = prefill(model, ids, maps, tail=TAIL, rows=Noting(ProbeRows(9, queries=7), []))
    assert_close_cache(plain, mixed_cache(model, ids[0, : N - 1], filled, 2, maps))


# corrections


@pytest.mark.parametrize("case", ["llama", "qwen3", "gemma3_text", "qwen3_next"])
@pytest.mark.parametrize("kind", [ValueRescale, KeyRescale])
def test_a_rescale_gives_filled_rows_the_tails_size(case, kind):
    """In the first layer that predicts, the tail is the same with and without: the scale is the formula's."""
    model, ids, w, split, i = model_of(case), prompt(), 7, N_LAYERS - 2, N_LAYERS - 1
    maps, decoder = random_maps(model, split), Decoder(model)
    assert not decoder.recurrent(i)
    settings = {"maps": maps, "tail": TAIL, "leading": 0}
    plain = prefill(model, ids, rows=Fixed(SCATTERED, attends=True), **settings)
    ours = prefill(model, ids, rows=Fixed(SCATTERED), corrections=[kind(window=w)], **settings)
    filled = torch.ones(N, dtype=torch.bool)
    filled[list(SCATTERED)] = filled[M:] = False
    state: dict[int, Tensor] = {}
    with torch.no_grad(), inputs_swapped(model, filled, split, affine(maps, split)):
        hooks = [
            model.model.layers[j].register_forward_pre_hook(lambda m, args, j=j: state.update({j: args[0]}))
            for j in (split, i)
        ]
        model(ids, use_cache=False)
        for hook in hooks:
            hook.remove()
        rows, which = decoder.rows(state[i], torch.arange(N)[None]), int(kind is ValueRescale)
        true = decoder.writes(i, state[i], rows)[which][:, :, M : M + w]
        guess = decoder.writes(i, affine(maps, split)(i, state[split]), rows)[which][:, :, M : M + w]
        scale = (true.norm(dim=-1) / guess.norm(dim=-1)).mean(-1)[..., None, None]
        a, b = ((c.layers[i].keys, c.layers[i].values)[which] for c in (plain, ours))
        close(b[:, :, filled[: N - 1]], a[:, :, filled[: N - 1]] * scale)
        close(b[:, :, ~filled[: N - 1]], a[:, :, ~filled[: N - 1]])  # exact rows and the tail keep theirs
        assert (scale - 1).abs().max() > 0.01 or (kind is KeyRescale and case != "llama")


@pytest.mark.parametrize("case", ["llama", "gemma3_text", "qwen3_next"])
def test_a_correction_of_strength_zero_changes_nothing_bit_for_bit(case):
    model, ids = model_of(case), prompt(batch=2)
    maps, rows = random_maps(model, SPLIT), Fixed(SCATTERED, attends=True)
    plain = prefill(model, ids, maps, tail=TAIL, rows=rows)
    zero = [ValueRescale(strength=0.0), KeyRescale(strength=0.0)]
    ours = prefill(model, ids, maps, tail=TAIL, rows=rows, corrections=zero)
    full = prefill(model, ids, maps, tail=TAIL, rows=rows, corrections=[ValueRescale()])
    for a, b in zip(plain.layers, ours.layers, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(tensors(a), tensors(b), strict=True))
    assert any(
        not torch.equal(x, y)
        for a, b in zip(plain.layers, full.layers, strict=True)
        for x, y in zip(tensors(a), tensors(b), strict=True)
    )


def test_a_rescale_of_an_arm_that_predicts_nothing_is_refused():
    for fill in ("none", "exact", "true"):
        with pytest.raises(SettingError, match="no filled rows to rescale"):
            make_plan(6, fill=fill, split=3, corrections=[ValueRescale()])
    with pytest.raises(SettingError, match="mean over rows"):
        KeyRescale(window=0)
