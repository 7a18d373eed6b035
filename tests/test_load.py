from __future__ import annotations

import json
import logging
import math
import shutil

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)
from transformers.utils import logging as chatter

from ridgefill.errors import ModelFileError, OutputError, SettingError, UnsupportedModelError
from ridgefill.gguf_file import converted_folder, read_architecture
from ridgefill.load import load_config, load_model
from tests import gguf_maker

SIZES = dict(
    vocab_size=16,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("RIDGEFILL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def save(folder, model, tokenizer=True):
    model.save_pretrained(folder)
    if tokenizer:
        words = {w: i for i, w in enumerate(["<unk>", "a", "b", "c"])}
        core = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
        core.pre_tokenizer = pre_tokenizers.Whitespace()
        PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>").save_pretrained(folder)
    return folder


@pytest.fixture
def llama_folder(tmp_path):
    torch.manual_seed(0)
    return save(tmp_path / "tiny-llama", LlamaForCausalLM(LlamaConfig(**SIZES)))


def test_folder(llama_folder):
    verbosity, bars = chatter.get_verbosity(), chatter.is_progress_bar_enabled()
    model, tokenizer = load_model(llama_folder, device="cpu")
    assert model.dtype == torch.float32 and not model.training and model.config._attn_implementation == "sdpa"
    assert model.config._name_or_path == "tiny-llama" and model.config.ridgefill_quantization is None
    assert tokenizer("a c b").input_ids == [1, 3, 2]
    stock = LlamaForCausalLM.from_pretrained(llama_folder)
    ids = torch.tensor([[1, 2, 3, 1]])
    assert torch.equal(model(ids).logits, stock(ids).logits)
    assert (chatter.get_verbosity(), chatter.is_progress_bar_enabled()) == (verbosity, bars)


def test_dtype(llama_folder):
    assert load_model(llama_folder, dtype="bfloat16", device="cpu")[0].dtype == torch.bfloat16
    assert load_model(llama_folder, dtype=torch.float16, device="cpu")[0].dtype == torch.float16
    with pytest.raises(SettingError, match="int3"):
        load_model(llama_folder, dtype="int3")
    with pytest.raises(SettingError, match="abacus"):
        load_model(llama_folder, device="abacus")


def test_a_soft_cap_takes_the_plain_attention(tmp_path):
    folder = save(tmp_path / "g", Gemma2ForCausalLM(Gemma2Config(**SIZES, head_dim=8)))
    assert load_model(folder, device="cpu")[0].config._attn_implementation == "eager"


def test_unsupported_is_refused_before_weights(tmp_path):
    GPT2Config(n_layer=1).save_pretrained(tmp_path / "gpt")  # no weights lie there
    with pytest.raises(UnsupportedModelError, match="gpt2"):
        load_model(tmp_path / "gpt")
    (tmp_path / "own").mkdir()
    own = {"model_type": "own", "auto_map": {"AutoConfig": "code.Config"}}
    (tmp_path / "own" / "config.json").write_text(json.dumps(own))
    with pytest.raises(UnsupportedModelError, match="program code"):
        load_model(tmp_path / "own")


@pytest.mark.parametrize("name", ["./nowhere", "a/b/c", "nowhere.gguf", "/nowhere"])
def test_nothing_there(name):
    with pytest.raises(ModelFileError, match="no such file or folder"):
        load_model(name)


def test_folder_without_config(tmp_path):
    with pytest.raises(ModelFileError, match=r"no config\.json"):
        load_model(tmp_path)


def test_damaged_config(llama_folder):
    (llama_folder / "config.json").write_text("{")
    with pytest.raises(ModelFileError, match="not a valid JSON"):
        load_model(llama_folder)


def test_no_network(tmp_path):
    """In a process of its own, as the hub's offline switch is read at import."""
    import os
    import subprocess
    import sys

    code = (
        "from ridgefill.errors import RidgeFillError\nfrom ridgefill.load import load_model\n"
        "try: load_model('someone/no-such-model')\nexcept RidgeFillError as e: print(e)"
    )
    env = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert "the hub cannot be reached" in done.stdout and "HF_HUB_OFFLINE" in done.stdout
    assert len(done.stdout.splitlines()) == 1 and done.stderr == ""


def test_no_tokenizer(tmp_path):
    folder = save(tmp_path / "bare", LlamaForCausalLM(LlamaConfig(**SIZES)), tokenizer=False)
    with pytest.raises(ModelFileError, match="tokenizer"):
        load_model(folder)


def test_incomplete_weights(llama_folder):
    from safetensors.torch import load_file, save_file

    path = llama_folder / "model.safetensors"
    weights = load_file(path)
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, path, metadata={"format": "pt"})
    with pytest.raises(ModelFileError, match=r"lack 1 .*layers\.1\.mlp\.up_proj"):
        load_model(llama_folder)
    path.write_bytes(path.read_bytes()[:2000])
    with pytest.raises(ModelFileError, match="load tiny-llama"):
        load_model(llama_folder)
    path.unlink()
    with pytest.raises(ModelFileError, match=r"model\.safetensors"):
        load_model(llama_folder)


# --- GGUF ---


def unpermuted(weight: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp stores a head's rotary pairs interleaved; transformers in halves."""
    d, width = weight.shape
    return weight.reshape(heads, d // heads // 2, 2, width).swapaxes(1, 2).reshape(d, width)


def test_gguf_is_converted_once_and_exactly(tmp_path, cache, caplog):
    path = tmp_path / "tiny.Q8_0.gguf"
    made = gguf_maker.write(path)
    with caplog.at_level(logging.INFO, logger="ridgefill"):
        model, tokenizer = load_model(path, device="cpu")
    assert "converting tiny.Q8_0.gguf once" in caplog.text
    assert model.config._name_or_path == "tiny.Q8_0" and model.config.ridgefill_quantization == "Q8_0"
    assert model.config.rope_parameters["rope_theta"] == 500_000.0
    assert not hasattr(model.config, "quantization_config")
    assert tokenizer.decode(tokenizer("the cat").input_ids) == "the cat"
    layer = model.model.layers[1]
    for weight, wanted in (
        (layer.self_attn.v_proj.weight, made["blk.1.attn_v.weight"]),
        (layer.self_attn.k_proj.weight, unpermuted(made["blk.1.attn_k.weight"], gguf_maker.KV_HEADS)),
        (layer.mlp.down_proj.weight, made["blk.1.ffn_down.weight"]),
        (model.lm_head.weight, made["token_embd.weight"]),
    ):
        assert torch.equal(weight, torch.from_numpy(np.ascontiguousarray(wanted)))

    folder = converted_folder(path)
    assert [p.name for p in folder.parent.iterdir()] == [folder.name]
    assert str(tmp_path) not in (folder / "config.json").read_text()
    written = (folder / "model.safetensors").stat().st_mtime_ns
    caplog.clear()
    again, _ = load_model(path, device="cpu")
    assert "converting" not in caplog.text
    assert (folder / "model.safetensors").stat().st_mtime_ns == written
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))


def test_gguf_config_alone(tmp_path, cache):
    gguf_maker.write(tmp_path / "tiny.gguf")
    config = load_config(tmp_path / "tiny.gguf")
    assert (config.num_hidden_layers, config.num_key_value_heads) == (gguf_maker.LAYERS, gguf_maker.KV_HEADS)
    assert not cache.exists()


def test_gguf_of_another_architecture(tmp_path):
    gguf_maker.write(tmp_path / "x.gguf", architecture="mamba")
    with pytest.raises(UnsupportedModelError, match="mamba"):
        load_model(tmp_path / "x.gguf")


@pytest.mark.parametrize("kept", [0, 3, 20, 60])
def test_gguf_cut_in_its_header(tmp_path, kept):
    gguf_maker.write(tmp_path / "x.gguf")
    (tmp_path / "x.gguf").write_bytes((tmp_path / "x.gguf").read_bytes()[:kept])
    with pytest.raises(ModelFileError, match=r"cut off|not a GGUF"):
        read_architecture(tmp_path / "x.gguf")


@pytest.mark.parametrize("share", [0.05, 0.5, 0.99])
def test_gguf_cut_later(tmp_path, cache, share):
    path = tmp_path / "x.gguf"
    gguf_maker.write(path)
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * share)])
    with pytest.raises(ModelFileError, match="truncated"):
        load_model(path)
    assert not (cache / "gguf").exists()


def test_gguf_that_is_text(tmp_path):
    (tmp_path / "x.gguf").write_text("hello, I am no model\n" * 10)
    with pytest.raises(ModelFileError, match="not a GGUF file"):
        load_model(tmp_path / "x.gguf")


def test_gguf_with_tensors_that_would_be_lost(tmp_path, cache):
    bias = {"blk.0.attn_q.bias": np.ones(gguf_maker.WIDTH, dtype=np.float32)}
    gguf_maker.write(tmp_path / "x.gguf", extra=bias)
    with pytest.raises(UnsupportedModelError, match="21 tensors"):
        load_model(tmp_path / "x.gguf")
    assert list((cache / "gguf").iterdir()) == []


def test_gguf_with_stretched_rope(tmp_path):
    gguf_maker.write(tmp_path / "x.gguf", scaling="yarn")
    with pytest.raises(UnsupportedModelError, match="rotary"):
        load_model(tmp_path / "x.gguf")


def llama3_factors(head_dim: int, theta: float, factor: float) -> np.ndarray:
    """The published rule of Llama 3.1, one divisor per frequency."""
    out = []
    for i in range(head_dim // 2):
        wavelength = 2 * math.pi * theta ** (2 * i / head_dim)
        smooth = (8192 / wavelength - 1) / 3
        if wavelength < 8192 / 4:
            out.append(1.0)
        elif wavelength > 8192:
            out.append(factor)
        else:
            out.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(out, dtype=np.float32)


def test_gguf_with_llama3_rope(tmp_path):
    head_dim = gguf_maker.WIDTH // gguf_maker.HEADS
    factors = llama3_factors(head_dim, 500_000.0, 8.0)
    gguf_maker.write(tmp_path / "x.gguf", extra={"rope_freqs.weight": factors})
    model, _ = load_model(tmp_path / "x.gguf", device="cpu")
    assert model.config.rope_parameters["rope_type"] == "llama3"
    assert model.config.rope_parameters["factor"] == 8.0
    plain = torch.tensor([500_000.0 ** (-2 * i / head_dim) for i in range(head_dim // 2)])
    torch.testing.assert_close(model.model.rotary_emb.inv_freq, plain / torch.from_numpy(factors))
    factors[-2] = 3.0
    gguf_maker.write(tmp_path / "y.gguf", extra={"rope_freqs.weight": factors})
    with pytest.raises(UnsupportedModelError, match="not known"):
        load_model(tmp_path / "y.gguf")


def test_no_room_for_the_conversion(tmp_path, cache, monkeypatch):
    gguf_maker.write(tmp_path / "x.gguf")
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(OutputError, match="the disk has less free"):
        load_model(tmp_path / "x.gguf")
    assert list((cache / "gguf").iterdir()) == []
