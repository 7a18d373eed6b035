"""The maps folder: how maps lie on disk, and what is refused when they are read back.

A folder holds ``ridgefill.json`` (the manifest) and the safetensors files that `maps_files` describes: one a
layer, and where the fit made them a token table and terminal states. The manifest names every file with its
sha256, and holds its own. Published folders of the same layout but with another manifest are read too; they
carry no hashes, which is said.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import uuid
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from ridgefill.errors import MapsFileError, OutputError, RidgeFillError, RidgeFillWarning, SettingError
from ridgefill.files import sha256_file
from ridgefill.fit.quantize import GROUP
from ridgefill.maps_files import (
    DOWN_FILE,
    DTYPES,
    LAYER_FILE,
    OTHER_FILES,
    TERMINAL_FILE,
    TOKENS_FILE,
    damaged,
    encode_layer,
    encode_others,
    file_sha256,
    is_maps_file,
    load_down,
    load_layer,
    load_terminal,
    load_tokens,
)
from ridgefill.models.identity import ModelIdentity
from ridgefill.reading import Reading
from ridgefill.rows.token_table import TokenTable

MANIFEST = "ridgefill.json"
FORMAT = "ridgefill-maps"
FORMAT_VERSION = 1
READING_VERSION = (
    2  # of maps that read or give something else than the paper's: who reads 1 only must refuse them
)


@dataclass(frozen=True)
class FolderContent:
    """What a maps folder says.

    Attributes:
        split: the split layer, S.
        tensors: layer -> weight [d_out, d_in] and bias [d_out].
        encoding: "fp32", "bf16" or "int8".
        identity: of the model that the maps fit, or None.
        provenance: how they were fitted; JSON-able.
        content_hash: sha256 over the split and the files' sha256.
        tokens: classes and frequencies of the vocabulary's tokens, or None.
        terminal: late recurrent layer -> offset of its state, [H_v, dk, dv] fp32.
        preset: the plan that the maps were made for; JSON-able, or None.
        reading: what the maps read and give, or None for the paper's.
        down: [r, K] the reduction that they share, or None.
    """

    split: int
    tensors: Mapping[int, tuple[Tensor, Tensor]]
    encoding: str = "fp32"
    identity: ModelIdentity | None = None
    provenance: Mapping[str, Any] = field(default_factory=dict)
    content_hash: str = ""
    tokens: TokenTable | None = None
    terminal: Mapping[int, Tensor] = field(default_factory=dict)
    preset: Mapping[str, Any] | None = None
    reading: Reading | None = None
    down: Tensor | None = None


def write_folder(folder: str | os.PathLike[str], content: FolderContent) -> Path:
    """Writes a maps folder, whole or not at all.

    An earlier maps folder of that name is replaced once the new one is complete; files in it that are no maps
    (a README, a report) are kept.

    Returns:
        The folder's resolved path.

    Raises:
        OutputError: no space or permission, or the folder holds something else than maps.
        SettingError: an unknown encoding, provenance that JSON cannot hold, or weights that int8 cannot.
    """
    if content.encoding not in DTYPES:
        raise SettingError(
            f"save maps as {content.encoding!r}",
            "there is no such encoding",
            f"use one of {', '.join(DTYPES)}",
        )
    asked = f"save maps to {folder}"
    temporary: Path | None = None
    try:
        target = Path(folder).expanduser().resolve()
        _refuse_foreign(asked, target)
        temporary = _sibling(target)
        temporary.mkdir(parents=True)
        _write_files(temporary, content)
        _keep_other_files(target, temporary)
        _put_in_place(temporary, target)
    except (OSError, SafetensorError) as error:  # safetensors has an error of its own for a full disk
        why = getattr(error, "strerror", None) or str(error)
        raise OutputError(asked, why, "free some space or choose another place, then save again") from error
    finally:
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)
    return target


def find_folder(source: str | os.PathLike[str]) -> Path:
    """The maps folder at ``source``: itself, or the only one in it.

    Raises:
        MapsFileError: there is none, or there are several.
    """
    path = Path(source).expanduser()
    asked = f"load maps from {source}"
    fit = "name the folder that `ridgefill fit -o` wrote, or a hub name such as org/name"
    try:
        if not path.is_dir():
            raise MapsFileError(asked, "there is no such folder", fit)
        if (path / MANIFEST).is_file():
            return path
        children = sorted(child for child in path.iterdir() if (child / MANIFEST).is_file())
    except OSError as error:
        raise MapsFileError(asked, error.strerror or str(error), fit) from error
    children = [child for child in children if not child.name.startswith(".")]  # a save in progress
    if not children:
        raise MapsFileError(asked, f"neither it nor a folder in it holds {MANIFEST}", fit)
    if len(children) > 1:
        names = ", ".join(child.name for child in children)
        raise MapsFileError(
            asked, f"it holds several maps folders: {names}", f"name one, such as {children[0]}"
        )
    return children[0]


def read_folder(folder: Path) -> FolderContent:
    """Reads a maps folder and checks every hash and shape it names.

    Raises:
        MapsFileError: a file is missing, truncated or altered, or the format is unknown.
    """
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        if not isinstance(manifest, dict):
            raise ValueError("no object")
    except (OSError, ValueError) as error:
        raise damaged(folder, MANIFEST, f"cannot be read ({error})") from error
    if manifest.get("format") != FORMAT:
        return _read_published(folder, manifest)
    _check_manifest(folder, manifest)
    try:
        return _read_own(folder, manifest)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        if isinstance(error, RidgeFillError):
            raise
        raise damaged(folder, MANIFEST, f"lacks something or names it wrongly ({error!r})") from error


def content_sha256(split: int, files: Mapping[str, str], reading: Mapping[str, Any] | None = None) -> str:
    """sha256 over the split, every file's sha256 and what is read: equal maps on disk, equal hash."""
    about = {} if reading is None else {"reading": dict(reading)}
    return _json_sha256({"split": split, "files": dict(files)} | about)


def _write_files(folder: Path, content: FolderContent) -> None:
    layers = []
    for layer, (weight, bias) in sorted(content.tensors.items()):
        name, tensors = encode_layer(layer, weight.detach().cpu(), bias.detach().cpu(), content.encoding)
        d_out, d_in = weight.shape
        entry = {"layer": layer, "file": name, "d_in": d_in, "d_out": d_out}
        layers.append({**entry, "sha256": _write_tensors(folder / name, tensors)})
    others = [
        {"file": name, "sha256": _write_tensors(folder / name, tensors)}
        for name, tensors in encode_others(
            content.tokens, content.terminal, content.down, content.encoding
        ).items()
    ]
    reading = None if content.reading is None or content.reading.is_plain else content.reading.to_json()
    manifest = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION if reading is None else READING_VERSION,
        "split": content.split,
        "encoding": content.encoding,
        "dtype": str(DTYPES[content.encoding]).removeprefix("torch."),
        "group": GROUP if content.encoding == "int8" else None,
        "lambda_rel": content.provenance.get("lambda_rel"),
        "layers": layers,
        "others": others,
        "preset": content.preset,
        "model": None if content.identity is None else content.identity.to_json(),
        "provenance": content.provenance,
    }
    manifest |= {} if reading is None else {"reading": reading}
    manifest = _jsonable(manifest)
    manifest["manifest_sha256"] = _json_sha256(manifest)
    text = json.dumps(manifest, indent=1, ensure_ascii=False, allow_nan=False)
    (folder / MANIFEST).write_text(text + "\n", encoding="utf-8")
    _flush(folder / MANIFEST)


def _write_tensors(path: Path, tensors: dict[str, Tensor]) -> str:
    """Writes one file; its sha256."""
    save_file(tensors, path, metadata={"format": "pt"})
    _flush(path)
    return sha256_file(path)


def _read_own(folder: Path, manifest: dict[str, Any]) -> FolderContent:
    tensors, hashes = {}, {}
    for entry in manifest["layers"]:
        name, layer = str(entry["file"]), int(entry["layer"])
        if not LAYER_FILE.fullmatch(name):  # also keeps the manifest from naming files elsewhere
            raise ValueError(name)
        hashes[name] = _checked_sha256(folder, name, entry)
        weight, bias = load_layer(folder, name, layer, manifest["group"] or GROUP)
        if tuple(weight.shape) != (entry["d_out"], entry["d_in"]):
            raise damaged(folder, name, f"has a map of shape {list(weight.shape)}, not the manifest's")
        tensors[layer] = weight, bias
    for entry in manifest.get("others", ()):  # earlier folders have none
        if (name := entry["file"]) not in OTHER_FILES:
            raise ValueError(name)
        hashes[name] = _checked_sha256(folder, name, entry)
    model, preset, reading = manifest["model"], manifest.get("preset"), manifest.get("reading")
    return FolderContent(
        split=int(manifest["split"]),
        tensors=tensors,
        encoding=str(manifest["encoding"]),
        identity=None if model is None else ModelIdentity.from_json(model),
        provenance=dict(manifest["provenance"]),
        content_hash=content_sha256(int(manifest["split"]), hashes, reading),
        tokens=load_tokens(folder) if TOKENS_FILE in hashes else None,
        terminal=load_terminal(folder) if TERMINAL_FILE in hashes else {},
        preset=None if preset is None else dict(preset),
        reading=None if reading is None else Reading.from_json(reading),
        down=load_down(folder, manifest["group"] or GROUP) if DOWN_FILE in hashes else None,
    )


def _checked_sha256(folder: Path, name: str, entry: dict[str, Any]) -> str:
    found = file_sha256(folder, name)
    if found != entry["sha256"]:
        raise damaged(folder, name, "is truncated or altered (its sha256 is not the manifest's)")
    return found


def _read_published(folder: Path, manifest: dict[str, Any]) -> FolderContent:
    """A folder of the published layout, whose manifest's fields are not ours."""
    names: dict[int, str] = {}
    for path in sorted(folder.iterdir(), reverse=True):  # "proj.L" after "proj8.L": full precision wins
        if match := LAYER_FILE.fullmatch(path.name):
            names[int(match[2])] = path.name
    if not names:
        raise MapsFileError(
            f"load maps from {folder}",
            f"{MANIFEST} is not in a known format, and there is no proj.L<layer>.safetensors beside it",
            "name a folder that `ridgefill fit -o` wrote, or one of the published layout",
        )
    first = min(names)
    stated = [v for k, v in manifest.items() if "split" in k.lower() and type(v) is int and 0 <= v <= first]
    split = stated[0] if stated else first
    tensors = {layer: load_layer(folder, name, layer, GROUP) for layer, name in sorted(names.items())}
    warnings.warn(
        f"the maps in {folder} name no model and carry no hashes: whether they fit a model and are intact "
        "cannot be checked",
        RidgeFillWarning,
        stacklevel=2,
    )
    encoding = "int8" if any(name.startswith("proj8") for name in names.values()) else "fp32"
    if all(weight.dtype == torch.bfloat16 for weight, _ in tensors.values()):
        encoding = "bf16"
    hashes = {name: file_sha256(folder, name) for name in names.values()}
    return FolderContent(split, tensors, encoding, content_hash=content_sha256(split, hashes))


def _check_manifest(folder: Path, manifest: dict[str, Any]) -> None:
    version = manifest.get("format_version")
    if version not in (FORMAT_VERSION, READING_VERSION):
        raise MapsFileError(
            f"load maps from {folder}",
            f"their format version is {version!r}, and this ridgefill reads up to {READING_VERSION}",
            "install the ridgefill version that wrote them, or fit the maps again",
        )
    rest = {key: value for key, value in manifest.items() if key != "manifest_sha256"}
    if _json_sha256(rest) != manifest.get("manifest_sha256"):
        raise damaged(folder, MANIFEST, "was altered (its sha256 is not the one that it holds)")


def _refuse_foreign(asked: str, target: Path) -> None:
    if target.is_dir() and ((target / MANIFEST).is_file() or not any(target.iterdir())):
        return
    if target.exists():
        what = "that folder holds other files" if target.is_dir() else "there is a file of that name"
        raise OutputError(
            asked, f"{what}, and would be lost", "name a new or empty folder, or an earlier maps folder"
        )


def _keep_other_files(old: Path, new: Path) -> None:
    for path in old.iterdir() if old.is_dir() else ():
        if path.name == MANIFEST or is_maps_file(path.name):
            continue
        if path.is_dir():
            shutil.copytree(path, new / path.name, symlinks=True)
        else:
            shutil.copy2(path, new / path.name, follow_symlinks=False)


def _put_in_place(new: Path, target: Path) -> None:
    if not target.exists():
        os.rename(new, target)
        return
    old = _sibling(target)
    os.rename(target, old)
    try:
        os.rename(new, target)
    except OSError:
        os.rename(old, target)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _sibling(target: Path) -> Path:
    return target.parent / f".{target.name}.{uuid.uuid4().hex[:8]}"


def _flush(path: Path) -> None:
    with open(path, "rb+") as file:
        os.fsync(file.fileno())


def _json_sha256(obj: Any) -> str:
    text = json.dumps(obj, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def _jsonable(value: Any, where: str = "manifest") -> Any:
    """``value`` as JSON gives it back: lists, string keys, None for what is not finite."""
    if value is None or isinstance(value, (str, bool, int)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _jsonable(item, f"{where}.{key}") for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_jsonable(item, where) for item in value]
    raise SettingError(
        f"save {where} with the maps",
        f"JSON cannot hold a {type(value).__name__}",
        "give plain numbers and text",
    )
