"""Tiny random models and a byte-level tokenizer, built offline: one per supported family."""

from __future__ import annotations

from typing import Any

import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    OlmoHybridConfig,
    OlmoHybridForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3_5ForCausalLM,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

DENSE = ("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text")
MOE = ("qwen3_moe", "mixtral", "gpt_oss", "qwen3_next", "qwen3_5_moe_text")  # their layers have experts
HYBRIDS = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "olmo_hybrid")
FAMILIES = tuple(dict.fromkeys((*DENSE, *MOE, *HYBRIDS)))

_CLASSES: dict[str, tuple[type, type]] = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "gemma2": (Gemma2Config, Gemma2ForCausalLM),
    "gemma3_text": (Gemma3TextConfig, Gemma3ForCausalLM),
    "qwen3_moe": (Qwen3MoeConfig, Qwen3MoeForCausalLM),
    "mixtral": (MixtralConfig, MixtralForCausalLM),
    "gpt_oss": (GptOssConfig, GptOssForCausalLM),
    "qwen3_next": (Qwen3NextConfig, Qwen3NextForCausalLM),
    "qwen3_5_text": (Qwen3_5TextConfig, Qwen3_5ForCausalLM),
    "qwen3_5_moe_text": (Qwen3_5MoeTextConfig, Qwen3_5MoeForCausalLM),
    "olmo_hybrid": (OlmoHybridConfig, OlmoHybridForCausalLM),
}
_COMMON: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 128,
    "vocab_size": 320,
    "max_position_embeddings": 4096,
    "bos_token_id": 257,
    "eos_token_id": 258,
    "pad_token_id": 256,
}
_EXPERTS: dict[str, Any] = {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2}
_SHARED: dict[str, Any] = {**_EXPERTS, "shared_expert_intermediate_size": 32}
_DELTA: dict[str, Any] = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
}
# 16 rotary numbers a head, in the shares of time, height and width
_MROPE = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]}
_OWN: dict[str, dict[str, Any]] = {
    "gemma2": {"sliding_window": 32, "query_pre_attn_scalar": 16},
    "gemma3_text": {"sliding_window": 32, "query_pre_attn_scalar": 16},
    "mistral": {"sliding_window": None},
    "qwen3_moe": _EXPERTS,
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 32},
    "qwen3_next": {**_DELTA, **_SHARED},
    "qwen3_5_text": {**_DELTA, "rope_parameters": _MROPE},
    "qwen3_5_moe_text": {**_DELTA, **_SHARED, "rope_parameters": _MROPE},
    "olmo_hybrid": {
        **_DELTA,
        "rope_parameters": {"rope_type": "default", "rope_theta": None},
    },  # as released: none
}
_WINDOWED = ("gemma2", "gemma3_text", "gpt_oss")
_NORMS_ADD_ONE = ("gemma2", "gemma3_text", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
_TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>\n{{ m['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)


def tiny_model(family: str = "llama", seed: int = 0, **overrides: Any) -> Any:
    """A random ``*ForCausalLM`` of ``family``, fp32, in eval mode; the same weights for the same seed.

    Weights have standard deviation 0.08 (the default 0.02 leaves every layer near the identity), and the
    norms' weights are spread too, so that a forgotten norm or bias changes the result.
    """
    config_class, model_class = _CLASSES[family]
    settings = {**_COMMON, **_OWN.get(family, {}), **overrides}
    pattern = ("sliding_attention", "sliding_attention", "full_attention") if family in _WINDOWED else None
    if family in HYBRIDS:
        pattern = ("linear_attention", "linear_attention", "full_attention")
    if pattern is not None and "layer_types" not in settings:
        settings["layer_types"] = [pattern[i % 3] for i in range(settings["num_hidden_layers"])]
    model = model_class(config_class(**settings)).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in sorted(model.named_parameters()):
            noise = torch.randn(weight.shape, generator=generator)
            scale, centre = _spread(family, name, weight.ndim)
            weight.copy_(centre + scale * noise)
    model.requires_grad_(False)
    model.generation_config.pad_token_id = settings["pad_token_id"]
    return model


def _spread(family: str, name: str, dimensions: int) -> tuple[float, float]:
    """Standard deviation and mean of a weight."""
    if name.endswith("conv1d.weight"):
        return 0.5, 0.0
    if dimensions > 1:
        return 0.08, 0.0
    if name.endswith("A_log"):
        return (
            0.3,
            -3.0,
        )  # states that last for tens of rows: at the usual values a tiny model forgets at once
    if name.endswith("bias"):
        return (0.3, 0.0) if name.endswith("dt_bias") else (0.05, 0.0)
    gated = name.endswith("linear_attn.norm.weight")
    return (
        0.1,
        0.0 if family in _NORMS_ADD_ONE and not gated else 1.0,
    )  # near 0 where the norm adds the 1 itself


def tiny_tokenizer(chat: bool = True) -> PreTrainedTokenizerFast:
    """A byte-level BPE without merges: one token a byte (256), then pad, bos, eos.

    Args:
        chat: give it a chat template.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(BPE({symbol: i for i, symbol in enumerate(alphabet)}, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", bos_token="<s>", eos_token="</s>", model_max_length=4096
    )
    if chat:
        tokenizer.chat_template = _TEMPLATE
    return tokenizer
