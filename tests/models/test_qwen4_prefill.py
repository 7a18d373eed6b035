"""The whole prefill of a model with wide streams, an indexer, Gated DeltaNet and experts."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from ridgefill.compat import cache_kwarg
from ridgefill.maps import AffineMap, RidgeMaps
from ridgefill.models.identity import ModelIdentity
from ridgefill.prefill import prefill
from ridgefill.rows import AttentionRows, ProbeRows, Prompt, RandomRows

from ..reference import close, generate, padded
from .test_qwen4 import (
    LAYERS,
    WIDE,
    D,
    N,
    assert_close,
    assert_same,
    each_attention,
    each_batch,
    filled_reference,
    model_of,
    needs_it,
    stock,
)

pytestmark = needs_it

TAIL = 24


def random_maps(model: Any, split: int, seed: int = 7) -> RidgeMaps:
    """Maps from all streams [256] to a layer's input [64], for every layer above the split."""
    g = torch.Generator().manual_seed(seed)

    def draw() -> AffineMap:
        return AffineMap(torch.randn(D, WIDE, generator=g) / 8, 0.2 * torch.randn(D, generator=g))

    maps = {layer: draw() for layer in range(split + 1, LAYERS)}
    return RidgeMaps(split, maps, identity=ModelIdentity.of(model))


@each_attention
@each_batch
@pytest.mark.parametrize("split", [1, 3, 5])
def test_a_fill_with_true_inputs_is_exact(attention, lengths, split):
    model, (ids, mask) = model_of(attention), padded(lengths)
    settings = {"split": split, "tail": TAIL, "leading": 0, "attention_mask": mask}
    exact = prefill(model, ids, fill="exact", **settings)
    true = prefill(model, ids, fill="true", **settings)
    theirs, _ = stock(model, ids[:, :-TAIL], mask[:, :-TAIL])
    assert_same(exact, theirs)
    assert_same(true, theirs)
    for cache in (exact, true):
        ours = generate(model, ids, attention_mask=mask, **cache_kwarg(cache))
        plain = generate(model, ids, attention_mask=mask, **cache_kwarg(copy.deepcopy(theirs)))
        assert torch.equal(ours[0], plain[0]) and torch.equal(ours[1], plain[1])


def expected(model: Any, ids: Tensor, mask: Tensor, filled: Tensor, fill: str, maps: RidgeMaps) -> Any:
    rules = {i: lambda h, m=m: h @ m.weight.T + m.bias for i, m in maps.maps.items()}
    cut = ids[:, : filled.shape[1]], mask[:, : filled.shape[1]]
    return filled_reference(model, *cut, maps.split, filled, rules if fill == "ridge" else None)


@each_attention
@pytest.mark.parametrize("fill", ["identity", "ridge"])
@pytest.mark.parametrize("leading", [0, 8])
@pytest.mark.parametrize("split", [1, 3, 5])
def test_a_fill_equals_a_slow_reference(attention, fill, leading, split):
    model, (ids, mask) = model_of(attention), padded((N, 60))
    maps = random_maps(model, split)
    settings: dict[str, Any] = {"tail": TAIL, "leading": leading, "attention_mask": mask}
    settings |= {"maps": maps} if fill == "ridge" else {"split": split}
    ours = prefill(model, ids, fill=fill, **settings)
    m = N - TAIL
    place = torch.arange(m) - torch.tensor([[0], [N - 60]])
    filled = place >= leading
    theirs = expected(model, ids, mask, filled, fill, maps)
    assert_close(ours, theirs, 0)
    assert_close(ours, theirs, 1, slice(N - 60, None))
    tokens, logits = generate(model, ids, attention_mask=mask, **cache_kwarg(ours))
    again, their_logits = generate(model, ids, attention_mask=mask, **cache_kwarg(theirs))
    assert torch.equal(tokens, again)
    close(logits, their_logits)


@each_attention
@pytest.mark.parametrize("fill", ["identity", "ridge"])
@pytest.mark.parametrize("split", [1, 3, 4])
def test_random_exact_rows_equal_a_slow_reference(attention, fill, split):
    model, ids = model_of(attention), padded((N,))[0]
    maps, rows = random_maps(model, split), RandomRows(0.2, seed=3)
    settings: dict[str, Any] = {"maps": maps} if fill == "ridge" else {"split": split}
    ours = prefill(model, ids, fill=fill, tail=TAIL, leading=4, rows=rows, **settings)
    chosen = rows.select(Prompt(ids[0], N - TAIL, 4))
    chosen[:4] = True
    assert 10 < chosen.sum() < N - TAIL
    mask = torch.ones_like(ids)
    assert_close(ours, expected(model, ids, mask, ~chosen[None], fill, maps), atol=2e-4)


@each_attention
@pytest.mark.parametrize("rows", [AttentionRows(1.0), ProbeRows(1.0)], ids=str)
@pytest.mark.parametrize("split", [3, 4])
def test_with_every_row_chosen_the_prefill_is_exact(attention, rows, split):
    model, (ids, mask) = model_of(attention), padded((N, 60))
    ours = prefill(
        model, ids, fill="identity", split=split, tail=TAIL, leading=4, rows=rows, attention_mask=mask
    )
    theirs, _ = stock(model, ids[:, :-1], mask[:, :-1])
    assert_close(ours, theirs, 0)
    assert_close(ours, theirs, 1, slice(N - 60, None))
    assert torch.equal(ours.layers[2].indexer_position_ids, theirs.layers[2].indexer_position_ids)


@torch.no_grad()
def test_without_a_fill_the_tail_reads_only_itself():
    model, ids, m = model_of(), padded((N,))[0], N - TAIL
    cache = prefill(model, ids, fill="none", split=5, tail=TAIL, leading=0)
    assert not cache.layers[5].keys.any() and not cache.layers[5].indexer_keys.any()
    ours = generate(model, ids, new=1, **cache_kwarg(cache))[1][:, 0]

    def hide(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        mask = kwargs["attention_mask"].clone()
        mask[..., m:, :m] = False
        return args, {**kwargs, "attention_mask": mask}

    handle = model.model.layers[5].register_forward_pre_hook(hide, with_kwargs=True)
    theirs = model(ids, use_cache=False).logits[:, -1]
    handle.remove()
    close(ours, theirs)
    assert (model(ids, use_cache=False).logits[:, -1] - ours).abs().max() > 1e-3
