"""Writes tiny real GGUF files."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np

WIDTH, MLP, HEADS, KV_HEADS, LAYERS = 64, 96, 4, 2, 2


def byte_alphabet() -> list[str]:
    """The 256 printable characters that stand for bytes in a byte-level vocabulary."""
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in kept]
    return [chr(b) for b in kept] + [chr(256 + i) for i in range(len(others))]


def tensors(seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)

    def draw(*shape: int) -> np.ndarray:
        return (rng.standard_normal(shape) * 0.2).astype(np.float32)

    kv = WIDTH * KV_HEADS // HEADS
    made = {"token_embd.weight": draw(260, WIDTH), "output_norm.weight": draw(WIDTH)}
    for i in range(LAYERS):
        made |= {
            f"blk.{i}.attn_norm.weight": draw(WIDTH),
            f"blk.{i}.attn_q.weight": draw(WIDTH, WIDTH),
            f"blk.{i}.attn_k.weight": draw(kv, WIDTH),
            f"blk.{i}.attn_v.weight": draw(kv, WIDTH),
            f"blk.{i}.attn_output.weight": draw(WIDTH, WIDTH),
            f"blk.{i}.ffn_norm.weight": draw(WIDTH),
            f"blk.{i}.ffn_gate.weight": draw(MLP, WIDTH),
            f"blk.{i}.ffn_up.weight": draw(MLP, WIDTH),
            f"blk.{i}.ffn_down.weight": draw(WIDTH, MLP),
        }
    return made


def write(
    path: Path,
    architecture: str = "llama",
    extra: dict[str, np.ndarray] | None = None,
    scaling: str | None = None,
) -> dict[str, np.ndarray]:
    """A 2-layer model; its value projections are Q8_0, the rest float32. Returns what was written."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_name("tiny")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q8_0)
    writer.add_block_count(LAYERS)
    writer.add_context_length(256)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(MLP)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_dimension_count(WIDTH // HEADS)
    writer.add_rope_freq_base(500_000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(260)
    if scaling is not None:
        writer.add_rope_scaling_type(gguf.RopeScalingType(scaling))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([*byte_alphabet(), "<s>", "</s>", "th", "he"])
    writer.add_token_types([1] * 256 + [3, 3, 1, 1])
    writer.add_token_merges(["t h", "h e"])
    writer.add_bos_token_id(256)
    writer.add_eos_token_id(257)
    made = tensors() | (extra or {})
    for name, values in made.items():
        if "attn_v" in name:
            packed = gguf.quantize(values, gguf.GGMLQuantizationType.Q8_0)
            writer.add_tensor(name, packed, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
            made[name] = gguf.dequantize(packed, gguf.GGMLQuantizationType.Q8_0)
        else:
            writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return made
