"""The maps artifact: an affine map for each late layer, and the identity of the model that they fit."""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import torch
from huggingface_hub import ModelCard, ModelHubMixin
from torch import Tensor

from ridgefill.affine import AffineMap, beside
from ridgefill.errors import MapsMismatchError, RidgeFillWarning, SettingError, UnsupportedModelError
from ridgefill.maps_folder import FolderContent, find_folder, read_folder, write_folder
from ridgefill.maps_hub import HUB_NAME, download, maps_card, ranges
from ridgefill.models.decoder import Decoder
from ridgefill.models.identity import ModelIdentity
from ridgefill.reading import Reading
from ridgefill.rows.token_table import TokenTable


class RidgeMaps(ModelHubMixin, library_name="ridgefill", tags=["ridgefill", "prefill", "kv-cache"]):
    """The maps of one split of one model; saved, loaded, pushed and pulled as a folder.

    Args:
        split: the split layer S, whose input predicts every later layer's.
        maps: layer -> map. The split layer itself needs none: its input is the split state.
        identity: of the model that the maps fit; without it, only widths and layer numbers can be checked.
        provenance: how they were fitted (lambda_rel, rows, documents, seed, held-out scores); JSON-able.
        encoding: what `save`, `save_pretrained` and `push_to_hub` write: "fp32", "bf16" or "int8".
        content_hash: of the files that they were loaded from.
        tokens: classes and calibration counts of the vocabulary's tokens, which some row selectors read.
        terminal: late recurrent layer -> Delta_bar [H_v, dk, dv] fp32, the mean of its exact less its filled
            state at the end of a prefix (paper 2.3).
        preset: name or settings of the plan that the maps were made for; JSON-able.
        reading: what the maps read and give; the paper's by default.
        down: [r, K] reduces what is read to the r columns that the maps then take, or None.
        streamed: a map, and the reduction, is copied to its rows' device each time it is used, and rests where it was
            loaded; otherwise it moves there the first time and stays (paper 4.2). The results are the same.

    Raises:
        SettingError: a reading of another split, or a reduction of another width.
    """

    def __init__(
        self,
        split: int,
        maps: Mapping[int, AffineMap],
        identity: ModelIdentity | None = None,
        provenance: Mapping[str, Any] | None = None,
        encoding: str = "fp32",
        content_hash: str | None = None,
        tokens: TokenTable | None = None,
        terminal: Mapping[int, Tensor] | None = None,
        preset: Mapping[str, Any] | None = None,
        reading: Reading | None = None,
        down: Tensor | None = None,
        streamed: bool = False,
    ) -> None:
        self.split = split
        self.reading = Reading.plain(split) if reading is None else reading
        if self.reading.split != split:
            raise SettingError(
                f"maps of split {split} that read layers {list(self.reading.layers)}",
                "the last layer read is the split",
                f"end the layers with {split}",
            )
        self.down, self.streamed = down, streamed
        self.maps = dict(maps)
        self.identity = identity
        self.provenance = dict(provenance or {})
        self.encoding = encoding
        self.tokens = tokens
        self.terminal = dict(terminal or {})
        self.preset = None if preset is None else dict(preset)
        self._content_hash = content_hash
        self._hub_mixin_config = None  # the mixin's config.json would repeat the manifest, and then drift

    def __repr__(self) -> str:
        return f"RidgeMaps(of {self.model_name}, split {self.split}, layers {ranges(self.maps)})"

    @property
    def model_name(self) -> str:
        """The model that they fit, as far as it has a name."""
        known = self.identity
        return "a model not named" if known is None else known.name or known.model_type

    @property
    def content_hash(self) -> str:
        """sha256 that tells these maps from any others: of the files they came from, or of the tensors.

        The token table and the terminal states count, for they change what is filled; the preset does not. A
        save and a load change it, for a file is another thing than the tensors before it was written; moving to
        another device or dtype does not.
        """
        if self._content_hash is None:
            digest = hashlib.sha256(f"split {self.split}".encode())
            if not self.reading.is_plain:
                digest.update(json.dumps(self.reading.to_json()).encode())
            if self.down is not None:
                digest.update(f"down {list(self.down.shape)}".encode() + _bytes(self.down.float()))
            for layer, m in sorted(self.maps.items()):
                digest.update(f"layer {layer} {list(m.weight.shape)}".encode())
                for tensor in (m.weight, m.bias):
                    digest.update(_bytes(tensor.float()))
            for layer, state in sorted(self.terminal.items()):
                digest.update(f"terminal {layer} {list(state.shape)}".encode() + _bytes(state.float()))
            for name, tensor in self.tokens.tensors().items() if self.tokens else ():
                digest.update(name.encode() + _bytes(tensor))
            self._content_hash = digest.hexdigest()
        return self._content_hash

    def read(self, states: Mapping[int, Tensor]) -> Tensor:
        """What the maps take of rows that follow one another: [..., m, d_in] (`Reading.of`).

        Args:
            states: layer -> [..., m, W] that entered it, for the layers of ``reading``.
        """
        down = self.down
        if down is not None:
            down = beside(down, states[self.split])
            if down is not self.down and not self.streamed:
                self._content_hash = self.content_hash
                self.down = down
        return self.reading.of(states, down)

    def predict(self, layer: int, read: Tensor) -> Tensor:
        """The predicted input of ``layer``, or what it writes (`Reading.gives`).

        Args:
            layer: the split layer or a later one.
            read: [..., d_in] of `read`, the split state for plain maps; the map goes where it is (``streamed``).

        Returns:
            [..., d_out] in read's dtype; the split state itself for the split layer without a map.

        Raises:
            MapsMismatchError: there is no map for ``layer``.
        """
        if (m := self.maps.get(layer)) is not None:
            m, rested = m.beside(read), m
            if m.weight is not rested.weight and not self.streamed:
                self._content_hash = self.content_hash  # of the maps as they came, before any is cast
                self.maps[layer] = m
            return m(read.to(m.weight.dtype)).to(read.dtype)
        if layer == self.split and self.reading.is_plain:
            return read
        raise MapsMismatchError(
            f"predict the input of layer {layer}",
            f"the maps are for split {self.split} and layers {ranges(self.maps)}",
            f"fit maps that have layer {layer}, or fill from another split",
        )

    def to(self, device: Any = None, dtype: torch.dtype | None = None) -> RidgeMaps:
        """The same maps elsewhere or in another dtype; these ones stay as they are."""
        return RidgeMaps(
            self.split,
            {layer: m.to(device, dtype) for layer, m in self.maps.items()},
            self.identity,
            self.provenance,
            self.encoding,
            self.content_hash,
            self.tokens,  # stays on the host, where the prompt's ids are looked up
            # fp32 whatever the maps become, as recurrent states are
            {layer: state.to(device) for layer, state in self.terminal.items()},
            self.preset,
            self.reading,
            None if self.down is None else self.down.to(device, dtype),
            self.streamed,
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
            SettingError: an unknown encoding, or a provenance or preset that JSON cannot hold.
        """
        content = FolderContent(
            self.split,
            {layer: (m.weight, m.bias) for layer, m in self.maps.items()},
            encoding or self.encoding,
            self.identity,
            self.provenance,
            tokens=self.tokens,
            terminal=self.terminal,
            preset=self.preset,
            reading=self.reading,
            down=self.down,
        )
        return write_folder(folder, content)

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
        if not path.exists() and HUB_NAME.fullmatch(str(source)):
            path = download(
                str(source),
                revision=revision,
                cache_dir=cache_dir,
                force_download=force_download,
                local_files_only=local_files_only,
                token=token,
            )
        found = read_folder(find_folder(path))
        return cls(
            found.split,
            {layer: AffineMap(weight, bias) for layer, (weight, bias) in found.tensors.items()},
            found.identity,
            found.provenance,
            found.encoding,
            found.content_hash,
            found.tokens,
            found.terminal,
            found.preset,
            found.reading,
            found.down,
        )

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
        tags = self._hub_mixin_info.model_card_data.tags
        return maps_card(self.model_name, self.split, self.maps, repo_id, tags=tags, **kwargs)

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
        self.check_identity(ModelIdentity.of(model, tokenizer), _decoder(model))

    def check_identity(self, own: ModelIdentity, decoder: Decoder | None = None) -> None:
        """As `check_model`, for a model that another engine loaded and whose identity is known.

        Args:
            own: the model's identity.
            decoder: the model layer by layer, where transformers runs it.

        Raises:
            MapsMismatchError: as `check_model`.
        """
        misfits = self._misfits(own, decoder)
        differences = misfits if self.identity is None else self.identity.differences(own)
        if differences := differences or misfits:
            self._refuse(own, "; ".join(differences))
        if self.identity is None:
            remarks = ["nothing to compare with: the maps name no model, only widths and layers were checked"]
        else:
            remarks = self.identity.remarks(own)
        if remarks:
            message = f"{self!r} on {own.name or own.model_type}: the model has {'; '.join(remarks)}"
            warnings.warn(message, RidgeFillWarning, stacklevel=3)

    def _misfits(self, own: ModelIdentity, decoder: Decoder | None) -> list[str]:
        """What in the maps' own shapes the model cannot be."""
        found = []
        d_in, d_out = (own.hidden, own.hidden)
        if decoder is not None:
            d_in, d_out = decoder.width_in, decoder.width_out
        outside = [layer for layer in self.maps if not self.split <= layer < own.layers]
        if outside or not 0 <= self.split < own.layers:
            ours = f"split {self.split} and the maps' layers {ranges(self.maps)}"
            found.append(f"{ours} do not lie in the model's layers 0-{own.layers - 1}")
        missing = [i for i in range(self.split + 1, own.layers) if i not in self.maps]
        if missing and not outside:
            found.append(f"the maps have none for layers {ranges(missing)}")
        for layer, m in sorted(self.maps.items()):
            gives = d_out
            if self.reading.gives == "writes" and layer < own.layers:
                # other engines check that width themselves
                gives = m.weight.shape[0] if decoder is None else decoder.map_width(layer, "writes")
            taken = self.reading.blocks * d_in if self.down is None else self.down.shape[0]
            if tuple(m.weight.shape) != (gives, taken):
                shape = " x ".join(map(str, m.weight.shape))
                wide = f"{d_in} wide" if d_in == d_out else f"{d_in} wide and its layers' inputs {d_out}"
                if not self.reading.is_plain or self.down is not None:
                    wide += f", of which it reads {self.reading.blocks} and gives {gives}"
                found.append(f"the map of layer {layer} is {shape}, and the model's states are {wide}")
                break
        if self.tokens is not None and len(self.tokens.counts) != own.vocab:
            found.append(f"the token table has {len(self.tokens.counts)} tokens, and the model {own.vocab}")
        late = range(max(self.split, 0), own.layers)
        kept = late if decoder is None else [i for i in late if decoder.recurrent(i)]
        if without := [layer for layer in self.terminal if layer not in kept]:
            found.append(f"there are terminal states of layers {ranges(without)}, which fill none")
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


def _decoder(model: Any) -> Decoder | None:
    """The model layer by layer, or None for one that cannot be filled, which is refused by name elsewhere."""
    try:
        return Decoder(model)
    except UnsupportedModelError:
        return None


def _bytes(tensor: Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().numpy().tobytes()
