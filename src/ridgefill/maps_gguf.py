"""Maps as one GGUF file, Q8_0: the form in which llama.cpp's users keep weights.

    ridgefill.l<l>.weight  [d_out, d_in] Q8_0 (blocks of 32 along d_in; F32 where d_in is no multiple of 32)
    ridgefill.l<l>.bias    [d_out] F32
    ridgefill.down.weight  [r, K] Q8_0, where the maps share a reduction (`fit.reduce`)

The metadata names the split, the model (`ModelIdentity`) and the maps that it was written from, by their hash; the
file's own tensors are hashed too, and checked when it is read.
"""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

from ridgefill.errors import MapsFileError, SettingError
from ridgefill.files import whole
from ridgefill.maps import AffineMap, RidgeMaps
from ridgefill.models.identity import ModelIdentity
from ridgefill.reading import Reading

ARCHITECTURE = "ridgefill-maps"
FORMAT = 2
FORMATS = (1, 2)  # 1 knew the paper's maps only
_Q8_0, _F32 = gguf.GGMLQuantizationType.Q8_0, gguf.GGMLQuantizationType.F32
_DOWN = "ridgefill.down.weight"
_NAME = re.compile(r"ridgefill\.l(\d+)\.(weight|bias)")


def load_maps(source: str | Path) -> RidgeMaps:
    """Maps from a GGUF file, a maps folder or a hub name.

    Raises:
        MapsFileError: as `load_gguf` and `RidgeMaps.load`.
    """
    return load_gguf(source) if str(source).endswith(".gguf") else RidgeMaps.load(source)


def save_gguf(maps: RidgeMaps, path: str | Path) -> Path:
    """Writes maps as one GGUF file, whole or not at all; its path.

    What llama.cpp cannot use (token table, terminal states) is left out.

    Raises:
        OutputError: it cannot be written.
        SettingError: weights that are not finite.
    """
    tensors: dict[str, tuple[np.ndarray, gguf.GGMLQuantizationType]] = {}
    for layer, m in sorted(maps.maps.items()):
        weight, bias = (np.ascontiguousarray(t.detach().float().cpu().numpy()) for t in (m.weight, m.bias))
        if not (np.isfinite(weight).all() and np.isfinite(bias).all()):
            raise SettingError(f"save the map of layer {layer}", "it is not finite", "fit the maps again")
        kind = _Q8_0 if weight.shape[1] % 32 == 0 else _F32
        tensors[f"ridgefill.l{layer}.weight"] = gguf.quantize(weight, kind), kind
        tensors[f"ridgefill.l{layer}.bias"] = bias, _F32
    if maps.down is not None:
        down = np.ascontiguousarray(maps.down.detach().float().cpu().numpy())
        kind = _Q8_0 if down.shape[1] % 32 == 0 else _F32
        tensors[_DOWN] = gguf.quantize(down, kind), kind
    with whole(path) as temporary:
        writer = gguf.GGUFWriter(temporary, ARCHITECTURE)
        writer.add_string("general.type", "adapter")
        writer.add_name(f"RidgeFill maps of {maps.model_name}, split {maps.split}")
        plain = maps.reading.is_plain and maps.down is None
        writer.add_uint32("ridgefill.format", 1 if plain else FORMAT)
        if not plain:
            writer.add_string("ridgefill.reading", json.dumps(maps.reading.to_json()))
        writer.add_uint32("ridgefill.split", maps.split)
        writer.add_string("ridgefill.maps_hash", maps.content_hash)
        writer.add_string(
            "ridgefill.tensors_sha256", _sha256({name: data for name, (data, _) in tensors.items()})
        )
        if maps.identity is not None:
            writer.add_string("ridgefill.model", json.dumps(maps.identity.to_json()))
        writer.add_string("ridgefill.provenance", json.dumps(_finite(maps.provenance)))
        if maps.preset is not None:
            writer.add_string("ridgefill.preset", json.dumps(maps.preset))
        for name, (data, kind) in tensors.items():
            writer.add_tensor(name, data, raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return Path(path)


def load_gguf(path: str | Path) -> RidgeMaps:
    """Reads `save_gguf`'s file, as fp32 on the CPU; the content hash is that of the maps that it was written from.

    Raises:
        MapsFileError: missing, no such file, damaged, or of another format version.
    """
    path = Path(path).expanduser()
    asked = f"load maps from {path}"
    if not path.is_file():
        raise MapsFileError(
            asked, "there is no such file", "name a GGUF file that `ridgefill export-gguf` wrote"
        )
    try:
        reader = gguf.GGUFReader(path)
        found = {key: field.contents() for key, field in reader.fields.items()}
        tensors = {t.name: (np.array(t.data), t.tensor_type) for t in reader.tensors}
    except Exception as error:  # gguf raises whatever the bytes lead it into
        raise MapsFileError(asked, f"it is damaged ({error})", "export the maps again") from error
    if found.get("general.architecture") != ARCHITECTURE:
        what = found.get("general.architecture")
        raise MapsFileError(asked, f"it holds a {what!r}, not maps", "name the maps' own GGUF file")
    if found.get("ridgefill.format") not in FORMATS:
        why = f"its format is {found.get('ridgefill.format')}, and this version reads up to {FORMAT}"
        raise MapsFileError(asked, why, "install the version that wrote it, or export the maps again")
    if _sha256({name: data for name, (data, _) in tensors.items()}) != found.get("ridgefill.tensors_sha256"):
        raise MapsFileError(asked, "its tensors were altered", "export the maps again")
    try:
        layers: dict[int, dict[str, np.ndarray]] = {}
        down = tensors.pop(_DOWN, None)
        for name, (data, kind) in tensors.items():
            match = _NAME.fullmatch(name)
            if match is None:
                raise ValueError(name)
            layers.setdefault(int(match[1]), {})[match[2]] = gguf.dequantize(data, kind)
        maps = {layer: AffineMap(_tensor(t["weight"]), _tensor(t["bias"])) for layer, t in layers.items()}
        model, preset, reading = (found.get(f"ridgefill.{key}") for key in ("model", "preset", "reading"))
        return RidgeMaps(
            int(found["ridgefill.split"]),
            maps,
            None if model is None else ModelIdentity.from_json(json.loads(model)),
            json.loads(found["ridgefill.provenance"]),
            content_hash=f"{found['ridgefill.maps_hash']}-q8_0",
            preset=None if preset is None else json.loads(preset),
            reading=None if reading is None else Reading.from_json(json.loads(reading)),
            down=None if down is None else _tensor(gguf.dequantize(*down)),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise MapsFileError(asked, f"it lacks something ({error!r})", "export the maps again") from error


def _tensor(values: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.array(values, np.float32))


def _sha256(tensors: dict[str, np.ndarray]) -> str:
    digest = hashlib.sha256()
    for name, data in sorted(tensors.items()):
        digest.update(name.encode())
        digest.update(np.ascontiguousarray(data).tobytes())
    return digest.hexdigest()


def _finite(value: Any) -> Any:
    return json.loads(json.dumps(value, default=str), parse_constant=lambda _: None)
