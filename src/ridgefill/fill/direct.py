"""Late layers' keys and values straight from the split state: what trained projectors learn (paper 7).

    x = h_S / rms(h_S)          [k_l ; v_l] = W_l x + c_l        for every late attention layer l > S

The state is normalised as a layer norm would, without a weight, because that is what trained projections read. Keys
are predicted before rotary embedding and then rotated to their positions. The split layer's own input is known: it
writes what it would have written.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ridgefill.errors import MapsFileError, MapsMismatchError, SettingError, UnsupportedModelError
from ridgefill.files import whole
from ridgefill.maps import AffineMap
from ridgefill.models.identity import ModelIdentity

if TYPE_CHECKING:
    from ridgefill.models.decoder import Decoder
    from ridgefill.walk import Prefix

FORMAT = 1
_ABOUT = "ridgefill_direct"  # the metadata key that says what the file is


@dataclass(frozen=True)
class DirectKV:
    """The fill by direct maps; made by `fit.direct.fit_direct`.

    Attributes:
        split: S.
        maps: late attention layer after S -> its map, [2 H D, d] and [2 H D]: keys first, then values, head by head.
        eps: added to the mean square before its root.
        identity: of the model that they fit.
        provenance: how they were fitted; JSON-able.
    """

    split: int
    maps: Mapping[int, AffineMap] = field(repr=False)
    eps: float
    identity: ModelIdentity = field(repr=False)
    provenance: Mapping[str, Any] = field(default_factory=dict, repr=False)
    name: str = "direct"

    def write(self, prefix: Prefix) -> None:
        """Writes each late layer's keys and values.

        Raises:
            SettingError: a plan of another split.
            UnsupportedModelError: a model with layers that keep other things.
        """
        check_ready(prefix, "direct maps", self.split)
        x = normalised(prefix.h_split, self.eps)
        for i in prefix.late_layers:
            if i == self.split:
                prefix.write(i, partial(prefix.split_state, i))
            else:
                prefix.write_ready(i, partial(self._writes, i, x, prefix))

    def _writes(self, i: int, x: Tensor, prefix: Prefix) -> tuple[Tensor, Tensor]:
        if (found := self.maps.get(i)) is None:
            raise MapsMismatchError(
                f"write layer {i}",
                f"the direct maps are for layers {', '.join(map(str, self.maps)) or 'none'}",
                "fit them for this model",
            )
        m = found.to(prefix.decoder.device(i))
        both = m(x[:, prefix.first_read(i) :].to(m.weight.device, m.weight.dtype))
        keys, values = both.to(prefix.h_split.dtype).chunk(2, -1)
        return at_positions(prefix, i, keys, values)

    def check_model(self, model: Any, tokenizer: Any = None) -> None:
        """Raises MapsMismatchError unless they were fitted for this model (and tokenizer, if one is given)."""
        found = self.identity.differences(ModelIdentity.of(model, tokenizer))
        if found:
            raise MapsMismatchError(
                f"use direct maps of {self.identity.name or self.identity.model_type}",
                f"the loaded model has {'; '.join(found)}",
                "load the model that they were fitted for, or fit maps for this one",
            )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes one safetensors file.

        Raises:
            OutputError: the disk is full, or the place is not writable.
        """
        about = {"format": FORMAT, "split": self.split, "eps": self.eps, "layers": sorted(self.maps)}
        about |= {"identity": self.identity.to_json(), "provenance": dict(self.provenance)}
        tensors = {}
        for i, m in self.maps.items():
            tensors[f"direct.{i}.weight"] = m.weight.cpu().contiguous()
            tensors[f"direct.{i}.bias"] = m.bias.cpu().contiguous()
        with whole(path) as temporary:
            try:
                save_file(tensors, temporary, {_ABOUT: json.dumps(about, allow_nan=False)})
            except SafetensorError as error:  # it wraps the system's own error: a full disk, mostly
                raise OSError(str(error)) from error

    @classmethod
    def load(cls, path: str | os.PathLike[str], model: Any = None, tokenizer: Any = None) -> DirectKV:
        """Reads `save`.

        Args:
            model, tokenizer: what they must fit, if given.

        Raises:
            MapsFileError: the file is missing, damaged or something else.
            MapsMismatchError: the maps of another model.
        """
        name = Path(path).name
        try:
            with safe_open(path, framework="pt") as file:
                about = json.loads((file.metadata() or {})[_ABOUT])
                if about["format"] != FORMAT:
                    raise _damaged(name, f"has the format {about['format']}, not {FORMAT}")
                maps = {int(i): _map(file.get_tensor, int(i)) for i in about["layers"]}
            identity = ModelIdentity.from_json(about["identity"])
            made = cls(int(about["split"]), maps, float(about["eps"]), identity, about["provenance"])
        except (KeyError, TypeError, ValueError) as error:
            raise _damaged(name, f"holds no direct maps ({error})") from error
        except (OSError, SafetensorError) as error:
            raise _damaged(name, f"cannot be read ({error})") from error
        if model is not None:
            made.check_model(model, tokenizer)
        return made


# --- what fills share that make keys and values themselves ---------------------------------------------------


def normalised(h: Tensor, eps: float) -> Tensor:
    """h / rms(h) over the last dimension, fp32."""
    h = h.float()
    return h * torch.rsqrt(h.square().mean(-1, keepdim=True) + eps)


def at_positions(prefix: Prefix, i: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """What `Decoder.writes` gives of keys and values [B, m, H D]: keys at their positions, [B, H, m, D] each.

    Args:
        keys, values: of the last m prefix rows.
    """
    decoder, m = prefix.decoder, keys.shape[1]
    dim = decoder.layers[i].self_attn.head_dim
    keys, values = (t.unflatten(-1, (-1, dim)).transpose(1, 2) for t in (keys, values))
    rows = prefix.rows if m == prefix.rows.positions.shape[1] else prefix.rows.last(m)
    return decoder.rotate(i, keys, rows), values


def check_ready(prefix: Prefix, asked: str, split: int) -> None:
    """Raises a named refusal where maps of keys and values for ``split`` cannot fill this prefix."""
    refuse_other_layers(prefix.decoder, asked, split)
    if prefix.plan.split != split:
        raise SettingError(
            f"{asked} at split {prefix.plan.split}",
            f"they are for split {split}",
            f"use split={split}",
        )


def refuse_other_layers(decoder: Decoder, asked: str, split: int) -> None:
    """Raises UnsupportedModelError for a model whose late layers keep more than keys and values."""
    why = None
    if decoder.wide:
        why = "it has several residual streams, and layers that keep more than keys and values"
    elif found := [i for i in range(split, decoder.n_layers) if decoder.recurrent(i)]:
        why = f"layer {found[0]} keeps a recurrent state, which has no keys and values"
    if why is not None:
        raise UnsupportedModelError(
            f"{asked} for {decoder.config.model_type}", why, "use the ridge fill, which predicts inputs"
        )


def _map(read: Callable[[str], Tensor], i: int) -> AffineMap:
    weight, bias = read(f"direct.{i}.weight"), read(f"direct.{i}.bias")
    if weight.ndim != 2 or bias.shape != weight.shape[:1]:
        raise ValueError(f"the tensors of layer {i} are no affine map")
    return AffineMap(weight, bias)


def _damaged(name: str, why: str) -> MapsFileError:
    return MapsFileError(
        f"load direct maps from {name}", f"the file {why}", "copy it again, or fit the maps anew"
    )
