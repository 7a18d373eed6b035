from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from torch import nn
from transformers import AutoConfig

from ridgefill.bench.cost import ModelShape
from ridgefill.bench.layers import LayerCost, layer_costs
from ridgefill.bench.shape import _known
from ridgefill.errors import SettingError, UnsupportedModelError
from ridgefill.models.decoder import Decoder
from tests.bench.configs import HYBRID, LLAMA, LLAMA_8B, QWEN, QWEN3_8B, QWEN_27B
from tests.bench.loop import dense
from tests.tiny import FAMILIES, tiny_model


def costs_of(layer: nn.Module) -> LayerCost:
    """What a layer's own weights say; only its reads are not in them."""
    row = sum(m.weight.numel() for m in layer.modules() if isinstance(m, nn.Linear))
    row += sum(m.weight.numel() for m in layer.modules() if isinstance(m, nn.Conv1d))
    for module in layer.modules():
        name = type(module).__name__
        if name.endswith("Router"):
            row += module.weight.numel()
        elif name.endswith("Experts"):
            row += (module.gate_up_proj.numel() + module.down_proj.numel()) // module.num_experts * CHOSEN
    if hasattr(layer, "linear_attn"):
        delta = layer.linear_attn
        state = delta.num_v_heads * delta.head_k_dim * delta.head_v_dim
        filled = sum(m.weight.numel() for n, m in delta.named_children() if n.startswith(INPUTS)) + 2 * state
        filled -= delta.hidden_size * delta.value_dim * hasattr(delta, "in_proj_qkvz")  # the gate among them
        return LayerCost(row + 3 * state, filled)
    attention = layer.self_attn
    value = attention.v_proj.weight.numel()
    assert attention.k_proj.weight.numel() == value
    return LayerCost(row, 2 * value, (), value)


CHOSEN = 2  # experts per token, in every tiny model
INPUTS = ("in_proj_qkv", "in_proj_a", "in_proj_b", "q_proj", "k_proj", "v_proj", "a_proj", "b_proj", "conv1d")


@pytest.mark.parametrize("family", FAMILIES)
def test_the_shape_is_that_of_the_model_itself(family: str, tmp_path: Any) -> None:
    model = tiny_model(family)
    layers = model.model.layers
    path = tmp_path / "config.json"
    model.config.to_json_file(path, use_diff=False)
    decoder, per_key = Decoder(model), 2 * 4 * 16
    for config in (model.config, model.config.to_dict(), path, str(tmp_path)):
        shape = ModelShape.from_config(config)
        assert shape.map == 64 * 64 and shape.hidden == 64 and shape.layers == len(layers)
        for i, (layer, cost) in enumerate(zip(layers, shape.costs, strict=True)):
            assert replace(cost, reads=()) == costs_of(layer)
            assert cost.reads == (() if hasattr(layer, "linear_attn") else ((per_key, decoder.window(i)),))


def test_a_layer_without_experts_among_those_with_them() -> None:
    shape = ModelShape.from_config(tiny_model("qwen3_moe", mlp_only_layers=[1]).config)
    assert [layer == shape.costs[0] for layer in shape.costs] == [True, False, True, True, True, True]
    assert shape.costs[1].row - shape.costs[0].row == 3 * 64 * 128 - (64 * 4 + 2 * 3 * 64 * 32)
    shape = ModelShape.from_config(tiny_model("qwen3_moe", decoder_sparse_step=2).config)
    assert shape.costs[0].row > shape.costs[1].row == shape.costs[3].row


def test_keys_that_the_family_does_not_know_count_nothing() -> None:
    stray = {"num_experts": 8, "num_experts_per_tok": 2, "hc_count": 4, "linear_num_value_heads": 4}
    assert ModelShape.from_config({**LLAMA_8B, **stray}) == LLAMA


def test_wide_streams_and_sparse_attention() -> None:
    qwen4 = pytest.importorskip("transformers.models.qwen4_exp")
    settings = {
        **{"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2},
        **{"head_dim": 16, "hc_count": 3, "hc_lowrank": 5, "num_experts": 4, "num_experts_per_tok": 2},
        **{"moe_intermediate_size": 32, "shared_expert_intermediate_size": 24, "full_attention_interval": 2},
        **{"linear_num_key_heads": 2, "linear_num_value_heads": 4},
        **{"linear_key_head_dim": 8, "linear_value_head_dim": 12},
        **{"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 8},
        **{"indexer_compress_ratio": 4, "ple_layer_ids": [3], "ple_embed_dim": 32, "eos_token_id": 258},
        **{"ngram_vocab_size_base": 50, "vocab_size": 320, "split_ngram_parts": 1},
    }
    config = AutoConfig.for_model("qwen4_exp_text", **settings)
    layers = qwen4.modeling_qwen4_exp.Qwen4ExpForCausalLM(config).model.layers
    costs = layer_costs(_known(config.to_dict()))
    key = 64 * 16  # a filled row writes the indexer's key as well
    for i, (layer, cost) in enumerate(zip(layers, costs, strict=True)):
        own = costs_of(layer)
        sparse = hasattr(layer, "self_attn")
        assert sparse == (i % 2 == 1)
        assert replace(cost, reads=()) == replace(own, filled=own.filled + key * sparse)
        assert cost.reads == (((2 * 4 * 16, 8), (2 * 16 // 4, None)) if sparse else ())
    assert costs[2].row > costs[0].row


def test_the_text_model_is_counted_of_one_that_reads_images() -> None:
    assert ModelShape.from_config(QWEN_27B["text_config"]) == HYBRID
    assert HYBRID.model_type == "qwen3_5_text"
    assert [bool(layer.value) for layer in HYBRID.costs] == [i % 4 == 3 for i in range(64)]


def test_a_shape_as_json_groups_equal_layers() -> None:
    made = json.loads(json.dumps(HYBRID.to_json()))
    assert (made["hidden"], made["layers"], made["map"]) == (5120, 64, 5120**2)
    assert [len(kind["of_layers"]) for kind in made["costs"]] == [48, 16]
    assert made["costs"][1]["reads"] == [[2 * 24 * 256, None]]


@pytest.mark.parametrize(
    ("family", "settings", "windows"),
    [
        ("mistral", {"sliding_window": 7}, [7] * 8),
        ("mistral", {"sliding_window": None}, [None] * 8),
        ("qwen2", {"sliding_window": 7, "use_sliding_window": False, "max_window_layers": 4}, [None] * 8),
        (
            "qwen2",
            {"sliding_window": 7, "use_sliding_window": True, "max_window_layers": 6},
            [None] * 6 + [7] * 2,
        ),
        ("gemma2", {"sliding_window": 7, "head_dim": 4}, [7, None] * 4),
        ("gemma3_text", {"sliding_window": 7, "head_dim": 4}, [7] * 5 + [None] + [7] * 2),
        ("gemma3_text", {"sliding_window": 7, "head_dim": 4, "sliding_window_pattern": 2}, [7, None] * 4),
        ("llama", {"sliding_window": 7}, [None] * 8),
    ],
)
def test_windows_of_configs_that_name_no_layer_types(
    family: str, settings: dict[str, Any], windows: list[int | None]
) -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 8, "num_hidden_layers": 8, "num_attention_heads": 4}
    shape = ModelShape.from_config({"model_type": family, "num_key_value_heads": 2, **sizes, **settings})
    assert [layer.reads for layer in shape.costs] == [((2 * 4 * 4, window),) for window in windows]


def test_the_published_configs_are_read() -> None:
    assert dense(4096, 32, 32, 8, 128, 14336, model_type="llama") == LLAMA
    assert dense(4096, 36, 32, 8, 128, 12288, model_type="qwen3") == QWEN


def test_missing_key_value_heads_mean_one_for_each_query_head() -> None:
    config = {key: value for key, value in LLAMA_8B.items() if key != "num_key_value_heads"}
    assert {layer.value for layer in ModelShape.from_config(config).costs} == {4096 * 32 * 128}


@pytest.mark.parametrize(
    "key", ["hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "model_type"]
)
@pytest.mark.parametrize("how", ["gone", "null"])
def test_a_missing_key_is_named(key: str, how: str) -> None:
    config = dict(LLAMA_8B)
    if how == "gone":
        del config[key]
    else:
        config[key] = None
    with pytest.raises(SettingError, match=key):
        ModelShape.from_config(config)


@pytest.mark.parametrize("value", [0, -3, "4096", 4096.5, True])
@pytest.mark.parametrize("key", ["hidden_size", "num_key_value_heads", "head_dim"])
def test_a_senseless_value_is_named(key: str, value: Any) -> None:
    with pytest.raises(SettingError, match=key):
        ModelShape.from_config({**LLAMA_8B, key: value})


def test_other_families_are_refused_by_name() -> None:
    for family in ("mamba", "gemma3", "lfm2"):
        with pytest.raises(UnsupportedModelError, match=family):
            ModelShape.from_config({**LLAMA_8B, "model_type": family})
    with pytest.raises(UnsupportedModelError, match="bidirectional"):
        ModelShape.from_config({**LLAMA_8B, "model_type": "gemma3_text", "use_bidirectional_attention": True})
    with pytest.raises(UnsupportedModelError, match="gpt2"):
        ModelShape.from_config(AutoConfig.for_model("gpt2"))


def test_layer_types_that_do_not_fit_are_refused() -> None:
    with pytest.raises((SettingError, UnsupportedModelError)):
        ModelShape.from_config({**QWEN3_8B, "layer_types": ["full_attention"] * 3})
    with pytest.raises((SettingError, UnsupportedModelError), match="linear_attention"):
        ModelShape.from_config({**QWEN3_8B, "layer_types": ["linear_attention"] * 36})


def test_unreadable_configs_are_refused(tmp_path: Any) -> None:
    with pytest.raises(SettingError, match=r"none\.json"):
        ModelShape.from_config(tmp_path / "none.json")
    for text in ("{", "[1]", "\x00"):
        path = tmp_path / "config.json"
        path.write_text(text)
        with pytest.raises(SettingError, match=r"config\.json"):
            ModelShape.from_config(path)
    with pytest.raises(SettingError, match="NoneType"):
        ModelShape.from_config(None)
