"""Architectures in small: their late rows are llama.cpp's own, or loading would refuse them (`self_check`)."""

from __future__ import annotations

import numpy as np
import pytest

from ...gguf_maker import HEADS, LAYERS, WIDTH, write
from . import needs_llama_cpp
from .test_engine import IDS, llama, logits

pytestmark = needs_llama_cpp

HEAD = WIDTH // HEADS


def extra(architecture):
    """The tensors that an architecture has beyond Llama's."""
    rng = np.random.default_rng(1)

    def draw(*shape):
        return rng.standard_normal(shape).astype(np.float32)

    made = {}
    for i in range(LAYERS):
        if architecture in ("qwen3", "gemma3"):
            made |= {f"blk.{i}.attn_{x}_norm.weight": draw(HEAD) for x in "qk"}
        if architecture.startswith("gemma"):
            made |= {f"blk.{i}.post_{x}.weight": draw(WIDTH) for x in ("attention_norm", "ffw_norm")}
    return made


@pytest.mark.parametrize("cache", [{}, {"flash_attn": True}, {"type_k": "bf16"}])
@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gemma2", "gemma3"])
def test_late_rows_are_llama_cpps_own(architecture, cache, tmp_path):
    write(tmp_path / "tiny.gguf", architecture, extra(architecture))
    llm = llama(tmp_path / "tiny.gguf", **cache)
    assert llm._gguf.architecture == architecture
    filled = logits(llm, IDS)
    assert llm.stats.filled > 0 and np.isfinite(filled).all()


def test_llama_3s_stretched_rope_is_followed(tmp_path):
    factors = {"rope_freqs.weight": np.linspace(1, 8, HEAD // 2).astype(np.float32)}
    write(tmp_path / "tiny.gguf", "llama", factors)
    assert np.isfinite(logits(llama(tmp_path / "tiny.gguf"), IDS)).all()
