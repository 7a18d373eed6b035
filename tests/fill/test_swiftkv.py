"""SwiftKV's projections, read from a small checkpoint of the released form."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file

from ridgefill.compat import cache_kwarg
from ridgefill.errors import (
    MapsMismatchError,
    ModelFileError,
    RidgeFillError,
    SettingError,
    UnsupportedModelError,
)
from ridgefill.fill.swiftkv import SwiftKV
from ridgefill.models.decoder import Decoder
from ridgefill.prefill import prefill
from tests.reference import TAIL, N, close, generate, hidden_states, model_of, prompt, stock_cache

M, SPLIT, WIDTH = N - TAIL, 2, 2 * 16
KEY, VALUE = "model.layers.{}.self_attn.k_proj_swiftkv", "model.layers.{}.self_attn.v_proj_swiftkv"


def checkpoint(folder, group=1, model=None, **config):
    """Config and tensors as released, in two files; returns the tensors."""
    model, g = model or model_of("llama"), torch.Generator().manual_seed(1)
    about = model.config.to_dict() | {"model_type": "llama_swiftkv", "swiftkv": True}
    about |= {"num_key_value_layers": SPLIT, "key_value_group_size": group} | config
    (folder / "config.json").write_text(json.dumps({k: v for k, v in about.items() if v != "absent"}))
    tensors = {
        "model.norm_swiftkv.weight": 1 + 0.1 * torch.randn(64, generator=g),
        "model.layers.0.input_layernorm.weight": model.model.layers[0].input_layernorm.weight.clone(),
    }
    for i in range(SPLIT, 6):
        tensors[f"model.layers.{i}.self_attn.q_proj_swiftkv.weight"] = torch.randn(64, 64, generator=g)
        if (i - SPLIT) % group == 0:
            for name in (KEY, VALUE):
                tensors[f"{name.format(i)}.weight"] = 0.1 * torch.randn(WIDTH, 64, generator=g)
    save(folder, tensors)
    return tensors


def save(folder, tensors):
    half = len(tensors) // 2
    for number, names in enumerate((list(tensors)[:half], list(tensors)[half:]), 1):
        save_file({n: tensors[n] for n in names}, folder / f"model-0000{number}-of-00002.safetensors")


def by_hand(model, h, norm, weight):
    """[1, 2, M, 16]: weight times norm times h over its root mean square."""
    x = h / (h.square().mean(-1, keepdim=True) + model.config.rms_norm_eps).sqrt() * norm
    return (x @ weight.T).view(M, 2, 16).transpose(0, 1)[None]


@pytest.mark.parametrize("group", [1, 2])
@torch.no_grad()
def test_keys_and_values_are_the_projections_of_the_split_state(group, tmp_path):
    model, ids = model_of("llama"), prompt()
    tensors, decoder = checkpoint(tmp_path, group), Decoder(model)
    fill = SwiftKV.load(tmp_path, decoder)
    assert fill.split == SPLIT
    cache = prefill(model, ids, fill=fill, split=SPLIT, tail=TAIL, leading=0)
    h = hidden_states(model, ids)[SPLIT][0, :M]
    cos, sin = model.model.rotary_emb(h[None], torch.arange(M)[None])
    norm = tensors["model.norm_swiftkv.weight"]
    for i in range(SPLIT, 6):
        first = i - (i - SPLIT) % group
        keys = by_hand(model, h, norm, tensors[KEY.format(first) + ".weight"])
        half = torch.cat([-keys[..., 8:], keys[..., :8]], -1)
        close(cache.layers[i].keys, keys * cos[:, None] + half * sin[:, None])
        close(cache.layers[i].values, by_hand(model, h, norm, tensors[VALUE.format(first) + ".weight"]))
    stock = stock_cache(model, ids[:, :M])
    for i in range(SPLIT):  # the first layers are the original model's
        assert torch.equal(cache.layers[i].keys, stock.layers[i].keys)


def test_the_tail_runs_the_original_model_over_them(tmp_path):
    """With projections that are the original layer's own, split layer included, that layer is exact."""
    model, ids = model_of("llama"), prompt()
    tensors = checkpoint(tmp_path)
    layer = model.model.layers[SPLIT]
    tensors["model.norm_swiftkv.weight"] = layer.input_layernorm.weight.clone()
    tensors[KEY.format(SPLIT) + ".weight"] = layer.self_attn.k_proj.weight.clone()
    tensors[VALUE.format(SPLIT) + ".weight"] = layer.self_attn.v_proj.weight.clone()
    save(tmp_path, tensors)
    fill = SwiftKV.load(tmp_path, Decoder(model))
    cache = prefill(model, ids, fill=fill, split=SPLIT, tail=TAIL, leading=0)
    stock = stock_cache(model, ids[:, :M])
    close(cache.layers[SPLIT].keys, stock.layers[SPLIT].keys)
    close(cache.layers[SPLIT].values, stock.layers[SPLIT].values)
    assert generate(model, ids, **cache_kwarg(cache))[1].isfinite().all()


def test_biases_are_added_where_the_checkpoint_has_them(tmp_path):
    tensors, decoder = checkpoint(tmp_path), Decoder(model_of("llama"))
    tensors[KEY.format(4) + ".bias"] = torch.arange(float(WIDTH))
    save(tmp_path, tensors)
    fill = SwiftKV.load(tmp_path, decoder)
    assert torch.equal(fill.keys[4](torch.zeros(64)), torch.arange(float(WIDTH)))
    assert not fill.keys[5](torch.zeros(64)).any()


@pytest.mark.parametrize(
    ("config", "error", "says"),
    [
        ({"swiftkv": False}, ModelFileError, "does not say"),
        ({"swiftkv": "absent"}, ModelFileError, "does not say"),
        ({"num_key_value_layers": "absent"}, ModelFileError, "num_key_value_layers is None"),
        ({"key_value_group_size": 0}, ModelFileError, "key_value_group_size 0"),
        ({"num_key_value_layers": 6}, SettingError, "split at 6"),
        ({"num_hidden_layers": 8}, MapsMismatchError, "num_hidden_layers is 8, and the model's 6"),
        ({"vocab_size": 99}, MapsMismatchError, "vocab_size is 99"),
        ({"key_value_group_size": 3}, None, ""),
        ({"num_key_value_layers": 1}, ModelFileError, r"no tensor model.layers.1.self_attn.k_proj_swiftkv"),
    ],
)
def test_another_kind_of_checkpoint_is_refused(config, error, says, tmp_path):
    checkpoint(tmp_path, **config)
    if error is None:  # other tensors than a group needs are not looked for
        assert len(SwiftKV.load(tmp_path, Decoder(model_of("llama"))).keys) == 4
        return
    with pytest.raises(error, match=says):
        SwiftKV.load(tmp_path, Decoder(model_of("llama")))


@pytest.mark.parametrize(
    ("name", "tensor", "says"),
    [
        ("model.norm_swiftkv.weight", None, "no tensor model.norm_swiftkv.weight"),
        (KEY.format(3) + ".weight", None, "no tensor model.layers.3.self_attn.k_proj_swiftkv.weight"),
        (VALUE.format(5) + ".weight", torch.zeros(WIDTH, 63), r"\[32, 63\] of float32, not \[32, 64\]"),
        (VALUE.format(5) + ".weight", torch.zeros(WIDTH, 64, dtype=torch.int8), "of int8"),
        ("model.layers.0.input_layernorm.weight", torch.zeros(64), "first layer's norm"),
    ],
)
def test_missing_and_senseless_tensors_are_named(name, tensor, says, tmp_path):
    tensors = checkpoint(tmp_path)
    tensors.pop(name)
    if tensor is not None:
        tensors[name] = tensor
    save(tmp_path, tensors)
    with pytest.raises(RidgeFillError, match=says):
        SwiftKV.load(tmp_path, Decoder(model_of("llama")))


def test_what_cannot_be_read_or_filled_is_refused(tmp_path):
    decoder = Decoder(model_of("llama"))
    with pytest.raises(ModelFileError, match=r"config\.json cannot be read"):
        SwiftKV.load(tmp_path / "nowhere", decoder)
    hybrid = model_of("qwen3_next")
    checkpoint(tmp_path, model=hybrid)
    with pytest.raises(UnsupportedModelError, match="recurrent state"):
        SwiftKV.load(tmp_path, Decoder(hybrid))
    checkpoint(tmp_path)
    fill = SwiftKV.load(tmp_path, decoder)
    with pytest.raises(SettingError, match="they are for split 2"):
        prefill(model_of("llama"), prompt(), fill=fill, split=3, tail=TAIL)
    for path in tmp_path.glob("*.safetensors"):
        path.write_bytes(b"nothing")
    with pytest.raises(ModelFileError, match=r"00001-of-00002\.safetensors cannot be read"):
        SwiftKV.load(tmp_path, decoder)
    for path in tmp_path.glob("*.safetensors"):
        path.unlink()
    with pytest.raises(ModelFileError, match="no safetensors file"):
        SwiftKV.load(tmp_path, decoder)
