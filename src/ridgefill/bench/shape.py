"""What a multiply-accumulate count needs to know of a model, read from its config alone."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from transformers import AutoConfig

from ridgefill.errors import SettingError, UnsupportedModelError
from ridgefill.models.decoder import refuse_unsupported

_REQUIRED = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
# With these keys the family's own config class says which layers have a window, and how wide a head is.
_OPTIONAL = (
    "num_key_value_heads",
    "head_dim",
    "layer_types",
    "sliding_window",
    "use_sliding_window",
    "max_window_layers",
    "sliding_window_pattern",
)


@dataclass(frozen=True)
class ModelShape:
    """What the count needs to know of a model.

    Attributes:
        hidden: width of a layer's input, d.
        layers: L.
        heads, kv_heads, head_dim: query heads, key and value heads, and the width of one head.
        intermediate: width of the gated MLP.
        windows: per layer, the number of keys its sliding window holds (a row's own included), or None.
        model_type: the family, as the config names it.
    """

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    windows: tuple[int | None, ...]
    model_type: str = ""

    @classmethod
    def from_config(cls, config: Any) -> ModelShape:
        """Reads the shape of a supported model.

        Args:
            config: a transformers config, its dict, or the path of a ``config.json`` or of its folder.
                Keys that were left out take the defaults of the family's own config class.

        Raises:
            UnsupportedModelError: a family (or a kind of layer) that cannot be filled, by name.
            SettingError: the file cannot be read, or a key is missing or senseless.
        """
        raw = _as_dict(config)
        if not raw.get("model_type"):
            raise _bad_config("model_type", "is missing")
        refuse_unsupported(SimpleNamespace(**raw), (raw.get("architectures") or [raw["model_type"]])[0])
        for key in _REQUIRED:
            if raw.get(key) is None:
                raise _bad_config(key, "is missing")
        given = {key: raw[key] for key in (*_REQUIRED, *_OPTIONAL) if raw.get(key) is not None}
        if "sliding_window" in raw:  # null means no window; a family's default is for a missing key
            given["sliding_window"] = raw["sliding_window"]
        _positive(given)
        try:
            full = AutoConfig.for_model(raw["model_type"], **given)
        except Exception as error:  # families and transformers versions differ in what they raise
            raise SettingError("read the model's config", _one_line(error), "correct the config") from error
        heads = full.num_attention_heads
        return cls(
            hidden=full.hidden_size,
            layers=full.num_hidden_layers,
            heads=heads,
            kv_heads=full.num_key_value_heads,
            head_dim=getattr(full, "head_dim", None) or full.hidden_size // heads,
            intermediate=full.intermediate_size,
            windows=_windows(full),
            model_type=raw["model_type"],
        )

    @property
    def row(self) -> int:
        """Projections and MLP of one exact row in one layer."""
        return 2 * self.hidden * self.heads * self.head_dim + self.kv + 3 * self.hidden * self.intermediate

    @property
    def kv(self) -> int:
        """Key and value projections of one row in one layer."""
        return 2 * self.hidden * self.kv_heads * self.head_dim

    @property
    def key(self) -> int:
        """Score and weighted sum of one attended key, over all query heads."""
        return 2 * self.heads * self.head_dim

    @property
    def map(self) -> int:
        """One map applied to one row."""
        return self.hidden * self.hidden


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


def _positive(given: Mapping[str, Any]) -> None:
    for key in (*_REQUIRED, "num_key_value_heads", "head_dim", "sliding_window"):
        value = given.get(key)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise _bad_config(key, f"is {value!r}, not a whole number of 1 or more")


def _windows(config: Any) -> tuple[int | None, ...]:
    """Per layer, the window that the family's own config class gives it."""
    own = type(config)()  # a key that the family does not know is kept by its config, but no layer reads it
    window = getattr(config, "sliding_window", None) if hasattr(own, "sliding_window") else None
    kinds = getattr(config, "layer_types", None) if hasattr(own, "layer_types") else None
    layers = config.num_hidden_layers
    if kinds is None:
        return (window,) * layers
    if len(kinds) != layers:
        raise _bad_config("layer_types", f"names {len(kinds)} layers where num_hidden_layers is {layers}")
    known: dict[str, int | None] = {"full_attention": None, "sliding_attention": window}
    for kind in kinds:
        if kind not in known:
            raise UnsupportedModelError(
                f"count a layer of type {kind!r}",
                "it is not supported",
                "use a model with attention layers only",
            )
    return tuple(known[kind] for kind in kinds)


def _bad_config(key: str, why: str) -> SettingError:
    return SettingError("read the model's config", f"the key {key!r} {why}", "give a complete config.json")


def _one_line(error: Exception) -> str:
    return " ".join((getattr(error, "strerror", None) or str(error)).split()).rstrip(".")
