"""A model and its tokenizer from a local folder, a hub name or a GGUF file; refused before weights are read.

A GGUF file is dequantized once, to a folder of float32 safetensors in the cache, named by the file's hash.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from ridgefill.devices import usable_device
from ridgefill.errors import ModelFileError, SettingError
from ridgefill.gguf_file import convert_once, quantization, read_architecture
from ridgefill.models.decoder import refuse_unsupported
from ridgefill.quiet import clear, quiet, refuse_incomplete

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


def load_model(
    name: str | Path,
    *,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device = "auto",
    revision: str | None = None,
) -> tuple[Any, Any]:
    """Loads a causal language model in evaluation mode, and its tokenizer.

    The architecture is checked before any weights are read. ``model.config._name_or_path`` is set to a name
    without folders, and ``model.config.ridgefill_quantization`` to a GGUF file's kind ("Q4_1"), else None.

    Args:
        name: a local folder, a GGUF file, or the name of a model on the Hugging Face hub.
        dtype: "auto" (float32 on a CPU, where bfloat16 is several times slower; bfloat16 on a GPU),
            "float32", "bfloat16", "float16" or a torch dtype.
        device: "auto" (the GPUs if there are any, the model spread over them and the host as it fits, else
            the CPU) or one device such as "cpu" or "cuda:0".
        revision: a hub model's branch, tag or commit.

    Returns:
        (model, tokenizer).

    Raises:
        UnsupportedModelError: the architecture cannot be filled, or the file cannot be read faithfully.
        ModelFileError: nothing there, an incomplete or broken file, no network, no tokenizer.
        OutputError: no room for a GGUF file's converted weights.
        SettingError: an unknown dtype or device.
    """
    device_map = _device_map(device)
    torch_dtype = _dtype(dtype, on_cpu=device_map == {"": "cpu"})
    source, label = _locate(name)
    config = _read_config(source, label, revision)
    with quiet(bars=not Path(source).is_dir()), clear(f"load {label}"):
        tokenizer = _read_tokenizer(source, label, revision)
        both: Any = AutoModelForCausalLM.from_pretrained(
            source,
            config=config,
            dtype=torch_dtype,
            device_map=device_map,
            revision=revision or "main",
            attn_implementation=_attention(config),
            output_loading_info=True,
            trust_remote_code=False,
        )
    model, info = both
    refuse_incomplete(info, label)
    model.config._name_or_path = model.name_or_path = label
    model.config.ridgefill_quantization = quantization(source)
    return model.eval(), tokenizer


def load_config(name: str | Path, *, revision: str | None = None) -> Any:
    """The config alone, checked; of a GGUF file too (no weights are read, nothing is converted).

    Raises:
        UnsupportedModelError, ModelFileError: as `load_model`.
    """
    path = Path(name).expanduser()
    if not path.is_file():
        source, label = _locate(name)
        return _read_config(source, label, revision)
    read_architecture(path)
    with quiet(), clear(f"read {path.name}", "it is probably truncated; fetch it again"):
        config = AutoConfig.from_pretrained(str(path.parent), gguf_file=path.name)
    refuse_unsupported(config, path.name)
    config._name_or_path = path.stem
    return config


def _locate(name: str | Path) -> tuple[str, str]:
    """(what transformers loads from, the model's name for people)."""
    text, path = str(name), Path(name).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelFileError(
                f"load the folder {path}",
                "it holds no config.json",
                "name the folder that a model was saved to",
            )
        return str(path), path.resolve().name
    if path.is_file():
        read_architecture(path)
        return str(convert_once(path)), path.stem
    if path.suffix == ".gguf" or not _HUB_NAME.fullmatch(text):
        raise ModelFileError(
            f"load {text}",
            "there is no such file or folder, and it is not the name of a hub model",
            "name a model folder, a GGUF file, or a hub model as OWNER/NAME",
        )
    return text, text


def _read_config(source: str, label: str, revision: str | None) -> Any:
    with quiet(), clear(f"read the config of {label}"):
        config = AutoConfig.from_pretrained(source, revision=revision or "main", trust_remote_code=False)
    refuse_unsupported(config, label)
    return config


def _read_tokenizer(source: str, label: str, revision: str | None) -> Any:
    """The tokenizer; a missing one surfaces as many different errors, so it gets one of its own."""
    with clear(
        f"load the tokenizer of {label}", "add the tokenizer's files (tokenizer.json) to the model folder"
    ):
        tokenizer = AutoTokenizer.from_pretrained(
            source, revision=revision or "main", trust_remote_code=False
        )
    if len(tokenizer) == 0:
        raise ModelFileError(
            f"load the tokenizer of {label}",
            "its vocabulary is missing",
            "add tokenizer.json to the model folder",
        )
    return tokenizer


def _dtype(dtype: str | torch.dtype, on_cpu: bool) -> torch.dtype:
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype == "auto":
        return torch.float32 if on_cpu else torch.bfloat16
    if dtype not in _DTYPES:
        raise SettingError(f"dtype {dtype!r}", "it is not known", f"use auto, {', '.join(_DTYPES)}")
    return _DTYPES[dtype]


def _device_map(device: str | torch.device) -> Any:
    """accelerate's device map: "auto" spreads a model that is larger than one device."""
    if device == "auto":
        return "auto" if torch.cuda.is_available() else {"": "cpu"}
    return {"": str(usable_device(device))}


def _attention(config: Any) -> str:
    """PyTorch's fused attention has no soft cap on its logits; models with one need the plain form."""
    return "sdpa" if getattr(config, "attn_logit_softcapping", None) is None else "eager"
