"""The maps artifact: an affine map for each late layer, and the identity of the model that they fit."""

from __future__ import annotations

import hashlib
import re
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
from huggingface_hub import ModelCard, ModelCardData, ModelHubMixin, snapshot_download
from torch import Tensor

from ridgefill.errors import MapsFileError, MapsMismatchError, RidgeFillWarning, SettingError
from ridgefill.maps_folder import MANIFEST, FolderContent, find_folder, read_folder, write_folder
from ridgefill.models.identity import ModelIdentity

_HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*", re.ASCII)  # "org/name"; "./name" is a folder
# Not all safetensors: a name may turn out to be a model's, with many gigabytes of weights.
_HUB_FILES = [MANIFEST, f"*/{MANIFEST}", "proj*.L*.safetensors", "*/proj*.L*.safetensors"]

_CARD = """---
{header}
---

# Fill maps for {model}, split {split}

{number} affine maps, one for each layer {layers}, fitted by ridge regression on the hidden states of {model}.
With them, the Python package `ridgefill` runs most rows of a long prompt only up to layer {split}: the later
layers' inputs are predicted from the state there (h_l = A h_S + b), and only their cache entries are written.
The first token comes sooner; nothing was trained, and the model's weights are untouched. The last rows of the
prompt and every generated token run all layers.

Base model: {model}. The maps fit no other model, and ridgefill refuses to use them on one.

## Use

```python
import ridgefill
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained("{model}")
maps = ridgefill.RidgeMaps.from_pretrained("{repo_id}")
with ridgefill.filling(model, maps):
    model.generate(...)
```

`ridgefill check {model} {repo_id}` says whether they are safe to use on your machine, and from which prompt
length they pay.
"""


@dataclass(frozen=True)
class AffineMap:
    """h^_l = A h_S + b (paper 2.2).

    Attributes:
        weight: A, [d_out, d_in].
        bias: b, [d_out].
    """

    weight: Tensor
    bias: Tensor

    def __call__(self, h: Tensor) -> Tensor:
        """h [..., d_in] -> [..., d_out], on the map's device and in its dtype."""
        return torch.nn.functional.linear(h, self.weight, self.bias)

    def to(self, device: Any = None, dtype: torch.dtype | None = None) -> AffineMap:
        """The same map elsewhere or in another dtype; nothing is copied where nothing changes."""
        return AffineMap(self.weight.to(device=device, dtype=dtype), self.bias.to(device=device, dtype=dtype))


class RidgeMaps(ModelHubMixin, library_name="ridgefill", tags=["ridgefill", "prefill", "kv-cache"]):
    """The maps of one split of one model; saved, loaded, pushed and pulled as a folder.

    Args:
        split: the split layer S, whose input predicts every later layer's.
        maps: layer -> map. The split layer itself needs none: its input is the split state.
        identity: of the model that the maps fit; without it, only widths and layer numbers can be checked.
        provenance: how they were fitted (lambda_rel, rows, documents, seed, held-out scores); JSON-able.
        encoding: what `save`, `save_pretrained` and `push_to_hub` write: "fp32", "bf16" or "int8".
        content_hash: of the files that they were loaded from.
    """

    def __init__(
        self,
        split: int,
        maps: Mapping[int, AffineMap],
        identity: ModelIdentity | None = None,
        provenance: Mapping[str, Any] | None = None,
        encoding: str = "fp32",
        content_hash: str | None = None,
    ) -> None:
        self.split = split
        self.maps = dict(maps)
        self.identity = identity
        self.provenance = dict(provenance or {})
        self.encoding = encoding
        self._content_hash = content_hash
        self._hub_mixin_config = None  # the mixin's config.json would repeat the manifest, and then drift

    def __repr__(self) -> str:
        name = (
            "a model not named" if self.identity is None else self.identity.name or self.identity.model_type
        )
        return f"RidgeMaps(of {name}, split {self.split}, layers {_ranges(self.maps)})"

    @property
    def content_hash(self) -> str:
        """sha256 that tells these maps from any others: of the files they came from, or of the tensors.

        A save and a load change it, for a file is another thing than the tensors before it was written;
        moving to another device or dtype does not.
        """
        if self._content_hash is None:
            digest = hashlib.sha256(f"split {self.split}".encode())
            for layer, m in sorted(self.maps.items()):
                digest.update(f"layer {layer} {list(m.weight.shape)}".encode())
                for tensor in (m.weight, m.bias):
                    digest.update(tensor.detach().float().cpu().contiguous().numpy().data)
            self._content_hash = digest.hexdigest()
        return self._content_hash

    def predict(self, layer: int, h: Tensor) -> Tensor:
        """The predicted input of ``layer`` from the split state.

        Args:
            layer: the split layer or a later one.
            h: [..., d_in], the split state; it is moved to the map's device, and the result stays there.

        Returns:
            [..., d_out] in h's dtype; h itself for the split layer without a map.

        Raises:
            MapsMismatchError: there is no map for ``layer``.
        """
        if (m := self.maps.get(layer)) is not None:
            return m(h.to(device=m.weight.device, dtype=m.weight.dtype)).to(h.dtype)
        if layer == self.split:
            return h
        raise MapsMismatchError(
            f"predict the input of layer {layer}",
            f"the maps are for split {self.split} and layers {_ranges(self.maps)}",
            f"fit maps that have layer {layer}, or fill from another split",
        )

    def to(self, device: Any = None, dtype: torch.dtype | None = None) -> RidgeMaps:
        """The same maps elsewhere or in another dtype; these ones stay as they are."""
        moved = {layer: m.to(device, dtype) for layer, m in self.maps.items()}
        return RidgeMaps(
            self.split, moved, self.identity, self.provenance, self.encoding, content_hash=self.content_hash
        )

    def save(self, folder: str | Path, encoding: str | None = None) -> Path:
        """Writes the maps folder, whole or not at all.

        Args:
            folder: a new or empty folder, or a maps folder to replace (its other files are kept).
            encoding: "fp32", "bf16" or "int8" (a scale for each 128 columns); by default ``self.encoding``.

        Returns:
            The folder's path.

        Raises:
            OutputError: no space or permission, or the folder holds something else; nothing is left behind.
            SettingError: an unknown encoding, or provenance that JSON cannot hold.
        """
        tensors = {layer: (m.weight, m.bias) for layer, m in self.maps.items()}
        encoding = encoding or self.encoding
        return write_folder(
            folder, FolderContent(self.split, tensors, encoding, self.identity, self.provenance)
        )

    @classmethod
    def load(
        cls,
        source: str | Path,
        *,
        revision: str | None = None,
        cache_dir: str | Path | None = None,
        force_download: bool = False,
        local_files_only: bool = False,
        token: str | bool | None = None,
    ) -> RidgeMaps:
        """Reads maps, on the CPU; int8 ones become fp32.

        Args:
            source: a maps folder, a folder that holds exactly one, or a hub name (``org/name``).
            revision, cache_dir, force_download, local_files_only, token: for the hub, as in huggingface_hub.

        Raises:
            MapsFileError: there are none, several, or they are truncated, altered or of an unknown format.
        """
        path = Path(source).expanduser()
        if not path.exists() and _HUB_NAME.fullmatch(str(source)):
            path = _download(
                str(source),
                revision=revision,
                cache_dir=cache_dir,
                force_download=force_download,
                local_files_only=local_files_only,
                token=token,
            )
        found = read_folder(find_folder(path))
        maps = {layer: AffineMap(weight, bias) for layer, (weight, bias) in found.tensors.items()}
        return cls(found.split, maps, found.identity, found.provenance, found.encoding, found.content_hash)

    @classmethod
    def from_pretrained(  # the mixin's own looks for a config.json first, and offline fails without one
        cls,
        pretrained_model_name_or_path: str | Path,
        *,
        force_download: bool = False,
        token: str | bool | None = None,
        cache_dir: str | Path | None = None,
        local_files_only: bool = False,
        revision: str | None = None,
        **model_kwargs: Any,
    ) -> RidgeMaps:
        """As `load`, under the name that huggingface_hub's users know.

        Raises:
            MapsFileError: as `load`.
            SettingError: a setting that maps do not have.
        """
        if model_kwargs:
            raise SettingError(
                f"load maps with {', '.join(model_kwargs)}", "maps have no such setting", "leave it out"
            )
        return cls.load(
            pretrained_model_name_or_path,
            revision=revision,
            cache_dir=cache_dir,
            force_download=force_download,
            local_files_only=local_files_only,
            token=token,
        )

    def generate_model_card(self, *args: Any, repo_id: str = "org/name", **kwargs: Any) -> ModelCard:
        """The README of a pushed folder: what the maps are, for which model and split, how to use them."""
        model = (
            "a model not named" if self.identity is None else self.identity.name or self.identity.model_type
        )
        data = ModelCardData(
            base_model=model if _HUB_NAME.fullmatch(model) else None,
            library_name="ridgefill",
            tags=self._hub_mixin_info.model_card_data.tags,
            **kwargs,
        )
        return ModelCard(
            _CARD.format(
                header=data.to_yaml(),
                model=model,
                split=self.split,
                number=len(self.maps),
                layers=_ranges(self.maps),
                repo_id=repo_id,
            )
        )

    def check_model(self, model: Any, tokenizer: Any = None) -> None:
        """Makes sure that the maps were fitted on this model.

        Warns (RidgeFillWarning) of another name, dtype or quantization, with which maps are known to carry
        over, and where the maps or the weights cannot be compared.

        Args:
            model: a loaded transformers causal LM.
            tokenizer: compared too if given and if the maps recorded theirs.

        Raises:
            MapsMismatchError: another architecture, shape, tokenizer or other weights, or layers that the
                model does not have.
        """
        own = ModelIdentity.of(model, tokenizer)
        differences = self._misfits(own) if self.identity is None else self.identity.differences(own)
        if differences := differences or self._misfits(own):
            self._refuse(own, "; ".join(differences))
        if self.identity is None:
            remarks = ["nothing to compare with: the maps name no model, only widths and layers were checked"]
        else:
            remarks = self.identity.remarks(own)
        if remarks:
            message = f"{self!r} on {own.name or own.model_type}: the model has {'; '.join(remarks)}"
            warnings.warn(message, RidgeFillWarning, stacklevel=2)

    def _misfits(self, own: ModelIdentity) -> list[str]:
        """What in the maps' own shapes the model cannot be."""
        found = []
        outside = [layer for layer in self.maps if not self.split <= layer < own.layers]
        if outside or not 0 <= self.split < own.layers:
            ours = f"split {self.split} and the maps' layers {_ranges(self.maps)}"
            found.append(f"{ours} do not lie in the model's layers 0-{own.layers - 1}")
        missing = [i for i in range(self.split + 1, own.layers) if i not in self.maps]
        if missing and not outside:
            found.append(f"the maps have none for layers {_ranges(missing)}")
        for layer, m in sorted(self.maps.items()):
            if tuple(m.weight.shape) != (own.hidden, own.hidden):
                shape = " x ".join(map(str, m.weight.shape))
                found.append(
                    f"the map of layer {layer} is {shape}, and the model's states are {own.hidden} wide"
                )
                break
        return found

    def _refuse(self, own: ModelIdentity, why: str) -> NoReturn:
        raise MapsMismatchError(
            f"use {self!r} on {own.name or own.model_type}",
            f"the model is not the one they fit: {why}",
            "load the model that they were fitted on, or fit maps for this one with `ridgefill fit`",
        )

    def _save_pretrained(self, save_directory: Path) -> None:
        self.save(save_directory)

    @classmethod
    def _from_pretrained(cls, *, model_id: str, **settings: Any) -> RidgeMaps:
        return cls.load(model_id, **settings)


def _download(name: str, **settings: Any) -> Path:
    asked, instead = f"load maps from {name}", "name a maps folder, or a hub repository that has maps"
    try:
        path = Path(snapshot_download(name, allow_patterns=_HUB_FILES, **settings))
    except (OSError, ValueError, RuntimeError) as error:  # the hub's own errors are all of these kinds
        lines = str(error).strip().splitlines() or [type(error).__name__]
        why = f"there is no such folder, and the hub did not give it ({lines[0].rstrip('.')})"
        raise MapsFileError(
            asked, why, f"{instead} and that you may read; the first time needs a network"
        ) from error
    if not path.is_dir():
        raise MapsFileError(asked, f"that hub repository holds no {MANIFEST}", instead)
    return path


def _ranges(layers: Iterable[int]) -> str:
    """16, 17, 18, 20 -> "16-18, 20"."""
    runs: list[list[int]] = []
    for layer in sorted(layers):
        if runs and layer == runs[-1][-1] + 1:
            runs[-1].append(layer)
        else:
            runs.append([layer])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs) or "none"
