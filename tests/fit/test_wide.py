"""The fit of a model whose layers read a mix of four streams: maps of 4 d columns, its indexer, its states."""

from __future__ import annotations

import math
import random

import pytest
import torch

from ridgefill.compat import cache_kwarg, new_cache
from ridgefill.fit import fit
from ridgefill.fit.capture import Capture, run_capture
from ridgefill.fit.moments import Moments
from ridgefill.fit.penalty import write
from ridgefill.fit.terminal import compare_states
from ridgefill.fit.windows import Plan, Window
from ridgefill.maps import AffineMap, RidgeMaps
from ridgefill.models.decoder import Decoder
from tests.models.test_qwen4 import HAS, model_of, seen_by_mixers, tiny_qwen4
from tests.tiny import tiny_tokenizer

pytestmark = pytest.mark.skipif(not HAS, reason="this transformers has no qwen4_exp")
SPLIT, D, WIDE, LEADING = 2, 64, 256, 5


def window(n, seed=0):
    ids = torch.randint(0, 256, (n,), generator=torch.Generator().manual_seed(seed), dtype=torch.int32)
    return Window(ids, 0, f"document {seed}", str(seed), False)


def wide_states(model, ids):
    """layer -> the state [m, W] that enters it, in the stock model."""
    seen = {}
    handles = [
        layer.register_forward_pre_hook(lambda _, args, i=i: seen.update({i: args[0][0]}))
        for i, layer in enumerate(model.model.layers)
    ]
    model(ids)
    for handle in handles:
        handle.remove()
    return seen


@torch.no_grad()
def test_moments_are_those_of_streams_and_mixes():
    model, windows = model_of(), [window(40, i) for i in range(3)]
    moments = Moments((SPLIT,), 6, dict.fromkeys(range(6), torch.device("cpu")), reads={SPLIT: ((SPLIT, 0),)})
    capture = Capture(moments)
    plan = Plan(windows[:2], windows[2:], [], "", "")
    run_capture(Decoder(model), plan, capture, leading=LEADING, seed=0)
    ids = [w.ids.long()[None] for w in windows]
    x = torch.cat([wide_states(model, i)[SPLIT][LEADING:] for i in ids[:2]]).double()
    assert x.shape == (2 * (40 - LEADING), WIDE)
    xc = x - x.mean(0)
    torch.testing.assert_close(moments.gram(SPLIT), xc.T @ xc, rtol=1e-6, atol=1e-6)
    seen = [seen_by_mixers(model, i) for i in ids]
    for layer in range(SPLIT, 6):  # layer 4 looks its tokens up
        y = torch.cat([inputs[layer][0, LEADING:] for inputs in seen[:2]]).double()
        expected = (y - y.mean(0)).T @ xc
        torch.testing.assert_close(moments.centred(SPLIT, layer).cross, expected, rtol=1e-5, atol=1e-5)
        held = seen[2][layer][0]
        assert all((row - held).abs().amax(1).min() < 1e-5 for row in capture.heldout()[layer])
    assert capture.heldout_states()[SPLIT].shape[1] == WIDE


@torch.no_grad()
def test_an_indexer_s_keys_are_scored_too():
    decoder, x = Decoder(model_of()), torch.randn(7, D, generator=torch.Generator().manual_seed(0))
    assert [t.shape for t in write(decoder, 5, x)] == [(7, 32), (7, 32), (7, 16)]
    assert [t.shape for t in write(decoder, 4, x)] == [(7, 16), (7, 48)]


@torch.no_grad()
def test_terminal_states_are_the_mean_over_slow_references():
    model, each, g = model_of(), window(80), torch.Generator().manual_seed(3)
    maps = RidgeMaps(
        SPLIT,
        {
            i: AffineMap(torch.randn(D, WIDE, generator=g) / 16, torch.randn(D, generator=g))
            for i in (3, 4, 5)
        },
    )
    found = compare_states(Decoder(model), [each], {SPLIT: maps}, leading=LEADING, every=40)[SPLIT]
    assert list(found.offsets()) == [3, 4]
    layer, slow = 4, []  # the one that looks its tokens up
    for end in (40, 80):
        ids = each.ids[:end].long()[None]
        true = seen_by_mixers(model, ids)[layer][0]
        x = maps.predict(layer, wide_states(model, ids)[SPLIT])
        x = torch.cat([true[:LEADING], x[LEADING:]])
        slow.append(state_after(model, ids, layer) - state_after(model, ids, layer, x))
    offset = found.offsets()[layer]
    torch.testing.assert_close(offset, torch.stack(slow).mean(0), rtol=1e-3, atol=2e-5)
    assert offset.norm() > 0.01


def state_after(model, ids, layer, x=None):
    """The stock model's recurrent state after ids [1, m]; with what enters that layer's recurrence replaced by x."""

    def replace(_, args, kwargs):
        return ((x[None], *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": x[None]})

    mixer, cache = model.model.layers[layer].linear_attn, new_cache(model)
    handle = mixer.register_forward_pre_hook(replace, with_kwargs=True) if x is not None else None
    model(ids, **cache_kwarg(cache))
    if handle is not None:
        handle.remove()
    return cache.layers[layer].recurrent_states[0][0]


def test_a_whole_fit(tmp_path):
    rng = random.Random(0)
    words = ["alpha", "beta", "gamma", "the", "of", "and", "42", "x = y\n", "déjà"]
    for i in range(4):
        (tmp_path / f"{i}.txt").write_text(" ".join(rng.choices(words, k=150)), encoding="utf-8")
    model, texts = tiny_qwen4(), [tmp_path / f"{i}.txt" for i in range(4)]
    maps = fit(
        model, tiny_tokenizer(), texts, [SPLIT], tmp_path / "out", tokens=1000, length=128, progress=False
    )[SPLIT]
    assert {m.weight.shape for m in maps.maps.values()} == {(D, WIDE)}
    p = maps.provenance
    assert set(p["heldout_identity"]) == {"3", "5"}  # layer 4 looks its tokens up
    assert set(p["heldout"]["0.01"]) == {"3", "4", "5"} and list(maps.terminal) == [3, 4]
    assert p["heldout_mean"] > p["heldout_identity_mean"] and math.isfinite(p["heldout_mean"])
    RidgeMaps.load(tmp_path / "out" / "split-02").check_model(model, tiny_tokenizer())
