"""SwiftKV's released projections as a fill: keys and values of late layers from the split state (paper 6.3).

A SwiftKV checkpoint (such as Llama-3.1-SwiftKV-8B-Instruct) is a Llama checkpoint whose first layers are the original
model's, and which holds besides::

    model.norm_swiftkv.weight                               [d]         normalises h_S, once for all layers
    model.layers.<l>.self_attn.k_proj_swiftkv.weight        [H D, d]    late layers; in groups of
    model.layers.<l>.self_attn.v_proj_swiftkv.weight        [H D, d]    key_value_group_size, the first one only
    model.layers.<l>.self_attn.q_proj_swiftkv.weight        [d, d]      its own queries

As a fill only keys and values of filled rows are its own; exact rows run the original model, queries included: the
paper's "SwiftKV maps + exact tail". The released model, which answers with its own queries, is not run here.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ridgefill.errors import MapsMismatchError, ModelFileError, SettingError, UnsupportedModelError
from ridgefill.maps import AffineMap
from ridgefill.plan import layer_of
from ridgefill.reading import unit

if TYPE_CHECKING:
    from ridgefill.models.decoder import Decoder
    from ridgefill.walk import Prefix

_TENSOR = re.compile(r"(?:model\.)?layers\.(\d+)\.self_attn\.([kv])_proj_swiftkv\.(weight|bias)")
_NORM = re.compile(r"(?:model\.)?norm_swiftkv\.weight")
_FIRST_NORM = re.compile(r"(?:model\.)?layers\.0\.input_layernorm\.weight")
_SIZES = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
)


@dataclass(frozen=True)
class SwiftKV:
    """The fill by SwiftKV's projections; made by `load`.

    Attributes:
        split: S, the checkpoint's ``num_key_value_layers``.
        norm: [d] weight of its norm of the split state.
        eps: of that norm.
        keys, values: late layer -> projection [H D, d]; layers of one group share theirs.
    """

    split: int
    norm: Tensor = field(repr=False)
    eps: float
    keys: Mapping[int, AffineMap] = field(repr=False)
    values: Mapping[int, AffineMap] = field(repr=False)
    name: str = "swiftkv"

    def write(self, prefix: Prefix) -> None:
        """Writes each late layer's keys and values.

        Raises:
            SettingError: a plan of another split.
        """
        if prefix.plan.split != self.split:
            raise SettingError(
                f"SwiftKV's projections at split {prefix.plan.split}",
                f"they are for split {self.split}",
                f"use split={self.split}",
            )
        x = unit(prefix.h_split, self.eps)
        x = self.norm.to(x.device) * x
        for i in prefix.late_layers:
            prefix.write_ready(i, partial(self._writes, i, x, prefix))

    def _writes(self, i: int, x: Tensor, prefix: Prefix) -> tuple[Tensor, Tensor]:
        rows = x[:, prefix.first_read(i) :].to(self.keys[i].weight.device)
        both = torch.cat([self.keys[i](rows), self.values[i](rows)], -1)
        return prefix.decoder.finish(i, both, prefix.rows)

    @classmethod
    def load(cls, folder: str | os.PathLike[str], decoder: Decoder) -> SwiftKV:
        """Reads the projections of a checkpoint folder, for the original model that it was made from.

        Args:
            folder: holds ``config.json`` and safetensors, in one file or several; nothing else of them is read.
            decoder: the original model; the projections get its dtype and its layers' devices.

        Raises:
            ModelFileError: no such folder, another kind of checkpoint, or a tensor that is missing or senseless.
            MapsMismatchError: it was made from another model.
            UnsupportedModelError: late layers that keep more than keys and values.
        """
        folder = Path(folder)
        config = _config(folder)
        split = _split(folder, config)
        _check_sizes(folder, config, decoder)
        _refuse_other_layers(decoder, split)
        found = _tensors(folder)
        _check_same_model(folder, found, decoder)
        group, last = int(config.get("key_value_group_size") or 1), decoder.n_layers
        keys, values = {}, {}
        for i in range(split, last):
            first = split + (i - split) // group * group
            keys[i] = _projection(folder, found, decoder, first, i, "k")
            values[i] = _projection(folder, found, decoder, first, i, "v")
        norm = _need(folder, found, "norm_swiftkv.weight", (decoder.width_out,))
        eps: Any = config.get("rms_norm_eps") or getattr(decoder.config, "rms_norm_eps", None) or 1e-6
        return cls(split, norm.to(decoder.device(split), decoder.model.dtype), float(eps), keys, values)


def _refuse_other_layers(decoder: Decoder, split: int) -> None:
    why = None
    if decoder.wide:
        why = "it has several residual streams, and layers that keep more than keys and values"
    elif found := [i for i in range(split, decoder.n_layers) if decoder.recurrent(i)]:
        why = f"layer {found[0]} keeps a recurrent state, which has no keys and values"
    if why is not None:
        asked = f"SwiftKV's projections for {decoder.config.model_type}"
        raise UnsupportedModelError(asked, why, "use the ridge fill")


def _config(folder: Path) -> dict[str, Any]:
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or f"it is not JSON ({error})"
        raise _refusal(folder, f"config.json cannot be read: {why}") from error
    if not isinstance(config, dict) or not config.get("swiftkv"):
        raise _refusal(folder, 'its config.json does not say "swiftkv": true')
    return config


def _split(folder: Path, config: dict[str, Any]) -> int:
    split, group = config.get("num_key_value_layers"), config.get("key_value_group_size", 1)
    whole = [type(v) is int and v >= 1 for v in (split, group)]
    if not all(whole):
        raise _refusal(folder, f"num_key_value_layers is {split!r} and key_value_group_size {group!r}")
    return layer_of(int(split), int(config.get("num_hidden_layers") or 0))  # type: ignore[arg-type]


def _check_sizes(folder: Path, config: dict[str, Any], decoder: Decoder) -> None:
    for key in _SIZES:
        theirs, ours = config.get(key), getattr(decoder.config, key, None)
        if theirs != ours:
            raise _mismatch(folder, f"its {key} is {theirs}, and the model's {ours}")


def _tensors(folder: Path) -> dict[str, Tensor]:
    """The SwiftKV tensors of all files, and the first layer's norm, by names without "model."."""
    found: dict[str, Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118
                    if any(pattern.fullmatch(name) for pattern in (_TENSOR, _NORM, _FIRST_NORM)):
                        found[name.removeprefix("model.")] = file.get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise _refusal(folder, f"{path.name} cannot be read ({error})") from error
    if not any(_TENSOR.fullmatch(name) for name in found):
        raise _refusal(folder, "no safetensors file in it holds k_proj_swiftkv or v_proj_swiftkv weights")
    return found


def _check_same_model(folder: Path, found: Mapping[str, Tensor], decoder: Decoder) -> None:
    """Its first layers are the original's: one weight vector of theirs tells, where the file holds it."""
    theirs = found.get("layers.0.input_layernorm.weight")
    ours = getattr(getattr(decoder.layers[0], "input_layernorm", None), "weight", None)
    if theirs is None or ours is None or ours.is_meta:
        return
    if theirs.shape != ours.shape or not torch.allclose(
        theirs.float(), ours.detach().float().cpu(), rtol=0.02, atol=1e-3
    ):
        raise _mismatch(folder, "the first layer's norm has other weights")


def _projection(
    folder: Path, found: Mapping[str, Tensor], decoder: Decoder, first: int, i: int, which: str
) -> AffineMap:
    """Layer i's projection of keys or values, which its group's first layer holds."""
    attention = decoder.layers[i].self_attn
    width = decoder.config.num_key_value_heads * attention.head_dim
    name = f"layers.{first}.self_attn.{which}_proj_swiftkv"
    weight = _need(folder, found, f"{name}.weight", (width, decoder.width_out))
    bias = torch.zeros(width)
    if f"{name}.bias" in found:
        bias = _need(folder, found, f"{name}.bias", (width,))
    return AffineMap(weight, bias).to(decoder.device(i), decoder.model.dtype)


def _need(folder: Path, found: Mapping[str, Tensor], name: str, shape: tuple[int, ...]) -> Tensor:
    if name not in found:
        raise _refusal(folder, f"it holds no tensor model.{name}")
    tensor = found[name]
    if tuple(tensor.shape) != shape or not tensor.is_floating_point() or tensor.itemsize < 2:
        kind = f"{list(tensor.shape)} of {str(tensor.dtype).removeprefix('torch.')}"
        raise _refusal(folder, f"model.{name} is {kind}, not {list(shape)} of 16 bits or more")
    return tensor


def _refusal(folder: Path, why: str) -> ModelFileError:
    return ModelFileError(
        f"load SwiftKV's projections from {folder.name}",
        why,
        "give the folder of a released SwiftKV checkpoint, unquantized",
    )


def _mismatch(folder: Path, why: str) -> MapsMismatchError:
    return MapsMismatchError(
        f"use SwiftKV's projections from {folder.name}", why, "load the model that they were distilled from"
    )
