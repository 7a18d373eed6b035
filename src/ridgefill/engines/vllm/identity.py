"""The identity of the model that vLLM serves, from its files: weights in memory may be repacked, and cut."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors import safe_open
from torch import nn

from ridgefill.models.identity import SKETCHED, ModelIdentity


def tokenizer_of(model_config: Any) -> Any:
    """The transformers tokenizer, or None where vLLM uses none or another kind."""
    if model_config.skip_tokenizer_init:
        return None
    from transformers import PreTrainedTokenizerBase
    from vllm.tokenizers import cached_tokenizer_from_config

    found = cached_tokenizer_from_config(model_config)
    return found if isinstance(found, PreTrainedTokenizerBase) else None


def identity_of(model_config: Any, tokenizer: Any) -> ModelIdentity:
    """As `ModelIdentity.of` the same model in transformers.

    Args:
        model_config: vLLM's ``ModelConfig``.
        tokenizer: of `tokenizer_of`.
    """
    folder = _folder(model_config.model, model_config.revision)
    layers: Any = _Layers(folder, model_config.hf_text_config.num_hidden_layers) if folder else []
    config = model_config.hf_config
    if not getattr(config, "_name_or_path", None):
        config._name_or_path = model_config.model
    model = SimpleNamespace(config=config, dtype=model_config.dtype, model=SimpleNamespace(layers=layers))
    return ModelIdentity.of(model, tokenizer)


def _folder(model: str, revision: str | None) -> Path | None:
    """Where the model's files are, for a folder or a name that vLLM has downloaded."""
    if Path(model).is_dir():
        return Path(model)
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(model, "config.json", revision=revision)
    return Path(found).parent if isinstance(found, str) else None


class _Layers:
    """The model's layers, each as a module of the weights that an identity samples."""

    def __init__(self, folder: Path, count: int) -> None:
        self.folder, self.count = folder, count
        index = folder / "model.safetensors.index.json"
        self.where = json.loads(index.read_text())["weight_map"] if index.exists() else None

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, i: int) -> nn.Module:
        layer = nn.Module()
        for path in (path for paths in SKETCHED for path in paths):
            weight = self._weight(f"model.layers.{i}.{path}.weight")
            if weight is None:
                continue
            part, name = path.split(".")
            if not hasattr(layer, part):
                layer.add_module(part, nn.Module())
            linear = nn.Module()
            linear.weight = nn.Parameter(weight, requires_grad=False)
            layer.get_submodule(part).add_module(name, linear)
        return layer

    def _weight(self, name: str) -> torch.Tensor | None:
        file = "model.safetensors" if self.where is None else self.where.get(name)
        if file is None or not (self.folder / file).exists():
            return None
        with safe_open(self.folder / file, framework="pt") as weights:
            return weights.get_tensor(name) if name in weights.keys() else None  # noqa: SIM118 - no mapping
