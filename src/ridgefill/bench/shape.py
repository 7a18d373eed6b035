"""What a multiply-accumulate count needs to know of a model, read from its config alone."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from transformers import AutoConfig

from ridgefill.bench.layers import LayerCost, bad_config, layer_costs
from ridgefill.errors import SettingError
from ridgefill.models.decoder import refuse_unsupported

# A text model's config may lie inside that of a model that reads images too.
_WITH_IMAGES = ("qwen3_5", "qwen3_5_moe", "qwen4_exp")
_REQUIRED = (
    "hidden_size",
    "intermediate_size",
    "moe_intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
)
_COUNTS = (
    *_REQUIRED,
    "num_key_value_heads",
    "head_dim",
    "sliding_window",
    "num_experts_per_tok",
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_conv_kernel_dim",
    "indexer_n_heads",
    "indexer_head_dim",
    "indexer_budget",
    "indexer_compress_ratio",
    "hc_count",
    "hc_lowrank",
    "ple_embed_dim",
    "ple_conv_kernel_size",
)
KEYS = (
    *_COUNTS,
    "layer_types",
    "num_experts",
    "num_local_experts",
    "decoder_sparse_step",
    "mlp_only_layers",
    "shared_expert_intermediate_size",
    "ple_layer_ids",
)
# With these the family's own config class works out the others.
_DERIVING = (
    "use_sliding_window",
    "max_window_layers",
    "sliding_window_pattern",
    "full_attention_interval",
    "indexer_kv_heads",
)
_CHECKED = ("rope_parameters", "eos_token_id")  # what the class of a sparse-attention model checks as well


@dataclass(frozen=True)
class ModelShape:
    """What the count needs to know of a model.

    Attributes:
        hidden: width of a layer's input, d.
        costs: every layer's multiply-accumulates.
        map: those of one map applied to one row: its input's width (d, or all parallel streams) times d.
        model_type: the family, as the config names it.
    """

    hidden: int
    costs: tuple[LayerCost, ...]
    map: int
    model_type: str = ""

    @classmethod
    def from_config(cls, config: Any) -> ModelShape:
        """Reads the shape of a supported model.

        Args:
            config: a transformers config, its dict, or the path of a ``config.json`` or of its folder.
                Keys that were left out take the defaults of the family's own config class. Of a model that
                reads images too the text model is counted.

        Raises:
            UnsupportedModelError: a family (or a kind of layer) that cannot be filled, by name.
            SettingError: the file cannot be read, or a key is missing or senseless.
        """
        raw = _text_config(_as_dict(config))
        if not raw.get("model_type"):
            raise bad_config("model_type", "is missing")
        refuse_unsupported(SimpleNamespace(**raw), (raw.get("architectures") or [raw["model_type"]])[0])
        known = _known(raw)
        return cls(
            hidden=known.hidden_size,
            costs=layer_costs(known),
            map=(known.hc_count or 1) * known.hidden_size**2,
            model_type=raw["model_type"],
        )

    @property
    def layers(self) -> int:
        """L."""
        return len(self.costs)

    def to_json(self) -> dict[str, Any]:
        """One JSON object; equal layers stand together, under "costs"."""
        alike: dict[LayerCost, list[int]] = {}
        for i, cost in enumerate(self.costs):
            alike.setdefault(cost, []).append(i)
        return {
            "model_type": self.model_type,
            "hidden": self.hidden,
            "layers": self.layers,
            "map": self.map,
            "costs": [{"of_layers": places, **asdict(cost)} for cost, places in alike.items()],
        }


def _as_dict(config: Any) -> dict[str, Any]:
    if isinstance(config, Mapping):
        return dict(config)
    if hasattr(config, "to_dict"):
        return config.to_dict()
    if not isinstance(config, str | os.PathLike):
        raise SettingError(
            f"read a model's config from {type(config).__name__}",
            "it is none",
            "give a config, a dict or a path",
        )
    path = Path(config)
    path = path / "config.json" if path.is_dir() else path
    instead = "give a transformers config.json, or the folder that holds one"
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SettingError(f"read {path}", _one_line(error), instead) from error
    if not isinstance(found, dict):
        raise SettingError(f"read {path}", "it holds no JSON object", instead)
    return found


def _text_config(raw: dict[str, Any]) -> dict[str, Any]:
    inner, family = raw.get("text_config"), raw.get("model_type")
    if family not in _WITH_IMAGES or not isinstance(inner, Mapping):
        return raw
    return {"architectures": raw.get("architectures"), **inner, "model_type": f"{family}_text"}


def _known(raw: dict[str, Any]) -> SimpleNamespace:
    """`KEYS` as the family's own config class has them; None for what it does not know, whatever the file says."""
    family = raw["model_type"]
    try:
        own = AutoConfig.for_model(family)
    except Exception as error:  # a family that this version of transformers does not have yet
        raise SettingError("read the model's config", _one_line(error), "update transformers") from error
    for key in _REQUIRED:
        if raw.get(key) is None and hasattr(own, key):
            raise bad_config(key, "is missing")
    read = (*KEYS, *_DERIVING, *(_CHECKED if hasattr(own, "indexer_budget") else ()))
    given = {key: raw[key] for key in read if raw.get(key) is not None}
    if "sliding_window" in raw:  # null means no window; a family's default is for a missing key
        given["sliding_window"] = raw["sliding_window"]
    _positive(given)
    try:
        full = AutoConfig.for_model(family, **given)
    except Exception as error:  # families and transformers versions differ in what they raise
        raise SettingError("read the model's config", _one_line(error), "correct the config") from error
    found = {key: getattr(full, key, None) if hasattr(own, key) else None for key in KEYS}
    return SimpleNamespace(model_type=family, **found)


def _positive(given: Mapping[str, Any]) -> None:
    for key in _COUNTS:
        value = given.get(key)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise bad_config(key, f"is {value!r}, not a whole number of 1 or more")


def _one_line(error: Exception) -> str:
    return " ".join((getattr(error, "strerror", None) or str(error)).split()).rstrip(".")
