"""Published configs, and shapes that the tests count."""

from __future__ import annotations

from typing import Any

from ridgefill.bench.cost import ModelShape, Setting
from tests.bench.loop import dense

# The published config.json files, as they were before head_dim and layer_types were written out.
LLAMA_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.43.0.dev0",
    "vocab_size": 128256,
}
QWEN3_8B: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "max_position_embeddings": 40960,
    "max_window_layers": 36,
    "model_type": "qwen3",
    "num_attention_heads": 32,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
# Qwen3.5-27B as published. Qwen3.8-27B, the paper's, has the same 64 layers, 48 of them Gated DeltaNet, and the same
# hidden size (4.1); the paper names no other width, so that these are taken to be the same too.
QWEN_27B: dict[str, Any] = {
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    "model_type": "qwen3_5",
    "text_config": {
        "model_type": "qwen3_5_text",
        "attn_output_gate": True,
        "full_attention_interval": 4,
        "head_dim": 256,
        "hidden_size": 5120,
        "intermediate_size": 17408,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 48,
        "linear_value_head_dim": 128,
        "num_attention_heads": 24,
        "num_hidden_layers": 64,
        "num_key_value_heads": 4,
        "vocab_size": 248320,
    },
}
LLAMA, QWEN = ModelShape.from_config(LLAMA_8B), ModelShape.from_config(QWEN3_8B)
HYBRID = ModelShape.from_config(QWEN_27B)
SMOL = dense(576, 30, 9, 3, 64, 1536)
TINY = dense(8, 4, 2, 1, 4, 12, (None, 3, None, 5))
FULL = dense(8, 3, 2, 1, 4, 12)


def paper(split: int, **changes: Any) -> Setting:
    return Setting(split=split, tail=4096, **changes)
