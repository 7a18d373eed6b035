"""Wide streams, an indexer, Gated DeltaNet and experts in one model: its layers' inputs and what its rows write."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from torch import Tensor

from ridgefill.compat import cache_kwarg, new_cache
from ridgefill.errors import SettingError, UnsupportedModelError
from ridgefill.models import attention, gathered
from ridgefill.models.decoder import WIDE_FAMILIES, Decoder, Rows, refuse_absent, refuse_unsupported
from ridgefill.models.gathered import Places, Scatter, commit, gather_rows, run_gathered

from ..reference import close, padded, prompt

HAS = Version(transformers.__version__) >= Version("5.18")
needs_it = pytest.mark.skipif(not HAS, reason="this transformers has no qwen4_exp")
N, D, STREAMS, LAYERS = 90, 64, 4, 6
WIDE = D * STREAMS
INDEXED, EMBEDDED = (2, 5), (0, 4)  # layers with an indexer; layers with per-layer embeddings


def tiny_qwen4(seed: int = 0, **overrides: Any) -> Any:
    """A random Qwen4ExpForCausalLM: 6 layers, every third indexed, embeddings below and above the usual split."""
    from transformers.models.qwen4_exp import Qwen4ExpForCausalLM, Qwen4ExpTextConfig

    kinds = ("linear_attention", "linear_attention", "indexed_attention")
    settings: dict[str, Any] = {
        **{"hidden_size": D, "num_hidden_layers": LAYERS, "vocab_size": 320, "max_position_embeddings": 4096},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16},
        **{"bos_token_id": 257, "eos_token_id": 258, "pad_token_id": 256},
        "layer_types": [kinds[i % 3] for i in range(LAYERS)],
        **{"linear_num_key_heads": 2, "linear_num_value_heads": 4},
        **{"linear_key_head_dim": 8, "linear_value_head_dim": 12},
        **{"hc_count": STREAMS, "hc_lowrank": 16},
        "ple_layer_ids": [i + 1 for i in EMBEDDED],
        **{"ngram_vocab_size_base": 50, "heads_per_ngram": 2, "split_ngram_parts": 4},
        **{"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16},
        **{"indexer_budget": 16, "indexer_compress_ratio": 4},  # far fewer rows than a prompt has
        **{"num_experts": 4, "num_experts_per_tok": 2},
        **{"moe_intermediate_size": 32, "shared_expert_intermediate_size": 32},
        "rope_parameters": {
            **{"rope_type": "default", "rope_theta": 1e4},
            **{"partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]},
        },
        **overrides,
    }
    model = Qwen4ExpForCausalLM(Qwen4ExpTextConfig(**settings)).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in sorted(model.named_parameters()):
            noise = torch.randn(weight.shape, generator=generator)
            centre = {"A_log": -3.0}.get(
                name.rsplit(".")[-1], float(name.endswith("linear_attn.norm.weight"))
            )
            scale = 0.5 if "conv1d" in name else 0.3 if name.endswith(("A_log", "dt_bias")) else 0.1
            weight.copy_(centre + scale * noise)
    model.requires_grad_(False)
    model.generation_config.pad_token_id = 256
    return model


@functools.cache
def model_of(attention: str = "sdpa") -> Any:
    """Made once; no test may leave it changed."""
    model = tiny_qwen4()
    model.set_attn_implementation(attention)
    return model


def positions_of(ids: Tensor, mask: Tensor | None = None) -> Tensor:
    if mask is None:
        return torch.arange(ids.shape[1])[None].expand(len(ids), -1)
    return (mask.cumsum(1) - 1).clamp(min=0)


@torch.no_grad()
def stock(model: Any, ids: Tensor, mask: Tensor | None = None, cache: Any = None) -> tuple[Any, Tensor]:
    """The stock model's cache and logits; ``ids`` follow what ``cache`` holds."""
    cache = new_cache(model) if cache is None else cache
    positions = None if mask is None else positions_of(ids, mask)[:, -ids.shape[1] :]
    out = model(ids, attention_mask=mask, position_ids=positions, use_cache=True, **cache_kwarg(cache))
    return cache, out.logits


def seen_by_mixers(model: Any, ids: Tensor, mask: Tensor | None = None, cache: Any = None) -> list[Tensor]:
    """What really enters each layer's attention or recurrence."""
    seen: list[Tensor] = []

    def look(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        seen.append(args[0] if args else kwargs["hidden_states"])

    mixers = [getattr(layer, "linear_attn", None) or layer.self_attn for layer in model.model.layers]
    handles = [mixer.register_forward_pre_hook(look, with_kwargs=True) for mixer in mixers]
    try:
        stock(model, ids, mask, cache)
    finally:
        for handle in handles:
            handle.remove()
    return seen


@torch.no_grad()
def walk(
    decoder: Decoder, ids: Tensor, mask: Tensor | None = None, cache: Any = None
) -> tuple[list[Tensor], Rows]:
    h = decoder.embed(ids)
    past = 0 if cache is None else cache.get_seq_length()
    positions = positions_of(ids) + past if mask is None else positions_of(ids, mask)[:, past:]
    rows = decoder.rows(h, positions, mask, cache, ids=ids)
    states = [h]
    for i in range(decoder.n_layers):
        states.append(decoder.run_layer(i, states[-1], rows, cache))
    return states, rows


def assert_same(ours: Any, theirs: Any, layers: range = range(LAYERS)) -> None:
    """Everything that these layers keep is equal bit for bit."""
    for i in layers:
        a, b = ours.layers[i], theirs.layers[i]
        assert type(a) is type(b)
        for name in ("keys", "values", "indexer_keys", "indexer_position_ids"):
            x, y = getattr(a, name, None), getattr(b, name, None)
            assert (x is None and y is None) or torch.equal(x, y), (i, name)
        for name in ("conv_states", "recurrent_states"):
            x, y = getattr(a, name, {}), getattr(b, name, {})
            assert x.keys() == y.keys(), (i, name)
            for k in x:
                assert (x[k] is None and y[k] is None) or torch.equal(x[k], y[k]), (i, name, k)


each_attention = pytest.mark.parametrize("attention", ["sdpa", "eager"])
each_batch = pytest.mark.parametrize("lengths", [(N,), (N, 60)])


@needs_it
@each_attention
@each_batch
@torch.no_grad()
def test_the_walk_is_the_stock_forward(attention, lengths):
    model, (ids, mask) = model_of(attention), padded(lengths)
    mask = mask if len(lengths) > 1 else None
    decoder, cache = Decoder(model), new_cache(model)
    states, _ = walk(decoder, ids, mask, cache)
    theirs, logits = stock(model, ids, mask)
    ours = decoder.final(states[-1])
    keep = torch.ones_like(ids).bool() if mask is None else mask.bool()
    assert torch.equal(ours[keep], logits[keep])
    assert_same(cache, theirs)
    assert states[0].shape == (len(ids), N, WIDE) == (len(ids), N, decoder.width_in)
    assert decoder.width_out == D


@needs_it
@torch.no_grad()
def test_a_second_turn_is_the_stock_forward():
    model, (ids, mask) = model_of(), padded((N, 60))
    decoder, cache = Decoder(model), new_cache(model)
    theirs, _ = stock(model, ids[:, :50], mask[:, :50])
    _, logits = stock(model, ids[:, 50:], mask, theirs)
    walk(decoder, ids[:, :50], mask[:, :50], cache)
    states, _ = walk(decoder, ids[:, 50:], mask, cache)
    assert torch.equal(decoder.final(states[-1]), logits)
    assert_same(cache, theirs)


@needs_it
@pytest.mark.parametrize("past", [0, 40])
@torch.no_grad()
def test_a_layers_input_is_what_enters_its_attention_or_recurrence(past):
    model, (ids, mask) = model_of(), padded((N, 60))
    decoder, cache = Decoder(model), new_cache(model)
    if past:
        walk(decoder, ids[:, :past], mask[:, :past], cache)
    before = copy.deepcopy(cache)
    states, rows = walk(decoder, ids[:, past:], mask, cache)
    theirs = seen_by_mixers(model, ids[:, past:], mask, copy.deepcopy(before))
    kept = copy.deepcopy(before)
    for i in range(LAYERS):
        x = decoder.layer_input(i, states[i], rows, before)
        assert x.shape == (2, N - past, D)
        assert torch.equal(x, theirs[i]), i
    assert_same(before, kept)  # only read


@needs_it
@pytest.mark.parametrize("past", [0, 40])
@each_batch
@torch.no_grad()
def test_writes_from_true_inputs_are_the_stock_cache(past, lengths):
    model, (ids, mask) = model_of(), padded(lengths)
    mask = mask if len(lengths) > 1 else None
    decoder, cache = Decoder(model), new_cache(model)
    cut = lambda m: None if mask is None else mask[:, :m]  # noqa: E731
    if past:
        walk(decoder, ids[:, :past], cut(past), cache)
    ours = copy.deepcopy(cache)
    states, rows = walk(decoder, ids[:, past:], cut(N), cache)
    theirs, _ = stock(model, ids[:, :past], cut(past)) if past else (None, None)
    theirs, _ = stock(model, ids[:, past:], cut(N), theirs)
    assert_same(cache, theirs)
    for i in range(LAYERS):
        x = decoder.layer_input(i, states[i], rows, ours)
        if i in INDEXED:
            written = decoder.writes(i, x, rows)
            assert [w.shape[-1] for w in written] == [16, 16, 16]
            attention.append(ours.layers[i], written, N - past)
        else:
            decoder.write_state(i, x, rows, ours, h=states[i])
    decoder.settle(ours, rows.positions)
    assert_same(ours, theirs)


@needs_it
@torch.no_grad()
def test_a_filled_row_runs_no_expert_and_no_attention():
    model, ids = model_of(), prompt(N)
    decoder, cache = Decoder(model), new_cache(model)
    h = decoder.embed(ids)
    rows = decoder.rows(h, positions_of(ids), None, cache, ids=ids)
    ran: list[str] = []
    named = [
        (n, m)
        for n, m in model.named_modules()
        if n.endswith((".mlp", "o_proj", "q_proj", "mlp_hyper_connection"))
    ]
    handles = [m.register_forward_pre_hook(lambda *_, n=n: ran.append(n)) for n, m in named]
    for i in range(LAYERS):
        x = decoder.layer_input(i, h, rows, cache)
        if i in INDEXED:
            decoder.writes(i, x, rows)
        else:
            decoder.write_state(i, x, rows, cache, h=h)
    for handle in handles:
        handle.remove()
    assert len(named) > LAYERS and ran == []


@needs_it
@torch.no_grad()
def test_embeddings_without_tokens_are_refused():
    model, ids = model_of(), prompt(N)
    decoder = Decoder(model)
    h = decoder.embed(ids)
    rows = decoder.rows(h, positions_of(ids))
    with pytest.raises(SettingError, match="tokens are not known"):
        decoder.layer_input(EMBEDDED[1], h, rows)
    rows = decoder.rows(h, positions_of(ids), ids=ids)
    with pytest.raises(SettingError, match="wide state of the rows is not known"):
        decoder.write_state(EMBEDDED[1], h[..., :D], rows, new_cache(model))


# rows gathered among filled ones


@torch.no_grad()
def fill_late(
    decoder: Decoder, ids: Tensor, mask: Tensor, split: int, at: Tensor, past: int = 0, start: Any = None
) -> tuple[Any, Tensor]:
    """The identity fill from ``split`` with the rows ``at`` [B, k] exact: the cache, and their last states."""
    cache = copy.deepcopy(start) if past else new_cache(decoder.model)
    h = decoder.embed(ids)
    rows = decoder.rows(h, positions_of(ids, mask)[:, past:], mask, cache, ids=ids)
    for i in range(split):
        h = decoder.run_layer(i, h, rows, cache)
    pick = at[..., None].expand(-1, -1, h.shape[-1])
    kept, own = h.gather(1, pick), gather_rows(rows, at)
    first_key = mask.shape[1] - mask.sum(1)
    for i in range(split, LAYERS):
        x = decoder.layer_input(i, h, rows, cache)
        if i in INDEXED:
            before = cache.layers[i]
            held = gathered.kept(before) if past else (None,) * 3
            written = decoder.writes(i, x, rows)
            buffers = tuple(
                w if b is None else torch.cat([b, w], -2) for b, w in zip(held, written, strict=True)
            )
            places = Places(at + past, 0, first_key)
            kept = run_gathered(decoder, i, kept, own, places, Scatter(buffers, at + past))
            commit(before, buffers, ids.shape[1])
        else:
            true = decoder.layer_input(i, kept, rows, cache, at, h)
            x = x.scatter(1, at[..., None].expand_as(true), true)
            kept = decoder.run_gathered_recurrent(i, kept, at, x, rows, cache, h)
    decoder.settle(cache, rows.positions)
    return cache, kept


def assert_close(
    ours: Any, theirs: Any, b: int | slice = slice(None), real: slice = slice(None), atol: float = 3e-5
) -> None:
    """Equal to rounding: of sequence b, and where there are slots of the real ones."""
    for i in range(LAYERS):
        x, y = ours.layers[i], theirs.layers[i]
        if i in INDEXED:
            for name in ("keys", "values", "indexer_keys"):
                mine, stock = getattr(x, name)[b][..., real, :], getattr(y, name)[b][..., real, :]
                close(mine, stock, atol)
            continue
        close(x.recurrent_states[0][b], y.recurrent_states[0][b], atol)
        for k, state in x.conv_states.items():
            if state is not None:
                close(state[b].float(), y.conv_states[k][b].float(), atol)


@needs_it
@each_attention
@pytest.mark.parametrize("past", [0, 40])
@pytest.mark.parametrize("split", [1, 3, 5])
@torch.no_grad()
def test_with_every_row_exact_the_result_is_exact(attention, past, split):
    model, (ids, mask) = model_of(attention), padded((N, 60))
    decoder, start = Decoder(model), new_cache(model)
    if past:
        walk(decoder, ids[:, :past], mask[:, :past], start)
    exact = copy.deepcopy(start)
    states, _ = walk(decoder, ids[:, past:], mask, exact)
    at = torch.arange(N - past).expand(2, -1)
    ours, kept = fill_late(decoder, ids[:, past:], mask, split, at, past, start)
    assert_close(ours, exact, 0)
    assert_close(ours, exact, 1, slice(N - 60, None))
    close(kept[mask[:, past:].bool()], states[-1][mask[:, past:].bool()])
    assert torch.equal(ours.layers[2].indexer_position_ids, exact.layers[2].indexer_position_ids)


@needs_it
@each_attention
@torch.no_grad()
def test_some_rows_among_filled_ones_equal_a_slow_reference(attention):
    """The reference runs every row with the stock model; hooks replace what filled rows' layers see."""
    model, (ids, mask), split = model_of(attention), padded((N, 60)), 1
    at = torch.tensor([[3, 20, 21, 50, 88], [33, 34, 60, 89, 89]])
    filled = torch.ones(2, N, dtype=torch.bool).scatter(1, at, False)
    ours, _ = fill_late(Decoder(model), ids, mask, split, at)
    theirs = filled_reference(model, ids, mask, split, filled)
    assert_close(ours, theirs, 0, atol=2e-4)
    assert_close(ours, theirs, 1, slice(N - 60, None), atol=2e-4)
    exact, _ = stock(model, ids, mask)
    assert (exact.layers[5].keys - theirs.layers[5].keys)[0].abs().max() > 1e-2


def filled_reference(
    model: Any,
    ids: Tensor,
    mask: Tensor | None,
    split: int,
    filled: Tensor,
    maps: dict[int, Any] | None = None,
) -> Any:
    """The stock cache when filled rows [B, N] enter every late layer with the split layer's streams.

    Args:
        maps: layer -> what its attention or recurrence reads of a filled row instead, from the split layer's streams.
    """
    state: dict[str, Tensor] = {}

    def streams(i: int) -> Any:
        def hook(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if i == split:
                state["h"] = args[0]
            return (torch.where(filled[..., None], state["h"], args[0]), *args[1:]), kwargs

        return hook

    def mixed(i: int) -> Any:
        def hook(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if maps is None or i not in maps:
                return None
            return (torch.where(filled[..., None], maps[i](state["h"]), args[0]), *args[1:]), kwargs

        return hook

    handles = []
    for i, layer in list(enumerate(model.model.layers))[split:]:
        handles.append(layer.register_forward_pre_hook(streams(i), with_kwargs=True))
        mixer = layer.self_attn if i in INDEXED else layer.linear_attn
        handles.append(mixer.register_forward_pre_hook(mixed(i), with_kwargs=True))
    try:
        return stock(model, ids, mask)[0]
    finally:
        for handle in handles:
            handle.remove()


# refusals


def test_a_transformers_without_it_is_told_which_version_has_it():
    for model_type in (*WIDE_FAMILIES, "qwen4_exp"):
        if HAS:
            refuse_absent(model_type, "a model")
            continue
        with pytest.raises(UnsupportedModelError, match=r"install transformers 5\.18 or newer"):
            refuse_absent(model_type, "a model")


@needs_it
def test_a_model_that_reads_images_is_told_the_class_of_its_text_model():
    with pytest.raises(UnsupportedModelError, match="load Qwen4ExpForCausalLM"):
        refuse_unsupported(transformers.AutoConfig.for_model("qwen4_exp"), "a model")
    assert isinstance(model_of(), transformers.Qwen4ExpForCausalLM)
    assert model_of().config.model_type in WIDE_FAMILIES
