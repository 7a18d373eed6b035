"""What a user asks of the llama.cpp engine, checked before any weights are read."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gguf
import numpy as np

from ridgefill.engines.arms import refuse_arm
from ridgefill.engines.llamacpp.late_rows import READ, CacheForm, Recipe
from ridgefill.errors import SettingError, UnsupportedModelError
from ridgefill.fill import Ridge

if TYPE_CHECKING:
    from ridgefill.engines.llamacpp.gguf_model import GgufModel
    from ridgefill.plan import FillPlan

CACHE_TYPES = ("F32", "F16", "BF16", "Q8_0")
_F16 = int(gguf.GGMLQuantizationType.F16)
# Settings of `llama_cpp.Llama` that change what the late layers compute, which the fill would not know of.
_REFUSED = {
    "embedding": "an embedding context keeps no cache to fill",
    "lora_path": "the fill projects with the file's own weights, without the adapter",
    "kv_overrides": "the fill reads the file's own metadata",
    "rope_freq_base": "the fill takes the rotary settings from the file",
    "rope_freq_scale": "the fill takes the rotary settings from the file",
    "vocab_only": "there are no weights",
}
_EXACT = "leave it out, or use llama_cpp.Llama itself, which runs exactly"


def refuse_settings(asked: Mapping[str, Any]) -> None:
    """Raises SettingError for settings of `llama_cpp.Llama` that the fill cannot honour."""
    for name, why in _REFUSED.items():
        if asked.get(name):
            raise SettingError(f"{name}={asked[name]!r} with the fill", why, _EXACT)
    scaling = asked.get("rope_scaling_type", -1)
    if scaling not in (None, -1, 0):
        why = "the fill takes the rotary settings from the file"
        raise SettingError(f"rope_scaling_type={scaling} with the fill", why, _EXACT)
    for name in ("type_k", "type_v"):
        cache_type(name, asked.get(name))
    value = cache_type("type_v", asked.get("type_v"))
    if value not in ("F32", "F16", "BF16") and not asked.get("flash_attn"):
        raise SettingError(
            f"a {value} cache of values without flash attention",
            "llama.cpp keeps values transposed then, and cannot quantize them",
            "add flash_attn=True, or keep values as f16",
        )


def numbered_types(asked: Mapping[str, Any]) -> dict[str, Any]:
    """Settings whose cache types, where they are named ("q8_0"), became ggml's numbers.

    Raises:
        SettingError: no type of that name.
    """
    made = dict(asked)
    for key in ("type_k", "type_v"):
        if isinstance(name := made.get(key), str):
            if name.upper() not in gguf.GGMLQuantizationType.__members__:
                raise SettingError(
                    f"{key}={name}", "ggml has no such type", f"use one of {', '.join(CACHE_TYPES)}"
                )
            made[key] = int(gguf.GGMLQuantizationType[name.upper()])
    return made


def cache_type(name: str, number: int | None) -> str:
    """The type of keys or values by ggml's number, f16 unless named.

    Raises:
        SettingError: the fill cannot write it.
    """
    try:
        found = gguf.GGMLQuantizationType(_F16 if number is None else number).name
    except ValueError:
        found = f"type {number}"
    if found not in CACHE_TYPES:
        raise SettingError(
            f"{name}={found} with the fill",
            "rows of that cache type were never written and compared",
            f"use one of {', '.join(CACHE_TYPES)}, or run exactly (fill='exact')",
        )
    return found


def refuse_plan(plan: FillPlan, model: GgufModel) -> None:
    """Raises SettingError for what a plan asks and llama.cpp cannot do."""
    refuse_arm(plan.fill, "on llama.cpp")
    if plan.rows is not None and plan.rows.probes:
        raise SettingError(
            f"rows chosen by {plan.rows} on llama.cpp",
            "late attention is not read there",
            "use another selector",
        )
    if plan.rows is not None and (model.window is not None or model.softcap):
        raise SettingError(
            f"rows chosen by {plan.rows} in {model.path.name} on llama.cpp",
            "layers with a sliding window keep no rows before it, which such rows would read"
            if model.window is not None
            else "its attention's logits are capped, which is not read there",
            "leave the rows out, make the tail longer, or use the transformers engine",
        )
    if plan.corrections:
        raise SettingError(
            "corrections on llama.cpp",
            "they are not built there",
            "leave them out, or use the transformers engine",
        )


def recipes(plan: FillPlan, model: GgufModel) -> dict[int, Recipe]:
    """Late layer -> how its input, or its keys and values, come from the source states, for the plan's arm.

    Raises:
        UnsupportedModelError: maps of another width than the model's.
    """
    late = range(plan.split, model.layers)
    if not isinstance(plan.fill, Ridge):
        return {layer: Recipe(((plan.split, None),)) for layer in late}
    maps, made = plan.fill.maps, {}
    plain = maps.reading.is_plain and maps.down is None
    taken = maps.reading.blocks * model.width if maps.down is None else maps.down.shape[0]
    writes = maps.reading.gives == "writes"
    keys = model.kv_heads * model.key_width
    given = keys + model.kv_heads * model.value_width if writes else model.width
    for layer in late:
        if (found := maps.maps.get(layer)) is None:
            made[layer] = Recipe(((plan.split, None),))
            continue
        weight, bias = (np.asarray(t.detach().float().cpu()) for t in (found.weight, found.bias))
        if weight.shape != (given, taken):
            raise UnsupportedModelError(
                f"the map of layer {layer}, {weight.shape[0]} x {weight.shape[1]}, on llama.cpp",
                f"the model's states are {model.width} wide, and its maps would be {given} x {taken}",
                "use maps that were fitted for this model",
            )
        source = plan.split if plain else READ
        if not writes:
            made[layer] = Recipe(((source, weight),), bias)
            continue
        values = Recipe(((source, weight[keys:]),), bias[keys:])
        made[layer] = Recipe(
            ((source, _in_file_order(weight[:keys], model)),), _in_file_order(bias[:keys], model), values
        )
    return made


def _in_file_order(keys: np.ndarray, model: GgufModel) -> np.ndarray:
    """Rows of a map that gives keys, [H D, ...], as the file's own projection has them.

    Files of the llama family keep the two halves that a rotary embedding pairs side by side, number by number.
    """
    if model.architecture != "llama":
        return keys
    paired = keys.reshape(model.kv_heads, 2, model.key_width // 2, *keys.shape[1:]).swapaxes(1, 2)
    return np.ascontiguousarray(paired.reshape(keys.shape))


def cache_form(model: GgufModel, key_type: int, value_type: int) -> CacheForm:
    """The form of llama.cpp's cache: quantized ones are turned by a Hadamard rotation, where the width allows it."""
    off = os.environ.get("LLAMA_ATTN_ROT_DISABLE", "0").strip() not in ("", "0")
    plain = [int(gguf.GGMLQuantizationType[name]) for name in ("F32", "F16", "BF16")]
    keys = values = 0
    if key_type not in plain and model.key_width % 64 == 0 and not off:
        keys = 64
        while model.key_width % (keys * 2) == 0:
            keys *= 2
    if value_type not in plain and model.value_width % 64 == 0 and not off:
        values = 64  # llama.cpp keeps to the smallest for values
    return CacheForm(key_type, value_type, keys, values)


def model_file(path: str | Path) -> Path:
    """A GGUF file's path.

    Raises:
        SettingError: a folder or a hub name, which llama.cpp cannot load.
    """
    found = Path(path).expanduser()
    if found.suffix != ".gguf" and not found.is_file():
        raise SettingError(
            f"{path} on llama.cpp",
            "llama.cpp loads GGUF files alone",
            "name a .gguf file, or use the transformers engine",
        )
    return found
