"""A prompt saved by one process runs on in another; whatever does not match is refused, with nothing touched."""

from __future__ import annotations

import json
import struct

import numpy as np
import pytest
import torch

from ridgefill.errors import PromptError
from ridgefill.maps import AffineMap, RidgeMaps

from ...gguf_maker import WIDTH, write
from . import needs_llama_cpp
from .test_engine import IDS, LEADING, TAIL, llama

pytestmark = [*needs_llama_cpp, pytest.mark.filterwarnings("ignore::ridgefill.errors.RidgeFillWarning")]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    made = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write(made)
    return made


@pytest.fixture(scope="module")
def saved(path, tmp_path_factory):
    llm = llama(path)
    llm.eval(IDS)
    return llm.save_prompt(tmp_path_factory.mktemp("cache") / "prompt.bin")


def next_logits(llm, token=9):
    from ridgefill.engines.llamacpp.measures import last_logits

    llm.eval([token])
    return last_logits(llm)


def test_it_loads_again_and_runs_on_alike(path, saved):
    first, second = llama(path), llama(path)
    first.eval(IDS)
    assert second.load_prompt(saved) == len(IDS)
    assert (
        second._filled.tolist() == first._filled.tolist() and second._filled[LEADING : len(IDS) - TAIL].all()
    )
    assert np.array_equal(next_logits(first), next_logits(second))


def test_a_prompt_that_begins_with_it_starts_from_there(path, saved):
    llm = llama(path)
    llm.load_prompt(saved)
    list(zip(range(1), llm.generate([*IDS, 3, 4]), strict=False))
    # only the tail of the new prompt was run: the rest of its rows were there
    assert llm.stats.tokens == 2


def refused(llm, file, why):
    from ridgefill.engines.llamacpp.prompt_cache import PromptCacheError

    llm.eval(IDS[:5])
    with pytest.raises(PromptCacheError, match=why):
        llm.load_prompt(file)
    assert llm.n_tokens == 5


def test_another_cache_type_is_refused(path, saved):
    refused(llama(path, type_k="f32"), saved, "another cache type")
    refused(llama(path, flash_attn=True), saved, "flash attention switched")


def test_other_maps_are_refused(path, saved):
    eye = RidgeMaps(1, {1: AffineMap(torch.eye(WIDTH), torch.zeros(WIDTH))})
    refused(llama(path, maps=eye, fill="ridge"), saved, "other maps")


def test_another_model_is_refused(tmp_path, saved):
    write(tmp_path / "other.gguf", extra={"blk.0.ffn_down.weight": np.ones((WIDTH, 96), np.float32)})
    refused(llama(tmp_path / "other.gguf"), saved, "another model")


def test_a_context_too_small_is_refused(path, tmp_path):
    llm = llama(path, n_ctx=512)
    llm.eval(IDS * 3)
    refused(llama(path), llm.save_prompt(tmp_path / "long.bin"), "360 tokens, and the context holds 256")


@pytest.mark.parametrize("change", ["cut", "flip", "magic", "format"])
def test_a_damaged_file_is_refused(path, saved, tmp_path, change):
    data = bytearray(saved.read_bytes())
    if change == "cut":
        data = data[:-10]
    elif change == "flip":
        data[-10] ^= 1
    elif change == "magic":
        data[0] ^= 1
    else:
        (length,) = struct.unpack("<Q", data[8:16])
        header = json.dumps(json.loads(data[16 : 16 + length]) | {"format": 99}).encode()
        data = data[:8] + struct.pack("<Q", len(header)) + header + data[16 + length :]
    (tmp_path / "bad.bin").write_bytes(data)
    why = {"cut": "cut off", "flip": "altered", "magic": "no prompt cache", "format": "format is 99"}[change]
    refused(llama(path), tmp_path / "bad.bin", why)


def test_an_empty_context_is_not_saved(path, tmp_path):
    with pytest.raises(PromptError, match="empty"):
        llama(path).save_prompt(tmp_path / "x.bin")
