"""What the safetensors files of a maps folder hold.

One file a layer, and two more where the fit made them::

    proj.L<l>.safetensors   proj.<l>.weight [d_out, d_in], .bias [d_out]                   fp32 or bf16
    proj8.L<l>.safetensors  proj.<l>.codes [d_out, d_in], .scale [d_out, groups], .bias   int8: `fit.quantize`
    down.safetensors        down.weight [r, K], or .codes and .scale                       `fit.reduce`
    tokens.safetensors      classes [V] uint8, counts [V] int64, special [V] bool         `rows.token_table`
    terminal.safetensors    terminal.<l> [H_v, dk, dv]                                    fp32: `fit.terminal`
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from ridgefill.errors import MapsFileError, SettingError
from ridgefill.files import sha256_file
from ridgefill.fit.quantize import dequantize_int8, quantize_int8
from ridgefill.rows.token_table import TokenTable

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": torch.float32}  # as loaded, by encoding
LAYER_FILE = re.compile(r"proj(8?)\.L(\d+)\.safetensors")
TOKENS_FILE, TERMINAL_FILE, DOWN_FILE = "tokens.safetensors", "terminal.safetensors", "down.safetensors"
OTHER_FILES = (TOKENS_FILE, TERMINAL_FILE, DOWN_FILE)

_TERMINAL = re.compile(r"terminal\.(\d+)")


def is_maps_file(name: str) -> bool:
    """Whether a file of that name in a maps folder belongs to the maps."""
    return name in OTHER_FILES or LAYER_FILE.fullmatch(name) is not None


def encode_layer(layer: int, weight: Tensor, bias: Tensor, encoding: str) -> tuple[str, dict[str, Tensor]]:
    """A layer's file name and tensors.

    Raises:
        SettingError: weights that int8 cannot hold.
    """
    tensors = {f"proj.{layer}.bias": bias.to(DTYPES[encoding]).contiguous()}
    tensors |= _encode(f"proj.{layer}", weight, encoding)
    return f"proj{'8' * (encoding == 'int8')}.L{layer}.safetensors", tensors


def _encode(name: str, weight: Tensor, encoding: str) -> dict[str, Tensor]:
    if encoding != "int8":
        return {f"{name}.weight": weight.to(DTYPES[encoding]).contiguous()}
    codes, scale = quantize_int8(weight)
    return {f"{name}.codes": codes, f"{name}.scale": scale}


def _decode(name: str, tensors: Mapping[str, Tensor], group: int) -> Tensor:
    """Raises KeyError or SettingError for something else than `_encode` gives."""
    if (codes := tensors.get(f"{name}.codes")) is None:
        return tensors[f"{name}.weight"]
    return dequantize_int8(codes, tensors[f"{name}.scale"], group)


def encode_others(
    tokens: TokenTable | None,
    terminal: Mapping[int, Tensor],
    down: Tensor | None = None,
    encoding: str = "fp32",
) -> dict[str, dict[str, Tensor]]:
    """File name -> tensors, of what the maps carry beside their layers."""
    files = {}
    if down is not None:
        files[DOWN_FILE] = _encode("down", down.detach().cpu(), encoding)
    if tokens is not None:
        files[TOKENS_FILE] = {name: t.contiguous() for name, t in tokens.tensors().items()}
    if terminal:
        states = {f"terminal.{i}": t.detach().float().cpu().contiguous() for i, t in terminal.items()}
        files[TERMINAL_FILE] = states
    return files


def load_layer(folder: Path, name: str, layer: int, group: int) -> tuple[Tensor, Tensor]:
    """weight [d_out, d_in] and bias [d_out]; int8 becomes fp32.

    Raises:
        MapsFileError: the file cannot be read, or holds no affine map of that layer.
    """
    try:
        tensors = load_file(folder / name)
        bias = tensors[f"proj.{layer}.bias"]
        weight = _decode(f"proj.{layer}", tensors, group)
    except KeyError as error:
        raise damaged(folder, name, f"holds no tensor {error}") from error
    except (OSError, SafetensorError, SettingError) as error:
        raise damaged(folder, name, f"cannot be read ({error})") from error
    if weight.ndim != 2 or bias.shape != weight.shape[:1]:
        shapes = f"{list(weight.shape)} and bias {list(bias.shape)}"
        raise damaged(folder, name, f"holds a weight of shape {shapes}, which is no affine map")
    return weight, bias.to(weight.dtype)


def load_down(folder: Path, group: int) -> Tensor:
    """The reduction [r, K]; int8 becomes fp32.

    Raises:
        MapsFileError: the file cannot be read or holds none.
    """
    try:
        weight = _decode("down", load_file(folder / DOWN_FILE), group)
        if weight.ndim != 2:
            raise ValueError(f"a tensor of shape {list(weight.shape)}")
    except (OSError, SafetensorError, KeyError, ValueError, SettingError) as error:
        raise damaged(folder, DOWN_FILE, f"holds no reduction ({error})") from error
    return weight


def load_tokens(folder: Path) -> TokenTable:
    """The token table.

    Raises:
        MapsFileError: the file cannot be read or holds none.
    """
    try:
        return TokenTable.from_tensors(load_file(folder / TOKENS_FILE))
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise damaged(folder, TOKENS_FILE, f"holds no token table ({error})") from error


def load_terminal(folder: Path) -> dict[int, Tensor]:
    """Layer -> Delta_bar [H_v, dk, dv], fp32.

    Raises:
        MapsFileError: the file cannot be read or holds something else.
    """
    try:
        tensors = load_file(folder / TERMINAL_FILE)
    except (OSError, SafetensorError) as error:
        raise damaged(folder, TERMINAL_FILE, f"cannot be read ({error})") from error
    found = {}
    for name, state in tensors.items():
        match = _TERMINAL.fullmatch(name)
        if match is None or state.ndim != 3 or state.dtype != torch.float32 or not state.isfinite().all():
            raise damaged(folder, TERMINAL_FILE, f"holds a tensor {name} that is no terminal state")
        found[int(match[1])] = state
    return dict(sorted(found.items()))


def file_sha256(folder: Path, name: str) -> str:
    """sha256 of a file of the folder.

    Raises:
        MapsFileError: it is missing or cannot be read.
    """
    try:
        return sha256_file(folder / name)
    except FileNotFoundError as error:
        raise damaged(folder, name, "is missing") from error
    except OSError as error:
        raise damaged(folder, name, f"cannot be read ({error.strerror})") from error


def damaged(folder: Path, name: str, why: str) -> MapsFileError:
    """The refusal of a file of the folder."""
    instead = "copy or download the folder again, or fit the maps anew"
    return MapsFileError(f"load maps from {folder}", f"{name} {why}", instead)
