"""The seam to the families: layer by layer it is the stock model, bit for bit."""

from __future__ import annotations

import pytest
import torch
from accelerate import cpu_offload
from transformers import Qwen3_5Config, Qwen3_5MoeConfig

from ridgefill.compat import cache_kwarg, new_cache
from ridgefill.errors import UnsupportedModelError
from ridgefill.gguf_file import ARCHITECTURES
from ridgefill.models.decoder import FAMILIES, GGUF_FAMILIES, WIDE_FAMILIES, Decoder, refuse_unsupported
from ridgefill.prefill import prefill

from ..reference import (
    CASES,
    N_LAYERS,
    WINDOWS,
    N,
    assert_same_cache,
    generate,
    is_recurrent,
    model_of,
    padded,
    prompt,
    random_maps,
    stock_cache,
)
from ..tiny import FAMILIES as TINY_FAMILIES
from ..tiny import MOE, tiny_model

each_case = pytest.mark.parametrize("case", CASES)


def positions_of(ids, mask=None):
    if mask is None:
        return torch.arange(ids.shape[1])[None].expand(len(ids), -1)
    return (mask.cumsum(1) - 1).clamp(min=0)


@torch.no_grad()
def walk(decoder, ids, mask=None, cache=None):
    h = decoder.embed(ids)
    rows = decoder.rows(h, positions_of(ids, mask), mask, cache)
    states = [h]
    for i in range(decoder.n_layers):
        states.append(decoder.run_layer(i, states[-1], rows, cache))
    return states, rows


def test_every_family_is_tested():
    assert set(FAMILIES) - set(WIDE_FAMILIES) == set(TINY_FAMILIES)
    assert set(TINY_FAMILIES) == {model_of(case).config.model_type for case in CASES}


@each_case
@torch.no_grad()
def test_the_walk_is_the_stock_forward(case):
    model, ids = model_of(case), prompt(batch=2)
    decoder, cache, stock = Decoder(model), new_cache(model), new_cache(model)
    states, _ = walk(decoder, ids, cache=cache)
    assert torch.equal(decoder.final(states[-1]), model(ids, use_cache=True, **cache_kwarg(stock)).logits)
    assert_same_cache(cache, stock)
    assert decoder.n_layers == N_LAYERS


@each_case
@torch.no_grad()
def test_a_padded_walk_is_the_stock_forward(case):
    model, (ids, mask) = model_of(case), padded((N, 60))
    states, _ = walk(Decoder(model), ids, mask)
    stock = model(ids, attention_mask=mask, position_ids=positions_of(ids, mask), use_cache=False).logits
    ours = Decoder(model).final(states[-1])
    assert torch.equal(ours[mask.bool()], stock[mask.bool()])


@each_case
@torch.no_grad()
def test_what_a_layer_writes(case):
    """Projected and rotated from the layer's true input, any last part of the rows is what the stock model caches."""
    model, ids = model_of(case), prompt(20)  # inside the windows: every row is still there
    decoder, stock = Decoder(model), stock_cache(model, ids)
    states, rows = walk(decoder, ids)
    for i in (i for i in range(decoder.n_layers) if not decoder.recurrent(i)):
        for m in (20, 7):
            keys, values = decoder.writes(i, states[i][:, -m:], rows)
            before, same = decoder.project(i, states[i][:, -m:])
            assert torch.equal(decoder.rotate(i, before, rows.last(m)), keys) and torch.equal(same, values)
            assert torch.equal(before, keys) == (
                case == "olmo_hybrid"
            )  # the only one without rotary embeddings
            # fewer rows may take another kernel path, so only whole inputs promise the same bits
            tolerance = {"rtol": 0, "atol": 0} if m == 20 else {"rtol": 1e-5, "atol": 1e-5}
            torch.testing.assert_close(keys, stock.layers[i].keys[:, :, -m:], **tolerance)
            torch.testing.assert_close(values, stock.layers[i].values[:, :, -m:], **tolerance)


@each_case
@pytest.mark.parametrize("n", [1, 31, 32, 33, N])
def test_first_read_is_what_the_stock_cache_keeps(case, n):
    model = model_of(case)
    decoder, stock = Decoder(model), stock_cache(model, prompt(n))
    for i, layer in enumerate(stock.layers):
        assert decoder.first_read(i, n) == (0 if is_recurrent(layer) else n - layer.keys.shape[2])
    if n == N:
        assert any(decoder.first_read(i, n) for i in range(N_LAYERS)) == (case in WINDOWS)


def test_rows_without_a_cache_are_not_read_as_packed_sequences():
    """Gappy positions would be, and then rows would not see one another."""
    model, ids = model_of("llama"), prompt(20)
    decoder = Decoder(model)
    h, positions = decoder.embed(ids), torch.arange(20)[None].clone()
    positions[:, 10:] += 7
    with torch.no_grad():
        rows = decoder.rows(h, positions)
        changed = h.clone()
        changed[:, 0] += 1
        a, b = decoder.run_layer(0, h, rows), decoder.run_layer(0, changed, rows)
    assert (a[:, 15] - b[:, 15]).abs().max() > 1e-6


@pytest.mark.parametrize("family", MOE)
@torch.no_grad()
def test_writing_runs_no_router_and_no_expert(family):
    """A whole layer runs both once, which shows that the count counts."""
    model, ids, seen = tiny_model(family), prompt(20), []
    decoder = Decoder(model)
    h = decoder.embed(ids)
    rows = decoder.rows(h, positions_of(ids))
    for i in (0, 2):  # in hybrids a recurrent layer and one with attention
        mlp = model.model.layers[i].mlp
        parts = [mlp, mlp.experts, mlp.router if family == "gpt_oss" else mlp.gate]
        for part in parts:
            part.register_forward_hook(lambda *_: seen.append(1))
        if decoder.recurrent(i):
            decoder.write_state(i, h, rows, new_cache(model))
        else:
            decoder.writes(i, h, rows)
        assert seen == []
        decoder.run_layer(i, h, rows)
        assert len(seen) == len(parts)
        seen.clear()


@pytest.mark.parametrize("family", MOE)
@pytest.mark.parametrize("fill", ["ridge", "identity"])
def test_filled_rows_run_no_expert(family, fill):
    """Above the split experts see the rows that run exactly, and those alone."""
    model, ids, tail, leading, seen = tiny_model(family), prompt(), 24, 16, {}
    for i, layer in enumerate(model.model.layers):
        layer.mlp.experts.register_forward_pre_hook(
            lambda _, args, i=i: seen.setdefault(i, []).append(args[0].shape[0])
        )
    cache = prefill(model, ids, random_maps(model, 3), fill=fill, tail=tail, leading=leading)
    assert sum(seen[0]) == N - tail and all(sum(seen[i]) == leading for i in (3, 4, 5))
    seen.clear()
    generate(model, ids, 1, **cache_kwarg(cache))
    assert all(seen[i] == [tail] for i in range(N_LAYERS))


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (Qwen3_5Config(), "images.*load Qwen3_5ForCausalLM"),
        (Qwen3_5MoeConfig(), "images.*load Qwen3_5MoeForCausalLM"),
    ],
)
def test_models_that_read_images_are_refused(config, words):
    with pytest.raises(UnsupportedModelError, match=words):
        refuse_unsupported(config, "it")


def test_gguf_files_are_promised_for_the_families_that_transformers_reads_from_them():
    assert {family.removesuffix("_text") for family in GGUF_FAMILIES} == ARCHITECTURES
    assert not ARCHITECTURES & {"qwen3_next", "olmo_hybrid", "qwen3_5", "mixtral", "gpt_oss"}


@pytest.mark.parametrize("case", ["llama", "gemma3_text", "gpt_oss", "qwen3_next", "olmo_hybrid"])
def test_an_offloaded_model(case):
    """Weights rest elsewhere between calls (here as meta tensors), and come when a module runs."""
    model, ids, maps = tiny_model(case), prompt(), random_maps(model_of(case), 3)
    expected = [prefill(model, ids, maps, tail=24, fill=fill) for fill in ("ridge", "none")]
    tokens = [generate(model, ids, **cache_kwarg(cache))[0] for cache in expected]
    cpu_offload(model, execution_device=torch.device("cpu"))
    assert all(p.is_meta for p in model.model.layers.parameters())
    maps.identity = None  # offloaded weights cannot be compared, which is not what is tested here
    with pytest.warns(UserWarning, match="nothing to compare"):
        ours = [prefill(model, ids, maps, tail=24, fill=fill) for fill in ("ridge", "none")]
    assert Decoder(model).device(4) == torch.device("cpu")
    for a, t in zip(ours, tokens, strict=True):
        assert torch.equal(generate(model, ids, **cache_kwarg(a))[0], t)


@pytest.mark.parametrize("model", [torch.nn.Linear(2, 2), "a name"])
def test_what_is_no_model_is_refused(model):
    with pytest.raises(UnsupportedModelError, match="ForCausalLM"):
        Decoder(model)
