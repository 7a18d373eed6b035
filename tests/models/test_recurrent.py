"""Recurrent layers: states carried once, in order, over true and predicted rows; whole layers for kept rows only."""

from __future__ import annotations

import sys

import pytest
import torch
from accelerate import cpu_offload

from ridgefill.compat import cache_kwarg, new_cache
from ridgefill.models.decoder import HYBRID_FAMILIES, Decoder
from ridgefill.models.recurrent import run_apart

from ..reference import close, hooks_of, model_of, padded, prompt, stock_cache
from ..tiny import HYBRIDS, tiny_model

N, LAYER = 80, 3
each_hybrid = pytest.mark.parametrize("family", HYBRIDS)


def inputs(family, ids, mask=None, cache=None, upto=LAYER):
    """A decoder, the true input of a layer [B, N, d] (which is recurrent), and the rows."""
    decoder = Decoder(model_of(family))
    h = decoder.embed(ids)
    past = 0 if cache is None else cache.get_seq_length()
    positions = past + torch.arange(ids.shape[1])[None].expand(len(ids), -1)
    if mask is not None:
        positions = (mask.cumsum(1) - 1).clamp(min=0)
    rows = decoder.rows(h, positions, mask, cache)
    for i in range(upto):
        h = decoder.run_layer(i, h, rows, cache)
    return decoder, h, rows


def noise(h, seed=3):
    """Inputs that differ from the true ones in every row, as predictions do."""
    return h + 0.5 * torch.randn(h.shape, generator=torch.Generator().manual_seed(seed))


def states(cache, i=LAYER):
    layer = cache.layers[i]
    assert layer.has_previous_state[0]
    return layer.conv_states[0], layer.recurrent_states[0]


def same_states(a, b, exactly=True):
    for x, y in zip(states(a), states(b), strict=True):
        assert x.shape == y.shape and x.dtype == y.dtype
        if exactly:
            assert torch.equal(x, y)
        else:
            close(x, y)


def places(*at, batch=1):
    return torch.tensor([at]).expand(batch, -1)


def test_every_hybrid_is_tested():
    assert set(HYBRIDS) == set(HYBRID_FAMILIES)


@each_hybrid
def test_which_layers_are_recurrent(family):
    decoder = Decoder(model_of(family))
    kinds = decoder.config.layer_types
    assert [decoder.recurrent(i) for i in range(6)] == [kind == "linear_attention" for kind in kinds]
    assert [decoder.recurrent(i) for i in range(6)] == [True, True, False] * 2
    assert not any(Decoder(model_of("gemma2")).recurrent(i) for i in range(6))
    assert [decoder.first_read(i, 50) for i in range(6)] == [0] * 6


# write_state


@each_hybrid
@torch.no_grad()
def test_writing_true_inputs_is_the_stock_model_s_cache(family):
    """Every recurrent layer, bit for bit, also when the prompt comes in two parts."""
    model, ids = model_of(family), prompt(N, batch=2)
    decoder, ours, walked, stock = Decoder(model), new_cache(model), new_cache(model), new_cache(model)
    for part in (ids[:, :50], ids[:, 50:]):
        h = decoder.embed(part)
        positions = walked.get_seq_length() + torch.arange(part.shape[1])[None].expand(2, -1)
        rows = decoder.rows(h, positions, None, walked)
        for i in range(6):
            if decoder.recurrent(i):
                decoder.write_state(i, h, rows, ours)
            h = decoder.run_layer(i, h, rows, walked)
        model(part, use_cache=True, **cache_kwarg(stock))
        for i in (0, 1, 3, 4):
            for a, b in zip(states(ours, i), states(stock, i), strict=True):
                assert torch.equal(a, b), i


@each_hybrid
@torch.no_grad()
def test_writing_padded_rows_is_the_stock_model_s_cache(family):
    model, (ids, mask) = model_of(family), padded((N, 33))
    decoder, h, rows = inputs(family, ids, mask)
    ours, stock = new_cache(model), stock_cache(model, ids, mask)
    decoder.write_state(LAYER, h, rows, ours)
    same_states(ours, stock)
    # and each sequence of the batch is as it would be alone
    alone = stock_cache(model, ids[1:, N - 33 :])
    for a, b in zip(states(ours), states(alone), strict=True):
        close(a[1:], b)


@each_hybrid
@torch.no_grad()
def test_writing_runs_no_output_projection_and_nothing_after_it(family):
    model, ids = tiny_model(family), prompt(N)
    decoder = Decoder(model)
    h = decoder.embed(ids)
    rows = decoder.rows(h, torch.arange(N)[None])
    layer, seen = model.model.layers[0], {}
    for name, module in layer.named_modules():
        module.register_forward_hook(lambda _, args, out, name=name: seen.update({name: out.shape}))
    before = hooks_of(model)
    decoder.write_state(0, h, rows, new_cache(model))
    projection = "linear_attn.o_proj" if family == "olmo_hybrid" else "linear_attn.out_proj"
    assert seen["input_layernorm"] == (1, N, 64)
    assert seen[projection] == seen["linear_attn"] == (1, 0, 64)
    assert not any(name == "" or name.startswith(("mlp", "post")) for name in seen)
    assert hooks_of(model) == before


# run_gathered_recurrent


@each_hybrid
@torch.no_grad()
def test_all_rows_kept_is_the_layer_itself(family):
    ids = prompt(N, batch=2)
    decoder, h, rows = inputs(family, ids)
    ours, stock = new_cache(decoder.model), new_cache(decoder.model)
    out = decoder.run_layer(LAYER, h, rows, stock)
    at = torch.arange(N)[None].expand(2, -1)
    assert torch.equal(decoder.run_gathered_recurrent(LAYER, h, at, noise(h), rows, ours), out)
    same_states(ours, stock)


@each_hybrid
@torch.no_grad()
def test_no_row_kept_only_writes_the_state(family):
    decoder, h, rows = inputs(family, prompt(N, batch=2))
    ours, written = new_cache(decoder.model), new_cache(decoder.model)
    none = torch.zeros(2, 0, dtype=torch.long)
    out = decoder.run_gathered_recurrent(LAYER, h[:, :0], none, noise(h), rows, ours)
    decoder.write_state(LAYER, noise(h), rows, written)
    assert out.shape == (2, 0, 64)
    same_states(ours, written)


@each_hybrid
@pytest.mark.parametrize("at", [(0, 1, 2), (5, 6, 31, 64, 79), (79,), (12, 12, 40, 40, 40)])
@torch.no_grad()
def test_some_rows_kept_is_the_layer_row_by_row(family, at):
    """The reference feeds one row after another: true or predicted, and keeps the outputs of the true ones."""
    decoder, h, rows = inputs(family, prompt(N, batch=2))
    index = places(*at, batch=2)
    kept = h.gather(1, index[..., None].expand(-1, -1, 64))
    ours, slow = new_cache(decoder.model), new_cache(decoder.model)
    out = decoder.run_gathered_recurrent(LAYER, kept, index, noise(h), rows, ours)
    mixed, outputs = noise(h), {}
    for row in range(N):
        true = row in at
        one = (h if true else mixed)[:, row : row + 1]
        position = decoder.rows(one, torch.full((2, 1), row), None, slow)
        outputs[row] = decoder.run_layer(LAYER, one, position, slow)
    close(out, torch.cat([outputs[row] for row in at], 1))
    same_states(ours, slow, exactly=False)
    exact = new_cache(decoder.model)
    whole = decoder.run_layer(LAYER, h, rows, exact).gather(1, index[..., None].expand(-1, -1, 64))
    differs = (out - whole).abs().amax((0, 2)) > 1e-3
    assert differs.any() == (
        at != (0, 1, 2)
    )  # what stands before a row changes its output, what follows does not
    assert hooks_of(decoder.model) == 0


@each_hybrid
@torch.no_grad()
def test_kept_rows_of_a_padded_batch_are_as_alone(family):
    lengths = (N, 41)
    ids, mask = padded(lengths)
    decoder, h, rows = inputs(family, ids, mask)
    own = (0, 7, 38)  # places in each sequence, counted without its padding
    index = torch.tensor([[N - n + j for j in own] for n in lengths])
    kept, cache = h.gather(1, index[..., None].expand(-1, -1, 64)), new_cache(decoder.model)
    out = decoder.run_gathered_recurrent(LAYER, kept, index, noise(h), rows, cache)
    for b, n in enumerate(lengths):
        alone, positions = new_cache(decoder.model), torch.arange(n)[None]
        x = noise(h)[b : b + 1, N - n :]
        its = decoder.rows(x, positions)
        one = decoder.run_gathered_recurrent(LAYER, kept[b : b + 1], places(*own), x, its, alone)
        close(out[b : b + 1], one)
        for a, c in zip(states(cache), states(alone), strict=True):
            close(a[b : b + 1], c)


@each_hybrid
@torch.no_grad()
def test_kept_rows_follow_what_the_cache_holds(family):
    ids, model = prompt(N), model_of(family)
    caches = [stock_cache(model, ids[:, :30]) for _ in range(2)]
    decoder, h, rows = inputs(family, ids[:, 30:], cache=caches[0])
    kept, x = h[:, [4, 20]], noise(h)
    mixed = x.clone()
    mixed[:, [4, 20]] = kept
    whole = decoder.run_layer(LAYER, mixed, rows, caches[1])
    out = decoder.run_gathered_recurrent(LAYER, kept, places(4, 20), x, rows, caches[0])
    close(out, whole[:, [4, 20]])
    same_states(*caches, exactly=False)
    fresh = decoder.run_gathered_recurrent(LAYER, kept, places(4, 20), x, rows, new_cache(model))
    assert (fresh - out).abs().max() > 1e-3


@each_hybrid
@torch.no_grad()
def test_the_rest_of_the_layer_sees_the_kept_rows_alone(family):
    model = tiny_model(family)
    decoder = Decoder(model)
    h = decoder.embed(prompt(N))
    rows, seen = decoder.rows(h, torch.arange(N)[None]), []
    layer = model.model.layers[0]
    for module in (layer.input_layernorm, layer.linear_attn, layer.mlp):
        module.register_forward_hook(lambda _, args, out: seen.append(out.shape[1]))
    projection = layer.linear_attn.o_proj if family == "olmo_hybrid" else layer.linear_attn.out_proj
    projection.register_forward_hook(lambda _, args, out: seen.append(out.shape[1]))
    before = hooks_of(model)
    decoder.run_gathered_recurrent(0, h[:, :3], places(0, 1, 2), noise(h), rows, new_cache(model))
    assert seen == [N, 3, 3, 3, 3]  # the norm of the predicted rows; then norm, projection, mixer and MLP
    assert hooks_of(model) == before


# run_apart


@each_hybrid
@torch.no_grad()
def test_rows_run_apart_are_a_prompt_of_their_own(family):
    """Sequences with different counts of rows, left out at the end or in between, as each would be alone."""
    ids = prompt(N, batch=3)
    decoder, h, _ = inputs(family, ids)
    keep = torch.ones(3, 12, dtype=torch.bool)
    keep[1, 5:] = False
    keep[2, [0, 3, 4]] = False
    few = decoder.rows(h[:, :12], torch.arange(12)[None].expand(3, -1))
    cache = new_cache(decoder.model)
    out = run_apart(decoder, LAYER, h[:, :12], keep, few, cache)
    for b in range(3):
        own, alone = h[b : b + 1, :12][:, keep[b]], new_cache(decoder.model)
        expected = decoder.run_layer(LAYER, own, decoder.rows(own, torch.arange(own.shape[1])[None]), alone)
        close(out[b : b + 1][:, keep[b]], expected)
        for a, c in zip(states(cache), states(alone), strict=True):
            close(a[b : b + 1], c)
    every, stock = new_cache(decoder.model), new_cache(decoder.model)
    out = run_apart(decoder, LAYER, h[:, :12], torch.ones_like(keep), few, every)
    assert torch.equal(out, decoder.run_layer(LAYER, h[:, :12], few, stock))
    same_states(every, stock)


# gates


@each_hybrid
@torch.no_grad()
def test_gates_are_what_the_layer_gives_its_recurrence(family, monkeypatch):
    ids, mask = padded((N, 33))
    for padding in (None, mask):
        decoder, h, rows = inputs(family, ids, padding)
        module = sys.modules[type(decoder.layers[LAYER].linear_attn).__module__]
        stock, given = module.torch_chunk_gated_delta_rule, []

        def watch(*args, stock=stock, given=given, **kwargs):
            given.append(kwargs["g"])
            return stock(*args, **kwargs)

        with monkeypatch.context() as patched:
            patched.setattr(module, "torch_chunk_gated_delta_rule", watch)
            decoder.run_layer(LAYER, h, rows, new_cache(decoder.model))
        gates = decoder.gates(LAYER, h, rows)
        assert len(given) == 1 and torch.equal(gates, given[0])
        assert gates.shape == (2, N, 4) and gates.dtype == torch.float32 and gates.max() < 0


@each_hybrid
@torch.no_grad()
def test_an_offloaded_layer(family):
    model = tiny_model(family)
    decoder = Decoder(model)
    h = decoder.embed(prompt(N))
    rows, results = decoder.rows(h, torch.arange(N)[None]), []
    for offloaded in (False, True):
        if offloaded:
            cpu_offload(model, execution_device=torch.device("cpu"))
            assert all(p.is_meta for p in model.model.layers.parameters())
        written, kept = new_cache(model), new_cache(model)
        decoder.write_state(0, h, rows, written)
        out = decoder.run_gathered_recurrent(0, h[:, 3:9], places(*range(3, 9)), noise(h), rows, kept)
        results.append((*states(written, 0), *states(kept, 0), out, decoder.gates(0, h, rows)))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert all(p.is_meta for p in model.model.layers.parameters())


@each_hybrid
@torch.no_grad()
def test_bfloat16(family):
    model, ids = tiny_model(family).to(torch.bfloat16), prompt(N)
    decoder, ours = Decoder(model), new_cache(model)
    h = decoder.embed(ids)
    rows = decoder.rows(h, torch.arange(N)[None])
    decoder.write_state(0, h, rows, ours)
    for a, b in zip(states(ours, 0), states(stock_cache(model, ids), 0), strict=True):
        assert torch.equal(a, b) and a.dtype == b.dtype
    assert decoder.gates(0, h, rows).dtype == torch.float32
