"""Direct maps: exact where keys and values are affine in the split state, and the ridge solution elsewhere."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from ridgefill.compat import cache_kwarg
from ridgefill.errors import (
    CorpusError,
    MapsFileError,
    MapsMismatchError,
    SettingError,
    UnsupportedModelError,
)
from ridgefill.fill.direct import DirectKV, normalised
from ridgefill.fit.corpus import read_sources
from ridgefill.fit.direct import fit_direct
from ridgefill.fit.windows import Cutter, plan_windows
from ridgefill.models.decoder import Decoder
from ridgefill.prefill import prefill
from tests.reference import TAIL, N, close, generate, hidden_states, model_of, prompt, stock_cache
from tests.test_walk import Fixed
from tests.tiny import tiny_model, tiny_tokenizer

M, SPLIT = N - TAIL, 3
SMALL = {"tokens": 4000, "length": 256, "leading": 4}


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    folder, rng = tmp_path_factory.mktemp("texts"), random.Random(0)
    for i in range(12):  # every byte occurs: embeddings alone must span the split state
        (folder / f"{i}.txt").write_text("".join(rng.choices([chr(c) for c in range(32, 383)], k=400)))
    return folder


@pytest.fixture(scope="module")
def direct(texts):
    return fit_direct(model_of("llama"), tiny_tokenizer(), [texts], SPLIT, **SMALL)


def still(family):
    """A model whose late layers add nothing: every late layer's input is the split state."""
    model = tiny_model(family)
    for layer in model.model.layers[SPLIT:]:
        for weight in (layer.self_attn.o_proj.weight, layer.mlp.down_proj.weight):
            weight.zero_()
    return model


@pytest.mark.parametrize("family", ["llama", "qwen2"])  # qwen2 has biases
def test_where_keys_and_values_are_affine_the_fill_is_exact(family, texts):
    model = still(family)
    fill = fit_direct(model, tiny_tokenizer(), [texts], SPLIT, lambda_rel=1e-10, **SMALL)
    assert sorted(fill.maps) == [4, 5]
    ids = prompt()
    cache = prefill(model, ids, fill=fill, split=SPLIT, tail=TAIL, leading=0)
    assert (cache.stats.fill, cache.stats.filled) == ("direct", M)
    stock = stock_cache(model, ids[:, :M])
    for i in range(SPLIT, 6):
        close(cache.layers[i].keys, stock.layers[i].keys, 2e-4)
        close(cache.layers[i].values, stock.layers[i].values, 2e-4)
    assert torch.equal(cache.layers[SPLIT].keys, stock.layers[SPLIT].keys)  # the split layer's input is known
    ours, theirs = generate(model, ids, **cache_kwarg(cache)), generate(model, ids)
    assert torch.equal(ours[0], theirs[0])


def test_the_maps_are_the_ridge_solution(direct, texts):
    """Over the windows' rows, in one matrix: (X'X + lambda I)^-1 X'Y, lambda a share of the mean diagonal."""
    model, decoder = model_of("llama"), Decoder(model_of("llama"))
    cutter = Cutter(tiny_tokenizer(), length=256, shortest=4 + 64, chat_share=0.25, seed=0)
    plan = plan_windows(read_sources([texts]), cutter, tokens=4000, holdout=0.1, leading=4, width=64)
    x, y = [], []
    for window in plan.fit:
        with torch.no_grad():
            h = hidden_states(model, window.ids.long()[None])
        x.append(h[SPLIT][0, 4:].double())
        keys, values = decoder.project(5, h[5][:, 4:])
        y.append(torch.cat([t[0].transpose(0, 1).reshape(-1, 32) for t in (keys, values)], 1).double())
    x, y = torch.cat(x), torch.cat(y)
    x = x / (x.square().mean(1, keepdim=True) + model.config.rms_norm_eps).sqrt()
    assert len(x) == direct.provenance["rows"]
    centred, target = x - x.mean(0), y - y.mean(0)
    gram = centred.T @ centred
    solved = torch.linalg.solve(
        gram + 0.01 * gram.trace() / 64 * torch.eye(64, dtype=torch.float64), centred.T @ target
    )
    torch.testing.assert_close(direct.maps[5].weight.double(), solved.T, rtol=1e-4, atol=1e-5)
    bias = y.mean(0) - x.mean(0) @ solved
    torch.testing.assert_close(direct.maps[5].bias.double(), bias, rtol=1e-4, atol=1e-5)


def test_filled_rows_hold_what_the_maps_say(direct):
    """Head by head, rotated to their positions; exact rows among them hold their own."""
    model, ids = model_of("llama"), prompt()
    rows = Fixed((5, 40), attends=True)
    cache = prefill(model, ids, fill=direct, split=SPLIT, tail=TAIL, leading=0, rows=rows)
    with torch.no_grad():
        h = hidden_states(model, ids)[SPLIT][0, :M]
        both = normalised(h, direct.eps) @ direct.maps[4].weight.T + direct.maps[4].bias
        decoder = Decoder(model)
        keys = both[:, :32].view(1, M, 2, 16).transpose(1, 2)
        keys = decoder.rotate(4, keys, decoder.rows(h[None], torch.arange(M)[None]))
    values = both[:, 32:].view(1, M, 2, 16).transpose(1, 2)
    filled = torch.ones(M, dtype=torch.bool)
    filled[[5, 40]] = False
    close(cache.layers[4].keys[:, :, :M][:, :, filled], keys[:, :, filled])
    close(cache.layers[4].values[:, :, :M][:, :, filled], values[:, :, filled])
    assert (cache.layers[4].values[:, :, [5, 40]] - values[:, :, [5, 40]]).abs().max() > 0.01


def test_windows_are_written_as_far_as_they_are_read(texts):
    """gemma3's windowed layers keep 31 rows: the others are not written, as in the stock cache."""
    model, ids = model_of("gemma3_text"), prompt()
    fill = fit_direct(model, tiny_tokenizer(), [texts], SPLIT, **SMALL)
    cache = prefill(model, ids, fill=fill, split=SPLIT, tail=TAIL, leading=0)
    stock = stock_cache(model, ids[:, :M])
    for ours, theirs in zip(cache.layers, stock.layers, strict=True):
        assert ours.keys.shape == theirs.keys.shape
        assert ours.get_seq_length() == theirs.get_seq_length()
    assert generate(model, ids, 40, **cache_kwarg(cache))[1].isfinite().all()


def test_saved_and_loaded_it_is_the_same(direct, tmp_path):
    model, ids, path = model_of("llama"), prompt(), tmp_path / "direct.safetensors"
    direct.save(path)
    again = DirectKV.load(path, model, tiny_tokenizer())
    assert (again.split, again.eps, again.identity) == (SPLIT, direct.eps, direct.identity)
    assert again.provenance == direct.provenance and again.provenance["sources"][0]["fit"]["windows"] > 3
    one, two = (prefill(model, ids, fill=fill, split=SPLIT, tail=TAIL) for fill in (direct, again))
    assert all(torch.equal(a.keys, b.keys) for a, b in zip(one.layers, two.layers, strict=True))
    for other in (tiny_model("llama", seed=1), tiny_model("qwen2")):
        with pytest.raises(MapsMismatchError, match="the loaded model has"):
            DirectKV.load(path, other)


def test_a_file_that_is_something_else_is_refused(direct, tmp_path):
    from safetensors.torch import save_file

    damaged, other = tmp_path / "damaged.safetensors", tmp_path / "other.safetensors"
    direct.save(damaged)
    damaged.write_bytes(damaged.read_bytes()[:-100])
    save_file({"a": torch.zeros(1)}, other)
    for path, says in (
        (damaged, "cannot be read"),
        (other, "holds no direct maps"),
        (tmp_path / "no", "cannot be read"),
    ):
        with pytest.raises(MapsFileError, match=says):
            DirectKV.load(path)


def test_what_direct_maps_cannot_do_is_refused(direct, texts):
    model, hybrid, ids = model_of("llama"), model_of("qwen3_next"), prompt()
    with pytest.raises(SettingError, match="they are for split 3"):
        prefill(model, ids, fill=direct, split=2, tail=TAIL)
    with pytest.raises(UnsupportedModelError, match="layer 3 keeps a recurrent state"):
        fit_direct(hybrid, tiny_tokenizer(), [texts], 3, **SMALL)
    with pytest.raises(UnsupportedModelError, match="recurrent state"):
        prefill(hybrid, ids, fill=direct, split=3, tail=TAIL)
    with pytest.raises(MapsMismatchError, match="write layer 5"):
        less = replace(direct, maps={4: direct.maps[4]})
        prefill(model, ids, fill=less, split=SPLIT, tail=TAIL)
    with pytest.raises(SettingError, match="positive"):
        fit_direct(model, tiny_tokenizer(), [texts], SPLIT, lambda_rel=0, tokens=4000)
    with pytest.raises(CorpusError, match="too short"):
        fit_direct(model, tiny_tokenizer(), [texts], SPLIT, tokens=140, leading=4)
