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
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text")

_CLASSES: dict[str, tuple[type, type]] = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "gemma2": (Gemma2Config, Gemma2ForCausalLM),
    "gemma3_text": (Gemma3TextConfig, Gemma3ForCausalLM),
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
_OWN: dict[str, dict[str, Any]] = {
    "gemma2": {"sliding_window": 32, "query_pre_attn_scalar": 16},
    "gemma3_text": {"sliding_window": 32, "query_pre_attn_scalar": 16},
    "mistral": {"sliding_window": None},
}
_WINDOWED = ("gemma2", "gemma3_text")
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
    if family in _WINDOWED and "layer_types" not in settings:
        kinds = ("sliding_attention", "sliding_attention", "full_attention")
        settings["layer_types"] = [kinds[i % 3] for i in range(settings["num_hidden_layers"])]
    model = model_class(config_class(**settings)).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in sorted(model.named_parameters()):
            noise = torch.randn(weight.shape, generator=generator)
            if weight.ndim > 1:
                weight.copy_(0.08 * noise)
            elif name.endswith("bias"):
                weight.copy_(0.05 * noise)
            else:  # a norm's weight: near 1, or near 0 in Gemma, which adds the 1 itself
                weight.copy_((0.0 if family.startswith("gemma") else 1.0) + 0.1 * noise)
    model.requires_grad_(False)
    model.generation_config.pad_token_id = settings["pad_token_id"]
    return model


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
